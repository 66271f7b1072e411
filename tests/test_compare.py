import json
import math
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from edge_eval.compare import Comparison, PairedDifference, Ratio, compare, holm
from edge_eval.errors import RecordError
from edge_eval.likeness import CONDITIONS, Unlike, find_unlike, name_runs
from edge_eval.schema import (
    DataFingerprint,
    ExportManifest,
    Prediction,
    RunConfig,
    RunRecord,
    Status,
)
from edge_eval.verdict import comparison_json, describe, print_comparison

MACHINE = {"cpu_model": "EPYC", "instruction_sets": ["avx2"], "threads": 2, "streams": 1}


def answer(
    number: int,
    predicted: int = 0,
    *,
    right: int = 0,
    logits: Sequence[float] = (),
    latency_s: float | None = 0.1,
    group: str = "STEM",
    subject: str = "Biology",
    **changes: Any,
) -> Prediction:
    """One prediction of four options, by default right (option 0 chosen, option 0 the answer)."""
    chosen = logits or [float(i == predicted) for i in range(4)]
    prediction = Prediction(
        question_id=f"q{number}",
        group=group,
        subject=subject,
        level="High",
        country="",
        has_context=False,
        negated=False,
        n_characters=50,
        letters=("A", "B", "C", "D")[: len(chosen)],
        answer=right,
        predicted=predicted,
        tied=False,
        letter_logits=(*chosen, *[None] * (10 - len(chosen))),
        n_tokens=100,
        latency_s=latency_s,
        status=Status.SCORED,
        index=number,
    )
    return replace(prediction, **changes)


def record(
    predictions: Sequence[Prediction],
    precision: str = "fp32",
    *,
    name: str = "tiny",
    memory: int | None = 1000,
    sha256: str = "aa" * 32,
    environment: dict[str, Any] = MACHINE,
    complete: bool = True,
    path: str = "",
    **config: Any,
) -> RunRecord:
    manifest = ExportManifest(
        schema_version=1,
        name=name,
        source=name,
        revision=None,
        architecture="llama",
        precision=precision,
        graph="fused",
        n_layers=1,
        hidden_size=8,
        vocab_size=16,
        max_length=64,
        sliding_window=None,
        tied_embedding=True,
        embedding_scale=1.0,
        head_bias=False,
        head_scale=1.0,
        head_softcap=None,
        files={},
        tools={},
        parity={},
        created="2026-11-30T00:00:00+00:00",
    )
    n = len(predictions)
    return RunRecord(
        config=RunConfig(**config),
        manifest=manifest,
        data=DataFingerprint("rows.csv", "file", None, sha256, n, 0, n),
        scoring={"letters": list("ABCDEأبجده"), "letter_ids": [[i] for i in range(10)]},
        environment=environment,
        observed={"peak_memory_bytes": memory, "disk_bytes": 500},
        predictions=tuple(predictions),
        complete=complete,
        created="2026-11-30T00:00:00+00:00",
        path=path,
    )


def outcomes(pattern: str, **changes: Any) -> list[Prediction]:
    """A prediction per character: 1 is right, 0 is wrong (option 1 chosen)."""
    return [answer(i, 0 if c == "1" else 1, **changes) for i, c in enumerate(pattern)]


def pair(baseline: str, candidate: str, **options: Any) -> Comparison:
    runs = record(outcomes(baseline)), record(outcomes(candidate), "int8")
    return compare(runs[0], [runs[1]], **options).comparisons[0]


# --- the difference and its test


