"""Encoded prompts -> an order and the beginnings they share, so that none is computed twice.

In lexicographic order of their token ids, prompts that begin alike stand together: a walk through
them is a walk through the trie of their ids, and only the keys and values on the path to the
current prompt are kept. Sharing is decided on the ids of whole prompts, never of pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_eval.schema import Int64Array

TokenIds: TypeAlias = npt.NDArray[np.integer[Any]]  # (seq,) of one prompt

# What a pass costs before its first token, in tokens: every weight is read from memory once more.
# A beginning is worth keeping when it spares more than that to all who share it.
PASS_COST_TOKENS = 32

# Keys and values kept at once, all streams together.
BUDGET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """How one prompt is computed, given the beginnings kept for the one before it."""

    index: int  # of the prompt
    path: tuple[int, ...]  # the kept beginnings it continues, by length in tokens, longest last
    n_valid: int  # how many of them the prompt before left behind


def plan(prompts: Sequence[TokenIds]) -> list[Step]:
    """The prompts in lexicographic order, each with the beginnings worth keeping on its way."""
    # Bytes, the highest first, are in the order of the numbers that they are of.
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    shared = [common_length(prompts[a], prompts[b]) for a, b in pairwise(order)]
    paths: list[tuple[int, ...]] = [()] * len(order)
    owners: list[tuple[int, ...]] = [()] * len(order)  # the first prompt of each kept beginning
    waiting: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, len(order), (), ())]
    while waiting:
        low, high, path, owner = waiting.pop()
        if high - low < 2:
            paths[low:high], owners[low:high] = [path] * (high - low), [owner] * (high - low)
            continue
        depth = min(shared[low : high - 1])
        spared = (depth - (path[-1] if path else 0)) * (high - low - 1)
        if spared > PASS_COST_TOKENS:
            path, owner = (*path, depth), (*owner, low)
        start = low
        for position in range(low, high):
            if position == high - 1 or shared[position] == depth:
                waiting.append((start, position + 1, path, owner))
                start = position + 1
    kept = [list(zip(path, owner, strict=True)) for path, owner in zip(paths, owners, strict=True)]
    valid = [0, *(_n_common(a, b) for a, b in pairwise(kept))][: len(order)]
    return [Step(i, path, n) for i, path, n in zip(order, paths, valid, strict=True)]


def _n_common(a: Sequence[object], b: Sequence[object]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def common_length(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two prompts share; one token at least is left to compute in each."""
    n = max(min(len(a), len(b)) - 1, 0)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class PrefixStack:
    """The shared beginnings on the way to the current prompt, longest last."""

    def __init__(self, model: Any, budget_bytes: int = BUDGET_BYTES) -> None:
        self._model = model
        self._budget_bytes = budget_bytes
        self._kept: list[tuple[int, Any]] = []  # length in tokens, keys and values

    def begin(self, input_ids: Int64Array, step: Step) -> tuple[Any, Int64Array]:
        """The keys and values to continue from (None for none) and the ids left to run."""
        still_shared = step.path[step.n_valid - 1] if step.n_valid else 0
        while self._kept and self._kept[-1][0] > still_shared:
            self._kept.pop()
        for wanted in step.path[step.n_valid :]:
            length, past = self._kept[-1] if self._kept else (0, None)
            if self._fits(past, length, wanted):
                _, past = self._model.run(input_ids[length:wanted], past, keep=True)
                self._kept.append((wanted, past))
        length, past = self._kept[-1] if self._kept else (0, None)
        return past, input_ids[length:]

    def _fits(self, past: Any, length: int, wanted: int) -> bool:
        held = sum(int(array.nbytes) for _, kept in self._kept for array in kept)
        per_token = sum(int(array.nbytes) for array in past) / length if past else 0.0
        return held + per_token * wanted <= self._budget_bytes


def streams(steps: Sequence[Step], n: int) -> Iterator[list[Step]]:
    """The steps cut into ``n`` runs of neighbours; each begins with nothing kept."""
    bounds = [len(steps) * part // n for part in range(n + 1)]
    for start, end in pairwise(bounds):
        if start < end:
            yield [replace(steps[start], n_valid=0), *steps[start + 1 : end]]
