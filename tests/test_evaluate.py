"""A run answers every question once, keeps what it saw, and fails before the model is loaded."""

import csv
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_model_dir import copy_model, seal
from tokenizers import Tokenizer

from edge_eval.asking import Asker
from edge_eval.errors import (
    DataError,
    EdgeEvalError,
    ModelError,
    OptionError,
    RecordError,
    ScoringError,
)
from edge_eval.evaluate import evaluate
from edge_eval.generated import read_answer
from edge_eval.letters import ARABIC, LATIN, OPTION_LETTERS
from edge_eval.model import open_model
from edge_eval.model_dir import read_manifest
from edge_eval.preparation import prepare
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.run_record import read_record
from edge_eval.schema import Prompt, Question, RunConfig, RunRecord, Status
from edge_eval.scoring import PROTOCOLS
from edge_eval.tokenization import load_tokenizer

EVERY_PROTOCOL = pytest.mark.parametrize("protocol", PROTOCOLS)
BOS, EOS = 0, 1


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Callable[..., RunRecord]:
    """Evaluates the tiny model on part of the sample."""

    def run(model: Path = tiny_model, name: str = "record", **settings: Any) -> RunRecord:
        return evaluate(config_of(model, **settings), tmp_path / f"{name}.jsonl")

    return run


def config_of(model: Path, **settings: Any) -> RunConfig:
    protocol = PROTOCOLS[settings.get("protocol", "paper")]
    fixed = {"prompt": protocol.prompt, "letters": protocol.letters, "scoring": protocol.scoring}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    return RunConfig(**{"model": str(model), "limit": 12, "threads": 1, **fixed, **settings})


def prompts_of(config: RunConfig, *, own_text: bool = False) -> list[tuple[Question, Prompt]]:
    """The questions and prompts of a run without a chat template, whose texts a run lets go."""
    model = Path(config.model)
    limit = read_manifest(model).max_length
    questions, tokenizer = load_questions(config), load_tokenizer(model)
    asker = Asker(config, questions, tokenizer, None, limit, own_text=own_text)
    return [(question, prompt) for question, prompt, _ in asker.prompts()]


def values(record: RunRecord) -> Any:
    """The ten values of every prediction (n, 10), NaN where there is none."""
    rows = [[math.nan if v is None else v for v in p.letter_logits] for p in record.predictions]
    return np.array(rows, dtype=np.float64)


def write_questions(path: Path, *questions: Question) -> str:
    options = [f"Option {n}" for n in range(1, 6)]
    names = ["ID", "Country", "Group", "Subject", "Level", "Question", "Context", "Answer Key"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *options, "is_few_shot"])
        for q in questions:
            labels = [q.id, q.country, q.group, q.subject, q.level, q.text, q.context]
            listed = [*q.options, *[""] * 5][:5]
            writer.writerow([*labels, LATIN[q.answer], *listed, int(q.split == "dev")])
    return str(path)


# ---- what a run records


@EVERY_PROTOCOL
def test_every_question_is_answered_once_in_the_datas_order(
    protocol: str, run: Callable[..., RunRecord], tiny_model: Path
) -> None:
    record = run(protocol=protocol)
    questions = load_questions(config_of(tiny_model)).test
    assert record.complete
    assert [p.question_id for p in record.predictions] == [q.id for q in questions]
    assert [p.index for p in record.predictions] == list(range(12))
    for asked, p in zip(questions, record.predictions, strict=True):
        assert (p.task, p.group, p.country, p.answer) == (
            asked.task,
            asked.group,
            asked.country,
            asked.answer,
        )
        assert p.has_context == (asked.context != "")
        assert len(p.letters) == len(asked.options)
        assert p.status is Status.SCORED
        assert p.latency_s is not None
        assert 0 < p.latency_s < 10


@EVERY_PROTOCOL
def test_a_prediction_follows_from_the_saved_logits(
    protocol: str, run: Callable[..., RunRecord]
) -> None:
    record = run(protocol=protocol)
    measured = record.scoring["letters"]
    for p in record.predictions:
        scores = [p.letter_logits[measured.index(letter)] for letter in p.letters]
        assert None not in scores
        if protocol == "oall":
            scores = [score / len(x) for score, x in zip(scores, p.letters, strict=True)]
        assert p.predicted == scores.index(max(scores))
        assert p.tied == (scores.count(max(scores)) > 1)


