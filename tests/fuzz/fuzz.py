"""Random bytes -> crashes, guided by coverage: what the tests draw blindly, atheris searches for.

    pip install "atheris>=3" && pip install -e .
    python tests/fuzz/fuzz.py record CORPUS -max_total_time=600

The first argument is a name in TARGETS, the second a folder that keeps what was found between
runs (the target's own seeds are put there), the rest are libFuzzer's. A crash is kept as a file
in the folder one is in; put it into found/NAME/, where tests/test_fuzz.py runs it ever after.
"""

import contextlib
import json
import random
import sys
from pathlib import Path

import atheris
import scipy.stats  # noqa: F401 - slow to import, and not what is looked at

with atheris.instrument_imports(include=["edge_eval", "exporters", "json", "csv"]):
    from targets import TARGETS, changed, ends_well


def mutate_json_lines(content: bytes, max_size: int, seed: int) -> bytes:
    """Another value somewhere in one line's JSON: bytes changed blindly are rarely JSON any more."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    lines = content.split(b"\n")
    if chance.random() < 0.3:
        return bytes(atheris.Mutate(content, max_size))
    at = chance.randrange(len(lines))
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(lines[at])
        lines[at] = json.dumps(changed(value, chance), ensure_ascii=chance.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
        if chance.random() < 0.1:
            lines.insert(at, chance.choice(lines))
        return b"\n".join(lines)[:max_size]
    return bytes(atheris.Mutate(content, max_size))


def main() -> None:
    """Fuzz one target until told to stop."""
    name, corpus, *options = sys.argv[1:]
    target, seeds = TARGETS[name]
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    mutator = {"custom_mutator": mutate_json_lines} if name == "record" else {}
    arguments = [sys.argv[0], corpus, "-max_len=16384", "-timeout=30", "-rss_limit_mb=1500"]
    atheris.Setup([*arguments, *options], lambda content: ends_well(target, content), **mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