def test_the_difference_pairs_questions_and_names_those_gained_and_lost() -> None:
    found = pair("1100110000", "1010110100")
    assert found.gained == ("q2", "q7")
    assert found.lost == ("q1",)
    assert found.micro.difference == pytest.approx(0.1)
    assert (found.micro.baseline, found.micro.candidate) == (0.4, 0.5)
    assert (found.micro.n_gained, found.micro.n_lost) == (2, 1)
    assert found.n_changed == 3
    assert found.agreement == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    # Two-sided binomial by hand: 2 (C(6,0) + C(6,1)) / 2^6; 2 / 2^6; an even split; no pair at all.
    [(1, 5, 14 / 64), (0, 6, 2 / 64), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_mcnemar_is_exact_on_the_discordant_questions(gained: int, lost: int, p: float) -> None:
    found = pair("0" * gained + "1" * lost + "11", "1" * gained + "0" * lost + "11")
    assert found.micro.p == pytest.approx(p)


def test_the_interval_is_that_of_the_paired_difference() -> None:
    # 60 gained, 40 lost of 1000: 0.02 ± 1.96 sqrt((0.1 - 0.02²) / 1000) = 0.0004 to 0.0396
    found = pair("0" * 60 + "1" * 40 + "1" * 900, "1" * 60 + "0" * 40 + "1" * 900)
    assert found.micro.ci_low == pytest.approx(0.0004, abs=0.0012)
    assert found.micro.ci_high == pytest.approx(0.0396, abs=0.0012)


def test_the_interval_agrees_with_scipys_bootstrap_by_index() -> None:
    from scipy.stats import bootstrap

    found = pair("0" * 30 + "1" * 15 + "1" * 155, "1" * 30 + "0" * 15 + "1" * 155)
    differences = np.array([1.0] * 30 + [-1.0] * 15 + [0.0] * 155)
    expected = bootstrap((differences,), np.mean, method="percentile", rng=1).confidence_interval
    assert found.micro.ci_low == pytest.approx(expected.low, abs=0.006)
    assert found.micro.ci_high == pytest.approx(expected.high, abs=0.006)


def test_a_difference_that_no_resample_can_change_has_no_interval() -> None:
    assert pair("1100", "1100").micro.ci_low is None
    assert pair("0000", "1111").micro.ci_high is None


def test_the_same_seed_gives_the_same_intervals_and_another_does_not() -> None:
    runs = "1100110000" * 5, "1010110100" * 5
    assert pair(*runs, seed=3) == pair(*runs, seed=3)
    many = [pair(*runs, seed=seed, n_resamples=50).micro.ci_low for seed in range(8)]
    assert len(set(many)) > 1


def test_exchanging_the_runs_turns_the_difference_round_and_keeps_p() -> None:
    forth, back = pair("1100110000", "1010110101"), pair("1010110101", "1100110000")
    assert forth.micro.difference == -back.micro.difference
    assert forth.micro.p == back.micro.p
    assert forth.gained == back.lost


def test_holm_multiplies_the_smallest_most_and_never_falls() -> None:
    # Sorted 0.01, 0.03, 0.04 times 3, 2, 1: 0.03, 0.06, and 0.04 raised to 0.06.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_groups_and_tasks_are_each_corrected_for_their_number() -> None:
    before = outcomes("1" * 6) + [answer(10 + i, group="Other", subject="Law") for i in range(4)]
    after = outcomes("0" * 6) + before[6:]
    found = compare(record(before), [record(after, "int8")]).comparisons[0]
    assert list(found.groups) == ["STEM", "Other"]
    assert found.groups["STEM"].p == pytest.approx(2 / 64)
    assert found.groups["STEM"].p_holm == pytest.approx(4 / 64)
    assert found.groups["Other"].p_holm == 1.0
    assert list(found.tasks) == ["Biology (High School)", "Law (High School)"]
    assert found.tasks["Biology (High School)"].p_holm == pytest.approx(4 / 64)


def test_the_macro_difference_weighs_tasks_alike() -> None:
    before = [*outcomes("1" * 6), answer(10, 1, group="Other", subject="Law")]
    after = [*outcomes("1" * 5 + "0"), answer(10, 0, group="Other", subject="Law")]
    found = compare(record(before), [record(after, "int8")]).comparisons[0]
    assert found.macro_difference == pytest.approx((-1 / 6 + 1) / 2)
    assert found.micro.difference == 0.0


def test_letter_distributions_are_compared_by_kl_and_total_variation() -> None:
    # (1/4, 3/4) against (1/2, 1/2): ln(1/2)/4 + 3 ln(3/2)/4, and |1/4 - 1/2|
    before = [answer(0, 1, logits=[0.0, math.log(3)])]
    after = [answer(0, 0, logits=[5.0, 5.0])]
    found = compare(record(before), [record(after, "int8")]).comparisons[0]
    assert found.mean_kl == pytest.approx(math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4)
    assert found.mean_total_variation == pytest.approx(0.25)


def test_a_probability_that_underflows_leaves_kl_finite() -> None:
    before, after = [answer(0, logits=[0.0, 0.0])], [answer(0, logits=[2000.0, 0.0])]
    found = compare(record(before), [record(after, "int8")]).comparisons[0]
    assert 300 < found.mean_kl < 1000


# --- which questions


def test_questions_that_a_run_could_not_score_are_left_out_and_counted() -> None:
    after = outcomes("1011")
    after[1] = replace(after[1], status=Status.TOO_LONG, predicted=None, letter_logits=(None,) * 10)
    found = compare(record(outcomes("1111")), [record(after, "int8")]).comparisons[0]
    assert (found.n_common, found.n_unscored, found.micro.n) == (4, 1, 3)
    assert found.lost == ()


def test_rotated_askings_are_no_further_questions() -> None:
    rotated = [replace(answer(0, 1), rotation=1), replace(answer(1, 1), rotation=1)]
    runs = [record([*outcomes("11"), *rotated], p, permute=True) for p in ("fp32", "int8")]
    assert compare(runs[0], runs[1:]).comparisons[0].micro.n == 2


def test_order_does_not_matter_for_pairing() -> None:
    found = compare(record(outcomes("1100")), [record(outcomes("1010")[::-1], "int8")]).comparisons[
        0
    ]
    assert found.gained == ("q2",)
    assert found.lost == ("q1",)


def test_one_id_for_two_questions_is_refused_even_when_forced() -> None:
    other = [replace(p, n_characters=51) for p in outcomes("11")]
    with pytest.raises(RecordError, match="q0 is another question in each run"):
        compare(record(outcomes("11")), [record(other, sha256="bb" * 32)], force=True)


def test_runs_without_a_common_question_are_refused() -> None:
    with pytest.raises(RecordError, match="no question in common"):
        compare(record([answer(1)]), [record([answer(2)])], force=True)


def test_runs_that_scored_no_common_question_are_refused() -> None:
    broken = [replace(answer(0), status=Status.INVALID, predicted=None)]
    with pytest.raises(RecordError, match="none was scored"):
        compare(record([answer(0)]), [record(broken, "int8")])


# --- like for like

UNLIKE: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 4},
    "protocol": {"protocol": "lm-eval"},
    "template": {"prompt": "ar"},
    "scoring": {"scoring": "per-character"},
    "shots": {"shots": 3},
    "allow_fewer_shots": {"shots": 3, "allow_fewer_shots": True},
    "chat_template": {"chat_template": "auto"},
    "system_prompt": {"chat_template": "auto", "system_prompt": "Answer with a letter."},
    "permute": {"permute": True},
    "normalized": {"scoring": "per-character"},
    "data": {"sha256": "bb" * 32},
}
# Conditions the record keeps beside the scoring rule.
IN_SCORING: dict[str, dict[str, Any]] = {
    "shots' rows": {"shots_sha256": "cc" * 32},
    "normalized": {"normalized": True},
}


