"""How much memory a long run takes: many questions, a model of no cost, a kill in the middle.

    python benchmarks/load.py MODEL --rows 20000

The rows are the sample's (or --data's), again and again under new ids; MODEL is any model
directory, whose tokenizer and checks are real, but whose forward pass is replaced by one that
costs nothing: hours of answering pass in minutes. The run is killed when half is answered and gone
on with; show, compare and report then read its record. Every step is a process of its own, and
its line says how long it took and the most it had resident (Linux).
"""

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_eval.questions import COLUMNS

ANSWER = Path(__file__).resolve()


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    peak_mb: float
    # Resident at a quarter of its answering and at the end of it: what a run holds on to grows.
    quarter_mb: float | None = None
    end_mb: float | None = None


def write_rows(path: Path, source: Path, n_rows: int) -> None:
    """A file of ``n_rows`` test questions with ids of their own."""
    with source.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("is_few_shot", "0") != "1"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, row in enumerate(itertools.islice(itertools.cycle(rows), n_rows)):
            writer.writerow([number, *(row.get(name, "") for name in COLUMNS[1:])])


def answer_for_nothing(model: str, data: str, record: str) -> None:
    """A run whose passes are replaced: what is measured is everything around them."""
    from edge_eval import evaluate as module
    from edge_eval.schema import Float32Array, LetterLogits, RunConfig

    class NoCost:
        def __init__(self) -> None:
            self._rng = np.random.default_rng(0)

        def read(self, input_ids: Any) -> LetterLogits:
            values: Float32Array = self._rng.standard_normal(10, dtype=np.float32)
            return LetterLogits(values, 1e-4 * len(input_ids))

    setattr(module, "letter_reader", lambda *_, **__: NoCost())  # noqa: B010 - replaced on purpose
    module.evaluate(RunConfig(model=model, data=data), Path(record))


def run_step(name: str, *command: str, watch: Path | None = None, n_rows: int = 0) -> Step:
    """Run a process to its end, or until ``watch`` holds half of the rows, and measure it."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    looks: list[tuple[int, float]] = []
    n_before = count_lines(watch) if watch is not None else 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if watch is not None:
            looks.append((count_lines(watch), resident_mb(process.pid)))
            if name == "run, killed half-way" and looks[-1][0] > n_rows // 2:
                process.kill()
        time.sleep(0.2)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -9):
        raise SystemExit(f"{name} ended with {process.returncode}")
    # Behind its first answer and before its last: then the whole record is read again.
    answering = [mb for lines, mb in looks if n_before + 1 < lines < looks[-1][0] and mb]
    return Step(
        name,
        time.monotonic() - start,
        usage.ru_maxrss / 1e3,
        answering[len(answering) // 4] if answering else None,
        answering[-1] if answering else None,
    )


_counted: dict[Path, tuple[int, int]] = {}


def count_lines(path: Path) -> int:
    """Lines so far, of a file that only grows."""
    offset, lines = _counted.get(path, (0, 0))
    if path.exists():
        with path.open("rb") as file:
            file.seek(offset)
            while block := file.read(1 << 24):
                offset, lines = offset + len(block), lines + block.count(b"\n")
    _counted[path] = offset, lines
    return lines


def resident_mb(pid: int) -> float:
    """What a process has in memory now; 0 when it has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def check_whole(record: Path, n_rows: int) -> None:
    """Every question is answered once; read line by line, for the record may be large."""
    seen = np.zeros(n_rows, dtype=np.int64)
    with record.open("rb") as file:
        for line in file:
            if line.startswith(b'{"kind":"prediction"'):
                seen[int(json.loads(line)["question_id"])] += 1
    if not (seen == 1).all():
        raise SystemExit(f"{(seen == 0).sum()} questions lost, {(seen > 1).sum()} counted twice")


def steps(model: str, source: Path, n_rows: int, folder: Path) -> Iterator[Step]:
    """Every step as it is done."""
    data, first, second = folder / "rows.csv", folder / "first.jsonl", folder / "second.jsonl"
    write_rows(data, source, n_rows)
    arguments = [str(ANSWER), model, "--worker", str(data), str(first)]
    yield run_step("run, killed half-way", *arguments, watch=first, n_rows=n_rows)
    yield run_step("run, gone on with", *arguments, watch=first)
    check_whole(first, n_rows)
    yield run_step("show", "-m", "edge_eval", "show", str(first))
    second.write_bytes(first.read_bytes())
    yield run_step("compare", "-m", "edge_eval", "compare", str(first), str(second))
    report = ["report", str(first), str(second), "-o", str(folder / "report.html")]
    yield run_step("report", "-m", "edge_eval", *report)


def main() -> None:
    """Print a line a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=14_455)
    parser.add_argument("--data", type=Path, help="rows to repeat instead of the sample's")
    parser.add_argument("--only-run", action="store_true", help="stop behind the run")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer_for_nothing(options.model, *options.worker)
        return
    source = options.data
    if source is None:
        import edge_eval

        source = Path(edge_eval.__file__).parent / "sample" / "questions.csv"
    print(f"{options.rows:,} rows{'':<14}  seconds  peak MB  at a quarter  at the end")
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(options.model, source, options.rows, Path(folder)):
            held = "" if step.end_mb is None else f"{step.quarter_mb:14,.0f}{step.end_mb:12,.0f}"
            print(f"{step.name:<24}{step.seconds:9,.1f}{step.peak_mb:9,.0f}{held}", flush=True)
            if options.only_run and step.name == "run, gone on with":
                break


if __name__ == "__main__":
    main()
