"""Round trips through other tools' files.

tests/data/lm_eval holds what lm-evaluation-harness 0.4.13 itself wrote: its task arabicmmlu on
questions of the bundled sample, with a random tiny model, at 0 and 2 shots. Emptied were only
``pretty_env_info`` and the task functions' source and addresses.
"""

import csv
import functools
import json
import math
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare import record

from edge_eval.compare import compare
from edge_eval.convert import READERS, WRITERS
from edge_eval.convert.foreign import predict, save_record
from edge_eval.convert.lm_eval_reader import read_lm_eval
from edge_eval.convert.lm_eval_writer import write_lm_eval
from edge_eval.convert.model_index import model_index, write_model_index
from edge_eval.convert.official import read_official, write_official
from edge_eval.convert.table import write_table
from edge_eval.errors import DataError, RecordError
from edge_eval.letters import OPTION_LETTERS
from edge_eval.metrics import letter_probabilities, micro_accuracy
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import MAX_ROW_CHARACTERS, load_questions
from edge_eval.run_record import MAX_LINE_BYTES, read_record
from edge_eval.schema import Question, RunConfig, RunRecord, Status
from edge_eval.summary import summarize

LM_EVAL = Path(__file__).parent / "data" / "lm_eval"
SAMPLES = "samples_arabicmmlu_general_knowledge_middle_school_2026-11-30T05-58-52.572750.jsonl"
LOGS = ("zero_shot", "two_shot")


@functools.cache
def sample_run(**config: Any) -> RunRecord:
    """A complete run over the bundled sample with made-up logits."""
    settings = RunConfig(**config)
    questions = load_questions(settings)
    rng = np.random.default_rng(5)
    letters = PROMPT_TEMPLATES[settings.template].letters
    predictions = []
    for index, question in enumerate(questions.test):
        logits = rng.normal(scale=3, size=len(question.options)).tolist()
        answered = predict(question, letters[: len(question.options)], logits, index)
        predictions.append(replace(answered, n_tokens=90, latency_s=0.25))
    made = record(predictions, path="run.jsonl", **config)
    scoring = {"letters": list(OPTION_LETTERS), "letter_ids": [], "normalized": False}
    return replace(made, data=questions.fingerprint, scoring=scoring)


def chosen(run: RunRecord) -> dict[str, int | None]:
    return {p.question_id: p.predicted for p in run.predictions}


def probabilities(run: RunRecord) -> list[float]:
    return [float(v) for p in run.predictions for v in letter_probabilities(p)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- lm-evaluation-harness's own files


@pytest.mark.parametrize("log", LOGS)
def test_the_harness_own_accuracies_are_found_again(log: str) -> None:
    run = read_lm_eval(LM_EVAL / log)
    results = json.loads(next((LM_EVAL / log).glob("results_*")).read_text(encoding="utf-8"))
    tasks = {t: r for t, r in results["results"].items() if t in results["configs"]}
    assert run.data.n_refused == 0
    for name, result in tasks.items():
        words = name.removeprefix("arabicmmlu_")
        of_task = [p for p in run.predictions if slug(p.task) == words]
        accuracy = micro_accuracy(of_task)
        assert accuracy.value == result["acc,none"]
        assert accuracy.standard_error == pytest.approx(result["acc_stderr,none"])


def slug(task: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in task.lower()).split())


def test_the_harness_log_is_a_run_of_its_protocol_with_the_rest_marked_unknown() -> None:
    run = read_lm_eval(LM_EVAL / "zero_shot")
    assert (run.config.protocol, run.config.template) == ("lm-eval", "lm-eval")
    assert (run.config.shots, run.config.chat_template) == (0, "off")
    assert (run.manifest.name, run.manifest.precision) == ("tiny-llama", "fp32")
    assert run.manifest.tools == {"lm-evaluation-harness": "0.4.13"}
    assert run.manifest.max_length == 1024
    assert run.manifest.architecture == "unknown"
    assert run.scoring["normalized"] is True
    assert run.scoring["letter_ids"] is None
    assert "predictions.latency_s" in run.observed["unknown"]
    assert all(p.latency_s is None and p.n_tokens == 0 for p in run.predictions)


def test_shots_are_read_from_the_harness_results() -> None:
    run = read_lm_eval(LM_EVAL / "two_shot")
    assert run.config.shots == 2
    assert {p.n_shots for p in run.predictions} == {2}