@pytest.mark.parametrize("field", CONDITIONS)
def test_runs_that_differ_in_a_condition_are_refused_by_its_name(field: str) -> None:
    other = record(outcomes("10"), "int8", **UNLIKE.get(field, {}))
    if field in IN_SCORING:
        other = replace(other, scoring={**other.scoring, **IN_SCORING[field]})
    with pytest.raises(RecordError, match=rf"\b{field} "):
        compare(record(outcomes("11")), [other])


def test_a_refusal_names_every_field_with_both_values_and_the_common_questions() -> None:
    other = record(outcomes("100"), "int8", prompt="ar", shots=2, limit=3, path="b.jsonl")
    with pytest.raises(RecordError) as caught:
        compare(record(outcomes("11"), path="a.jsonl"), [other])
    message = str(caught.value)
    for words in (
        "b.jsonl is not like a.jsonl",
        "template en-latin / ar-latin",
        "shots 0 / 2",
        "questions 2 / 3",
        "limit None / 3",
        "2 questions are in both",
        "--force",
    ):
        assert words in message


def test_a_filter_that_changed_no_question_is_no_difference() -> None:
    limited = record(outcomes("10"), "int8", limit=2, groups=("STEM",), seed=7)
    assert find_unlike(record(outcomes("11")), limited) == ()


