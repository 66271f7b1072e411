"""The fuzzer's targets without the fuzzer: its seeds, what it found, and what chance draws."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, changed, ends_well
from hypothesis import given, settings
from hypothesis import strategies as st

FOUND = Path(__file__).parent / "fuzz" / "found"
EVERY_TARGET = pytest.mark.parametrize("name", TARGETS)


@cache
def seeds(name: str) -> list[bytes]:
    return TARGETS[name][1]()


@EVERY_TARGET
def test_the_seeds_are_what_the_target_reads(name: str) -> None:
    target: Callable[[bytes], None] = TARGETS[name][0]
    whole = [seed for seed in seeds(name) if not seed[1:].startswith(b"[")]  # JSON, but no Lines
    for seed in whole:
        target(seed)
    assert len(whole) >= 2


@pytest.mark.parametrize(
    "path", sorted(FOUND.glob("*/*")), ids=lambda p: f"{p.parent.name}-{p.name}"
)
def test_what_the_fuzzer_found_is_one_line_or_read(path: Path) -> None:
    ends_well(TARGETS[path.parent.name][0], path.read_bytes())


@EVERY_TARGET
@given(chance=st.randoms(use_true_random=False), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_one_line_or_read(
    name: str, chance: random.Random, data: st.DataObject
) -> None:
    content = bytearray(chance.choice(seeds(name)))
    for _ in range(chance.randrange(1, 4)):
        start = chance.randrange(len(content))
        length = min(chance.choice((0, 1, 8, 100)), len(content) - start)
        content[start : start + length] = data.draw(st.binary(max_size=12))
    ends_well(TARGETS[name][0], bytes(content))


@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_record_of_other_values_is_one_line_or_shown(chance: random.Random) -> None:
    lines = chance.choice(seeds("record")).split(b"\n")
    at = chance.randrange(len(lines) - 1)
    lines[at] = json.dumps(changed(json.loads(lines[at]), chance)).encode()
    ends_well(TARGETS["record"][0], b"\n".join(lines))
