"""Model directory -> its speed and memory on this machine; a new figure is a line of measure().

Prompts are seeded random token ids; a pass is what a run times for a question. One session is open
at a time, and memory is read before the second.
"""

import ctypes
import itertools
import math
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from edge_eval import environment, metrics
from edge_eval.errors import ModelError, OptionError
from edge_eval.model import LetterReader, letter_reader
from edge_eval.model_dir import graphs_of, size_on_disk
from edge_eval.onnx_file import fields
from edge_eval.onnx_folder import is_as_found, open_any_model, read_any_manifest
from edge_eval.schema import Int64Array
from edge_eval.streams import SharedIterator, merge
from edge_eval.tables import fact_table, figure_table, print_table

MIN_PASSES = 5  # of each length: fewer have no quartiles worth the name
PRODUCT_SIZE = 2048  # rows and columns of the product that finds the machine's peak

# Why a figure is None, where it is.
NOT_MEASURED = {
    "load_cold_s": "the page cache kept the files",
    "fit": "it takes three lengths",
    "drift": f"it takes {metrics.DRIFT_MIN_SAMPLES} passes: a longer --seconds",
    "peak_memory_bytes": "not told by this system",
    "n_product_weights": "no product of the graph names its weights",
    "thermal_throttle_count": "no readable counters",
    "battery_percent": "no readable battery",
    "energy_per_prompt_j": "no readable RAPL counter",
}