def test_settings_that_only_cost_time_are_no_difference() -> None:
    other = record(outcomes("11"), scenario="offline", reuse="shared", threads=1, warmup=0)
    assert find_unlike(record(outcomes("11")), other) == ()


def test_log_probabilities_are_like_logits_where_the_largest_decides() -> None:
    other = record(outcomes("11"))
    other = replace(other, scoring={**other.scoring, "normalized": True})
    assert find_unlike(record(outcomes("11")), other) == ()


@pytest.mark.parametrize("complete", [(True, False), (False, True), (False, False)])
def test_incomplete_runs_are_refused_unless_forced(complete: tuple[bool, bool]) -> None:
    runs = [record(outcomes("10"), complete=c) for c in complete]
    with pytest.raises(RecordError, match=r"complete (True|False) / (True|False)"):
        compare(runs[0], runs[1:])
    assert compare(runs[0], runs[1:], force=True).comparisons[0].unlike[0].field == "complete"


def test_a_forced_comparison_takes_the_common_questions_and_says_so() -> None:
    other = record(outcomes("100"), "int8", prompt="ar", sha256="bb" * 32)
    found = compare(record(outcomes("11")), [other], force=True).comparisons[0]
    assert (found.n_baseline, found.n_candidate, found.n_common) == (2, 3, 2)
    assert [u.field for u in found.unlike] == ["template", "data", "questions"]
    assert describe(found).startswith(
        "Forced, on 2 common questions of unlike runs (template en-latin / ar-latin; "
        "data aaaaaaaaaaaa / bbbbbbbbbbbb; questions 2 / 3): "
    )


# --- time, memory and size


def timed(*latency_s: float | None, precision: str = "fp32", **changes: Any) -> RunRecord:
    rows = [answer(i, latency_s=s) for i, s in enumerate(latency_s)]
    return record(rows, precision, **changes)


def test_latency_is_the_geometric_mean_of_the_questions_ratios() -> None:
    found = compare(timed(1.0, 1.0), [timed(0.5, 8.0, precision="int8")]).comparisons[0].latency
    assert found.value == pytest.approx(2.0)
    assert found.ci_low == pytest.approx(0.5)
    assert found.ci_high == pytest.approx(8.0)


def test_latency_pairs_only_questions_that_both_timed() -> None:
    runs = timed(1.0, None, 1.0), timed(0.5, 0.1, 0.5, precision="int8")
    found = compare(runs[0], runs[1:]).comparisons[0].latency
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx((0.5, 0.5, 0.5))


