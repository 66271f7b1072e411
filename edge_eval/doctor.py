"""Model directory and data -> what to know before a night is spent: letters, tokens, limits.

Every figure is of the model at hand and of real rows; the verdict's bounds stand at the top.
"""

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edge_eval.chat import has_chat_template
from edge_eval.environment import release_memory, usable_cores
from edge_eval.errors import ScoringError
from edge_eval.letters import describe_letter
from edge_eval.metrics import Float64Array
from edge_eval.model import LetterModel, letter_reader
from edge_eval.onnx_folder import open_any_model, read_any_manifest
from edge_eval.prefixes import PrefixStack, Step, plan, streams
from edge_eval.prompts import PROMPT_TEMPLATES, PromptTemplate, render
from edge_eval.questions import load_questions
from edge_eval.schema import EncodedPrompt, Float32Array, Question, QuestionSet, RunConfig
from edge_eval.scoring import decoder_input_ids
from edge_eval.streams import merge
from edge_eval.tables import figure_table, print_table
from edge_eval.tokenization import LetterTokens, encode_prompts, letter_tokens, load_tokenizer

N_ROWS = 20
# The default and the other protocols are measured on all of them, the paper's three other ways to
# ask on every fourth one: they tell less, and would take half of the time.
MEASURED_WHOLE = ("en-latin", "lm-eval", "oall")

# Below this share of the probability the letters are noise beside the words a model would say.
MIN_MASS = 0.01
# Another protocol is worth naming when its letters hold so many times more.
BETTER_BY = 2.0


@dataclass(frozen=True, slots=True)
class LetterFinding:
    """How one letter is spelt under a template, and what the tokenizer makes of it in place."""

    letter: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    in_place: tuple[str, ...]  # the tokens that appear when the letter is appended to a prompt
    changed: bool  # by the tokenizer's normaliser
    agrees: bool  # whether the tokens in place are those scored


def examine(model_path: Path, data: str = "sample", file: str = "") -> dict[str, Any]:
    """All findings on a model and, where given, a data file, as JSON-able values.

    file: which graph of an ONNX folder.
    Errors: ModelError, DataError as for a run.
    """
    manifest = read_any_manifest(model_path, file, hashes=True)
    tokenizer = load_tokenizer(model_path)
    questions = load_questions(RunConfig(data=data))
    rows = load_questions(RunConfig(data=data, limit=N_ROWS)).test
    templates: dict[str, Any] = {}
    asked: list[tuple[str, Question, EncodedPrompt]] = []
    spelt: dict[str, LetterTokens] = {}
    for name, wording in PROMPT_TEMPLATES.items():
        lengths = [
            len(item.input_ids)
            for item in encode_prompts(tokenizer, (render(q, name) for q in questions.test))
        ]
        found: dict[str, Any] = {
            "longest_tokens": max(lengths),
            "mean_tokens": sum(lengths) / len(lengths),
            "n_too_long": sum(n > manifest.max_length for n in lengths),
            "n_beyond_window": sum(n > (manifest.sliding_window or n) for n in lengths),
        }
        templates[name] = found
        try:
            spelt[name] = letter_tokens(
                tokenizer,
                wording.letters,
                wording.letter_prefix,
                own_text=manifest.encoder_decoder,
            )
        except ScoringError as error:
            found["refused"] = str(error)
            continue
        prompts = [render(question, name) for question in rows]
        # An encoder-decoder's answer does not continue the prompt: its letter stands alone.
        before = "" if manifest.encoder_decoder else prompts[0].text
        found["letters"] = [_fields(f) for f in _letters(tokenizer, wording, spelt[name], before)]
        if given := decoder_input_ids(manifest, name):
            found["decoder_input"] = [str(tokenizer.id_to_token(token_id)) for token_id in given]
        encoded = encode_prompts(tokenizer, prompts)
        fitting = [
            (name, q, item)
            for q, item in zip(rows, encoded, strict=True)
            if len(item.input_ids) <= manifest.max_length
        ]
        asked += fitting if name in MEASURED_WHOLE else fitting[::4]
    special = _special_tokens(tokenizer, model_path)
    del tokenizer
    release_memory()
    model = open_any_model(model_path, manifest, threads=1)
    _measure(model, asked, spelt, templates)
    report = {
        "model": manifest.name,
        "max_length": manifest.max_length,
        "sliding_window": manifest.sliding_window,
        "chat_template": has_chat_template(model_path),
        "special_tokens": special,
        "n_rows": len(rows),
        "templates": templates,
        "data": examine_data(questions),
    }
    return report | {"verdict": verdict(templates)}