def test_every_way_to_name_a_log_reads_the_same_samples() -> None:
    folder = LM_EVAL / "zero_shot"
    whole = read_lm_eval(folder)
    assert chosen(read_lm_eval(next(folder.glob("results_*")))) == chosen(whole)
    part = read_lm_eval(folder / SAMPLES)
    assert len(part.predictions) == 4
    assert part.manifest.name == "tiny-llama"
    assert chosen(part).items() <= chosen(whole).items()


def test_a_samples_file_alone_is_read_with_an_unknown_model(tmp_path: Path) -> None:
    shutil.copy(LM_EVAL / "zero_shot" / SAMPLES, tmp_path)
    run = read_lm_eval(tmp_path / SAMPLES)
    assert len(run.predictions) == 4
    assert (run.manifest.name, run.manifest.precision) == ("unknown", "unknown")


def test_a_log_is_compared_with_a_run_of_the_same_questions(tmp_path: Path) -> None:
    run = read_lm_eval(LM_EVAL / "zero_shot", "sample")
    own = sample_run(protocol="lm-eval")
    ids = set(chosen(run))
    shared = tuple(p for p in own.predictions if p.question_id in ids)
    own = replace(own, predictions=shared, data=replace(own.data, sha256=run.data.sha256))
    found = compare(own, [run]).comparisons[0]
    assert found.n_common == 12
    assert found.latency.reason == "unknown processor"


def test_given_data_the_log_has_its_order_and_source() -> None:
    run = read_lm_eval(LM_EVAL / "zero_shot", "sample")
    ids = [p.question_id for p in run.predictions]
    assert ids == sorted(ids)
    assert (run.data.kind, run.config.data) == ("sample", "sample")


@pytest.mark.parametrize("log", LOGS)
def test_what_the_harness_wrote_is_written_again(log: str, tmp_path: Path) -> None:
    run = read_lm_eval(LM_EVAL / log, "sample")
    write_lm_eval(run, tmp_path / "out")
    for original in sorted((LM_EVAL / log).glob("samples_*")):
        (written,) = (tmp_path / "out").glob(original.name.rpartition("_")[0] + "_*")
        pairs = list(zip(lines(original), lines(written), strict=True))
        for ours, theirs in [(w, o) for o, w in pairs]:
            assert list(ours) == list(theirs)
            for key in ("doc_id", "target", "arguments", "filter", "metrics", "acc"):
                assert ours[key] == theirs[key]
            assert ours["prompt_hash"] == theirs["prompt_hash"]
            assert ours["target_hash"] == theirs["target_hash"]
            assert [r[0] for r in ours["filtered_resps"]] == [
                r[0] for r in theirs["filtered_resps"]
            ]
            assert np.shape(ours["resps"]) == np.shape(theirs["resps"])
            assert ours["doc"].items() <= theirs["doc"].items()
    theirs = json.loads(next((LM_EVAL / log).glob("results_*")).read_text(encoding="utf-8"))
    ours = json.loads(next((tmp_path / "out").glob("results_*")).read_text(encoding="utf-8"))
    assert set(theirs["results"]) <= set(ours["results"])
    for name, result in theirs["results"].items():
        assert ours["results"][name]["acc,none"] == pytest.approx(result["acc,none"])
        assert ours["results"][name]["acc_stderr,none"] == pytest.approx(result["acc_stderr,none"])
        assert ours["results"][name]["sample_len"] == result["sample_len"]
    for key in ("n-shot", "n-samples", "higher_is_better"):
        assert ours[key].items() <= theirs[key].items()
    for group, tasks in theirs["group_subtasks"].items():
        assert set(ours["group_subtasks"][group]) == set(tasks)


@pytest.mark.parametrize("log", LOGS)
def test_a_log_survives_the_way_there_and_back(log: str, tmp_path: Path) -> None:
    run = read_lm_eval(LM_EVAL / log, "sample")
    write_lm_eval(run, tmp_path)
    again = read_lm_eval(tmp_path, "sample")
    assert again.predictions == run.predictions
    assert again.data == run.data
    assert again.config == run.config


# --- damaged and foreign files


