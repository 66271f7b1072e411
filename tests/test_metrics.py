import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_eval.errors import RecordError
from edge_eval.letters import ARABIC, LATIN, OPTION_LETTERS
from edge_eval.metrics import (
    ACCURACY_CEILING,
    SLICES,
    brier_score,
    by,
    expected_calibration_error,
    is_negated,
    latency,
    latency_of,
    letter_probabilities,
    letter_shares,
    macro_accuracy,
    micro_accuracy,
    read_answers,
)
from edge_eval.schema import Prediction, Status


def make(
    answer: int = 0,
    predicted: int | None = 0,
    *,
    n_options: int = 4,
    logits: Sequence[float] | None = None,
    subject: str = "Biology",
    level: str = "High",
    group: str = "STEM",
    country: str = "Egypt",
    n_characters: int = 50,
    n_tokens: int = 100,
    latency_s: float | None = 0.1,
    status: Status = Status.SCORED,
    letters: tuple[str, ...] = LATIN,
) -> Prediction:
    row: list[float | None] = [None] * len(OPTION_LETTERS)
    if status is Status.SCORED:
        start = OPTION_LETTERS.index(letters[0])
        chosen = [float(i == predicted) for i in range(n_options)]
        row[start : start + n_options] = logits or chosen
    return Prediction(
        question_id="1",
        group=group,
        subject=subject,
        level=level,
        country=country,
        has_context=False,
        negated=False,
        n_characters=n_characters,
        letters=letters[:n_options],
        answer=answer,
        predicted=predicted if status is Status.SCORED else None,
        tied=False,
        letter_logits=tuple(row),
        n_tokens=n_tokens,
        latency_s=latency_s,
        status=status,
    )


def outcomes(n_correct: int, n: int, subject: str = "Biology") -> list[Prediction]:
    return [make(predicted=0 if i < n_correct else 1, subject=subject) for i in range(n)]


# The first example also pays for scipy's import, so none has a deadline.
examples = settings(max_examples=60, deadline=None)


@st.composite
def any_predictions(draw: st.DrawFn, min_size: int = 0) -> list[Prediction]:
    def one() -> Prediction:
        n_options = draw(st.integers(2, 5))
        option = st.integers(0, n_options - 1)
        return make(
            draw(option),
            draw(option),
            n_options=n_options,
            subject=draw(st.sampled_from(["Math", "Law", "Civics"])),
            level=draw(st.sampled_from(["", "High", "Primary"])),
            group=draw(st.sampled_from(["STEM", "Other", "Language", "Novel"])),
            country=draw(st.sampled_from(["", "Egypt", "UAE"])),
            n_characters=draw(st.integers(1, 400)),
            status=draw(st.sampled_from([*[Status.SCORED] * 4, Status.INVALID, Status.TOO_LONG])),
        )

    return [one() for _ in range(draw(st.integers(min_size, 15)))]


# --- micro accuracy


def test_micro_accuracy_matches_hand_computed_wilson_and_standard_error() -> None:
    accuracy = micro_accuracy(outcomes(8, 10))
    assert accuracy.value == 0.8
    assert accuracy.standard_error == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    # (p + z²/2n ± z sqrt(p q / n + z²/4n²)) / (1 + z²/n) at z = 1.959964
    assert accuracy.ci_low == pytest.approx(0.4901625, abs=1e-6)
    assert accuracy.ci_high == pytest.approx(0.9433178, abs=1e-6)


@pytest.mark.parametrize(("n_correct", "value"), [(0, 0.0), (1, 1.0)])
def test_a_single_question_has_no_standard_error_and_a_wide_interval(
    n_correct: int, value: float
) -> None:
    accuracy = micro_accuracy(outcomes(n_correct, 1))
    assert accuracy.value == value
    assert accuracy.standard_error is None
    assert accuracy.ci_low is not None
    assert accuracy.ci_high is not None
    assert accuracy.ci_high - accuracy.ci_low > 0.75


