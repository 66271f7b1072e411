"""RunRecord -> what `run` and `show` print: the JSON form first, the tables from it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge_eval import metrics
from edge_eval.metrics import Accuracy, slice_label
from edge_eval.questions import SAMPLE_NOTE
from edge_eval.rescore import rescore, unrotated
from edge_eval.schema import RunRecord
from edge_eval.scoring import TEXT_SCORING_METHODS, protocol_named
from edge_eval.tables import fact_table, figure_table, print_table


def summarize(record: RunRecord) -> dict[str, Any]:
    """Every figure of a run, computed from its predictions; shares are 0-1, times in ms."""
    predictions = unrotated(record.predictions)
    micro = metrics.micro_accuracy(predictions)
    macro = metrics.macro_accuracy(predictions)
    timing = metrics.latency(predictions)
    return {
        "model": {
            "name": record.manifest.name,
            "precision": record.manifest.precision,
            "graph": record.manifest.graph,
            "disk_bytes": record.observed.get("disk_bytes"),
        },
        "protocol": describe_protocol(record),
        "data": {
            "source": record.data.source,
            "kind": record.data.kind,
            "n_rows": record.data.n_rows,
            "n_refused": record.data.n_refused,
            "n_selected": record.data.n_selected,
        },
        "complete": record.complete,
        "n_questions": len(predictions),
        "n_scored": micro.n_scored,
        "n_invalid": micro.n_invalid,
        "n_too_long": micro.n_too_long,
        "n_unseen": micro.n_unseen,
        "n_tied": micro.n_tied,
        "micro_accuracy": _fields(micro),
        "macro_accuracy": _fields(macro),
        "generated": _generated(record),
        "groups": {k: _fields(v) for k, v in metrics.by(predictions, "group").items()},
        "tasks": {k: _fields(v) for k, v in metrics.by(predictions, "task").items()},
        "slices": {
            name: {k: _fields(v) for k, v in metrics.by(predictions, name).items()}
            for name in metrics.QUESTION_SLICES
        },
        "endpoint": _endpoint(record),
        "latency": {
            "scenario": record.config.scenario,
            "measured": LATENCY_WORDS["endpoint" if record.config.endpoint else "here"],
            "reuse": record.config.reuse,
            "n": timing.n,
            "latency_p50_ms": timing.p50_ms,
            "latency_p90_ms": timing.p90_ms,
            "latency_p99_ms": timing.p99_ms,
            "latency_max_ms": timing.max_ms,
            "latency_mean_ms": timing.mean_ms,
            "mean_tokens": timing.mean_tokens or None,  # 0 where an endpoint does not count them
            "prompt_tokens_per_s": None if record.config.endpoint else timing.tokens_per_s,
            "drift": timing.drift,
        },
        "prompts_per_s": _rate(record),
        "load_s": record.observed.get("load_s"),
        "first_call_s": record.observed.get("first_call_s"),
        "peak_memory_bytes": record.observed.get("peak_memory_bytes"),
        "rss_anon_bytes": record.observed.get("rss_anon_bytes"),
        "rss_file_bytes": record.observed.get("rss_file_bytes"),
        "machine": {
            key: record.environment.get(key)
            for key in ("cpu_model", "architecture", "instruction_sets", "threads", "os")
        },
    }


LATENCY_WORDS = {
    "here": "forward passes, without tokenisation",
    "endpoint": "of the endpoint at the client, network included",
}


def _generated(record: RunRecord) -> dict[str, Any] | None:
    """What the accuracy of generated answers is made of; None where letters were scored."""
    found = metrics.read_answers(unrotated(record.predictions))
    if found is None:
        return None
    return {
        "max_new_tokens": record.config.max_new_tokens,
        "fallbacks": _fields(found.fallbacks),
        "matched_accuracy": _fields(found.matched),
        "expected_accuracy": _fields(found.expected),
    }


def _endpoint(record: RunRecord) -> dict[str, Any] | None:
    """Who answered, where it was no model directory."""
    if not record.config.endpoint:
        return None
    return {
        "url": record.config.endpoint,
        "kind": "chat" if record.config.chat_template == "server" else "completions",
        "model": record.config.model,
        "concurrency": record.config.concurrency,
        "top_logprobs": None if _generated(record) else record.config.top_logprobs,
        "n_retries": record.observed.get("n_retries"),
    }


def _rate(record: RunRecord) -> float | None:
    wall_s = record.observed.get("wall_s")
    n_prompts = record.observed.get("n_prompts_together")
    return n_prompts / wall_s if wall_s and n_prompts else None


def describe_protocol(record: RunRecord) -> dict[str, Any]:
    """All that decides which score a run's accuracy is."""
    config = record.config
    return {
        "protocol": config.protocol,
        "template": config.template,
        "scoring": config.scoring,
        "max_new_tokens": config.max_new_tokens if config.scoring in TEXT_SCORING_METHODS else None,
        "shots": config.shots,
        "chat_template": config.chat_template,
        "normalized": record.scoring.get("normalized"),
        "headline": protocol_named(config.protocol).headline,
    }


