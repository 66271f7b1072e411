"""Shared beginnings are planned so that every prompt is whole and none is computed twice."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_eval.model import Model, open_model
from edge_eval.model_dir import read_manifest
from edge_eval.prefixes import PASS_COST_TOKENS, PrefixStack, common_length, plan, streams
from edge_eval.schema import Int64Array

ids_strategy = st.lists(st.integers(0, 2), min_size=1, max_size=90)


def encode(*prompts: list[int]) -> list[Int64Array]:
    return [np.array(ids, dtype=np.int64) for ids in prompts]


class Tape:
    """A network whose keys and values are the ids it has read; counts the tokens it was given."""

    def __init__(self) -> None:
        self.n_tokens = 0

    def run(
        self, input_ids: Int64Array, past: tuple[Int64Array, ...] | None, *, keep: bool
    ) -> tuple[None, tuple[Int64Array, ...]]:
        assert keep
        self.n_tokens += len(input_ids)
        return None, (np.concatenate([past[0] if past else input_ids[:0], input_ids]),)


@given(st.lists(ids_strategy, min_size=1, max_size=12), st.integers(1, 3))
def test_every_prompt_is_continued_from_its_own_beginning(
    prompts: list[list[int]], n_streams: int
) -> None:
    encoded = encode(*prompts)
    seen = []
    for part in streams(plan(encoded), n_streams):
        stack = PrefixStack(Tape())
        for step in part:
            past, rest = stack.begin(encoded[step.index], step)
            whole = np.concatenate([past[0], rest]) if past else rest
            assert whole.tolist() == prompts[step.index]
            assert len(rest) >= 1
            seen.append(step.index)
    assert sorted(seen) == list(range(len(prompts)))


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4)))
def test_prompts_are_taken_in_the_order_of_their_ids(prompts: list[list[int]]) -> None:
    assert [prompts[step.index] for step in plan(encode(*prompts))] == sorted(prompts)


@given(st.lists(ids_strategy, min_size=1, max_size=12))
def test_sharing_never_reads_more_tokens_than_not_sharing(prompts: list[list[int]]) -> None:
    encoded, tape = encode(*prompts), Tape()
    stack = PrefixStack(tape)
    remaining = sum(len(stack.begin(encoded[s.index], s)[1]) for s in plan(encoded))
    assert remaining + tape.n_tokens <= sum(map(len, prompts))


def test_a_beginning_is_kept_only_when_it_spares_more_than_a_pass() -> None:
    short = PASS_COST_TOKENS // 2
    two = plan(encode([7] * short + [1], [7] * short + [2]))
    assert [step.path for step in two] == [(), ()]
    four = plan(encode(*([7] * short + [i, i] for i in range(4))))
    assert [step.path for step in four] == [(short,)] * 4
    assert [step.n_valid for step in four] == [0, 1, 1, 1]


def test_beginnings_nest() -> None:
    block, deeper = [1] * 60, [2] * 60
    prompts = [*([*block, *deeper, 9, i] for i in range(3)), *([*block, 5, i] for i in range(3))]
    paths = {step.index: step.path for step in plan(encode(*prompts))}
    assert {paths[i] for i in range(3)} == {(60, 121)}
    assert {paths[i] for i in range(3, 6)} == {(60,)}


def test_the_budget_bounds_what_is_kept() -> None:
    encoded = encode(*([1] * 100 + [2] * 100 + [i, i] for i in range(5)))
    stack = PrefixStack(Tape(), budget_bytes=10)
    for step in plan(encoded):
        stack.begin(encoded[step.index], step)
        assert sum(past[0].nbytes for _, past in stack._kept[1:]) <= 10


def test_one_token_is_always_left_to_compute() -> None:
    a = np.array([1, 2, 3])
    assert common_length(a, a) == 2
    assert common_length(a, a[:1]) == 0


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return open_model(tiny_model, read_manifest(tiny_model), threads=1)


def test_sharing_changes_no_hidden_state(model: Model) -> None:
    rng = np.random.default_rng(0)
    block = rng.integers(2, 500, 80).tolist()
    prompts = [block + rng.integers(2, 500, n).tolist() for n in (1, 5, 40, 40)]
    encoded = encode(*prompts)
    stack = PrefixStack(model)
    for step in plan(encoded):
        past, rest = stack.begin(encoded[step.index], step)
        shared, _ = model.run(rest, past)
        whole, _ = model.run(encoded[step.index])
        np.testing.assert_allclose(shared, whole, atol=1e-4 * float(np.abs(whole).max()))


def test_a_plan_is_the_same_every_time() -> None:
    encoded = encode([1, 2, 3], [1, 2, 4], [0] * 50)
    assert plan(encoded) == plan(encoded)