def _fields(finding: LetterFinding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in LetterFinding.__dataclass_fields__}


def _letters(
    tokenizer: Any, wording: PromptTemplate, spelt: LetterTokens, prompt: str
) -> list[LetterFinding]:
    before = tokenizer.encode(prompt, add_special_tokens=False)
    findings = []
    for letter, ids, pieces in zip(wording.letters, spelt.ids, spelt.pieces, strict=True):
        after = tokenizer.encode(prompt + wording.letter_prefix + letter, add_special_tokens=False)
        n_same = 0
        while n_same < len(before.ids) and before.ids[n_same] == after.ids[n_same]:
            n_same += 1
        normalizer = tokenizer.normalizer
        findings.append(
            LetterFinding(
                letter=letter,
                ids=ids,
                pieces=pieces,
                in_place=tuple(after.tokens[n_same:]),
                changed=normalizer is not None
                and normalizer.normalize_str(letter).strip("\u2581 ") != letter,
                agrees=tuple(after.ids[n_same:]) == ids,
            )
        )
    return findings


def _special_tokens(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """What the tokenizer puts around a text, and what its settings say it should."""
    plain = tokenizer.encode("A", add_special_tokens=False).tokens
    whole = tokenizer.encode("A", add_special_tokens=True).tokens
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        "before": whole[:start],
        "after": whole[start + len(plain) :],
        "add_bos_token": settings.get("add_bos_token"),
        "add_eos_token": settings.get("add_eos_token"),
    }


def _measure(
    model: LetterModel,
    asked: Sequence[tuple[str, Question, EncodedPrompt]],
    spelt: dict[str, LetterTokens],
    templates: dict[str, Any],
) -> None:
    """Add to each template the letters' mean probability mass, entropy and wins."""
    rows: dict[str, list[tuple[float, float, int]]] = {}
    for (name, _, _), logs in zip(asked, _log_probabilities(model, asked, spelt), strict=True):
        probabilities = np.exp(logs)
        mass = float(probabilities.sum())
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        entropy = -float((shares * np.log(np.maximum(shares, 1e-300))).sum()) / math.log(len(logs))
        rows.setdefault(name, []).append((mass, entropy, int(logs.argmax())))
    for name, values in rows.items():
        wins = Counter(best for _, _, best in values)
        templates[name] |= {
            "n_measured": len(values),
            "letter_mass": sum(mass for mass, _, _ in values) / len(values),
            "letter_entropy": sum(entropy for _, entropy, _ in values) / len(values),
            "letter_wins": [wins.get(i, 0) for i in range(5)],
        }


def _log_probabilities(
    model: LetterModel,
    asked: Sequence[tuple[str, Question, EncodedPrompt]],
    spelt: dict[str, LetterTokens],
) -> list[Float64Array]:
    """Each prompt's log-probabilities (options,) of its letters, over the whole vocabulary.

    Shared beginnings are computed once, on all cores. Letters of several tokens are read step by
    step, as a run does; the others in one product, so that the head, by far the largest table, is
    read once for all prompts.
    """
    ids = [spelt[name].ids[: len(question.options)] for name, question, _ in asked]
    quick = [all(len(spelling) == 1 for spelling in own) for own in ids]
    encoded = [item.input_ids for _, _, item in asked]

    def walk(steps: Sequence[Step]) -> Iterator[tuple[int, Float32Array]]:
        stack = PrefixStack(model)
        for step in steps:
            at = step.index
            past, rest = stack.begin(encoded[at], step)
            asking = model.answering_behind(decoder_input_ids(model.manifest, asked[at][0]))
            if quick[at]:
                yield at, asking.run(rest, past)[0]
            else:
                yield at, letter_reader(asking, ids[at], normalized=True).read(rest, past).values

    found: list[Float32Array] = [np.empty(0, np.float32)] * len(asked)
    steps = plan(encoded) if model.continues else [Step(at, (), 0) for at in range(len(asked))]
    for at, values in merge(walk(part) for part in streams(steps, usable_cores())):
        found[at] = values
    together = [at for at in range(len(asked)) if quick[at]]
    log_z: dict[int, float] = {}
    if together:
        sums = _log_sums(model, np.stack([found[at] for at in together]))
        log_z = dict(zip(together, sums.tolist(), strict=True))
    return [
        model.logits(found[at], model.head_rows([spelling[0] for spelling in ids[at]])).astype(
            np.float64
        )
        - log_z[at]
        if quick[at]
        else found[at].astype(np.float64)
        for at in range(len(asked))
    ]


