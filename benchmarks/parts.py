"""What a run spends outside the forward passes, and what reading and reporting it costs.

    python benchmarks/parts.py --model DIR --data FILE.csv --limit 200

A real evaluation, with onnxruntime's session timed from outside: whatever is not inside
session.run() is ours. Prints one line a part, with its n.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from edge_eval import model as model_module
from edge_eval.environment import describe_machine
from edge_eval.evaluate import evaluate
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.report import load_report_questions, write_report
from edge_eval.run_record import read_record
from edge_eval.schema import RunConfig
from edge_eval.summary import summarize
from edge_eval.tokenization import encode_prompts, load_tokenizer


class TimedSession:
    """A session that remembers how long each pass took."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds: list[float] = []

    def run(self, *arguments: Any) -> Any:
        """What the session answers, timed."""
        start = time.perf_counter()
        outputs = self._session.run(*arguments)
        self.seconds.append(time.perf_counter() - start)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def main() -> None:
    """Measure each part once and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="A model directory.")
    parser.add_argument("--data", default="sample", help="Questions, as for edge-eval run.")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    config = RunConfig(model=str(options.model), data=options.data, limit=options.limit)
    sessions: list[TimedSession] = []
    open_session = model_module.open_session

    def timed(path: Path, threads: int) -> TimedSession:
        sessions.append(TimedSession(open_session(path, threads)))
        return sessions[-1]

    def clock(part: str, n: int, work: Any) -> Any:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        print(f"{part:<32} {seconds:8.3f} s   {seconds / n * 1e3:9.3f} ms each   n = {n:,}")
        return result

    machine = describe_machine()
    print(f"{machine['cpu_model']}, {' '.join(machine['instruction_sets'] or [])}")
    questions = clock("questions", 1, lambda: load_questions(config)).test
    n = len(questions)
    tokenizer = clock("tokenizer", 1, lambda: load_tokenizer(options.model))
    prompts = clock("prompts", n, lambda: [render(q, config.template) for q in questions])
    clock("tokenising", n, lambda: list(encode_prompts(tokenizer, prompts)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        model_module.open_session = timed
        record = clock("whole evaluation", n, lambda: evaluate(config, path))
        passes = sessions[0].seconds[-n:]  # without the warm-up
        wall_s = record.observed["wall_s"]
        share = (wall_s - sum(passes)) / wall_s
        print(f"{'outside the forward passes':<32} {share:8.2%} of the answering loop   n = {n:,}")
        clock("reading the record", n, lambda: read_record(path))
        clock("every figure of it", n, lambda: summarize(record))
        texts = load_report_questions([record])
        clock("its report", 1, lambda: write_report([record], Path(folder) / "run.html", texts))


if __name__ == "__main__":
    main()
