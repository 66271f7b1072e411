"""RunRecord -> the ``model-index`` block in the front matter of a Hugging Face model card.

Source: huggingface_hub.repocard_data, eval_results_to_model_index, for the keys.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_eval import __version__
from edge_eval.convert.foreign import new_file
from edge_eval.errors import RecordError
from edge_eval.metrics import macro_accuracy, micro_accuracy
from edge_eval.paper import BENCHMARK
from edge_eval.questions import HUB_REPOSITORY
from edge_eval.schema import RunRecord
from edge_eval.scoring import protocol_named


def write_model_index(record: RunRecord, output: Path, data: str | None = None) -> None:  # noqa: ARG001
    """Write the YAML block, to be put between a model card's two ``---`` lines."""
    with new_file(output) as file:
        file.write("\n".join(_yaml({"model-index": model_index(record)})) + "\n")


def model_index(record: RunRecord) -> list[dict[str, Any]]:
    """The block's content; shares are 0-1, the protocol's own average stands first.

    Errors: RecordError for an incomplete run and for one without a scored question.
    """
    micro, macro = micro_accuracy(record.predictions), macro_accuracy(record.predictions)
    if not record.complete or micro.value is None or macro.value is None:
        raise RecordError(f"{record.path} is not a complete run with an accuracy to publish.")
    shared = {"n_scored": micro.n_scored, "n_questions": len(record.predictions)}
    metrics = {
        "micro": _metric(
            "micro",
            micro.value,
            micro.standard_error,
            shared
            | {
                "ci95_low": _rounded(micro.ci_low),
                "ci95_high": _rounded(micro.ci_high),
                "chance": _rounded(micro.chance),
            },
        ),
        "macro": _metric(
            "macro",
            macro.value,
            macro.standard_error,
            shared
            | {
                "n_tasks": macro.n_tasks,
            },
        ),
    }
    headline = protocol_named(record.config.protocol).headline
    ordered = sorted(metrics, key=lambda name: name != headline)
    result = {
        "task": {"type": "multiple-choice", "name": "Multiple Choice"},
        "dataset": _dataset(record),
        "metrics": [metrics[name] for name in ordered],
    }
    return [{"name": record.manifest.name, "results": [result]}]


def _metric(
    name: str, value: float, error: float | None, args: Mapping[str, Any]
) -> dict[str, Any]:
    known = {k: v for k, v in {"standard_error": _rounded(error), **args}.items() if v is not None}
    return {"type": "accuracy", "value": _rounded(value), "name": f"{name} accuracy", "args": known}


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _dataset(record: RunRecord) -> dict[str, Any]:
    """Only what is the benchmark may bear its name."""
    config, source = record.config, record.data
    counts = Counter(p.task for p in record.predictions if p.rotation == 0)
    whole = counts == BENCHMARK
    part = "" if whole else f", {sum(counts.values()):,} questions"
    if source.kind == "hub" or whole:
        named = {"type": HUB_REPOSITORY, "name": f"ArabicMMLU{part}"}
    elif source.kind == "sample":
        named = {"type": "edge-eval-sample", "name": f"edge-eval's smoke sample{part}"}
    else:
        named = {"type": "custom", "name": f"{Path(source.source).name}{part}"}
    if source.revision:
        named["revision"] = source.revision
    args = {
        "protocol": config.protocol,
        "template": config.template,
        "scoring": config.scoring,
        "num_few_shot": config.shots,
        "chat_template": config.chat_template,
        "precision": record.manifest.precision,
        "questions_sha256": source.sha256,
        "tool": f"edge-eval {__version__}",
    }
    return {**named, "split": "test", "args": args}


def _yaml(value: Mapping[str, Any] | Sequence[Any], indent: str = "") -> list[str]:
    """Block-style YAML of mappings with plain keys, lists of mappings, and scalars."""
    lines = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Mapping | list):
                lines += [f"{indent}{key}:", *_yaml(item, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {_scalar(item)}")
        return lines
    for item in value:
        first, *rest = _yaml(item, indent + "  ")
        lines += [f"{indent}- {first.removeprefix(indent + '  ')}", *rest]
    return lines


def _scalar(value: object) -> str:
    """A JSON scalar, which is YAML too once what YAML takes for a line's end is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