def _log_sums(model: LetterModel, hidden: Float32Array) -> Float64Array:
    """The log of the sum over the vocabulary of exp(logit), for each last hidden state (prompts,)."""
    largest = np.full(len(hidden), -np.inf, dtype=np.float64)
    total = np.zeros(len(hidden), dtype=np.float64)
    for logits in model.logits_in_blocks(hidden):
        peak = np.maximum(largest, logits.max(axis=1))
        total = total * np.exp(largest - peak) + np.exp(logits - peak[:, None]).sum(axis=1)
        largest = peak
    return np.asarray(largest + np.log(total), dtype=np.float64)


def examine_data(questions: QuestionSet) -> dict[str, Any]:
    """What is odd in the rows themselves; counts of questions unless the name says otherwise."""
    test = questions.test
    texts = Counter((q.context, q.text, q.options) for q in test)
    everything = {q.id: "".join((q.context, q.text, *q.options)) for q in test}
    n_keys = Counter(q.answer for q in test)
    return {
        "source": questions.fingerprint.source,
        "n_questions": len(test),
        "n_refused": len(questions.refused),
        "refused": [f"line {row.line}: {row.reason}" for row in questions.refused[:20]],
        "n_tasks": len({q.task for q in test}),
        "n_with_few_shot_rows": sum(bool(questions.shots.get(q.task)) for q in test),
        "n_repeated": sum(n - 1 for n in texts.values()),
        "n_with_equal_options": sum(len(set(q.options)) < len(q.options) for q in test),
        "answers_per_option": [n_keys.get(i, 0) for i in range(5)],
        "n_with_presentation_forms": _count(everything, _is_presentation_form),
        "n_with_tatweel": _count(everything, "\u0640".__eq__),
        "n_with_bidi_marks": _count(everything, _is_bidi_mark),
        "n_with_replacement_characters": _count(everything, "\ufffd".__eq__),
    }


def _count(texts: dict[str, str], odd: Any) -> int:
    return sum(any(odd(character) for character in text) for text in texts.values())


def _is_presentation_form(character: str) -> bool:
    return "\ufb50" <= character <= "\ufdff" or "\ufe70" <= character <= "\ufefc"


def _is_bidi_mark(character: str) -> bool:
    return unicodedata.category(character) == "Cf" and unicodedata.bidirectional(character) in {
        "L", "R", "AL", "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
    }  # fmt: skip


def verdict(templates: dict[str, Any]) -> dict[str, str]:
    """Go, go with another protocol, or stop: one word and one sentence."""
    usable = {name: t["letter_mass"] for name, t in templates.items() if "letter_mass" in t}
    if not usable:
        reasons = {t["refused"] for t in templates.values() if "refused" in t}
        return {
            "word": "stop",
            "reason": "no protocol can be scored: " + "; ".join(sorted(reasons)),
        }
    best = max(usable, key=lambda name: usable[name])
    default = RunConfig().template
    if usable[best] < MIN_MASS:
        return {
            "word": "stop",
            "reason": f"under no protocol do the letters hold more than {usable[best]:.1%} of the "
            "probability, so the answers would be noise: the prompt's ending does not suit this "
            "model, or its tokenizer is another model's",
        }
    if usable.get(default, 0.0) * BETTER_BY < usable[best]:
        return {
            "word": "go with another protocol",
            "reason": f"under {how_to_ask(best)} the letters hold {usable[best]:.1%} of the "
            f"probability, under the default {usable.get(default, 0.0):.1%}: the default's "
            "ranking of the letters is of what the model hardly considers saying",
        }
    return {
        "word": "go",
        "reason": f"under the default protocol the letters hold {usable[default]:.1%} of the probability",
    }


