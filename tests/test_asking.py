"""A run holds of every prompt its tokens and what its prediction records, and little beside."""

import gc
import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_evaluate import config_of, prompts_of, write_questions

from edge_eval.asking import AskedPrompts
from edge_eval.evaluate import evaluate
from edge_eval.letters import LATIN
from edge_eval.preparation import Preparation, prepare
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import Question, RunConfig
from edge_eval.tokenization import load_tokenizer

SAMPLE = load_questions(RunConfig())
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def repeat_sample(path: Path, n: int) -> str:
    """A file of the sample's test questions ``n`` times under new ids."""
    rows = [replace(q, id=f"{turn} {q.id}") for turn in range(n) for q in SAMPLE.test]
    return write_questions(path, *rows)


def held_bytes(model: Path, data: str) -> tuple[int, Preparation]:
    """What is still allocated by Python and numpy when a run is prepared."""
    gc.collect()
    tracemalloc.start()
    try:
        prepared = prepare(config_of(model, data=data, limit=None))
        gc.collect()
        return tracemalloc.get_traced_memory()[0], prepared
    finally:
        tracemalloc.stop()


def test_a_prepared_question_takes_four_bytes_a_token_and_little_more(
    tiny_model: Path, tmp_path: Path
) -> None:
    few, many = (repeat_sample(tmp_path / f"{n}.csv", n) for n in (1, 5))
    held_bytes(tiny_model, few)  # what is imported and cached once
    less, small = held_bytes(tiny_model, few)
    more, large = held_bytes(tiny_model, many)
    n = len(large.asked) - len(small.asked)
    n_tokens = int(large.asked.n_tokens.sum() - small.asked.n_tokens.sum())
    assert n == 4 * len(SAMPLE.test)
    # An array that grows is an eighth larger than what it holds.
    assert more - less < 9 / 8 * 4 * n_tokens + 60 * n


def test_a_run_does_not_grow_as_it_answers(tiny_model: Path, tmp_path: Path) -> None:
    held: dict[int, int] = {}

    def look(done: int, _total: int) -> None:
        if done in (40, 160):
            gc.collect()
            held[done] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        evaluate(config_of(tiny_model, limit=160), tmp_path / "r.jsonl", look)
    finally:
        tracemalloc.stop()
    # A prediction takes 690 bytes; numpy and onnxruntime keep small blocks for the next, some 150.
    assert held[160] - held[40] < 120 * 350


@given(st.lists(st.tuples(TEXT, TOKENS, st.integers(0, 3)), min_size=1, max_size=5))
def test_what_is_kept_of_a_prompt_is_what_was_given(
    prompts: list[tuple[str, list[int], int]],
) -> None:
    asked, expected = AskedPrompts(LATIN), hashlib.sha256()
    for number, (name, tokens, rotation) in enumerate(prompts):
        question = replace(SAMPLE.test[number], id=name)
        ids = np.array(tokens, dtype=np.int64)
        asked.add(question, render(question, "en-latin", rotation=rotation), ids)
        expected.update(f"{name!r} {rotation} {len(ids)}\n".encode() + ids.tobytes())
    assert asked.sha256 == expected.hexdigest()
    assert len(asked) == len(prompts)
    assert asked.n_tokens.tolist() == [len(tokens) for _, tokens, _ in prompts]
    assert asked.largest_token_id() == max(
        (t for _, tokens, _ in prompts for t in tokens), default=0
    )
    for number, (name, tokens, rotation) in enumerate(prompts):
        question, found = SAMPLE.test[number], asked[number]
        assert asked.input_ids(number).dtype == np.int64
        assert asked.input_ids(number).tolist() == tokens
        assert (found.question_id, found.rotation, found.n_tokens) == (name, rotation, len(tokens))
        labels = (question.group, question.subject, question.level, question.country)
        assert (found.group, found.subject, found.level, found.country) == labels
        assert found.n_characters == len(question.context) + len(question.text)
        assert found.has_context == bool(question.context)
        assert found.letters == LATIN[: len(question.options)]
        assert (found.answer + rotation) % len(found.letters) == question.answer


@given(TEXT, st.lists(TEXT, max_size=4))
def test_a_request_is_sent_as_it_was_made(prompt: str, messages: list[str]) -> None:
    asked = AskedPrompts(LATIN, requests=True)
    question = SAMPLE.test[0]
    requests = [{"prompt": prompt}, {"messages": [{"content": text} for text in messages]}]
    for request in requests:
        content = json.dumps(request, ensure_ascii=False).encode()
        asked.add(question, render(question, "en-latin"), content)
    assert [asked.request(i) for i in range(2)] == requests
    assert asked[0].n_tokens == 0  # an endpoint's tokenizer is unknown


@pytest.mark.parametrize("settings", [{}, {"shots": 2}, {"permute": True}], ids=str)
def test_the_tokens_kept_are_those_of_the_rendered_texts(
    settings: dict[str, int], tiny_model: Path
) -> None:
    config = config_of(tiny_model, limit=40 if not settings else 12, **settings)
    asked, tokenizer = prepare(config).asked, load_tokenizer(tiny_model)
    pairs: list[tuple[Question, str]] = [(q, p.text) for q, p in prompts_of(config)]
    assert len(asked) == len(pairs)
    for index, (question, text) in enumerate(pairs):
        assert asked[index].question_id == question.id
        assert asked.input_ids(index).tolist() == tokenizer.encode(text).ids