def test_nothing_scored_gives_none_and_counts_instead_of_zero_over_zero() -> None:
    empty = micro_accuracy([])
    assert (empty.n_scored, empty.n_correct) == (0, 0)
    assert empty.value is None
    assert empty.ci_low is None
    assert empty.chance is None
    assert empty.value_of_all is None

    invalid = micro_accuracy([make(status=Status.INVALID)] * 3)
    assert invalid.value is None
    assert invalid.value_of_all is None
    assert (invalid.n_scored, invalid.n_invalid) == (0, 3)


def test_unscored_questions_are_not_wrong_but_are_counted_and_shown_as_wrong_beside() -> None:
    unscored = [make(status=Status.INVALID), *[make(status=Status.TOO_LONG)] * 2]
    accuracy = micro_accuracy([*outcomes(3, 5), *unscored])
    assert accuracy.value == 0.6
    assert accuracy.value_of_all == 3 / 8
    assert (accuracy.n_scored, accuracy.n_invalid, accuracy.n_too_long) == (5, 1, 2)
    assert micro_accuracy(outcomes(3, 5)).value_of_all is None


def test_trivial_strategies_are_measured_on_the_scored_questions() -> None:
    predictions = [
        make(0, n_options=2),
        make(2, n_options=4),
        make(2, n_options=4),
        replace(make(1, n_options=5), tied=True),
        make(0, n_options=3, status=Status.TOO_LONG),
    ]
    accuracy = micro_accuracy(predictions)
    assert accuracy.chance == pytest.approx((1 / 2 + 1 / 4 + 1 / 4 + 1 / 5) / 4)
    assert accuracy.always_a == 1 / 4
    assert accuracy.majority == 2 / 4
    assert accuracy.n_tied == 1


@examples
@given(any_predictions())
def test_accuracy_lies_within_its_interval(predictions: list[Prediction]) -> None:
    accuracy = micro_accuracy(predictions)
    assume(accuracy.value is not None)
    assert accuracy.value is not None
    assert accuracy.ci_low is not None
    assert accuracy.ci_high is not None
    assert 0 <= accuracy.ci_low <= accuracy.value <= accuracy.ci_high <= 1
    assert accuracy.ci_low < accuracy.ci_high


@examples
@given(any_predictions(), st.randoms(use_true_random=False))
def test_order_changes_no_share(predictions: list[Prediction], shuffler: random.Random) -> None:
    shuffled = shuffler.sample(predictions, len(predictions))
    assert micro_accuracy(shuffled) == micro_accuracy(predictions)
    assert macro_accuracy(shuffled) == macro_accuracy(predictions)
    assert letter_shares(shuffled) == letter_shares(predictions)
    for name in SLICES:
        assert list(by(shuffled, name).items()) == list(by(predictions, name).items())


@examples
@given(any_predictions(min_size=2))
def test_a_share_strictly_between_0_and_1_never_has_standard_error_0(
    predictions: list[Prediction],
) -> None:
    for accuracy in (micro_accuracy(predictions), macro_accuracy(predictions)):
        if accuracy.value is not None and 0 < accuracy.value < 1:
            assert accuracy.standard_error
            assert accuracy.standard_error > 0


# --- macro accuracy


def test_macro_accuracy_weighs_tasks_alike_and_has_its_own_standard_error() -> None:
    macro = macro_accuracy([*outcomes(8, 10, "Biology"), *outcomes(50, 100, "Law")])
    assert macro.value == pytest.approx(0.65)
    error = math.sqrt(0.8 * 0.2 / 9 + 0.5 * 0.5 / 99) / 2
    assert macro.standard_error == pytest.approx(error)
    assert macro.ci_low == pytest.approx(0.65 - 1.959964 * error, abs=1e-6)
    assert macro.ci_high == pytest.approx(0.65 + 1.959964 * error, abs=1e-6)
    assert (macro.n_tasks, macro.n_single_tasks, macro.n_unscored_tasks) == (2, 0, 0)