def test_latency_of_one_question_has_no_interval() -> None:
    found = compare(timed(1.0), [timed(0.5)]).comparisons[0].latency
    assert (found.value, found.ci_low) == (pytest.approx(0.5), None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"environment": MACHINE | {"cpu_model": "M4"}}, "other processor: EPYC / M4"),
        ({"environment": MACHINE | {"instruction_sets": []}}, "other instruction sets: "),
        ({"environment": MACHINE | {"threads": 4}}, "other threads: 2 / 4"),
        ({"environment": MACHINE | {"streams": 2}}, "other streams: 1 / 2"),
        ({"environment": MACHINE | {"cpu_model": None}}, "unknown processor"),
        ({"environment": {}}, "unknown processor"),
        ({"scenario": "offline"}, "other scenario: single-stream / offline"),
        ({"reuse": "shared"}, "other reuse: none / shared"),
        ({"endpoint": "http://h/v1"}, "other place: this machine / http://h/v1"),
    ],
)
def test_latency_is_not_compared_across_machines(changes: dict[str, Any], reason: str) -> None:
    found = compare(timed(1.0, 1.0), [timed(0.5, 0.5, precision="int8", **changes)]).comparisons[0]
    assert found.latency.value is None
    assert (found.latency.reason or "").startswith(reason)
    assert f"its speed is not compared ({found.latency.reason})" in describe(found)


def test_times_that_nobody_took_are_a_reason() -> None:
    found = compare(timed(1.0), [timed(None)]).comparisons[0].latency
    assert found == Ratio(None, reason="no question was timed in both runs")


def test_texts_of_other_lengths_are_not_timed_against_each_other() -> None:
    first = timed(1.0, scoring="generated")
    longer = timed(1.0, scoring="generated", max_new_tokens=8)
    found = compare(first, [longer], force=True).comparisons[0]
    assert found.latency.reason == "other answer: 1 new tokens / 8 new tokens"
    assert compare(first, [timed(2.0, scoring="generated")]).comparisons[0].latency.value == 2


def test_without_every_letters_probability_their_distance_is_not_computed() -> None:
    texts = [replace(a, letter_logits=(None,) * 10, matched=True) for a in outcomes("110")]
    runs = record(texts, scoring="generated"), record(texts[::-1], "int8", scoring="generated")
    ranking = compare(runs[0], [runs[1]])
    (found,) = ranking.comparisons
    assert (found.mean_kl, found.mean_total_variation) == (None, None)
    assert found.agreement == 1
    json.dumps(comparison_json(ranking), allow_nan=False)
    out = StringIO()
    print_comparison(ranking, Console(file=out, width=120))
    assert "not computed: a run does not know the probability of every letter" in out.getvalue()


def test_memory_is_compared_when_measured_with_as_many_threads() -> None:
    runs = timed(1.0), timed(1.0, precision="int8", memory=450)
    assert compare(runs[0], runs[1:]).comparisons[0].memory.value == pytest.approx(0.45)
    other = timed(1.0, environment=MACHINE | {"threads": 8})
    assert compare(runs[0], [other]).comparisons[0].memory.reason == "other threads: 2 / 8"
    unmeasured = timed(1.0, memory=None)
    assert (
        compare(runs[0], [unmeasured]).comparisons[0].memory.reason == "not measured in both runs"
    )


def test_size_is_compared_whatever_the_machine() -> None:
    other = timed(1.0, environment={})
    assert compare(timed(1.0), [other]).comparisons[0].size.value == 1.0


# --- several candidates

HALF = "10" * 30


def ranked(*patterns: str) -> dict[str, tuple[int, ...]]:
    runs = [record(outcomes(p), name=f"m{i}") for i, p in enumerate(patterns)]
    return {place.run: place.alike for place in compare(runs[0], runs[1:]).places}


def test_runs_that_cannot_be_told_apart_share_a_group() -> None:
    assert ranked("1" * 60, "1" * 59 + "0", HALF) == {"m0": (1,), "m1": (1,), "m2": (2,)}


