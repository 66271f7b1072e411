"""Two run records -> what makes them unlike; CONDITIONS and MACHINE say what must agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_eval.schema import RunRecord
from edge_eval.scoring import TEXT_SCORING_METHODS


@dataclass(frozen=True, slots=True)
class Unlike:
    """A setting in which two runs differ, so that their accuracies are not alike."""

    field: str
    baseline: Any
    candidate: Any

    def __str__(self) -> str:
        values = [self.baseline, self.candidate]
        if self.field == "data":  # a hash's beginning is enough to see that it is another
            values = [value[:12] for value in values]
        return f"{self.field} {values[0]} / {values[1]}"


def find_unlike(baseline: RunRecord, candidate: RunRecord) -> tuple[Unlike, ...]:
    """Every setting that makes the two runs' accuracies unlike; empty when they are alike."""
    found = [
        Unlike(name, read(baseline), read(candidate))
        for name, read in CONDITIONS.items()
        if read(baseline) != read(candidate)
    ]
    if not (baseline.complete and candidate.complete):
        found.append(Unlike("complete", baseline.complete, candidate.complete))
    ids = [{p.question_id for p in r.predictions} for r in (baseline, candidate)]
    if ids[0] != ids[1]:
        found.append(Unlike("questions", len(ids[0]), len(ids[1])))
        subset = ("tasks", "groups", "levels", "countries", "limit", "seed")
        values = [(n, getattr(baseline.config, n), getattr(candidate.config, n)) for n in subset]
        found += [Unlike(name, a, b) for name, a, b in values if a != b]
    return tuple(found)


def other_machine(
    baseline: RunRecord, candidate: RunRecord, names: Sequence[str] = ()
) -> str | None:
    """Why times (or what ``names`` of MACHINE decide) are not to be compared; None when they are."""
    for name in names or MACHINE:
        a, b = MACHINE[name](baseline), MACHINE[name](candidate)
        if a is None or b is None:
            return f"unknown {name}"
        if a != b:
            return f"other {name}: {a} / {b}"
    return None


def name_runs(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """The shortest names that tell the runs apart: precision, model, both, template or file."""
    names = [r.manifest.name for r in records]
    precisions = [r.manifest.precision for r in records]
    both = [f"{name} {precision}" for name, precision in zip(names, precisions, strict=True)]
    templates = [r.config.template for r in records]
    files = [Path(r.path).stem for r in records]
    for choice in (*([precisions] if len(set(names)) == 1 else []), names, both, templates, files):
        if len(set(choice)) == len(records) and all(choice):
            return tuple(choice)
    return tuple(f"run {number}" for number in range(1, len(records) + 1))


CONDITIONS: dict[str, Callable[[RunRecord], Any]] = {
    "protocol": lambda r: r.config.protocol,
    "template": lambda r: r.config.template,
    "scoring": lambda r: r.config.scoring,
    "max_new_tokens": lambda r: r.config.max_new_tokens,
    "shots": lambda r: r.config.shots,
    "shots' rows": lambda r: r.scoring.get("shots_sha256"),
    "allow_fewer_shots": lambda r: bool(r.config.shots) and r.config.allow_fewer_shots,
    "chat_template": lambda r: r.scoring.get("chat_template_sha256", r.config.chat_template),
    "system_prompt": lambda r: r.config.system_prompt,
    "permute": lambda r: r.config.permute,
    # Argmax and the letters' probabilities are the same from logits and log-probabilities.
    "normalized": lambda r: r.config.scoring != "argmax" and r.scoring.get("normalized"),
    "data": lambda r: r.data.sha256,
}

# What must agree, and be known, before two times are set against each other.
MACHINE: dict[str, Callable[[RunRecord], Any]] = {
    # An endpoint's times are the client's, with the network in them.
    "place": lambda r: r.config.endpoint or "this machine",
    "processor": lambda r: r.environment.get("cpu_model"),
    "instruction sets": lambda r: r.environment.get("instruction_sets"),
    "threads": lambda r: "the server's" if r.config.endpoint else r.environment.get("threads"),
    "streams": lambda r: r.environment.get("streams", 1),
    "scenario": lambda r: r.config.scenario,
    "reuse": lambda r: r.config.reuse,
    # Texts are longer than one pass, and read the whole head.
    "answer": lambda r: (
        f"{r.config.max_new_tokens} new tokens"
        if r.config.scoring in TEXT_SCORING_METHODS
        else "letters"
    ),
}