def _fields(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__dataclass_fields__}


def print_summary(record: RunRecord, console: Console, *, slices: bool = False) -> None:
    """The run as tables: accuracy with what it is worth, by kind of question if asked, cost."""
    figures = summarize(record)
    sample = f" ({SAMPLE_NOTE})" if record.data.kind == "sample" else ""
    console.print(
        f"[bold]{escape(record.manifest.name)}[/bold], {record.manifest.precision}, on "
        f"{len(unrotated(record.predictions)):,} questions of {escape(record.data.source)}{sample}",
        soft_wrap=True,
    )
    console.print(f"Protocol: {_protocol_words(figures['protocol'])}", soft_wrap=True)
    if (endpoint := figures["endpoint"]) is not None:
        told = endpoint["top_logprobs"]
        how = f", letters among its {told} likeliest tokens" if told else ""
        console.print(
            f"Asked: {escape(endpoint['url'])} ({endpoint['kind']}{how}); its tokenizer and "
            "precision are unknown",
            soft_wrap=True,
        )
    if not record.complete:
        console.print(
            f"[bold]Interrupted:[/bold] {len(record.predictions):,} of "
            f"{record.data.n_selected:,} questions were answered; these figures are of a part.",
            soft_wrap=True,
        )
    if record.config.permute:
        cyclic = metrics.micro_accuracy(rescore(record, "cyclic").predictions)
        console.print(
            "Every question was asked with its options rotated too. Averaged over the places of an "
            f"option (cyclic scoring) the accuracy is {_percent(cyclic.value)} %, "
            f"{_interval(cyclic.ci_low, cyclic.ci_high)} (n = {cyclic.n_scored:,}); the table is of "
            "the options in their own order.",
            soft_wrap=True,
        )
    print_table(console, _accuracy_table(record, slices=slices))
    _print_counts(figures, console)
    print_table(console, _cost_table(figures))


def _protocol_words(protocol: Mapping[str, Any]) -> str:
    shots = f"{protocol['shots']}-shot" if protocol["shots"] else "zero-shot"
    chat = "" if protocol["chat_template"] == "off" else ", in a chat template"
    new_tokens = protocol["max_new_tokens"]
    text = (
        f" (first {'token' if new_tokens == 1 else f'{new_tokens} tokens'})" if new_tokens else ""
    )
    return (
        f"{protocol['protocol']} ({protocol['template']}), {shots}{chat}, scoring "
        f"{protocol['scoring']}{text}; its headline is the {protocol['headline']} average"
    )