def test_a_run_between_two_that_differ_may_belong_to_both_groups() -> None:
    # 8 apart: p = 2 / 2^8, by Holm times 3 still below 0.05. 4 apart: p = 2 / 2^4.
    assert ranked("1" * 20, "1" * 16 + "0" * 4, "1" * 12 + "0" * 8) == {
        "m0": (1,),
        "m1": (1, 2),
        "m2": (2,),
    }


def test_places_are_ordered_by_accuracy_and_the_baseline_is_among_them() -> None:
    assert list(ranked("100", "111", "110")) == ["m1", "m2", "m0"]


def test_many_pairs_are_corrected_where_one_alone_would_count() -> None:
    alone = ranked("1" * 6, "0" * 6)  # p = 2 / 64
    assert alone == {"m0": (1,), "m1": (2,)}
    among = ranked("1" * 6, "0" * 6, "1" * 3 + "0" * 3)  # 3 * 2 / 64
    assert set(among.values()) == {(1,)}


def test_each_candidate_is_compared_with_the_baseline_on_what_all_scored() -> None:
    rows = outcomes("1111")
    broken = [*rows[:3], replace(rows[3], status=Status.INVALID, predicted=None)]
    runs = [record(rows, p) for p in ("fp32", "int8")] + [record(broken, "int4")]
    found = compare(runs[0], runs[1:]).comparisons
    assert [c.candidate for c in found] == ["int8", "int4"]
    assert [c.micro.n for c in found] == [3, 3]


# --- names, words, tables


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([("m", "fp32", "a"), ("m", "int8", "b")], ("fp32", "int8")),
        ([("m", "fp32", "a"), ("n", "int8", "b")], ("m", "n")),
        (
            [("m", "fp32", "a"), ("m", "int8", "b"), ("n", "int8", "c")],
            ("m fp32", "m int8", "n int8"),
        ),
        ([("m", "fp32", "x/a.jsonl"), ("m", "fp32", "b.jsonl")], ("a", "b")),
        ([("m", "fp32", ""), ("m", "fp32", "b.jsonl")], ("run 1", "run 2")),
    ],
)
def test_runs_get_the_shortest_names_that_tell_them_apart(
    runs: list[tuple[str, str, str]], names: tuple[str, ...]
) -> None:
    records = [record([], precision, name=name, path=path) for name, precision, path in runs]
    assert name_runs(records) == names


def test_forced_runs_of_one_model_are_named_by_their_templates() -> None:
    assert name_runs([record([]), record([], prompt="ar")]) == ("en-latin", "ar-latin")


def comparison(**changes: Any) -> Comparison:
    return replace(
        pair("1100", "1010"),
        **{
            "n_changed": 12,
            "micro": PairedDifference(1000, 0.4, 0.397, -0.003, -0.011, 0.005, 4, 7, 0.5, 0.5),
            "latency": Ratio(0.526, 0.5, 0.55),
            "memory": Ratio(0.45),
            **changes,
        },
    )


