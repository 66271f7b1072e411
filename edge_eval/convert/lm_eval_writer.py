"""RunRecord -> lm-evaluation-harness's results_DATE.json and samples_TASK_DATE.jsonl.

Source: lm-evaluation-harness 0.4.13, loggers/evaluation_tracker.py, and files it wrote. A run of
the harness's own protocol bears its task names; one of another template has the template in every
name, for its numbers are others.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_eval import __version__
from edge_eval.convert.foreign import Asked, ask_again, new_file
from edge_eval.letters import LATIN, OPTION_LETTERS
from edge_eval.metrics import micro_accuracy
from edge_eval.prompts import PROMPT_TEMPLATES
from edge_eval.questions import HUB_REPOSITORY, OPTIONS
from edge_eval.schema import Prediction, RunRecord, Status


def write_lm_eval(record: RunRecord, output: Path, data: str | None = None) -> None:
    """Write the files into the folder ``output``; questions not scored are left out, and counted.

    A sample's resps are the letters' logits, or log-probabilities where the record has them, with
    "None" for is_greedy, which a record does not tell.
    """
    asked = ask_again(record, data)
    date = datetime.fromisoformat(record.created)
    stamp = date.replace(tzinfo=None).isoformat(timespec="microseconds").replace(":", "-")
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in asked:
        if item.prediction.status is Status.SCORED:
            samples = tasks[_task_name(record, item.question.task)]
            samples.append(_sample(record, item, len(samples)))
    results = _results(record, asked, tasks) | {"date": date.timestamp()}
    with new_file(output / f"results_{stamp}.json") as file:
        json.dump(results, file, indent=2, ensure_ascii=False, allow_nan=False)
    for task, samples in tasks.items():
        with new_file(output / f"samples_{task}_{stamp}.jsonl") as file:
            for sample in samples:
                file.write(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n")


def _task_name(record: RunRecord, name: str) -> str:
    """The harness's name for a task or group, with the template where it is not the harness's."""
    template = record.config.template
    own = "" if template == "lm-eval" else f"_{template}"
    words = re.sub(r"[^a-z0-9]+", "_", f"{own}_{name}".lower()).strip("_")
    return f"arabicmmlu_{words}" if words else "arabicmmlu"


def _sample(record: RunRecord, asked: Asked, doc_id: int) -> dict[str, Any]:
    question, prediction = asked.question, asked.prediction
    wording = PROMPT_TEMPLATES[record.config.template]
    target = prediction.letters[prediction.answer]
    start = OPTION_LETTERS.index(prediction.letters[0])
    resps = [[str(v), "None"] for v in prediction.letter_logits[start:][: len(prediction.letters)]]
    doc = {
        "ID": question.id,
        "Country": question.country,
        "Group": question.group,
        "Subject": question.subject,
        "Level": question.level,
        "Question": question.text,
        "Context": question.context,
        "Answer Key": LATIN[question.answer],
        **dict.fromkeys(OPTIONS, ""),
        **dict(zip(OPTIONS, question.options, strict=False)),
        "is_few_shot": "0",
    }
    return {
        "doc_id": doc_id,
        "doc": doc,
        "target": target,
        "arguments": {
            f"gen_args_{i}": {"arg_0": asked.prompt.text, "arg_1": wording.letter_prefix + letter}
            for i, letter in enumerate(prediction.letters)
        },
        "resps": [[resp] for resp in resps],
        "filtered_resps": resps,
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(asked.prompt.text),
        "target_hash": _hash(target),
        "acc": float(prediction.correct),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _results(
    record: RunRecord, asked: Sequence[Asked], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """What the harness writes beside the samples: a score per task, group and in all."""
    parts: dict[str, dict[str, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    aliases: dict[str, str] = {}
    for item in asked:
        group, task = (_task_name(record, n) for n in (item.question.group, item.question.task))
        aliases |= {group: item.question.group, task: item.question.task}
        parts[group][task].append(item.prediction)
    tasks = {task: found for group in parts.values() for task, found in group.items()}
    whole = _task_name(record, "")
    scores = {task: _score(task, aliases[task], [found]) for task, found in tasks.items()}
    groups = {group: _score(group, aliases[group], [*parts[group].values()]) for group in parts}
    groups[whole] = _score(whole, whole, [*tasks.values()])
    source = HUB_REPOSITORY if record.data.kind == "hub" else record.data.source
    return {
        "results": scores | groups,
        "groups": groups,
        "group_subtasks": {whole: [*parts], **{group: [*parts[group]] for group in parts}},
        "configs": {
            task: {
                "task": task,
                "task_alias": aliases[task],
                "dataset_path": source,
                "dataset_name": aliases[task],
                "test_split": "test",
                "num_fewshot": record.config.shots,
                "output_type": "multiple_choice",
                "metadata": {"version": 1.0},
            }
            for task in tasks
        },
        "versions": dict.fromkeys(tasks, 1.0),
        "n-shot": dict.fromkeys(tasks, record.config.shots),
        "higher_is_better": {task: {"acc": True} for task in tasks},
        "n-samples": {
            task: {"original": len(found), "effective": len(samples.get(task, ()))}
            for task, found in tasks.items()
        },
        "config": {
            "model": "edge-eval",
            "model_args": {"pretrained": record.manifest.name},
            "model_dtype": record.manifest.precision,
            "model_revision": record.manifest.revision,
        },
        "max_length": record.manifest.max_length,
        "task_hashes": {
            task: _hash("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in rows))
            for task, rows in samples.items()
        },
        "model_source": "edge-eval",
        "model_name": record.manifest.name,
        "system_instruction": None,
        "chat_template": None,
        "chat_template_sha": None,
        "edge_eval_version": __version__,
    }


def _score(name: str, alias: str, parts: Sequence[Sequence[Prediction]]) -> dict[str, Any]:
    """Accuracy over all parts with the harness's standard error, pooled within the parts."""
    found = [part for part in map(micro_accuracy, parts) if part.n_scored]
    n = sum(part.n_scored for part in found)
    errors = [part.standard_error for part in found]
    error: float | str = "N/A"
    if found and None not in errors:
        # Source: lm_eval/api/metrics.py, pooled_sample_stderr.
        squares = [p.n_scored * (p.n_scored - 1) * (p.standard_error or 0) ** 2 for p in found]
        error = math.sqrt(sum(squares) / (n - len(found)) / n)
    return {
        "name": name,
        "alias": alias,
        "sample_len": n,
        "acc,none": sum(part.n_correct for part in found) / n if n else "N/A",
        "acc_stderr,none": error,
    }