def _accuracy_table(record: RunRecord, *, slices: bool) -> Table:
    table = figure_table("accuracy", "n", "%", "95 % interval", "chance %")
    predictions = unrotated(record.predictions)
    for name, accuracy in metrics.by(predictions, "group").items():
        table.add_row(name, *_cells(accuracy))
    for slice_name in metrics.QUESTION_SLICES if slices else ():
        for part, accuracy in metrics.by(predictions, slice_name).items():
            table.add_row(slice_label(slice_name, part), *_cells(accuracy))
    micro = metrics.micro_accuracy(predictions)
    macro = metrics.macro_accuracy(predictions)
    table.add_section()
    error = f" ± {micro.standard_error:.1%}".replace("%", "") if micro.standard_error else ""
    cells = _cells(micro)
    table.add_row("micro (all)", cells[0], cells[1] + error, *cells[2:], style="bold")
    table.add_row(
        f"macro ({macro.n_tasks} tasks)",
        str(micro.n_scored),
        _percent(macro.value)
        + (f" ± {macro.standard_error * 100:.1f}" if macro.standard_error else ""),
        _interval(macro.ci_low, macro.ci_high),
        "",
    )
    if micro.value_of_all is not None:
        n_all = str(len(predictions))
        table.add_row("micro, unscored as wrong", n_all, _percent(micro.value_of_all), "", "")
    if (found := metrics.read_answers(unrotated(record.predictions))) is not None:
        table.add_section()
        for name, share in (
            ("answers read from the text", found.matched),
            ("expected, random ones at chance", found.expected),
            ("share answered at random", found.fallbacks),
        ):
            interval = _interval(share.ci_low, share.ci_high)
            table.add_row(name, str(share.n), _percent(share.value), interval, "")
        table.add_section()
    table.add_row("always the first option", str(micro.n_scored), _percent(micro.always_a), "", "")
    table.add_row("most common answer", str(micro.n_scored), _percent(micro.majority), "", "")
    return table


def _cells(accuracy: Accuracy) -> tuple[str, str, str, str]:
    return (
        str(accuracy.n_scored),
        _percent(accuracy.value),
        _interval(accuracy.ci_low, accuracy.ci_high),
        _percent(accuracy.chance),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low * 100:.1f} to {high * 100:.1f}"


def _print_counts(figures: Mapping[str, Any], console: Console) -> None:
    counts = {
        "rows refused": figures["data"]["n_refused"],
        "invalid (a logit was not finite)": figures["n_invalid"],
        "too long for the model": figures["n_too_long"],
        "no letter among the endpoint's likeliest tokens": figures["n_unseen"],
        "tied (first option taken)": figures["n_tied"],
    }
    words = [f"{name}: {count:,}" for name, count in counts.items() if count]
    if words:
        console.print("Not scored or worth knowing: " + "; ".join(words), soft_wrap=True)


def _cost_table(figures: Mapping[str, Any]) -> Table:
    timing, machine = figures["latency"], figures["machine"]
    table = fact_table()
    # A percentile that too few samples cannot carry is None and left out.
    known = [name for name in ("p50", "p90", "p99", "max") if timing[f"latency_{name}_ms"]]
    times = ", ".join(f"{name} {_ms(timing[f'latency_{name}_ms'])}" for name in known)
    shared = ", shared beginnings" if timing["reuse"] == "shared" else ""
    measured = f"{times} (n = {timing['n']:,})" if timing["n"] else "not measured"
    endpoint = figures["endpoint"]
    if endpoint is not None:
        at_once = endpoint["concurrency"]
        several = f", {at_once} requests at once" if at_once > 1 else ""
        table.add_row("latency of the endpoint", measured)
        table.add_row("", f"at the client, network included{several}")
    else:
        written = ", text" if figures["generated"] else ""
        table.add_row(f"latency, {timing['scenario']}{shared}{written}", measured)
    if timing["mean_tokens"]:
        rate = timing["prompt_tokens_per_s"]  # unknown where no time passed
        speed = "" if rate is None else f", {rate:,.0f} prompt tokens per second"
        counted = speed if endpoint is None else ", as the server counts them"
        table.add_row("prompts", f"{timing['mean_tokens']:.0f} tokens on average{counted}")
    if figures["prompts_per_s"]:
        table.add_row("throughput", f"{figures['prompts_per_s']:.1f} prompts per second")
    if endpoint is not None:
        table.add_row("requests sent again", f"{endpoint['n_retries'] or 0:,}")
        client = machine["cpu_model"] or machine["architecture"] or "unknown"
        table.add_row("client's machine", client)
        return table
    table.add_row("model load", _seconds(figures["load_s"]))
    table.add_row("peak memory", _megabytes(figures["peak_memory_bytes"]))
    table.add_row("size on disk", _megabytes(figures["model"]["disk_bytes"]))
    isa = " ".join(machine["instruction_sets"] or ["instruction sets unknown"])
    table.add_row(
        "machine",
        f"{machine['cpu_model'] or machine['architecture'] or 'unknown'}, "
        f"{machine['threads'] or 'unknown'} threads",
    )
    table.add_row("", isa)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s"


def _megabytes(value: int | None) -> str:
    return "not measured" if value is None else f"{value / 1e6:,.0f} MB"