def test_the_sentence_says_all_that_decides() -> None:
    assert describe(comparison()) == (
        "int8 answers 12 of 1,000 questions differently; its accuracy is not distinguishable from fp32's "
        "(-0.3 points, -1.1 to +0.5); it is 1.9 times faster and needs 0.45 of the memory."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_changed": 1}, "int8 answers 1 of 1,000 questions differently;"),
        ({"n_changed": 0}, "int8 answers every question as fp32 does;"),
        (
            {"micro": PairedDifference(9, 0.4, 0.5, 0.1, 0.02, 0.18, 4, 0, 0.01, 0.02)},
            "its accuracy is higher than fp32's (+10.0 points, +2.0 to +18.0);",
        ),
        (
            {"micro": PairedDifference(9, 0.4, 0.3, -0.1, -0.18, -0.02, 0, 4, 0.01, 0.02)},
            "its accuracy is lower than fp32's (-10.0 points, -18.0 to -2.0);",
        ),
        (
            {"micro": PairedDifference(9, 0.4, 0.3, -0.1, -0.18, -0.02, 0, 4, 0.01, 0.06)},
            "its accuracy is not distinguishable from fp32's (-10.0 points,",
        ),
        (
            {"micro": PairedDifference(9, 0.4, 0.4, 0.0, None, None, 0, 0, 1.0, 1.0)},
            "it is right on exactly the same questions;",
        ),
        (
            {"latency": Ratio(1.02, 0.99, 1.05)},
            "it is neither faster nor slower as far as can be told and needs",
        ),
        ({"latency": Ratio(1.5, 1.4, 1.6)}, "it is 1.5 times slower and needs"),
        ({"latency": Ratio(0.98, 0.97, 0.99)}, "it is 1.020 times faster and needs"),
        ({"memory": Ratio(1.3)}, "and needs 1.30 times the memory."),
        ({"memory": Ratio(0.998)}, "and needs as much memory."),
        ({"memory": Ratio(None, reason="-")}, "it is 1.9 times faster."),
        (
            {"latency": Ratio(None, reason="other threads: 2 / 4")},
            "its speed is not compared (other threads: 2 / 4); it needs 0.45 of the memory.",
        ),
    ],
)
def test_the_sentence_follows_the_figures(changes: dict[str, Any], words: str) -> None:
    assert words in describe(comparison(**changes))


def printed(*records: RunRecord, **options: Any) -> str:
    console = Console(file=StringIO(), width=120, highlight=False)
    print_comparison(compare(records[0], records[1:], **options), console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_two_runs_print_a_sentence_and_tables_without_a_ranking() -> None:
    text = printed(record(outcomes("1" * 8)), record(outcomes("0" * 8), "int8"))
    assert text.startswith("int8 answers 8 of 8 questions differently; its accuracy is lower")
    assert "Biology (High School)" in text  # a task that stands out
    assert "lost 8: q0, q1" in text
    assert "gained 0\n" in text
    assert "group" not in text


def test_several_runs_print_their_ranking_first() -> None:
    text = printed(*(record(outcomes("10"), name=name) for name in "abc"))
    assert text.splitlines()[0].split() == ["run", "accuracy", "%", "95", "%", "interval", "group"]
    assert "b answers every question as a does" in text


def test_a_models_name_is_never_markup() -> None:
    runs = [record(outcomes("10"), name=name) for name in ("[red]a", "[/]b")]
    assert "[/]b / [red]a" in printed(*runs)


def test_tied_rows_of_unlike_runs_are_labelled_in_print() -> None:
    text = printed(record(outcomes("10")), record(outcomes("10"), "int8", prompt="ar"), force=True)
    assert text.startswith("Forced, on 2 common questions")


def test_the_json_form_is_strict_and_holds_every_id_and_the_sentence() -> None:
    runs = record(outcomes("1" * 40)), record(outcomes("0" * 40), "int8")
    value = json.loads(json.dumps(comparison_json(compare(runs[0], runs[1:])), allow_nan=False))
    (found,) = value["comparisons"]
    assert len(found["lost"]) == 40
    assert found["sentence"].startswith("int8 answers 40 of 40 questions differently")
    assert found["groups"]["STEM"]["n"] == 40
    assert [place["run"] for place in value["ranking"]] == ["fp32", "int8"]


def test_a_hash_is_shortened_only_in_words() -> None:
    found = Unlike("data", "a" * 64, "b" * 64)
    assert str(found) == f"data {'a' * 12} / {'b' * 12}"
    assert found.baseline == "a" * 64


def test_long_names_do_not_break_the_columns() -> None:
    long = record(outcomes("10"), name="SmolLM2-135M-Instruct.Q4_1")
    console = Console(file=StringIO(), width=100)
    print_comparison(compare(record(outcomes("11")), [long]), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "SmolLM2-135M-Instruct.Q4_1 answers 1 of 2 questions differently" in text
    assert "baseline  candidate" in text
