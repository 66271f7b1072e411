"""Encoded prompts -> an order and the beginnings they share, so that none is computed twice.

In lexicographic order of their token ids, prompts that begin alike stand together: a walk through
them is a walk through the trie of their ids, and only the keys and values on the path to the
current prompt are kept. Sharing is decided on the ids of whole prompts, never of pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from edge_eval.schema import EncodedPrompt, Int64Array

# A beginning shorter than this costs more in a pass of its own than it saves.
MIN_TOKENS = 8

# Keys and values kept at once, all streams together.
BUDGET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """How one prompt is computed, given the beginnings already on the stack."""

    index: int  # of the prompt
    drop_to: int  # beginnings longer than this (tokens) are no longer shared: forget them
    keep: int  # compute and keep the beginning of this many tokens first; 0 for none


def plan(prompts: Sequence[EncodedPrompt]) -> list[Step]:
    """The prompts' order and, for each, what it shares with the one before and the one after."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].input_ids.tolist())
    shared = [common_length(prompts[a].input_ids, prompts[b].input_ids) for a, b in pairwise(order)]
    before, after = [0, *shared], [*shared, 0]
    return [
        Step(index, b, a if a >= MIN_TOKENS else 0)
        for index, b, a in zip(order, before, after, strict=True)
    ]


def common_length(a: Int64Array, b: Int64Array) -> int:
    """How many tokens two prompts share; one token at least is left to compute in each."""
    n = min(len(a), len(b)) - 1
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else max(n, 0)


class PrefixStack:
    """The shared beginnings on the way to the current prompt, longest last."""

    def __init__(self, model: Any, budget_bytes: int = BUDGET_BYTES) -> None:
        self._model = model
        self._budget_bytes = budget_bytes
        self._kept: list[tuple[int, Any]] = []  # length in tokens, keys and values

    def begin(self, input_ids: Int64Array, step: Step) -> tuple[Any, Int64Array]:
        """The keys and values to continue from (None for none) and the ids left to run."""
        while self._kept and self._kept[-1][0] > step.drop_to:
            self._kept.pop()
        length, past = self._kept[-1] if self._kept else (0, None)
        if step.keep - length >= MIN_TOKENS and self._fits(past, length, step.keep):
            _, past = self._model.run(input_ids[length : step.keep], past, keep=True)
            length = step.keep
            self._kept.append((length, past))
        return past, input_ids[length:]

    def _fits(self, past: Any, length: int, wanted: int) -> bool:
        held = sum(int(array.nbytes) for _, kept in self._kept for array in kept)
        per_token = sum(int(array.nbytes) for array in past) / length if past else 0.0
        return held + per_token * wanted <= self._budget_bytes


def streams(steps: Sequence[Step], n: int) -> Iterator[list[Step]]:
    """The steps cut into ``n`` runs of neighbours; each begins with nothing kept."""
    bounds = [len(steps) * part // n for part in range(n + 1)]
    for start, end in pairwise(bounds):
        part = list(steps[start:end])
        if part:
            part[0] = Step(part[0].index, 0, part[0].keep)
            part[-1] = Step(part[-1].index, part[-1].drop_to, 0)
            yield part
