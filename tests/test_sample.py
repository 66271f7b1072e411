"""The bundled sample is what its card says: every task, every shape of question, clean text."""

import unicodedata
from collections import Counter

import pytest

from edge_eval.questions import load_questions
from edge_eval.schema import Question, QuestionSet, RunConfig

# Source: Koto et al. 2024, the table of tasks; names as on the Hub.
TASKS = """
Biology (High School)
Computer Science (High School)
Computer Science (Middle School)
Computer Science (Primary School)
Computer Science (University)
Math (Primary School)
Natural Science (Middle School)
Natural Science (Primary School)
Physics (High School)
Accounting (University)
Civics (High School)
Civics (Middle School)
Economics (High School)
Economics (Middle School)
Economics (University)
Geography (High School)
Geography (Middle School)
Geography (Primary School)
Political Science (University)
Social Science (Middle School)
Social Science (Primary School)
History (High School)
History (Middle School)
History (Primary School)
Islamic Studies
Islamic Studies (High School)
Islamic Studies (Middle School)
Islamic Studies (Primary School)
Law (Professional)
Philosophy (High School)
Arabic Language (General)
Arabic Language (Grammar)
Arabic Language (High School)
Arabic Language (Middle School)
Arabic Language (Primary School)
Driving Test
General Knowledge
General Knowledge (Middle School)
General Knowledge (Primary School)
Management (University)
""".strip().split("\n")
GROUPS = {"STEM": 9, "Social Science": 12, "Humanities": 9, "Language": 5, "Other": 5}


@pytest.fixture(scope="module")
def sample() -> QuestionSet:
    return load_questions(RunConfig(data="sample"))


@pytest.fixture(scope="module")
def everything(sample: QuestionSet) -> list[Question]:
    return [*sample.test, *(shot for shots in sample.shots.values() for shot in shots)]


def texts(question: Question) -> tuple[str, ...]:
    return (question.text, question.context, *question.options)


def test_no_row_is_refused(sample: QuestionSet) -> None:
    assert sample.refused == ()


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_questions_and_shots(task: str, sample: QuestionSet) -> None:
    assert sum(q.task == task for q in sample.test) >= 2
    assert len(sample.shots[task]) >= 3


def test_there_are_the_papers_40_tasks_in_its_groups_and_no_other(
    everything: list[Question],
) -> None:
    assert {q.task for q in everything} == set(TASKS)
    by_task = {q.task: q.group for q in everything}
    assert {(q.task, q.group) for q in everything} == set(by_task.items())
    assert Counter(by_task.values()) == GROUPS


def test_ids_and_questions_are_unique(everything: list[Question]) -> None:
    assert len({q.id for q in everything}) == len(everything)
    assert len({(q.context, q.text) for q in everything}) == len(everything)


def test_every_shape_of_question_is_there(sample: QuestionSet) -> None:
    assert {len(q.options) for q in sample.test} == {2, 3, 4, 5}
    assert any("0" in q.options for q in sample.test)
    assert any(q.context for q in sample.test)
    assert any(q.country for q in sample.test)
    assert any(not q.level for q in sample.test)


def test_a_questions_options_differ(everything: list[Question]) -> None:
    for question in everything:
        assert len(set(question.options)) == len(question.options), question.id


def test_answers_are_spread_over_the_letters(sample: QuestionSet) -> None:
    answers = Counter(q.answer for q in sample.test if len(q.options) == 4)
    assert set(answers) == {0, 1, 2, 3}
    assert max(answers.values()) <= 0.4 * answers.total()


def test_text_is_clean(everything: list[Question]) -> None:
    for question in everything:
        for text in texts(question):
            assert text == text.strip(), question.id
            assert text == unicodedata.normalize("NFC", text), question.id
            assert "\u0640" not in text, question.id
            unseen = {unicodedata.category(c) for c in text if c != "\n"}
            assert not unseen & {"Cc", "Cf", "Cn", "Co", "Cs"}, question.id