@EVERY_PROTOCOL
def test_the_saved_values_are_those_of_the_model(
    protocol: str, run: Callable[..., RunRecord], tiny_model: Path
) -> None:
    record = run(protocol=protocol)
    prompts = prompts_of(config_of(tiny_model, protocol=protocol))
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert record.scoring["normalized"] or not PROTOCOLS[protocol].normalized
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    for (_, prompt), p in zip(prompts, record.predictions, strict=True):
        ids = tokenizer.encode(prompt.text).ids
        assert p.n_tokens == len(ids)
        expected = model.all_logits(model.run(np.array(ids))[0]).astype(np.float64)
        if record.scoring["normalized"]:
            expected -= np.log(np.exp(expected).sum())
        for value, spelling in zip(p.letter_logits, record.scoring["letter_ids"], strict=True):
            if len(spelling) == 1:
                assert value == pytest.approx(expected[spelling[0]], abs=1e-4)


@pytest.mark.parametrize("letters", ["latin", "arabic"])
def test_the_other_alphabets_logits_are_kept(letters: str, run: Callable[..., RunRecord]) -> None:
    record = run(letters=letters)
    assert tuple(record.scoring["letters"]) == OPTION_LETTERS
    assert np.isfinite(values(record)).all()


def test_one_prompt_has_one_row_of_ten_logits_whichever_letters_it_asks_for(
    run: Callable[..., RunRecord],
) -> None:
    # The letters stand in the prompt, so the logits differ; their order does not.
    latin, arabic = run(name="a", letters="latin"), run(name="b", letters="arabic")
    assert latin.scoring["letter_ids"] == arabic.scoring["letter_ids"]
    assert latin.predictions[0].letters == LATIN[: len(latin.predictions[0].letters)]
    assert arabic.predictions[0].letters == ARABIC[: len(arabic.predictions[0].letters)]


def test_a_run_can_be_repeated(run: Callable[..., RunRecord]) -> None:
    first, second = run(name="a"), run(name="b")
    assert values(first).tolist() == values(second).tolist()
    assert first.data == second.data


def test_a_record_names_all_that_made_it(run: Callable[..., RunRecord], tiny_model: Path) -> None:
    record = run(warmup=2)
    assert record.config == config_of(tiny_model, warmup=2)
    assert record.manifest == read_manifest(tiny_model)
    assert (record.data.kind, record.data.n_selected) == ("sample", 12)
    assert record.environment["threads"] == 1
    assert record.observed["load_s"] > 0
    assert record.observed["first_call_s"] > 0
    on_disk = sum(path.stat().st_size for path in tiny_model.iterdir())
    assert record.observed["disk_bytes"] == on_disk - (tiny_model / "manifest.json").stat().st_size