def how_to_ask(template: str) -> str:
    """The options that choose a template."""
    if template in {"lm-eval", "oall"}:
        return f"--protocol {template}"
    prompt, letters = template.split("-")
    return f"--prompt {prompt} --letters {letters}"


def print_report(report: dict[str, Any], console: Console) -> None:
    """The findings as tables, the verdict last."""
    window = report["sliding_window"]
    around = report["special_tokens"]
    console.print(
        f"[bold]{report['model']}[/bold]: at most {report['max_length']:,} tokens"
        + (f", attention window {window:,}" if window else "")
        + f"; puts {_list(around['before'])} before a prompt and {_list(around['after'])} behind it"
        + ("; carries a chat template" if report["chat_template"] else ""),
        soft_wrap=True,
    )
    inputs = {
        name: f["decoder_input"] for name, f in report["templates"].items() if "decoder_input" in f
    }
    if inputs:
        ways = {
            _list(given): [n for n in inputs if inputs[n] == given] for given in inputs.values()
        }
        console.print(
            "Its decoder is given, before the letter: "
            + "; ".join(f"{given} under {', '.join(names)}" for given, names in ways.items()),
            soft_wrap=True,
        )
    columns = ("protocol", "letter", "scored as", "ids", "in place")
    letters = Table(*columns, box=None, pad_edge=False)
    for name, found in report["templates"].items():
        for index, letter in enumerate(found.get("letters", ())):
            mark = "" if letter["agrees"] else " (*)"
            letters.add_row(
                name if index == 0 else "",
                describe_letter(letter["letter"]),
                _list(letter["pieces"]),
                " ".join(map(str, letter["ids"])),
                _list(letter["in_place"]) + mark,
            )
    print_table(console, letters)
    console.print(
        "(*) Written out behind the prompt the letter would be other tokens than the one scored, "
        "mostly because the cue's space joins it.",
        soft_wrap=True,
    )
    measured = ("rows", "letter mass %", "entropy 0-1", "A/B/C/D/E wins", "longest", "too long")
    table = figure_table("protocol", *measured)
    for name, found in report["templates"].items():
        if "refused" in found:
            table.add_row(name, "", "refused", "", "", str(found["longest_tokens"]), "")
            continue
        table.add_row(
            name,
            str(found["n_measured"]),
            f"{found['letter_mass'] * 100:.1f}",
            f"{found['letter_entropy']:.2f}",
            "/".join(map(str, found["letter_wins"])),
            f"{found['longest_tokens']:,}",
            str(found["n_too_long"]),
        )
    console.print("\nOn rows stratified by task, the share of the probability the letters hold:")
    print_table(console, table)
    for found in report["templates"].values():
        if "refused" in found:
            console.print(f"Refused: {found['refused']}", soft_wrap=True, markup=False)
    data = report["data"]
    odd = {k: v for k, v in data.items() if k.startswith("n_") and v}
    console.print(
        f"\nData {data['source']}: "
        + ", ".join(f"{k[2:].replace('_', ' ')} {v:,}" for k, v in odd.items())
        + f"; answers per option {'/'.join(map(str, data['answers_per_option']))}",
        soft_wrap=True,
    )
    for refused in data["refused"]:
        console.print(f"Refused, {refused}", soft_wrap=True, markup=False)
    found = report["verdict"]
    console.print(
        f"\n[bold]{found['word'].capitalize()}:[/bold] {found['reason']}.", soft_wrap=True
    )


def _list(pieces: Sequence[str]) -> str:
    return " ".join(pieces).replace("[", "\\[") if pieces else "nothing"