def edit(folder: Path, change: Callable[[dict[str, Any]], None], rows: slice = slice(1)) -> Path:
    """A copy of a samples file of the harness with some rows changed; returns its path."""
    path = folder / SAMPLES
    samples = lines(LM_EVAL / "zero_shot" / SAMPLES)
    for sample in samples[rows]:
        change(sample)
    path.write_text("".join(json.dumps(s) + "\n" for s in samples), encoding="utf-8")
    return path


def other_prompt(sample: dict[str, Any]) -> None:
    for argument in sample["arguments"].values():
        argument["arg_0"] = "Pick a letter: "


def other_letter(sample: dict[str, Any]) -> None:
    sample["arguments"]["gen_args_0"]["arg_1"] = "A"


def other_answer(sample: dict[str, Any]) -> None:
    sample["acc"] = 1.0 - sample["acc"]


def fewer_responses(sample: dict[str, Any]) -> None:
    sample["filtered_resps"] = sample["filtered_resps"][:-1]


def no_question(sample: dict[str, Any]) -> None:
    sample["doc"] = {"text": "another task's row"}


def no_mapping(sample: dict[str, Any]) -> None:
    sample["doc"] = ["a", "list"]


def same_id(sample: dict[str, Any]) -> None:
    sample["doc"] = lines(LM_EVAL / "zero_shot" / SAMPLES)[1]["doc"]
    sample["arguments"] = lines(LM_EVAL / "zero_shot" / SAMPLES)[1]["arguments"]


def empty_responses(sample: dict[str, Any]) -> None:
    sample["filtered_resps"][0] = []


def endless_response(sample: dict[str, Any]) -> None:
    sample["filtered_resps"][0][0] = -(10**400)


def response_beyond_single_precision(sample: dict[str, Any]) -> None:
    sample["filtered_resps"][0][0] = "-1e300"


def response_of_many_words(sample: dict[str, Any]) -> None:
    sample["filtered_resps"][0][0] = "none\n" * 100_000


DAMAGES = (
    *(other_prompt, other_letter, other_answer, fewer_responses, no_question, no_mapping),
    *(empty_responses, endless_response, response_beyond_single_precision, response_of_many_words),
)


@pytest.mark.parametrize("damage", [*DAMAGES, same_id])
def test_a_sample_that_is_not_what_it_should_be_is_refused_and_counted(
    damage: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    run = read_lm_eval(edit(tmp_path, damage))
    assert len(run.predictions) == 3
    assert (run.data.n_rows, run.data.n_refused, run.data.n_selected) == (4, 1, 3)
    (reason,) = run.observed["refused"]
    assert reason.startswith(f"{SAMPLES}, line ")
    assert len(reason) < 500
    assert "\n" not in reason
    save_record(run, tmp_path / "record.jsonl")
    assert len(read_record(tmp_path / "record.jsonl").predictions) == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_log_without_any_sample_left_is_an_error(
    damage: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match="holds no sample of ArabicMMLU"):
        read_lm_eval(edit(tmp_path, damage, slice(None)))


def test_a_question_that_is_another_one_in_the_data_is_refused(tmp_path: Path) -> None:
    def change(sample: dict[str, Any]) -> None:
        sample["doc"]["Question"] += "؟"
        question = sample["doc"]["Question"]
        for argument in sample["arguments"].values():
            argument["arg_0"] = argument["arg_0"].replace(question[:-1], question)

    path = edit(tmp_path, change)
    assert read_lm_eval(path).data.n_refused == 0
    assert read_lm_eval(path, "sample").data.n_refused == 1


def test_numbers_and_nulls_are_read_as_the_harness_put_them(tmp_path: Path) -> None:
    # On the Hub the harness has "6" as 6.0, an empty cell as None, and takes 0 for no option.
    def change(sample: dict[str, Any]) -> None:
        sample["doc"] |= {"ID": 7, "Level": None, "Country": None, "Context": None}
        sample["doc"] |= {"Option 1": 6.0, "Option 2": 7.0, "Option 3": 0.0, "Option 4": None}
        sample["doc"] |= {"Option 5": None, "Answer Key": "B", "is_few_shot": 0}
        doc = sample["doc"]
        text = f"This is a {doc['Subject']} question. Select the correct answer!\n\nQuestion: "
        text += f"{doc['Question']}\nA. 6.0\nB. 7.0\n\nAnswer:"
        sample["arguments"] = {
            f"gen_args_{i}": {"arg_0": text, "arg_1": f" {'AB'[i]}"} for i in (0, 1)
        }
        sample["filtered_resps"] = [["-1.5", "False"], ["-0.5", "True"]]
        sample["acc"] = 1.0

    run = read_lm_eval(edit(tmp_path, change))
    assert run.observed["refused"] == []
    first = run.predictions[0]
    assert (first.question_id, first.letters, first.predicted) == ("7", ("A", "B"), 1)
    assert first.correct


def test_a_response_that_is_not_finite_is_invalid(tmp_path: Path) -> None:
    def change(sample: dict[str, Any]) -> None:
        sample["filtered_resps"][0][0] = "nan"

    run = read_lm_eval(edit(tmp_path, change))
    assert run.predictions[0].status is Status.INVALID
    assert run.predictions[0].letter_logits[0] is None


def test_chat_templates_and_system_prompts_are_kept_apart(tmp_path: Path) -> None:
    results = json.loads(
        next((LM_EVAL / "zero_shot").glob("results_*")).read_text(encoding="utf-8")
    )
    results |= {"chat_template_sha": "ab" * 32, "system_instruction": "Be short."}
    (tmp_path / "results_2026-11-30T05-58-52.572750.json").write_text(json.dumps(results))

    def wrap(sample: dict[str, Any]) -> None:
        for argument in sample["arguments"].values():
            argument["arg_0"] = f"<user>{argument['arg_0']}<model>"

    run = read_lm_eval(edit(tmp_path, wrap, slice(None)))
    assert len(run.predictions) == 4
    assert (run.config.chat_template, run.config.system_prompt) == ("ab" * 32, "Be short.")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("samples_x_1.jsonl", "{", "cannot be read as JSON Lines"),
        ("samples_x_1.jsonl", "", "its samples files are empty"),
        ("samples_x_1.jsonl", "[]\n", "holds no sample"),
        ("results_1.json", "{}", "run the harness with --log_samples"),
        ("report.html", "<p>", "run the harness with --log_samples"),
    ],
)
def test_files_of_another_kind_are_errors_that_say_so(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match=message):
        read_lm_eval(tmp_path / name)