def test_progress_counts_every_prompt(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(config_of(tiny_model), tmp_path / "r.jsonl", lambda *step: seen.append(step))
    assert seen == [(done, 12) for done in range(1, 13)]


def test_what_was_answered_before_an_interrupt_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    def stop(done: int, _total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(config_of(tiny_model), tmp_path / "r.jsonl", stop)
    record = read_record(tmp_path / "r.jsonl")
    assert (len(record.predictions), record.complete) == (5, False)


# ---- settings


def test_a_limit_and_filters_choose_the_questions(run: Callable[..., RunRecord]) -> None:
    record = run(groups=("Humanities",), levels=("High",), limit=5)
    assert len(record.predictions) == 5
    assert {(p.group, p.level) for p in record.predictions} == {("Humanities", "High")}
    assert record.data.n_selected == 5


@pytest.mark.parametrize(
    "settings",
    [{"reuse": "shared"}, {"scenario": "offline"}, {"reuse": "shared", "scenario": "offline"}],
    ids=str,
)
@EVERY_PROTOCOL
def test_time_saved_changes_no_value(
    settings: dict[str, Any], protocol: str, run: Callable[..., RunRecord]
) -> None:
    plain = run(name="plain", protocol=protocol, limit=40)
    fast = run(name="fast", protocol=protocol, limit=40, threads=2, **settings)
    np.testing.assert_allclose(values(fast), values(plain), atol=1e-4, equal_nan=True)
    untimed = [replace(p, latency_s=None, letter_logits=()) for p in plain.predictions]
    assert [replace(p, latency_s=None, letter_logits=()) for p in fast.predictions] == untimed


def test_a_permuted_run_asks_every_rotation_and_turns_the_answer(
    run: Callable[..., RunRecord],
) -> None:
    record = run(permute=True, limit=6)
    plain = {p.question_id: p for p in run(name="plain", limit=6).predictions}
    turns = Counter(p.question_id for p in record.predictions)
    assert turns == {name: len(p.letters) for name, p in plain.items()}
    for p in record.predictions:
        assert p.answer == (plain[p.question_id].answer - p.rotation) % len(p.letters)
        if p.rotation == 0:
            np.testing.assert_allclose(p.letter_logits, plain[p.question_id].letter_logits)


@EVERY_PROTOCOL
def test_shots_are_the_tasks_own_rows_in_order(protocol: str, tiny_model: Path) -> None:
    config = config_of(tiny_model, protocol=protocol, shots=3)
    shots = load_questions(config).shots
    for question, prompt in prompts_of(config):
        places = [prompt.text.index(row.text) for row in shots[question.task]]
        assert prompt.n_shots == 3
        assert all(a < b for a, b in pairwise([*places, prompt.text.rindex(question.text)]))


def test_the_scored_question_is_never_its_own_shot(tiny_model: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model)
    everything = load_questions(replace(config, limit=None))
    question = everything.test[0]
    twin = replace(question, id="twin", split="dev")
    rows = [twin, *everything.shots[question.task], question]
    data = write_questions(tmp_path / "data.csv", *rows)
    ((_, prompt),) = prompts_of(replace(config, data=data, shots=3, limit=None))
    assert prompt.n_shots == 3
    assert prompt.text.count(question.text) == 1


def test_more_shots_than_a_task_has_are_refused_unless_allowed(
    tiny_model: Path, tmp_path: Path
) -> None:
    everything = load_questions(RunConfig())
    question = everything.test[0]
    data = write_questions(tmp_path / "d.csv", *everything.shots[question.task][:1], question)
    config = config_of(tiny_model, data=data, shots=2)
    with pytest.raises(DataError, match=r"has 1 few-shot rows .* and 2 were asked for"):
        prepare(config)
    prepared = prepare(replace(config, allow_fewer_shots=True))
    assert prepared.asked[0].n_shots == 1
    assert any("1 prompts have fewer than 2 shots" in note for note in prepared.notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "lm-eval", "prompt": "ar", "letters": "latin"}, "--prompt"),
        ({"protocol": "oall", "prompt": "ar", "letters": "latin"}, "--letters"),
        ({"protocol": "unheard-of"}, "paper"),
        ({"system_prompt": "Be brief."}, "--chat-template"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        evaluate(RunConfig(model=str(tiny_model), **settings), tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()


# ---- prompts that are too long


def test_a_prompt_that_is_too_long_is_counted_and_never_cut(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    whole = run(name="whole", limit=40)
    limit = int(np.median([p.n_tokens for p in whole.predictions]))
    short = seal(copy_model(tiny_model, tmp_path), max_length=limit)
    record = run(short, limit=40)
    for expected, p in zip(whole.predictions, record.predictions, strict=True):
        assert p.n_tokens == expected.n_tokens
        if p.n_tokens <= limit:
            assert (p.status, p.letter_logits) == (Status.SCORED, expected.letter_logits)
        else:
            assert (p.status, p.predicted, p.latency_s) == (Status.TOO_LONG, None, None)
            assert set(p.letter_logits) == {None}
    assert {p.status for p in record.predictions} == {Status.SCORED, Status.TOO_LONG}


def test_shots_are_dropped_before_a_prompt_is_too_long(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    whole = run(name="whole", shots=3, limit=40)
    limit = int(np.median([p.n_tokens for p in whole.predictions]))
    record = run(seal(copy_model(tiny_model, tmp_path), max_length=limit), shots=3, limit=40)
    for expected, p in zip(whole.predictions, record.predictions, strict=True):
        assert p.status is Status.SCORED
        assert p.n_tokens <= limit
        assert (p.n_shots == 3) == (expected.n_tokens <= limit)
    # One by one: not all of them at once.
    assert 2 in {p.n_shots for p in record.predictions}


def test_a_run_without_a_prompt_that_fits_leaves_no_record(
    tiny_model: Path, tmp_path: Path
) -> None:
    short = seal(copy_model(tiny_model, tmp_path), max_length=8)
    with pytest.raises(DataError, match=r"every prompt is longer than the 8 tokens"):
        evaluate(config_of(short), tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()


# ---- models that cannot be trusted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_makes_its_questions_invalid(
    bad: float, run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    whole = run(name="whole", limit=40)
    broken = copy_model(tiny_model, tmp_path)
    head = np.load(broken / "lm_head.npy")
    head[whole.scoring["letter_ids"][OPTION_LETTERS.index("D")]] = bad
    np.save(broken / "lm_head.npy", head)
    record = run(seal(broken), limit=40)
    for expected, p in zip(whole.predictions, record.predictions, strict=True):
        if "D" in p.letters:
            assert (p.status, p.predicted, p.tied) == (Status.INVALID, None, False)
            assert p.letter_logits[OPTION_LETTERS.index("D")] is None
        else:
            assert (p.status, p.predicted) == (Status.SCORED, expected.predicted)
    assert {p.status for p in record.predictions} == {Status.SCORED, Status.INVALID}


def test_another_models_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    small = copy_model(tiny_model, tmp_path)
    for name in ("lm_head.npy", "embedding.npy"):
        np.save(small / name, np.load(small / name)[:300])
    with pytest.raises(ModelError, match="belongs to another model"):
        evaluate(config_of(seal(small, vocab_size=300)), tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()


def test_a_changed_file_is_refused_before_the_run_unless_told_otherwise(
    tiny_model: Path, tmp_path: Path
) -> None:
    changed = copy_model(tiny_model, tmp_path)
    head = np.load(changed / "lm_head.npy")
    np.save(changed / "lm_head.npy", head * np.float32(2))
    with pytest.raises(ModelError, match=r"lm_head\.npy is not the file that was exported"):
        evaluate(config_of(changed), tmp_path / "r.jsonl")
    assert evaluate(config_of(changed), tmp_path / "r.jsonl", hashes=False).complete


def change_tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = directory / "tokenizer.json"
    contents = json.loads(path.read_text(encoding="utf-8"))
    change(contents)
    path.write_text(json.dumps(contents), encoding="utf-8")
    return seal(directory)


def without_merges(contents: dict[str, Any]) -> None:
    contents["model"]["merges"] = []


def merge_letters(contents: dict[str, Any]) -> None:
    """Spells B and D alike."""
    normalizer = {"type": "Replace", "pattern": {"String": "D"}, "content": "B"}
    contents["normalizer"] = normalizer


def test_letters_of_several_tokens_are_scored_in_several_steps(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    bytes_only = change_tokenizer(copy_model(tiny_model, tmp_path), without_merges)
    config = config_of(bytes_only, letters="arabic", limit=4)
    record = run(bytes_only, letters="arabic", limit=4)
    assert {len(spelling) for spelling in record.scoring["letter_ids"][5:]} == {2}
    assert record.scoring["normalized"]
    assert np.exp(values(record)).sum(axis=1).max() < 1
    assert any("in several steps" in note for note in prepare(config).notes)
    model = open_model(bytes_only, read_manifest(bytes_only), 1)
    first, second = record.scoring["letter_ids"][6]
    ids = prepare(config).asked.input_ids(0)
    total = 0.0
    for token_id, behind in ((first, ids), (second, np.append(ids, first))):
        logits = model.all_logits(model.run(behind)[0]).astype(np.float64)
        total += logits[token_id] - np.log(np.exp(logits).sum())
    assert record.predictions[0].letter_logits[6] == pytest.approx(total, abs=1e-4)


def one_token_for_heh_with_tatweel(contents: dict[str, Any]) -> None:
    """Gives the leaderboard's fifth letter the id of the last merge."""
    left, right = contents["model"]["merges"].pop()
    token_id = contents["model"]["vocab"].pop(left + right)
    settings = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    contents["added_tokens"].append({"id": token_id, "content": "هـ", **settings})


def test_a_protocol_of_log_probabilities_has_them_where_every_letter_is_one_token_too(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    model = change_tokenizer(copy_model(tiny_model, tmp_path), one_token_for_heh_with_tatweel)
    record = run(model, protocol="oall")
    assert {len(spelling) for spelling in record.scoring["letter_ids"]} == {1}
    assert record.scoring["normalized"]
    assert np.exp(values(record)).sum(axis=1).max() < 1


def test_the_other_alphabet_is_left_out_where_it_would_cost_a_second_pass(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    record = run(change_tokenizer(copy_model(tiny_model, tmp_path), without_merges))
    assert np.isfinite(values(record)[:, :5]).all()
    assert np.isnan(values(record)[:, 5:]).all()
    assert not record.scoring["normalized"]


def test_letters_that_cannot_be_told_apart_stop_only_a_run_that_asks_for_them(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    model = change_tokenizer(copy_model(tiny_model, tmp_path), merge_letters)
    with pytest.raises(ScoringError, match="cannot be told apart"):
        evaluate(config_of(model), tmp_path / "r.jsonl")
    assert run(model, letters="arabic").complete


def test_a_record_that_exists_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("mine")
    with pytest.raises(RecordError, match="exists already"):
        evaluate(config_of(tiny_model), tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").read_text() == "mine"


def test_a_model_that_is_none_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(EdgeEvalError) as caught:
        evaluate(config_of(tmp_path / "missing"), tmp_path / "r.jsonl")
    assert "\n" not in str(caught.value)


# ---- control tokens


CHAT = "<s>{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}assistant:"


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """Two questions and a shot of one task, control tokens in every part of them."""
    question = Question(
        id="q1",
        group="Other",
        subject="Driving Test",
        level="",
        country="",
        context="<s>نص</s>",
        text="سؤال</s>",
        options=("</s>", "ب</s>1", "<s>", "د</s>2"),
        answer=0,
        split="test",
    )
    twin = replace(question, id="q2", context="", text="<s>آخر")
    shot = replace(question, id="shot", text="مثال</s>", split="dev")
    return write_questions(tmp_path / "hostile.csv", question, twin, shot)


@pytest.mark.parametrize("shots", [0, 1])
def test_control_tokens_in_a_row_stay_text(shots: int, hostile: str, tiny_model: Path) -> None:
    asked = prepare(config_of(tiny_model, data=hostile, shots=shots)).asked
    for ids in (asked.input_ids(i).tolist() for i in range(len(asked))):
        assert Counter(ids)[BOS] == 1
        assert EOS not in ids


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("permute", [False, True])
def test_control_tokens_in_a_row_stay_text_in_a_chat(
    shots: int, permute: bool, hostile: str, tiny_model: Path, tmp_path: Path
) -> None:
    chatty = copy_model(tiny_model, tmp_path)
    (chatty / "chat_template.jinja").write_text(CHAT)
    settings = {"chat_template": "auto", "shots": shots, "permute": permute}
    asked = prepare(config_of(seal(chatty), data=hostile, **settings)).asked
    for ids in (asked.input_ids(i).tolist() for i in range(len(asked))):
        # The template's own: one BOS, and an EOS behind each turn.
        assert (ids[0], ids.count(BOS), ids.count(EOS)) == (BOS, 1, 1 + 2 * shots)


# ---- against the authors' code


@pytest.mark.parametrize(("prompt", "letters"), [("en", LATIN), ("ar", ARABIC)])
def test_predictions_are_those_of_the_papers_rule_in_torch(
    prompt: str, letters: tuple[str, ...], run: Callable[..., RunRecord], tiny_checkpoint: Path
) -> None:
    """Transcribed from mbzuai-nlp/ArabicMMLU, util_compute.py at 8d5b148, for causal models."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    alphabet = "latin" if letters == LATIN else "arabic"
    record = run(prompt=prompt, letters=alphabet, limit=None)
    questions = {question.id: question for question in load_questions(RunConfig()).test}
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()
    for prediction in record.predictions:
        text = render(questions[prediction.question_id], record.config.template).text
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        present = letters[: len(prediction.letters)]
        ids = [tokenizer(letter).input_ids[-1] for letter in present]
        confidence = torch.softmax(logits[ids], dim=0)
        assert prediction.predicted == int(torch.argmax(confidence))


# ---- generated answers


@pytest.mark.parametrize("n", [1, 5])
def test_a_generated_answer_is_the_models_own_text(
    n: int, run: Callable[..., RunRecord], tiny_model: Path
) -> None:
    record = run(scoring="generated", max_new_tokens=n)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    prompts = prompts_of(config_of(tiny_model))
    for (_, prompt), p in zip(prompts, record.predictions, strict=True):
        ids = tokenizer.encode(prompt.text).ids
        for _ in range(n):
            following = int(np.argmax(model.all_logits(model.run(np.array(ids))[0])))
            if following in (BOS, EOS):
                break
            ids.append(following)
        assert p.generated == tokenizer.decode(ids[p.n_tokens :])
        assert p.status is Status.SCORED
        assert p.matched == (read_answer(p.generated, p.letters) is not None)
        assert p.letter_logits == (None,) * 10


def test_generated_answers_are_the_same_however_they_are_run(run: Callable[..., RunRecord]) -> None:
    settings = {"scoring": "generated", "max_new_tokens": 3}
    records = [
        run(name="plain", **settings),
        run(name="offline", scenario="offline", threads=2, **settings),
        run(name="shared", reuse="shared", **settings),
    ]
    texts = [[(p.generated, p.predicted) for p in record.predictions] for record in records]
    assert texts[0] == texts[1] == texts[2]


def test_a_model_whose_letters_cannot_be_scored_can_still_write(
    run: Callable[..., RunRecord], tiny_model: Path, tmp_path: Path
) -> None:
    model = change_tokenizer(copy_model(tiny_model, tmp_path), merge_letters)
    record = run(model, scoring="generated")
    assert record.scoring["letter_ids"] == [[]] * 10
    assert record.complete