def parse_lengths(text: str) -> tuple[int, ...]:
    """``64,128`` as numbers of tokens. Errors: OptionError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"--lengths is {text!r}: give numbers of tokens, as in 64,128,256.")
    return tuple(map(int, parts))


def measure(
    directory: Path,
    lengths: Sequence[int],
    *,
    file: str = "",
    threads: int | None = None,
    seconds: float = 20.0,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Every figure, as JSON can hold it; None where it could not be had, and why in not_measured.

    The sustained run lasts ``seconds``, any other series an eighth of that for each length.
    ``threads`` (default: the usable cores) is the most that a scenario uses, ``file`` the graph
    of an ONNX folder.
    Errors: ModelError for the directory, OptionError when no length fits the model.
    """
    manifest = read_any_manifest(directory, file)
    fitting = sorted({n for n in lengths if n <= manifest.max_length})
    if not fitting:
        raise OptionError(
            f"{manifest.name} takes {manifest.max_length} tokens and all of --lengths is above."
        )
    ids = np.random.default_rng(seed).integers(0, manifest.vocab_size, fitting[-1], dtype=np.int64)
    prompts = [ids[:n] for n in fitting]
    middle, series_s = prompts[(len(prompts) - 1) // 2], seconds / 8
    machine = environment.describe_machine()
    cores = threads or environment.usable_cores()
    loads_s: list[float] = []

    def open_session(n_threads: int) -> LetterReader:
        model = open_any_model(directory, manifest, n_threads)
        loads_s.append(model.load_s)
        return letter_reader(model, tuple((token,) for token in range(10)))

    on_step("load, latency")
    is_cold = drop_page_cache([directory / name for name in manifest.files])
    reader = open_session(cores)
    first = reader.read(middle)
    if not np.isfinite(first.values).all():
        raise ModelError(f"{directory} gives logits that are not finite: export it again.")
    times_s = time_rounds(reader, prompts, series_s * len(prompts))
    memory = environment.peak_memory()
    peak = _product_flops(series_s / 2)  # at the same heat as the latencies
    latency = [_row(n, own, cores) for n, own in zip(fitting, times_s, strict=True)]
    fit = metrics.latency_of(fitting, [row["latency_p50_ms"] / 1e3 for row in latency]).fit
    on_step("threads")
    sweep = []
    for n in [*itertools.takewhile(lambda n: n < cores, (2**k for k in range(cores))), cores]:
        del reader
        reader = open_session(n)
        sweep.append(_row(len(middle), time_rounds(reader, [middle], series_s)[0], n))
    del reader
    on_step("throughput")
    offline = _offline(open_session(1), middle, cores, series_s)
    on_step(f"sustained run of {seconds:.0f} s")  # last, since it heats the machine
    sustained, drift, energy_j = _sustained(open_session(cores), prompts[0], cores, seconds)
    # Of an encoder-decoder the encoder's: few of the decoder's meet more than the answer.
    graph = manifest.graph if is_as_found(manifest) else graphs_of(manifest)[0]
    weights = count_product_weights(directory / graph)
    for row in (*latency, *sweep, sustained, offline):
        flops = 2 * weights * row["prompt_tokens_per_s"]
        row["share_of_fp32_peak"] = flops / peak if weights else None
    throttled = environment.thermal_throttle_count()
    figures: dict[str, Any] = {
        "model": {key: getattr(manifest, key) for key in ("name", "precision", "graph")},
        "disk_bytes": size_on_disk(manifest),
        "n_product_weights": weights or None,
        "machine": {
            key: machine[key] for key in ("cpu_model", "architecture", "instruction_sets", "os")
        }
        | {"threads": cores, "fp32_peak_gflops": peak / 1e9},
        "max_length": manifest.max_length,
        "lengths_left_out": sorted(set(lengths) - set(fitting)),
        "latency": latency,
        "fit": fit and {"fixed_ms": fit.fixed_ms, "ms_per_token": fit.ms_per_token},
        "threads_sweep": sweep,
        "offline": offline,
        "sustained": sustained,
        "drift": drift,
        "load_cold_s": loads_s[0] if is_cold else None,
        "load_warm_s": statistics.median(loads_s[1:]),
        "n_warm_loads": len(loads_s) - 1,
        "first_call_s": first.latency_s,
        "first_call_tokens": len(middle),
        **memory,
        "thermal_throttle_count_before": machine["thermal_throttle_count"],
        "thermal_throttle_count": throttled,
        "battery_percent": machine["battery_percent"],
        "on_ac_power": machine["on_ac_power"],
        "energy_per_prompt_j": energy_j,
    }
    reasons = {key: why for key, why in NOT_MEASURED.items() if figures[key] is None}
    return figures | {"not_measured": reasons}


def time_rounds(
    reader: LetterReader, prompts: Sequence[Int64Array], seconds: float
) -> list[list[float]]:
    """Times in s of each prompt's passes, the prompts in turn so that heat meets all alike."""
    for prompt in (*prompts, *prompts):  # warm-up
        reader.read(prompt)
    times_s: list[list[float]] = [[] for _ in prompts]
    end = time.perf_counter() + seconds
    while len(times_s[0]) < MIN_PASSES or time.perf_counter() < end:
        for prompt, own in zip(prompts, times_s, strict=True):
            own.append(reader.read(prompt).latency_s)
    return times_s


def _row(n_tokens: int, times_s: Sequence[float], threads: int) -> dict[str, Any]:
    """One series at one length; tokens a second at the median, which one pause does not move."""
    found = metrics.latency_of([n_tokens] * len(times_s), times_s)
    p25, p75 = np.percentile(times_s, [25, 75]) * 1e3
    return {
        "scenario": "single-stream",
        "streams": 1,
        "threads": threads,
        "n_tokens": n_tokens,
        "n": found.n,
        "latency_p50_ms": found.p50_ms,
        "latency_p25_ms": float(p25),
        "latency_p75_ms": float(p75),
        "latency_p90_ms": found.p90_ms,
        "latency_max_ms": found.max_ms,
        "prompt_tokens_per_s": n_tokens / statistics.median(times_s),
    }


def _offline(
    reader: LetterReader, prompt: Int64Array, n_streams: int, seconds: float
) -> dict[str, Any]:
    """Throughput with every core busy on a query of its own; latencies are under that load."""

    def passes(n_min: int, end: float) -> list[float]:
        def queries() -> Iterator[Int64Array]:
            for n in itertools.count():
                if n >= n_min and time.perf_counter() >= end:
                    return
                yield prompt

        waiting = SharedIterator(queries())
        streams = ((reader.read(query).latency_s for query in waiting) for _ in range(n_streams))
        return list(merge(streams))

    passes(2 * n_streams, 0.0)  # warm-up
    start = time.perf_counter()
    times_s = passes(MIN_PASSES * n_streams, start + seconds)
    rate = len(times_s) / (time.perf_counter() - start)
    return _row(len(prompt), times_s, 1) | {
        "scenario": "offline",
        "streams": n_streams,
        "prompts_per_s": rate,
        "prompt_tokens_per_s": rate * len(prompt),
    }


def _sustained(
    reader: LetterReader, prompt: Int64Array, threads: int, seconds: float
) -> tuple[dict[str, Any], float | None, float | None]:
    """One length without a break: its row, its drift, and the J of a pass."""
    reader.read(prompt)
    times_s: list[float] = []
    joules = [environment.read_energy_j()]
    end = time.perf_counter() + seconds
    while len(times_s) < MIN_PASSES or time.perf_counter() < end:
        times_s.append(reader.read(prompt).latency_s)
        joules.append(environment.read_energy_j())
    drift = metrics.latency_of([len(prompt)] * len(times_s), times_s).drift
    return _row(len(prompt), times_s, threads), drift, energy_per_pass(joules)


def energy_per_pass(joules: Sequence[float | None]) -> float | None:
    """Mean J between readings of the CPU packages' counter; idle power and other programs count.

    Two readings between which a counter started again are left out.
    """
    known = [value for value in joules if value is not None]
    rises = [after - before for before, after in itertools.pairwise(known) if after >= before]
    return math.fsum(rises) / len(rises) if rises and len(known) == len(joules) else None


def drop_page_cache(paths: Sequence[Path]) -> bool:
    """Whether the system let go of these files' pages, all but 1 %; what others map it keeps.

    The caches of a disk or of a virtual machine's host are out of reach.
    """
    if sys.platform != "linux":  # nowhere else can it be both asked and checked
        return False
    n_pages, n_kept, libc = 0, 0, ctypes.CDLL(None)
    try:
        for path in (path for path in paths if path.stat().st_size):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # what is not on disk yet cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
            states = np.ones(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            libc.mincore(start, ctypes.c_size_t(len(mapped)), ctypes.c_void_p(states.ctypes.data))
            n_pages, n_kept = n_pages + len(states), n_kept + int((states & 1).sum())
    except OSError:
        return False
    return n_kept * 100 <= n_pages


def _product_flops(seconds: float) -> float:
    """Operations a second of the best float32 product, numpy's, on as many cores as it takes."""
    a = np.random.default_rng(0).standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    product, best_s, end = a @ a, math.inf, time.perf_counter() + seconds  # the first warms up
    while math.isinf(best_s) or time.perf_counter() < end:
        start = time.perf_counter()
        np.matmul(a, a, out=product)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * PRODUCT_SIZE**3 / best_s


def count_product_weights(path: Path) -> int:
    """Weights that meet every token: those of the graph's matrix products, by their shapes.

    So neither embedding, norms nor rotary tables, whatever the precision, and the head only where
    it is in the graph, in an ONNX folder taken as it is; a pass computes
    2 x tokens x this, attention's own products left out. 0 where none is found.
    Source: onnx/onnx.proto has the field numbers read here.
    """
    with path.open("rb") as file:  # mapped, since it may hold the weights themselves
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    graph = list(fields(next(value for number, value in fields(model) if number == 7)))
    sizes: dict[bytes, int] = {}
    for initializer in (list(fields(value)) for number, value in graph if number == 5):
        size = math.prod(value for number, value in initializer if number == 1)  # dims
        sizes[dict(initializer)[8]] = size
    total = 0
    for node in (list(fields(value)) for number, value in graph if number == 1):
        largest = max((sizes.get(value, 0) for number, value in node if number == 1), default=0)
        op, outputs = bytes(dict(node)[4]), [value for number, value in node if number == 2]
        if b"NBits" in op:  # packed: the shape is in the attributes
            attributes = [dict(fields(value)) for number, value in node if number == 5]
            integers = {attribute[1]: attribute.get(3, 0) for attribute in attributes}
            total += integers[b"K"] * integers[b"N"]
        elif b"MatMul" in op or b"Gemm" in op:
            total += largest
        elif op in (b"Cast", b"DequantizeLinear", b"Identity", b"Transpose"):  # on the way to one
            sizes[outputs[0]] = largest
    return total


def print_bench(figures: dict[str, Any], console: Console) -> None:
    """Every series as a row, then what is said once."""
    model, machine = figures["model"], figures["machine"]
    console.print(
        f"[bold]{escape(model['name'])}[/bold], {model['precision']}, {model['graph']} graph, "
        f"{figures['disk_bytes'] / 1e6:,.0f} MB on disk"
    )
    if figures["lengths_left_out"]:
        console.print(
            f"Left out, above the model's limit of {figures['max_length']:,} tokens: "
            f"{', '.join(map(str, figures['lengths_left_out']))}"
        )
    rows = [("single-stream", row) for row in figures["latency"]]
    rows += [("  by threads", row) for row in figures["threads_sweep"]]
    rows += [("  sustained", figures["sustained"]), ("offline", figures["offline"])]
    headings = ("cores", "tokens", "n", "p50 ms", "p25-p75", "p90", "tokens/s", "% peak")
    series = figure_table("scenario", *headings)
    for name, row in rows:
        low, middle, high, p90 = (_ms(row[f"latency_p{rank}_ms"]) for rank in (25, 50, 75, 90))
        share = row["share_of_fp32_peak"]
        series.add_row(
            name,
            str(row["streams"] * row["threads"]),
            str(row["n_tokens"]),
            str(row["n"]),
            middle,
            f"{low}-{high}",
            f"max {_ms(row['latency_max_ms'])}" if row["latency_p90_ms"] is None else p90,
            f"{row['prompt_tokens_per_s']:,.0f}",
            "-" if share is None else f"{share:.0%}".rstrip("%"),
        )
    print_table(console, series)

    def known(key: str, words: Callable[[Any], str]) -> str:
        value = figures[key]
        if value is None:
            return f"not measured ({figures['not_measured'].get(key, 'not told by this system')})"
        return words(value)

    offline, sustained = figures["offline"], figures["sustained"]
    facts = fact_table()
    for name, words in {
        "latency, fitted": known(
            "fit", lambda f: f"{f['fixed_ms']:.1f} ms + {f['ms_per_token']:.3f} ms x tokens"
        ),
        "throughput, offline": f"{offline['prompts_per_s']:.1f} prompts of "
        f"{offline['n_tokens']} tokens per second, {offline['streams']} at a time",
        "load, cold": known("load_cold_s", lambda s: f"{s:.2f} s (n = 1)"),
        "load, warm": f"{figures['load_warm_s']:.2f} s (median, n = {figures['n_warm_loads']})",
        "first call": f"{figures['first_call_s']:.2f} s, {figures['first_call_tokens']} tokens (n = 1)",
        "peak memory": known(
            "peak_memory_bytes", lambda b: f"{b / 1e6:,.0f} MB, one session, all lengths"
        ),
        "  anonymous": known("rss_anon_bytes", lambda b: f"{b / 1e6:,.0f} MB then"),
        "  file-backed": known("rss_file_bytes", lambda b: f"{b / 1e6:,.0f} MB then"),
        "drift": known("drift", lambda d: f"last tenth {d:.2f} x the first, n = {sustained['n']}"),
        "energy per prompt": known(
            "energy_per_prompt_j", lambda j: f"{j:.2f} J, {sustained['n_tokens']} tokens"
        ),
        "throttled": known(
            "thermal_throttle_count",
            lambda n: f"{n - (figures['thermal_throttle_count_before'] or 0)} times meanwhile",
        ),
        "battery": known("battery_percent", lambda p: f"{p:.0f} %"),
        "on AC power": known("on_ac_power", lambda on: "yes" if on else "no"),
        "peak speed": f"{machine['fp32_peak_gflops']:,.0f} GFLOP/s, numpy's float32 product",
        "machine": f"{escape(machine['cpu_model'] or machine['architecture'])}, "
        f"{machine['threads']} threads",
        "": " ".join(machine["instruction_sets"] or ["instruction sets unknown"]),
    }.items():
        facts.add_row(name, words)
    print_table(console, facts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2f}"
