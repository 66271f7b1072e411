"""Run records -> one offline HTML page, or a markdown or CSV table; add columns in REPORT_COLUMNS.

The same records give the same bytes. The page's words, style and script are in templates/; which
figures it shows, and what it may compare, is in figures.py; how they are drawn, in charts.py.
"""

import base64
import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from edge_eval import __version__, charts, figures, metrics
from edge_eval.errors import DataError, RecordError
from edge_eval.figures import Cell, Run, number, percent, plain
from edge_eval.paper import COLUMNS, beside_paper, why_not_beside
from edge_eval.prompts import rotate
from edge_eval.questions import load_questions
from edge_eval.schema import Prediction, Question, RunRecord, Status

Texts: TypeAlias = Mapping[str, Question]  # by id

LONG_SETTING = 300  # characters


def write_report(
    records: Sequence[RunRecord],
    output: Path,
    questions: Texts | None,
    *,
    include_incomplete: bool = False,
    paper: bool = False,
) -> None:
    """Write the page; ``questions`` are load_report_questions()'s, or None to show ids only.

    paper: with the paper's Table 4, the runs that may stand there among its rows.
    Errors: RecordError for no record, an incomplete one, or a place that cannot be written.
    """
    page = render_page(records, questions, include_incomplete=include_incomplete, paper=paper)
    if output.resolve() in {Path(record.path).resolve() for record in records if record.path}:
        raise RecordError(f"{output} is one of the run records: name another file with -o.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Half of a surrogate pair, which a record may hold, is no character and becomes a mark.
        output.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise RecordError(f"{output} cannot be written: {error.strerror}.") from error


def load_report_questions(records: Sequence[RunRecord]) -> Texts | None:
    """The records' questions, read again from where each run had them; None when none can be.

    The Hub's are those in its cache: a record names a source, but who reads it asked for no fetch.
    A source whose questions no longer have the run's fingerprint is left out: its texts may not be
    what the model was asked.
    """
    found: dict[str, Question] = {}
    seen: set[str] = set()
    for record in records:
        if record.data.sha256 in seen:
            continue
        try:
            again = load_questions(record.config, fetch=False)
        except DataError:
            continue
        if again.fingerprint.sha256 == record.data.sha256:
            seen.add(record.data.sha256)
            found |= {question.id: question for question in again.test}
    return found or None


def markdown(records: Sequence[RunRecord], *, include_incomplete: bool = False) -> str:
    """The headline table in GitHub's markdown. Errors: as write_report."""
    runs = figures.examine(records, include_incomplete=include_incomplete)
    cells = [[number(of(run)) for of in REPORT_COLUMNS.values()] for run in runs]
    rows = [[_markdown(text) for text in row] for row in (list(REPORT_COLUMNS), *cells)]
    rows.insert(1, ["---"] * len(REPORT_COLUMNS))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def csv_table(records: Sequence[RunRecord], *, include_incomplete: bool = False) -> str:
    """The headline table as CSV, its figures not rounded for reading. Errors: as write_report."""
    runs = figures.examine(records, include_incomplete=include_incomplete)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(REPORT_COLUMNS)
    writer.writerows([_csv(of(run)) for of in REPORT_COLUMNS.values()] for run in runs)
    return text.getvalue()


def render_page(
    records: Sequence[RunRecord],
    questions: Texts | None,
    *,
    include_incomplete: bool = False,
    paper: bool = False,
) -> str:
    """The whole page as text. Errors: as write_report."""
    runs = figures.examine(records, include_incomplete=include_incomplete)
    environment = Environment(
        loader=PackageLoader("edge_eval", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent}
    loader: Any = environment.loader
    script = loader.get_source(environment, "report.js")[0]
    browser = _browser(runs, questions)
    page = environment.get_template("report.html.j2").render(
        version=__version__,
        runs=runs,
        columns=REPORT_COLUMNS,
        notes=figures.find_notes(runs),
        costs=[
            figures.trade_off(runs, "latency p50 (ms)", lambda run: run.latency.p50_ms),
            figures.trade_off(runs, "peak memory (MB)", _megabytes("peak_memory_bytes")),
        ],
        slices=[figures.accuracy_by(runs, name) for name in metrics.SLICES],
        ceiling=metrics.ACCURACY_CEILING * 100,
        matrices=figures.prompt_matrices(runs),
        paper=_beside_paper(runs) if paper else None,
        choices=[figures.letter_choice(runs), figures.reliability(runs)],
        times=[
            figures.latency_distribution(runs),
            figures.latency_by_length(runs),
            figures.drift(runs),
        ],
        settings=_settings(runs),
        n_questions=len(browser["ids"]),
        n_texts=sum(text is not None for text in browser["texts"]),
        licensed=any(run.record.data.kind != "sample" for run in runs),
        can_draw=charts.can_draw(),
        chart_only=charts.CHART_ONLY,
        n_colors=charts.N_COLORS,
        signs=list(charts.SHAPES.values()),
        data=embed_json(browser),
        script=Markup(script),  # noqa: S704 - our own file
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        svg=Markup,  # vl-convert escapes the texts in what it draws
    )
    return page.lstrip()


def _beside_paper(runs: Sequence[Run]) -> dict[str, Any]:
    reasons = {run.label: why_not_beside(run.record) for run in runs}
    alike = {run.label: run.record for run in runs if reasons[run.label] is None}
    return {
        "columns": COLUMNS,
        "rows": beside_paper(alike),
        "reasons": {label: reason for label, reason in reasons.items() if reason},
    }


def embed_json(value: object) -> Markup:
    """Strict JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


# What a spreadsheet would take for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def _csv(value: Cell) -> str | int | float:
    if isinstance(value, str):
        text = plain(value).strip()
        return f"'{text}" if text.startswith(_FORMULA) else text
    return "" if value is None else value if isinstance(value, int) else round(value, 6)


def _markdown(text: str) -> str:
    escaped = plain(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|~" else c for c in escaped)


def _megabytes(observed: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        value = run.record.observed.get(observed)
        return None if value is None else float(value) / 1e6

    return of


# ---- the question browser: columns, not objects, since there may be 14,455 rows and six runs


def _browser(runs: Sequence[Run], questions: Texts | None) -> dict[str, Any]:
    asked: dict[tuple[Any, ...], Prediction] = {}
    tables = [_by_question(run.record.predictions) for run in runs]
    for table in tables:
        for key, p in table.items():
            asked.setdefault(key, p)
    rows = list(asked.values())
    kinds = list(dict.fromkeys((p.group, p.task, p.level, p.country) for p in rows))
    place = {kind: i for i, kind in enumerate(kinds)}
    return {
        "n_colors": charts.N_COLORS,
        "kinds": kinds,
        "ids": [p.question_id for p in rows],
        "kind": [place[p.group, p.task, p.level, p.country] for p in rows],
        "flags": [p.has_context + 2 * p.negated for p in rows],
        "rotations": [p.rotation for p in rows],
        "answers": [p.answer for p in rows],
        "n_options": [len(p.letters) for p in rows],
        "n_characters": [p.n_characters for p in rows],
        "texts": [_texts(p, (questions or {}).get(p.question_id)) for p in rows],
        "runs": [
            _answers(run, [table.get(key) for key in asked])
            for run, table in zip(runs, tables, strict=True)
        ],
    }


def _by_question(predictions: Sequence[Prediction]) -> dict[tuple[Any, ...], Prediction]:
    """Predictions by what tells their questions apart: an id may stand in two sources."""
    found: dict[tuple[Any, ...], Prediction] = {}
    times: Counter[tuple[Any, ...]] = Counter()
    for p in predictions:
        labels = (p.question_id, p.rotation, p.group, p.subject, p.level, p.country)
        key = (*labels, p.answer, len(p.letters), p.n_characters)
        found[*key, times[key]] = p
        times[key] += 1
    return found


def _texts(prediction: Prediction, question: Question | None) -> list[str] | None:
    """Context, question and options as they were asked; None unless they are the prediction's."""
    if question is None:
        return None
    asked = rotate(question, prediction.rotation)
    facts = (asked.task, asked.country, asked.answer, len(asked.options))
    n_characters = len(asked.context) + len(asked.text)
    own = (prediction.task, prediction.country, prediction.answer, len(prediction.letters))
    same = facts == own and n_characters == prediction.n_characters
    return [asked.context, asked.text, *asked.options] if same else None


def _answers(run: Run, predictions: Sequence[Prediction | None]) -> dict[str, Any]:
    """A run's answers: the option's digit, "i" invalid, "l" too long, "u" unseen, "-" not asked."""
    marks = {Status.INVALID: "i", Status.TOO_LONG: "l", Status.UNSEEN: "u"}
    scored = [p if p and p.predicted is not None else None for p in predictions]
    return {
        "label": run.label,
        "letters": max((p.letters for p in predictions if p), key=len, default=()),
        "answers": "".join(
            "-" if p is None else str(p.predicted) if p.predicted is not None else marks[p.status]
            for p in predictions
        ),
        "permille": [
            0
            if p is None or not metrics.has_probabilities(p)
            else [round(1000 * x) for x in metrics.letter_probabilities(p).tolist()]
            for p in scored
        ],
        "ms": [
            None if p is None or p.latency_s is None else float(f"{p.latency_s * 1e3:.4g}")
            for p in predictions
        ],
        "n_tokens": [None if p is None else p.n_tokens or None for p in predictions],
    }


def _settings(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Name, each run's value, and whether they differ: all that the headers and end markers say."""
    parts = ("config", "data", "scoring", "manifest", "environment", "observed")
    found = []
    for run in runs:
        flat = {"record": run.record.path or "–", "created": run.record.created}
        for part in parts:
            _flatten(part, _fields(getattr(run.record, part)), flat)
        found.append(flat)
    names = dict.fromkeys(name for flat in found for name in flat)
    rows = [(name, [flat.get(name, "–") for flat in found]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def _fields(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _flatten(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, into)
        return
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f"{text[:LONG_SETTING]}… ({len(text):,} characters)"
    into[name] = text if len(text) <= LONG_SETTING else cut


# Heading, with its unit -> a run's value; the headline table of the page, the markdown and the CSV.
REPORT_COLUMNS: Mapping[str, Callable[[Run], Cell]] = {
    "run": lambda run: run.label,
    "protocol": lambda run: run.protocol,
    "data": lambda run: run.data,
    "status": lambda run: run.status,
    "n scored": lambda run: run.micro.n_scored,
    "micro accuracy (%)": lambda run: percent(run.micro.value),
    "micro 95 % low (%)": lambda run: percent(run.micro.ci_low),
    "micro 95 % high (%)": lambda run: percent(run.micro.ci_high),
    "chance (%)": lambda run: percent(run.micro.chance),
    "macro accuracy (%)": lambda run: percent(run.macro.value),
    "macro 95 % low (%)": lambda run: percent(run.macro.ci_low),
    "macro 95 % high (%)": lambda run: percent(run.macro.ci_high),
    "ECE": lambda run: run.ece,
    "Brier score": lambda run: run.brier,
    "n timed": lambda run: run.latency.n,
    "latency p50 (ms)": lambda run: run.latency.p50_ms,
    "latency p90 (ms)": lambda run: run.latency.p90_ms,
    "latency max (ms)": lambda run: run.latency.max_ms,
    "prompt tokens per s": lambda run: run.latency.tokens_per_s,
    "scenario and machine": lambda run: run.machine,
    "model load (s)": lambda run: run.record.observed.get("load_s"),
    "peak memory (MB)": _megabytes("peak_memory_bytes"),
    "size on disk (MB)": _megabytes("disk_bytes"),
}