@pytest.mark.parametrize(
    "results",
    [
        "[]",
        "{",
        '{"n-shot": 3}',
        '{"max_length": "long"}',
        '{"configs": {"a": 1}}',
        '{"config": 4}',
        '{"n-shot": {"a": 1e999}}',
        '{"n-shot": {"a": -5}}',
        '{"n-shot": {"a": 3000000000}}',
        pytest.param(f'{{"n-shot": {{"a": 1{"0" * 400}}}}}', id="n-shot of 400 digits"),
        '{"max_length": 1e999}',
        pytest.param(json.dumps({"model_name": "m" * 100_000}), id="model_name"),
        pytest.param(json.dumps({"system_instruction": "m" * 100_000}), id="system_instruction"),
        pytest.param(" " * MAX_LINE_BYTES + "{}", id="too large a file"),
    ],
)
def test_results_that_are_no_results_are_an_error(results: str, tmp_path: Path) -> None:
    path = edit(tmp_path, lambda _: None)
    (tmp_path / "results_2026-11-30T05-58-52.572750.json").write_text(results)
    with pytest.raises(RecordError, match=r"results_2026|its results") as told:
        read_lm_eval(path)
    assert len(str(told.value)) < 700
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("max_length", [-1, 10**30])
def test_a_length_that_no_model_has_is_unknown(max_length: int, tmp_path: Path) -> None:
    path = edit(tmp_path, lambda _: None)
    results = tmp_path / "results_2026-11-30T05-58-52.572750.json"
    results.write_text(json.dumps({"max_length": max_length}))
    assert read_lm_eval(path).manifest.max_length == 0


