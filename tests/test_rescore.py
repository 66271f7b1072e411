"""Another rule on the saved logits, without the model."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_eval.errors import OptionError
from edge_eval.evaluate import evaluate
from edge_eval.rescore import RUN_METHODS, rescore, unrotated
from edge_eval.schema import RunConfig, RunRecord, Status
from edge_eval.scoring import SCORING_METHODS


@pytest.fixture(scope="module")
def permuted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    config = RunConfig(model=str(tiny_model), limit=20, permute=True, threads=1)
    return evaluate(config, tmp_path_factory.mktemp("run") / "permuted.jsonl")


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    config = RunConfig(model=str(tiny_model), limit=20, threads=1)
    return evaluate(config, tmp_path_factory.mktemp("run") / "plain.jsonl")


@pytest.mark.parametrize("method", sorted({*SCORING_METHODS, *RUN_METHODS} - {"per-character"}))
def test_every_rule_scores_every_question_once(method: str, permuted: RunRecord) -> None:
    again = rescore(permuted, method)
    assert [p.question_id for p in again.predictions] == [
        p.question_id for p in unrotated(permuted.predictions)
    ]
    assert {p.status for p in again.predictions} == {Status.SCORED}
    assert again.config.scoring == method


def test_the_runs_own_rule_changes_nothing(plain: RunRecord) -> None:
    assert rescore(plain, "argmax").predictions == plain.predictions


def test_a_permuted_run_holds_the_plain_one(permuted: RunRecord, plain: RunRecord) -> None:
    kept = unrotated(permuted.predictions)
    assert [p.predicted for p in kept] == [p.predicted for p in plain.predictions]
    assert len(permuted.predictions) == sum(len(p.letters) for p in kept)


def test_rotated_questions_keep_their_right_answer(permuted: RunRecord) -> None:
    for prediction in permuted.predictions:
        base = next(p for p in permuted.predictions if p.question_id == prediction.question_id)
        n = len(prediction.letters)
        assert (prediction.answer + prediction.rotation) % n == base.answer


def test_a_taste_for_one_letter_is_taken_out(plain: RunRecord) -> None:
    # Noise plus a taste for the first letter that decides every question.
    rng = np.random.default_rng(0)
    biased = tuple(
        replace(
            p,
            letter_logits=(9 + rng.normal(), *rng.normal(size=4).tolist(), *p.letter_logits[5:]),
            predicted=0,
        )
        for p in plain.predictions
    )
    again = rescore(replace(plain, predictions=biased), "bias-corrected")
    chosen = [p.predicted for p in again.predictions]
    assert chosen.count(0) < len(chosen)


def test_cyclic_ignores_where_an_option_stands(permuted: RunRecord) -> None:
    # The model that always says the first letter has no preference among the options.
    taste = (5.0, 0.0, 0.0, 0.0, 0.0, *(0.0,) * 5)
    blind = tuple(replace(p, letter_logits=taste) for p in permuted.predictions)
    again = rescore(replace(permuted, predictions=blind), "cyclic")
    assert all(p.predicted is not None for p in again.predictions)
    # And one that always finds the right option finds it here too.
    knowing = tuple(
        replace(
            p,
            letter_logits=tuple(4.0 if i == p.answer else 0.0 for i in range(5)) + (math.nan,) * 5,
        )
        for p in permuted.predictions
    )
    again = rescore(replace(permuted, predictions=knowing), "cyclic")
    assert all(p.correct for p in again.predictions)


def test_rules_that_a_record_cannot_serve_are_refused(plain: RunRecord) -> None:
    with pytest.raises(OptionError, match="--permute"):
        rescore(plain, "cyclic")
    with pytest.raises(OptionError, match="--protocol oall"):
        rescore(plain, "per-character")
    with pytest.raises(OptionError, match="no scoring 'magic'"):
        rescore(plain, "magic")


# ---- generated answers


@pytest.fixture(scope="module")
def written(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    config = RunConfig(
        model=str(tiny_model), limit=20, threads=1, scoring="generated", max_new_tokens=4
    )
    return evaluate(config, tmp_path_factory.mktemp("run") / "written.jsonl")


def test_a_text_can_be_read_again_without_the_model(written: RunRecord) -> None:
    assert all(p.generated is not None for p in written.predictions)
    assert rescore(written, "generated").predictions == written.predictions
    edited = [replace(p, generated="Answer: B") for p in written.predictions]
    again = rescore(replace(written, predictions=tuple(edited)), "generated")
    assert {(p.predicted, p.matched) for p in again.predictions} == {(1, True)}


def test_random_options_are_the_seeds(written: RunRecord) -> None:
    unread = [replace(p, generated="?") for p in written.predictions]
    record = replace(written, predictions=tuple(unread))
    other = replace(record, config=replace(record.config, seed=1))
    first, second = (rescore(r, "generated").predictions for r in (record, other))
    assert {p.matched for p in first} == {False}
    assert rescore(record, "generated").predictions == first
    assert [p.predicted for p in first] != [p.predicted for p in second]


@pytest.mark.parametrize("method", ["argmax", "bias-corrected"])
def test_a_text_has_no_letters_to_score(method: str, written: RunRecord) -> None:
    with pytest.raises(OptionError, match="keeps generated texts"):
        rescore(written, method)


def test_letters_have_no_text_to_read(plain: RunRecord) -> None:
    with pytest.raises(OptionError, match="--scoring generated"):
        rescore(plain, "generated")
