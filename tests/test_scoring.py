"""Of the letters a question has, the one with the largest score; never a guess from a NaN."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_eval.letters import ARABIC, LATIN, OPTION_LETTERS
from edge_eval.prompts import OALL_LETTERS, PROMPT_TEMPLATES
from edge_eval.schema import RunConfig
from edge_eval.scoring import PROTOCOLS, SCORING_METHODS, Decision, decide, option_logits

EVERY_METHOD = pytest.mark.parametrize("method", SCORING_METHODS.values(), ids=SCORING_METHODS)
FINITE = st.floats(-50, 50, width=32)


def scores(*values: float) -> Any:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("values", "predicted", "tied"),
    [
        ((1.0, 3.0, 2.0), 1, False),
        ((-3.0, -1.0, -2.0, -4.0), 1, False),
        ((3.0, 1.0, 3.0), 0, True),
        ((1.0, 3.0, 3.0), 1, True),
        ((1.0, 1.0, 3.0), 2, False),
        ((0.0, -0.0), 0, True),
    ],
)
def test_the_largest_score_is_chosen_and_a_tie_goes_to_the_first(
    values: tuple[float, ...], predicted: int, tied: bool
) -> None:
    assert decide(scores(*values)) == Decision(predicted, tied)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_score_that_is_not_finite_is_no_prediction(bad: float, place: int) -> None:
    values = [1.0, 1.0, 2.0]
    values[place] = bad
    assert decide(scores(*values)) == Decision(None, tied=False)


def test_letters_that_were_not_seen_stand_below_those_that_were() -> None:
    assert decide(scores(math.nan, -3.0, -9.0), partial=True) == Decision(1, tied=False)
    assert decide(scores(math.nan, -3.0, -3.0), partial=True) == Decision(1, tied=True)
    assert decide(scores(math.nan, math.nan), partial=True) == Decision(None, tied=False)


def test_only_the_questions_own_letters_are_compared() -> None:
    row = tuple(float(n) for n in range(10))
    assert option_logits(row, LATIN[:3], OPTION_LETTERS).tolist() == [0, 1, 2]
    assert option_logits(row, ARABIC[:2], OPTION_LETTERS).tolist() == [5, 6]


def test_a_letter_without_a_value_leaves_no_prediction() -> None:
    row = (1.0, None, 3.0, *[0.0] * 7)
    values = option_logits(row, LATIN[:3], OPTION_LETTERS)
    assert math.isnan(values[1])
    assert decide(values).predicted is None
    assert decide(option_logits(row, ("A", "C"), OPTION_LETTERS)).predicted == 1


@EVERY_METHOD
@pytest.mark.parametrize("letters", [LATIN, ARABIC, OALL_LETTERS], ids=["latin", "arabic", "oall"])
def test_a_method_keeps_one_score_an_option_and_its_input(
    method: Callable[[Any, Any], Any], letters: tuple[str, ...]
) -> None:
    for n in (2, 3, 4, 5):
        logits = scores(*range(-n, 0))
        before = logits.copy()
        found = method(logits, letters[:n])
        assert found.shape == (n,)
        assert np.isfinite(found).all()
        assert (logits == before).all()


@EVERY_METHOD
def test_a_method_lets_no_nan_become_a_score(method: Callable[[Any, Any], Any]) -> None:
    assert decide(method(scores(-1.0, math.nan), LATIN[:2])).predicted is None


@EVERY_METHOD
@given(st.lists(FINITE, min_size=2, max_size=5))
def test_with_letters_of_one_length_every_method_chooses_the_largest(
    method: Callable[[Any, Any], Any], values: list[float]
) -> None:
    decision = decide(method(scores(*values), LATIN[: len(values)]))
    assert decision.predicted == values.index(max(values))
    assert decision.tied == (values.count(max(values)) > 1)


def test_per_character_halves_heh_with_tatweel_alone() -> None:
    per_character = SCORING_METHODS["per-character"]
    logits = scores(-2.0, -2.0, -2.0, -2.0, -3.0)
    assert per_character(logits, OALL_LETTERS).tolist() == [-2.0, -2.0, -2.0, -2.0, -1.5]
    assert per_character(logits, ARABIC).tolist() == logits.tolist()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_names_what_there_is(name: str) -> None:
    protocol = PROTOCOLS[name]
    assert protocol.scoring in SCORING_METHODS
    assert protocol.headline in {"micro", "macro"}
    config = RunConfig(
        protocol=name, prompt=protocol.prompt or "en", letters=protocol.letters or "latin"
    )
    assert config.template in PROMPT_TEMPLATES


def test_the_published_protocols_keep_their_rules() -> None:
    rules = {
        name: (p.scoring, p.headline, p.normalized, p.prompt, p.letters)
        for name, p in PROTOCOLS.items()
    }
    assert rules["paper"] == ("argmax", "micro", False, None, None)
    assert rules["lm-eval"] == ("argmax", "micro", False, "en", "latin")
    assert rules["oall"] == ("per-character", "macro", True, "ar", "arabic")