def test_a_task_of_one_question_borrows_the_variance_pooled_within_the_others() -> None:
    macro = macro_accuracy([*outcomes(1, 2, "Biology"), *outcomes(1, 4, "Law"), make()])
    macro_3 = macro_accuracy(
        [*outcomes(1, 2, "Biology"), *outcomes(1, 4, "Law"), *outcomes(1, 1, "Math")]
    )
    assert macro.n_tasks == 2  # the last one joined Biology
    pooled = (0.5 + 0.75) / (1 + 3)
    total = 0.25 / 1 + 0.25 * 0.75 / 3 + pooled
    assert macro_3.standard_error == pytest.approx(math.sqrt(total) / 3)
    assert macro_3.n_single_tasks == 1


def test_tasks_all_right_or_all_wrong_take_the_variance_over_all_questions() -> None:
    macro = macro_accuracy([*outcomes(2, 2, "Biology"), *outcomes(0, 2, "Law")])
    over_all = 4 * 0.5 * 0.5 / 3
    assert macro.value == 0.5
    assert macro.standard_error == pytest.approx(math.sqrt(over_all / 2 + over_all / 2) / 2)


def test_single_questions_only_give_the_micro_average_and_its_standard_error() -> None:
    predictions = [make(predicted=i % 2, subject=f"Subject {i}") for i in range(7)]
    macro, micro = macro_accuracy(predictions), micro_accuracy(predictions)
    assert macro.value == pytest.approx(micro.value)
    assert macro.standard_error == pytest.approx(micro.standard_error)


def test_macro_interval_is_absent_where_its_error_is_unknown_or_0_and_stays_within_0_and_1() -> (
    None
):
    assert macro_accuracy([make()]).standard_error is None
    all_right = macro_accuracy([*outcomes(3, 3, "Biology"), *outcomes(3, 3, "Law")])
    assert (all_right.value, all_right.standard_error, all_right.ci_low) == (1.0, 0.0, None)
    high = macro_accuracy(outcomes(9, 10))
    assert high.ci_high == 1.0


def test_tasks_without_a_scored_question_are_left_out_and_counted() -> None:
    macro = macro_accuracy([*outcomes(1, 2), make(subject="Law", status=Status.INVALID)])
    assert (macro.value, macro.n_tasks, macro.n_unscored_tasks) == (0.5, 1, 1)
    empty = macro_accuracy([])
    assert (empty.value, empty.standard_error, empty.n_tasks) == (None, None, 0)


# --- slices


@examples
@given(any_predictions())
def test_every_slicing_adds_up_to_the_whole(predictions: list[Prediction]) -> None:
    whole = micro_accuracy(predictions)
    for name in SLICES:
        parts = by(predictions, name).values()
        assert sum(part.n_scored for part in parts) == whole.n_scored
        assert sum(part.n_invalid for part in parts) == whole.n_invalid
        if whole.value is not None:
            weighted = sum(part.n_scored * (part.value or 0) for part in parts) / whole.n_scored
            assert weighted == pytest.approx(whole.value)


def test_groups_and_levels_come_in_the_papers_order_and_empty_columns_last() -> None:
    groups = ["Other", "Zoology", "Humanities", "STEM", "Language", "", "Social Science"]
    assert list(by([make(group=g) for g in groups], "group")) == [
        *("STEM", "Social Science", "Humanities", "Language", "Other", "Zoology", "none")
    ]
    levels = ["", "Prof", "High", "Univ", "Primary", "Middle"]
    assert list(by([make(level=level) for level in levels], "level")) == [
        *("Primary", "Middle", "High", "Univ", "Prof", "none")
    ]
    countries = by([make(country=c) for c in ("", "UAE", "Egypt", "zone")], "country")
    assert list(countries) == ["Egypt", "UAE", "zone", "none"]


