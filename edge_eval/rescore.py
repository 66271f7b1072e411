"""RunRecord -> the same run decided by another rule, from its saved logits, without the model.

Beside SCORING_METHODS, which see one question, two rules see the whole run: RUN_METHODS, at the end.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edge_eval.errors import OptionError, RecordError
from edge_eval.generated import draw_option
from edge_eval.metrics import has_probabilities, letter_probabilities
from edge_eval.schema import Prediction, RunRecord, Status
from edge_eval.scoring import (
    SCORING_METHODS,
    TEXT_SCORING_METHODS,
    Scores,
    decide,
    option_logits,
)


def unrotated(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """The predictions with the options in the data's own order: all, but in a permuted run."""
    return tuple(p for p in predictions if p.rotation == 0)


def rescore(record: RunRecord, method: str) -> RunRecord:
    """The run with every prediction made anew by a rule of scoring.py or in RUN_METHODS.

    Errors: OptionError for an unknown rule, or one the record cannot serve.
    """
    _check_kept(record, method)
    if method in RUN_METHODS:
        predictions = RUN_METHODS[method](record)
    elif method in TEXT_SCORING_METHODS:
        predictions = [_read_again(record, p, method) for p in unrotated(record.predictions)]
    elif method in SCORING_METHODS:
        if method == "per-character" and not record.scoring.get("normalized"):
            raise OptionError(
                "per-character divides log-probabilities, and this record keeps bare logits: run again "
                "with --protocol oall."
            )
        predictions = [
            _decided(
                p,
                SCORING_METHODS[method](_logits(record, p), p.letters),
                partial=bool(record.config.endpoint),
            )
            for p in unrotated(record.predictions)
        ]
    else:
        known = ", ".join((*SCORING_METHODS, *TEXT_SCORING_METHODS, *RUN_METHODS))
        raise OptionError(f"no scoring {method!r}: there are {known}.")
    config = replace(record.config, scoring=method, permute=False)
    return replace(record, config=config, predictions=tuple(predictions))


def _check_kept(record: RunRecord, method: str) -> None:
    """Raise OptionError for a rule that needs what this run did not see."""
    reads_text = method in TEXT_SCORING_METHODS
    if reads_text != (record.config.scoring in TEXT_SCORING_METHODS):
        raise OptionError(
            f"{method} reads generated texts, and this record keeps letters' values: run again with "
            f"--scoring {method}."
            if reads_text
            else f"{method} needs the letters' values, and this record keeps generated texts: run "
            "again with another --scoring."
        )
    scored = (p for p in record.predictions if p.status is Status.SCORED)
    if method in RUN_METHODS and not all(map(has_probabilities, scored)):
        raise OptionError(
            f"{method} needs the probability of every letter, and this record's endpoint told of the "
            f"likeliest {record.config.top_logprobs} tokens only: ask for more with --top-logprobs."
        )


def _read_again(record: RunRecord, prediction: Prediction, method: str) -> Prediction:
    if prediction.generated is None:
        return prediction
    found = TEXT_SCORING_METHODS[method](prediction.generated, prediction.letters)
    n_options = len(prediction.letters)
    drawn = draw_option(record.config.seed, prediction.question_id, prediction.rotation, n_options)
    predicted = drawn if found is None else found
    return replace(prediction, predicted=predicted, matched=found is not None)


def _logits(record: RunRecord, prediction: Prediction) -> Scores:
    letters = record.scoring.get("letters") or ()
    if not set(prediction.letters) <= set(letters):
        raise RecordError(
            f"{record.path} does not say which logits are those of question "
            f"{prediction.question_id[:40]!r}'s letters: it cannot be decided again."
        )
    return option_logits(prediction.letter_logits, prediction.letters, letters)


def _decided(prediction: Prediction, scores: Scores, *, partial: bool = False) -> Prediction:
    if prediction.status in (Status.TOO_LONG, Status.UNSEEN):
        return prediction
    decision = decide(scores, partial=partial)
    return replace(
        prediction,
        predicted=decision.predicted,
        tied=decision.tied,
        status=Status.INVALID if decision.predicted is None else Status.SCORED,
    )


def _bias_corrected(record: RunRecord) -> list[Prediction]:
    """Log-probabilities less the letters' mean over the run, per number of options.

    A model that likes A whatever is asked has a high mean for A; over many questions the right
    answers are spread, so the mean is the model's taste. Source of the idea: batch calibration,
    Zhou et al. 2023, arXiv:2309.17249.
    """
    asked = unrotated(record.predictions)
    by_options: dict[int, list[Prediction]] = defaultdict(list)
    for prediction in asked:
        if prediction.status is Status.SCORED:
            by_options[len(prediction.letters)].append(prediction)
    prior = {
        n: np.mean([letter_probabilities(p) for p in group], axis=0)
        for n, group in by_options.items()
    }
    return [
        _decided(p, np.log(letter_probabilities(p)) - np.log(prior[len(p.letters)]))
        if p.status is Status.SCORED
        else p
        for p in asked
    ]


def _cyclic(record: RunRecord) -> list[Prediction]:
    """The mean probability of each option over all places it was shown in."""
    if not record.config.permute:
        raise OptionError(
            "cyclic scoring needs every question asked with its options rotated: run again with --permute."
        )
    by_question: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in record.predictions:
        by_question[prediction.question_id].append(prediction)
    averaged = []
    for rotations in by_question.values():
        shown = {p.rotation: p for p in rotations}
        base, n = shown.get(0), len(rotations[0].letters)
        if base is None:
            continue
        alike = all(p.status is Status.SCORED and len(p.letters) == n for p in rotations)
        if shown.keys() != set(range(n)) or not alike:
            averaged.append(_decided(base, np.full(n, math.nan)))
            continue
        mean = np.mean(
            [np.roll(letter_probabilities(shown[places]), places) for places in range(n)], axis=0
        )
        averaged.append(_decided(base, np.log(mean)))
    return averaged


RUN_METHODS: dict[str, Callable[[RunRecord], list[Prediction]]] = {
    "bias-corrected": _bias_corrected,
    "cyclic": _cyclic,
}