def test_a_line_that_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = edit(tmp_path, lambda _: None)
    with path.open("ab") as file:
        file.truncate(1 << 30)  # zeros, on the disk as in the file only a note of how many
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match="line 5 is longer than 16,777,216 bytes"):
            read_lm_eval(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_tasks_of_unequal_shots_are_not_one_run(tmp_path: Path) -> None:
    path = edit(tmp_path, lambda _: None)
    text = json.dumps({"n-shot": {"arabicmmlu_a": 0, "arabicmmlu_b": 3}})
    (tmp_path / "results_2026-11-30T05-58-52.572750.json").write_text(text)
    with pytest.raises(RecordError, match="convert one at a time"):
        read_lm_eval(path)


def test_a_folder_of_two_runs_is_not_guessed_at(tmp_path: Path) -> None:
    for date in "12":
        (tmp_path / f"results_{date}.json").write_text("{}")
    with pytest.raises(RecordError, match=r"has 2 results_\*\.json: name one"):
        read_lm_eval(tmp_path)


# --- a run of our own through lm-eval's and the paper's files

TEMPLATES = {
    "lm-eval": {"protocol": "lm-eval"},
    "oall": {"protocol": "oall", "prompt": "ar", "letters": "arabic"},
    **{
        f"{prompt}-{letters}": {"prompt": prompt, "letters": letters}
        for prompt in ("en", "ar")
        for letters in ("latin", "arabic")
    },
}


@pytest.mark.parametrize("template", PROMPT_TEMPLATES)
def test_a_run_of_every_template_survives_lm_evals_files(template: str, tmp_path: Path) -> None:
    run = sample_run(**TEMPLATES[template])
    write_lm_eval(run, tmp_path)
    again = read_lm_eval(tmp_path, "sample")
    assert again.config.template == template
    assert again.data.sha256 == run.data.sha256
    assert chosen(again) == chosen(run)
    assert [p.letter_logits for p in again.predictions] == [
        p.letter_logits for p in run.predictions
    ]


def test_only_the_harness_protocol_bears_the_harness_task_names(tmp_path: Path) -> None:
    write_lm_eval(sample_run(protocol="lm-eval"), tmp_path / "a")
    write_lm_eval(sample_run(), tmp_path / "b")
    assert list((tmp_path / "a").glob("samples_arabicmmlu_law_professional_*"))
    assert list((tmp_path / "b").glob("samples_arabicmmlu_en_latin_law_professional_*"))
    assert not list((tmp_path / "b").glob("samples_arabicmmlu_law_professional_*"))


def test_lm_eval_counts_what_was_not_scored(tmp_path: Path) -> None:
    run = sample_run()
    lost = replace(run.predictions[0], status=Status.TOO_LONG, predicted=None)
    run = replace(run, predictions=(lost, *run.predictions[1:]))
    write_lm_eval(run, tmp_path)
    results = json.loads(next(tmp_path.glob("results_*")).read_text(encoding="utf-8"))
    task = "arabicmmlu_en_latin_biology_high_school"
    assert results["n-samples"][task] == {"original": 4, "effective": 3}
    assert results["results"][task]["sample_len"] == 3
    assert results["results"]["arabicmmlu_en_latin"]["sample_len"] == 159


PAPER = [name for name in TEMPLATES if name not in ("lm-eval", "oall")]


@pytest.mark.parametrize("template", PAPER)
def test_a_run_survives_the_official_columns(template: str, tmp_path: Path) -> None:
    run = sample_run(**TEMPLATES[template])
    path = tmp_path / "result_prompt_en_alpa_en_bloomz-560m.csv"
    write_official(run, path)
    again = read_official(path, "sample")
    assert (again.config.template, again.manifest.name) == (template, "bloomz-560m")
    assert chosen(again) == chosen(run)
    assert again.data.sha256 == run.data.sha256
    assert again.data.n_refused == 0
    # Printed in single precision, to eight digits.
    assert probabilities(again) == pytest.approx(probabilities(run), rel=1e-5, abs=1e-7)


def test_official_files_are_what_the_papers_script_would_write(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run, questions = sample_run(), load_questions(RunConfig()).test
    # As evaluate.py at 097a316 makes its columns.
    frame = pandas.DataFrame()
    frame["input"] = [render(q, "en-latin").text for q in questions]
    frame["golds"] = [q.answer for q in questions]
    options = [[f"{'ABCDE'[i]}. {o}" for i, o in enumerate(q.options)] for q in questions]
    frame["options"] = pandas.Series(options, dtype=object)
    frame["preds"] = ["ABCDE"[p.predicted or 0] for p in run.predictions]
    probs = [letter_probabilities(p).astype(np.float32) for p in run.predictions]
    frame["probs"] = pandas.Series(probs, dtype=object)
    frame.to_csv(tmp_path / "theirs.csv", index=False)
    write_official(run, tmp_path / "ours.csv")
    assert read_table(tmp_path / "ours.csv") == read_table(tmp_path / "theirs.csv")
    assert chosen(read_official(tmp_path / "theirs.csv", "sample")) == chosen(run)


def test_a_question_not_scored_is_blank_in_the_official_file_and_unscored_again(
    tmp_path: Path,
) -> None:
    run = sample_run()
    lost = replace(run.predictions[3], status=Status.TOO_LONG, predicted=None)
    run = replace(run, predictions=(*run.predictions[:3], lost, *run.predictions[4:]))
    write_official(run, tmp_path / "out.csv")
    again = read_official(tmp_path / "out.csv", "sample")
    assert again.predictions[3].status is Status.INVALID
    assert sum(p.status is Status.SCORED for p in again.predictions) == 159


def test_a_probability_printed_as_zero_stays_finite(tmp_path: Path) -> None:
    run = sample_run()
    sure = replace(
        run.predictions[0], letter_logits=(0.0, 0.0, 0.0, 900.0, *[None] * 6), predicted=3
    )
    run = replace(run, predictions=(sure, *run.predictions[1:]))
    write_official(run, tmp_path / "out.csv")
    again = read_official(tmp_path / "out.csv", "sample")
    assert again.predictions[0].predicted == 3
    assert letter_probabilities(again.predictions[0])[3] == pytest.approx(1.0)


def edit_official(folder: Path, column: str, value: str) -> Path:
    """An official file whose second row has another cell."""
    write_official(sample_run(), folder / "made.csv")
    with (folder / "made.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rows[1][column] = value
    with (folder / "edited.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "edited.csv"


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("input", "Another question", "row 2: its prompt is none of the data's"),
        ("golds", "3", "row 2: its gold is '3' and the question's answer 1"),
        ("preds", "Z", "row 2: its options, preds or probs cannot be read"),
        ("options", "__import__('os')", "row 2: its options, preds or probs cannot be read"),
        ("options", "[[", "row 2: its options, preds or probs cannot be read"),
        ("options", "['A. 1']", "row 2: it has 1 options and 4 probs, and the question 4"),
        ("probs", "[0.5 x]", "row 2: its options, preds or probs cannot be read"),
        ("probs", "[0.5 0.5]", "row 2: it has 4 options and 2 probs, and the question 4"),
        ("probs", "[2.0 0.1 0.1 9.0]", "row 2: its probs are no probabilities"),
        ("probs", "[nan nan nan nan]", "row 2: its probs are no probabilities"),
        ("probs", "[0.1 0.3 0.3 0.3]", "row 2: its probs are no probabilities, or its pred"),
    ],
)
def test_an_official_row_that_cannot_be_right_is_refused_by_number(
    column: str, value: str, reason: str, tmp_path: Path
) -> None:
    run = read_official(edit_official(tmp_path, column, value), "sample")
    assert (run.data.n_rows, run.data.n_refused) == (160, 1)
    assert run.observed["refused"][0].startswith(reason)


def test_why_a_row_is_refused_stays_short(tmp_path: Path) -> None:
    run = read_official(edit_official(tmp_path, "golds", "7\n" * 60_000), "sample")
    (reason,) = run.observed["refused"]
    assert reason.startswith("row 2: its gold is '7")
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "it has no column"),
        ("", "it has no column"),
        ("input,golds,options,preds,probs\nx,1\n", "row 1: fewer cells"),
        ("input,golds,options,preds,probs\nx,1,[],A,[]\n", "name the data it was made from"),
        ('input,golds,options,preds,probs\n"x', "is not CSV in UTF-8"),
    ],
)
def test_a_file_that_is_not_the_scripts_says_so(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(text)
    with pytest.raises(RecordError, match=message):
        read_official(tmp_path / "in.csv", "sample")


@pytest.mark.parametrize(
    "row", ["," * (2 * MAX_ROW_CHARACTERS), ('"' + "x\n" * 50_000 + '",') * 20]
)
def test_a_row_that_has_no_end_is_not_read_to_it(row: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"input,golds,options,preds,probs\n{row}\n")
    with pytest.raises(RecordError, match=r"a row of over 1,048,576 characters"):
        read_official(tmp_path / "in.csv", "sample")


def test_many_rows_are_longer_together_than_one_may_be(tmp_path: Path) -> None:
    path = edit_official(tmp_path, "preds", "A")
    text = path.read_text(encoding="utf-8")
    path.write_text(text + ("x" * 100_000 + ",0,[],A,[]\n") * 30, encoding="utf-8")
    assert read_official(path, "sample").data.n_rows == 190


def test_equal_prompts_are_taken_in_the_datas_order(tmp_path: Path) -> None:
    data = tmp_path / "twice.csv"
    row = "{},,,STEM,Biology,High,Which?,,{},x,y,,,,0\n"
    header = "ID,Source,Country,Group,Subject,Level,Question,Context,Answer Key,Option 1,Option 2,"
    header += "Option 3,Option 4,Option 5,is_few_shot\n"
    data.write_text(header + row.format("first", "A") + row.format("second", "B"))
    questions = load_questions(RunConfig(data=str(data)))
    run = sample_run(data=str(data))
    write_official(run, tmp_path / "out.csv")
    again = read_official(tmp_path / "out.csv", str(data))
    assert [p.question_id for p in again.predictions] == ["first", "second"]
    assert again.data.sha256 == questions.fingerprint.sha256


# --- what cannot be written faithfully


@pytest.mark.parametrize("form", ["lm-eval", "official"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"complete": False}, "is not complete"),
        ({"shots": 3}, "run with shots or a chat template"),
        ({"chat_template": "auto"}, "run with shots or a chat template"),
        ({"scoring": "per-character"}, "is scored by per-character"),
        ({"sha256": "00" * 32}, "does not hold the questions of run.jsonl"),
    ],
)
def test_files_that_would_say_something_untrue_are_not_written(
    form: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = sample_run()
    config = {k: v for k, v in changes.items() if k in RunConfig.__dataclass_fields__}
    run = replace(run, config=replace(run.config, **config))
    run = replace(run, complete=changes.get("complete", True))
    if "sha256" in changes:
        run = replace(run, data=replace(run.data, sha256=changes["sha256"]))
    with pytest.raises(RecordError, match=message):
        WRITERS[form](run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_the_official_columns_are_for_the_papers_protocol(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="run by protocol lm-eval"):
        write_official(sample_run(protocol="lm-eval"), tmp_path / "out.csv")


def test_questions_that_are_elsewhere_now_are_named_with_data(tmp_path: Path) -> None:
    run = sample_run()
    moved = replace(run, config=replace(run.config, data="gone.csv"))
    with pytest.raises(DataError, match="no such file"):
        write_official(moved, tmp_path / "out.csv")
    write_official(moved, tmp_path / "out.csv", "sample")


@pytest.mark.parametrize("form", WRITERS)
def test_nothing_is_overwritten(form: str, tmp_path: Path) -> None:
    run = sample_run()
    WRITERS[form](run, tmp_path / "out", None)
    with pytest.raises(RecordError, match="exists already"):
        WRITERS[form](run, tmp_path / "out", None)


# --- csv


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_per_question_with_all_that_was_observed(tmp_path: Path) -> None:
    run = sample_run()
    write_table(run, tmp_path / "out.csv")
    rows = read_table(tmp_path / "out.csv")
    assert len(rows) == 160
    first, prediction = rows[0], run.predictions[0]
    assert first["task"] == "Biology (High School)"
    assert first["answer"] == "D"
    assert first["predicted"] == prediction.letters[prediction.predicted or 0]
    assert float(first["logit_A"]) == prediction.letter_logits[0]
    assert first["logit_أ"] == ""
    assert (first["latency_ms"], first["n_tokens"], first["status"]) == ("250.0", "90", "scored")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_cell_that_a_spreadsheet_would_run_is_made_text(start: str, tmp_path: Path) -> None:
    run = sample_run()
    hostile = replace(run.predictions[0], question_id=f"{start}HYPERLINK(1)")
    write_table(replace(run, predictions=(hostile,)), tmp_path / "out.csv")
    (row,) = read_table(tmp_path / "out.csv")
    assert row["question_id"] == f"'{start}HYPERLINK(1)"


def test_negative_numbers_stay_numbers(tmp_path: Path) -> None:
    run = sample_run()
    negative = replace(
        run.predictions[0], letter_logits=(-1.5, *run.predictions[0].letter_logits[1:])
    )
    write_table(replace(run, predictions=(negative,)), tmp_path / "out.csv")
    assert read_table(tmp_path / "out.csv")[0]["logit_A"] == "-1.5"


def test_spreadsheets_are_told_the_encoding(tmp_path: Path) -> None:
    write_table(sample_run(), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes().startswith(b"\xef\xbb\xbf")


# --- model-index


def test_the_model_index_is_yaml_that_says_what_was_measured(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    run = sample_run()
    write_model_index(run, tmp_path / "card.yaml")
    text = (tmp_path / "card.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"model-index": model_index(run)}


def test_the_hub_reads_the_model_index() -> None:
    cards = pytest.importorskip("huggingface_hub.repocard_data")
    run = sample_run()
    name, results = cards.model_index_to_eval_results(model_index(run))
    assert name == "tiny"
    micro = micro_accuracy(run.predictions)
    assert results[0].metric_name == "micro accuracy"
    assert results[0].metric_value == pytest.approx(micro.value, abs=5e-5)
    assert results[0].dataset_args["template"] == "en-latin"


def test_any_text_survives_the_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    name = "نموذج: #1 'x' \"y\" \\ \u2028 \u200f \u0085 \ufeff \U0001f600 \t\n- a: b"
    run = sample_run()
    run = replace(run, manifest=replace(run.manifest, name=name))
    write_model_index(run, tmp_path / "card.yaml")
    loaded = yaml.safe_load((tmp_path / "card.yaml").read_text(encoding="utf-8"))
    assert loaded["model-index"][0]["name"] == name


def test_the_protocols_own_average_stands_first() -> None:
    run = sample_run(protocol="oall", prompt="ar", letters="arabic")
    metrics = model_index(run)[0]["results"][0]["metrics"]
    assert [m["name"] for m in metrics] == ["macro accuracy", "micro accuracy"]


@pytest.mark.parametrize(
    ("kind", "source", "named"),
    [
        ("sample", "sample", ("edge-eval-sample", "edge-eval's smoke sample, 160 questions")),
        ("file", "/home/me/rows.csv", ("custom", "rows.csv, 160 questions")),
        ("hub", "MBZUAI/ArabicMMLU/All", ("MBZUAI/ArabicMMLU", "ArabicMMLU, 160 questions")),
    ],
)
def test_only_the_benchmark_bears_its_name_and_no_path_is_told(
    kind: str, source: str, named: tuple[str, str]
) -> None:
    run = sample_run()
    run = replace(run, data=replace(run.data, kind=kind, source=source))
    dataset = model_index(run)[0]["results"][0]["dataset"]
    assert (dataset["type"], dataset["name"]) == named
    assert "/home" not in json.dumps(dataset)


def test_an_incomplete_run_is_not_published() -> None:
    with pytest.raises(RecordError, match="not a complete run"):
        model_index(replace(sample_run(), complete=False))


# --- records


@pytest.mark.parametrize("form", READERS)
def test_a_converted_record_is_read_shown_and_compared_like_any(form: str, tmp_path: Path) -> None:
    run = sample_run()
    WRITERS[form](run, tmp_path / "out", None)
    save_record(READERS[form](tmp_path / "out", "sample"), tmp_path / "run.jsonl")
    again = read_record(tmp_path / "run.jsonl")
    assert again.complete
    assert summarize(again)["micro_accuracy"]["n_correct"] == sum(
        p.correct for p in run.predictions
    )
    found = compare(run, [again]).comparisons[0]
    assert (found.unlike, found.n_changed, found.micro.n) == ((), 0, 160)
    assert math.isclose(found.mean_kl, 0, abs_tol=1e-9)


def test_a_converted_record_never_replaces_a_file(tmp_path: Path) -> None:
    run = read_lm_eval(LM_EVAL / "two_shot")
    save_record(run, tmp_path / "run.jsonl")
    with pytest.raises(RecordError, match="exists already"):
        save_record(run, tmp_path / "run.jsonl")


def test_equal_logits_are_a_tie_and_no_logits_are_no_answer() -> None:
    question: Question = load_questions(RunConfig()).test[0]
    letters: Sequence[str] = ("A", "B", "C", "D")
    tied = predict(question, letters, [1.0, 2.0, 2.0, 0.0], 0)
    assert (tied.predicted, tied.tied) == (1, True)
    none = predict(question, letters, [], 0)
    assert (none.predicted, none.status) == (None, Status.INVALID)