def test_slices_are_named_by_what_the_question_is() -> None:
    p = replace(make(n_options=3), negated=True, has_context=True)
    labels = {name: list(by([p], name)) for name in SLICES}
    assert labels == {
        "group": ["STEM"],
        "subject": ["Biology"],
        "level": ["High"],
        "task": ["Biology (High School)"],
        "country": ["Egypt"],
        "n_options": ["3"],
        "context": ["with context"],
        "negation": ["negated"],
        "length": ["short"],
    }


def test_length_terciles_split_the_predictions_at_hand_and_keep_equal_lengths_together() -> None:
    thirds = by([make(n_characters=n) for n in (900, 10, 50, 20, 800, 60)], "length")
    assert {label: part.n_scored for label, part in thirds.items()} == {
        "short": 2,
        "medium": 2,
        "long": 2,
    }
    assert list(thirds) == ["short", "medium", "long"]
    assert list(by([make(n_characters=7)] * 9, "length")) == ["short"]
    assert by([], "length") == {}


# --- negation


@pytest.mark.parametrize(
    "text",
    [
        "أي مما يلي ليس من الثدييات؟",
        "أي العبارات التالية ليست صحيحة؟",
        "لا يجوز التخطي في المنحنيات",
        "\ufefb يجوز التخطي",  # the ligature of lam and alef, a presentation form
        "لَا يَجُوزُ",
        "لـــم يحدث",  # tatweel
        "جميع ما يلي من الفواكه ما عدا:",
        "كل مما يلي ماعدا:",
        "فيماعدا",
        "في الآتي عدا ........",
        "باستثناء",
        "كلها صحيحة إلا:",
        "كلها صحيحة الا واحدة",
        "العبارة غير الصحيحة هي",
        "(لن)",
        "ولا، فلم",
        "أليس كذلك",
        "أولم ينظروا",
        "أفلا يعقلون",
        "ألا تعلم",
        "لیس",  # Farsi yeh
        "\u200fليس\u200f",  # direction marks
        "ل\ufe76م",  # a fatha in its isolated form, which NFKC would part with a space
    ],
)
def test_negation_words_are_found_however_they_are_written(text: str) -> None:
    assert is_negated(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ما هي عاصمة مصر؟",
        "العالم القديم",
        "السلام عليكم، علم ولاية كلا أولا مثالا",
        "تغير المناخ، صغير، كل متغير، غيرها",
        "أشعر بألم في المعدة، ألم حاد",
        "وعدًا صادقًا",  # a promise: its tanwin goes, and except remains
        "أعداء، عداد، قواعد",
        "خلال الإلكترونات",
        "وليسين حمض أميني",
        "Biology 101",
    ],
)
def test_negation_words_inside_other_words_are_not_found(text: str) -> None:
    assert not is_negated(text)


# --- latency


def test_latency_of_no_passes_is_none_throughout() -> None:
    nothing = latency([make(latency_s=None)])
    assert nothing.n == 0
    assert {value for key, value in asdict(nothing).items() if key != "n"} == {None}


@pytest.mark.parametrize(
    ("n", "has_p90", "has_p99"),
    [
        (1, False, False),
        (63, False, False),
        (64, True, False),
        (661, True, False),
        (662, True, True),
    ],
)
def test_percentiles_wait_for_mlperfs_sample_counts(n: int, has_p90: bool, has_p99: bool) -> None:
    measured = latency_of([100] * n, [0.001 * (i + 1) for i in range(n)])
    assert measured.p50_ms == pytest.approx((n + 1) / 2)
    assert measured.max_ms == pytest.approx(n)
    assert (measured.p90_ms is not None, measured.p99_ms is not None) == (has_p90, has_p99)
    if measured.p90_ms is not None:
        assert measured.p90_ms == pytest.approx(1 + 0.9 * (n - 1))


def test_throughput_is_all_tokens_over_all_time_not_a_mean_of_rates() -> None:
    measured = latency_of([10, 90], [0.1, 0.1])
    assert measured.tokens_per_s == pytest.approx(500)
    assert measured.mean_tokens == 50
    assert measured.mean_ms == pytest.approx(100)


def test_latency_uses_every_timed_prediction_scored_or_not() -> None:
    predictions = [make(), make(status=Status.INVALID), make(latency_s=None)]
    assert latency(predictions).n == 2


@examples
@given(
    st.floats(0, 500),
    st.floats(0.01, 10),
    st.lists(st.integers(1, 4000), min_size=3, max_size=40, unique=True),
)
def test_the_fit_recovers_an_exact_line(fixed: float, slope: float, tokens: list[int]) -> None:
    fit = latency_of(tokens, [(fixed + slope * n) / 1e3 for n in tokens]).fit
    assert fit is not None
    assert fit.ms_per_token == pytest.approx(slope, rel=1e-6)
    assert fit.fixed_ms == pytest.approx(fixed, abs=1e-6 * (fixed + slope * max(tokens)))


def test_two_lengths_are_too_few_for_a_fit() -> None:
    assert latency_of([10, 20, 10, 20], [0.1, 0.2, 0.1, 0.2]).fit is None
    assert latency_of([10, 20, 30], [0.1, 0.2, 0.3]).fit is not None


def test_drift_compares_the_ends_at_equal_length() -> None:
    # The last tenth is long prompts: slower, but as fast as their length tells.
    tokens = [100 + n % 7 for n in range(180)] + [400 + n % 7 for n in range(20)]
    steady = [(5 + 0.5 * n) / 1e3 for n in tokens]
    assert latency_of(tokens, steady).drift == pytest.approx(1)
    assert latency_of(tokens[:199], steady[:199]).drift is None

    lengths = [100 + 40 * (n % 7) for n in range(1000)]
    throttled = [(5 + 0.5 * n) / 1e3 * (1.3 if i >= 900 else 1) for i, n in enumerate(lengths)]
    assert latency_of(lengths, throttled).drift == pytest.approx(1.3, rel=0.01)


def test_drift_is_seen_when_all_prompts_have_one_length() -> None:
    assert latency_of([64] * 200, [0.1] * 180 + [0.2] * 20).drift == pytest.approx(2)


def test_drift_is_unknown_where_the_line_predicts_no_time() -> None:
    tokens = range(1, 301)
    assert latency_of(tokens, [n**2 / 1e3 for n in tokens]).drift is None


# --- letters, confidence, calibration


def test_letter_shares_show_a_preference_for_a_letter() -> None:
    predictions = [
        make(0, 0, n_options=4),
        make(1, 0, n_options=2),
        make(3, 0, n_options=4),
        make(2, 2, n_options=4),
        make(1, status=Status.INVALID),
    ]
    first, second, third, fourth = letter_shares(predictions)
    assert (first.n_chosen, first.n_answer, first.chosen, first.right) == (3, 1, 0.75, 0.25)
    assert (second.n_chosen, second.n_answer) == (0, 1)
    assert (third.chosen, fourth.right) == (0.25, 0.25)
    assert [share.n_offered for share in (first, second, third, fourth)] == [4, 4, 3, 3]
    assert letter_shares([]) == ()


@pytest.mark.parametrize("letters", [LATIN, ARABIC, (*ARABIC[:4], "\u0647\u0640")])
def test_confidence_is_a_softmax_over_the_letters_present(letters: tuple[str, ...]) -> None:
    logits = [math.log(1), math.log(2), math.log(5)]
    p = make(predicted=2, n_options=3, logits=logits, letters=letters)
    probabilities = letter_probabilities(p)
    assert probabilities.dtype == np.float64
    assert probabilities == pytest.approx([1 / 8, 2 / 8, 5 / 8])


def test_confidence_survives_large_logits() -> None:
    probabilities = letter_probabilities(make(n_options=2, logits=[3000.0, -3000.0]))
    assert probabilities.tolist() == [1.0, 0.0]


def test_an_unscored_prediction_has_no_confidence() -> None:
    with pytest.raises(RecordError, match=r"question .1."):
        letter_probabilities(make(status=Status.INVALID))


def test_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    confident = [math.log(9), 0.0]  # 0.9
    even = [math.log(1.5), 0.0]  # 0.6
    predictions = [
        *[make(0, 0, n_options=2, logits=confident)] * 3,
        make(1, 0, n_options=2, logits=confident),
        *[make(0, 0, n_options=2, logits=even)] * 2,
    ]
    expected = 4 / 6 * abs(0.9 - 0.75) + 2 / 6 * abs(0.6 - 1)
    assert expected_calibration_error(predictions) == pytest.approx(expected)
    assert expected_calibration_error([]) is None


def test_brier_score_is_0_for_certainty_2_for_its_opposite_and_known_for_a_guess() -> None:
    certain = [100.0, -100.0, -100.0, -100.0]
    assert brier_score([make(0, 0, logits=certain)]) == pytest.approx(0)
    assert brier_score([make(1, 0, logits=certain)]) == pytest.approx(2)
    assert brier_score([make(1, 0, logits=[1.0] * 4)]) == pytest.approx(1 - 1 / 4)
    assert brier_score([make(status=Status.TOO_LONG)]) is None


@examples
@given(any_predictions(min_size=1))
def test_calibration_stays_in_its_range(predictions: list[Prediction]) -> None:
    error, brier = expected_calibration_error(predictions), brier_score(predictions)
    assert error is None or 0 <= error <= 1
    assert brier is None or 0 <= brier <= 2


# --- the whole


def test_results_are_plain_numbers_that_strict_json_can_hold() -> None:
    predictions = [
        make(i % 4, n_tokens=50 + i % 9, latency_s=0.1 + i % 9 / 100) for i in range(700)
    ]
    results = [
        asdict(micro_accuracy(predictions)),
        asdict(macro_accuracy(predictions)),
        asdict(latency(predictions)),
        [asdict(share) for share in letter_shares(predictions)],
    ]
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_more_evidence_never_widens_the_interval_of_one_share() -> None:
    widths = []
    for n in (10, 100, 1000):
        accuracy = micro_accuracy(outcomes(n // 2, n))
        assert accuracy.ci_low is not None
        assert accuracy.ci_high is not None
        widths.append(accuracy.ci_high - accuracy.ci_low)
    assert all(later < earlier for earlier, later in pairwise(widths))


def test_the_ceiling_is_the_papers() -> None:
    assert ACCURACY_CEILING == 0.96


# ---- generated answers


def test_random_options_are_told_apart_from_answers_read() -> None:
    read = [replace(make(0, int(n >= 30)), matched=True) for n in range(40)]
    drawn = [replace(make(0, int(n > 0), n_options=2), matched=False) for n in range(10)]
    found = read_answers([*read, *drawn, make(status=Status.TOO_LONG, predicted=None)])
    assert found is not None
    assert (found.fallbacks.n, found.fallbacks.value) == (50, 0.2)
    assert (found.matched.n, found.matched.value) == (40, 0.75)
    assert found.expected.value == pytest.approx((30 + 10 * 0.5) / 50)
    for share in (found.fallbacks, found.matched, found.expected):
        assert share.ci_low is not None
        assert share.ci_high is not None
        assert 0 <= share.ci_low < (share.value or 0) < share.ci_high <= 1


def test_where_nothing_was_generated_there_is_nothing_to_tell() -> None:
    assert read_answers([]) is None
    assert read_answers([make()]) is None


def test_where_nothing_could_be_read_chance_is_expected_without_an_interval() -> None:
    found = read_answers([replace(make(), matched=False) for _ in range(9)])
    assert found is not None
    assert (found.fallbacks.value, found.matched.value, found.expected.value) == (1, None, 0.25)
    assert found.expected.ci_low is None


def test_calibration_needs_every_letters_probability() -> None:
    unseen = make(logits=[1.0, 2.0, 3.0, 4.0])
    row = (*unseen.letter_logits[:3], None, *unseen.letter_logits[4:])
    some = [make(), replace(unseen, letter_logits=row)]
    assert expected_calibration_error(some) is None
    assert brier_score(some) is None
