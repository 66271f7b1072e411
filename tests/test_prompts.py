"""Questions become the published prompts, byte for byte.

What is expected is written out here a second time, from the paper's repository and the other
tools' documentation; nothing of it comes from prompts.py. The golden files are made by hand: when
one differs, the module is wrong, or a new wording wants a new name.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_eval import questions as questions_module
from edge_eval.prompts import PROMPT_TEMPLATES, render, rotate, wording_of
from edge_eval.questions import COUNTRIES, TASKS, load_questions
from edge_eval.schema import Question, RunConfig

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_IDS = [
    "sample-004",  # a level and a context
    "sample-011",  # two options
    "sample-018",  # five options behind a context
    "sample-052",  # a country, three options
    "sample-114",  # another country
    "sample-130",  # Political Science, whose Arabic name begins with a space
    "sample-172",  # neither level nor country
    "sample-199",  # Law (Professional)
    "sample-235",  # a subject with brackets in its name
]
AWKWARD = st.text(alphabet=" \t\n\r\u00a0\u200f\u0640\u064bأA1.{}%<>\\'", min_size=1, max_size=12)
EVERY_TEMPLATE = pytest.mark.parametrize("template", PROMPT_TEMPLATES)

LEVELS = {
    "": ("", ""),
    "Primary": (" for primary school", " للمرحلة الابتدائية"),
    "Middle": (" for middle school", " للمرحلة المتوسطة"),
    "High": (" for high school", " للمرحلة الثانوية"),
    "Univ": (" for university", " للجامعات"),
    "Prof": (" for professional", " للمحترفين"),
}
COUNTRIES_AR = """
UAE=في دولة الإمارات العربية المتحدة
Egypt=في مصر
Lebanon=في لبنان
Jordan=في الأردن
Kuwait=في الكويت
KSA=في المملكة العربية السعودية
Palestine=في فلسطين
Morocco=في المغرب
"""
SUBJECTS_AR = """
Islamic Studies=في الدراسات الإسلامية
Driving Test=اختبار القيادة
Natural Science=في العلوم الطبيعية
History=في التاريخ
General Knowledge=في المعلومات العامة
Law=في القانون
Physics=في الفيزياء
Social Science=في العلوم الاجتماعية
Management=في الإدارة
Arabic Language=في اللغة العربية
Political Science= في العلوم السياسية
Philosophy=في الفلسفة
Accounting=في المحاسبة
Computer Science=في علوم الحاسوب
Geography=في الجغرافيا
Math=في الرياضيات
Biology=في علم الأحياء
Economics=في الاقتصاد
Arabic Language (General)=في اللغة العربية (عام)
Arabic Language (Grammar)=في اللغة العربية (قواعد النحو)
Civics=في التربية المدنية
"""
MARKS = {
    "latin": ["A. ", "B. ", "C. ", "D. ", "E. "],
    "arabic": ["\u0623- ", "\u0628- ", "\u062c- ", "\u062f- ", "\u0647- "],
    "oall": ["\u0623. ", "\u0628. ", "\u062c. ", "\u062f. ", "\u0647\u0640. "],
}


def table(lines: str) -> dict[str, str]:
    return dict(line.split("=") for line in lines.strip().split("\n"))


def options(row: Mapping[str, str], alphabet: str) -> str:
    lines = []
    for number, mark in enumerate(MARKS[alphabet], start=1):
        if row[f"Option {number}"] == "":
            break
        lines.append(mark + row[f"Option {number}"])
    return "\n".join(lines)


def english(row: Mapping[str, str], alphabet: str, cue: str = "Answer: ") -> str:
    country = " in " + row["Country"] if row["Country"] else ""
    asked = row["Question"] if row["Context"] == "" else row["Context"] + "\n\n" + row["Question"]
    first = f"This is a {row['Subject']} question{LEVELS[row['Level']][0]}{country}."
    return f"{first} Select the correct answer!\n\nQuestion: {asked}\n{options(row, alphabet)}\n\n{cue}"


def arabic(row: Mapping[str, str], alphabet: str) -> str:
    country = " " + table(COUNTRIES_AR)[row["Country"]] if row["Country"] else ""
    asked = row["Question"] if row["Context"] == "" else row["Context"] + "\n\n" + row["Question"]
    first = f"هذا سؤال {table(SUBJECTS_AR)[row['Subject']]}{LEVELS[row['Level']][1]}{country}."
    listed = options(row, alphabet)
    return f"{first} اختر الإجابة الصحيحة!\n\nسؤال: {asked}\n{listed}\n\nإجابة: "


def oall(row: Mapping[str, str]) -> str:
    first = "السؤال التالي هو سؤال متعدد الإختيارات. اختر الإجابة الصحيحة:\n\n"
    return first + row["Question"] + "\n" + options(row, "oall") + "\n" + "الإجابة:"


PUBLISHED = {
    "en-latin": lambda row: english(row, "latin"),
    "en-arabic": lambda row: english(row, "arabic"),
    "ar-latin": lambda row: arabic(row, "latin"),
    "ar-arabic": lambda row: arabic(row, "arabic"),
    "lm-eval": lambda row: english(row, "latin", cue="Answer:"),
    "oall": oall,
}


def read_test_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["is_few_shot"] == "0"]


def question(n_options: int = 4, **changes: object) -> Question:
    sound = Question(
        id="q",
        group="STEM",
        subject="Math",
        level="Primary",
        country="",
        context="",
        text="ما ناتج ٢ + ٢؟",
        options=("0", "2", "4", "6", "8")[:n_options],
        answer=1,
        split="test",
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def row_of(asked: Question) -> dict[str, str]:
    cells = {"Subject": asked.subject, "Level": asked.level, "Country": asked.country}
    texts = {"Context": asked.context, "Question": asked.text}
    listed = [*asked.options, *[""] * 5][:5]
    return cells | texts | {f"Option {n}": text for n, text in enumerate(listed, start=1)}


@pytest.mark.parametrize("template", PUBLISHED)
def test_the_sample_is_put_in_the_published_words(
    template: str, sample_questions: tuple[Question, ...]
) -> None:
    rows = read_test_rows(Path(questions_module.__file__).parent / "sample" / "questions.csv")
    found = [render(question, template).text for question in sample_questions]
    assert found == [PUBLISHED[template](row) for row in rows]


@pytest.fixture(scope="module")
def real_questions(real_rows: Path) -> tuple[Question, ...]:
    return load_questions(RunConfig(data=str(real_rows))).test


@pytest.mark.parametrize("template", PUBLISHED)
def test_every_real_row_is_put_in_the_published_words(
    template: str, real_rows: Path, real_questions: tuple[Question, ...]
) -> None:
    rows = read_test_rows(real_rows)
    assert len(rows) == len(real_questions) == 2487
    for row, asked in zip(rows, real_questions, strict=True):
        assert render(asked, template).text.encode() == PUBLISHED[template](row).encode()


@EVERY_TEMPLATE
def test_a_template_gives_its_golden_prompts(
    template: str, sample_questions: tuple[Question, ...]
) -> None:
    by_id = {asked.id: asked for asked in sample_questions}
    # A pilcrow marks where a prompt ends: its last space is part of it.
    found = "".join(f"=== {id_}\n{render(by_id[id_], template).text}¶\n" for id_ in GOLDEN_IDS)
    assert found.encode() == (GOLDEN / f"{template}.txt").read_bytes()


def test_a_golden_file_without_a_template_is_none() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PROMPT_TEMPLATES)


@EVERY_TEMPLATE
@pytest.mark.parametrize("n_options", [2, 3, 4, 5])
def test_a_question_announces_as_many_letters_as_it_has_options(
    template: str, n_options: int
) -> None:
    prompt = render(question(n_options), template)
    alphabet = PROMPT_TEMPLATES[template].letters
    assert prompt.letters == alphabet[:n_options]
    for index, letter in enumerate(alphabet):
        assert (f"\n{letter}" in prompt.text) == (index < n_options)


@EVERY_TEMPLATE
@given(context=AWKWARD, text=AWKWARD, option=AWKWARD)
def test_text_goes_in_to_the_character(template: str, context: str, text: str, option: str) -> None:
    plain = question(context="BEFORE", text="TEXT", options=("first", "OPTION"))
    awkward = replace(plain, context=context, text=text, options=("first", option))
    expected = render(plain, template).text
    for mark, words in (("BEFORE", context), ("TEXT", text), ("OPTION", option)):
        expected = expected.replace(mark, words)
    assert render(awkward, template).text == expected


LABELS = [
    (group, subject, level, country)
    for group, subjects in TASKS.items()
    for subject, levels in subjects.items()
    for level in levels
    for country in ("", *COUNTRIES)
]


@EVERY_TEMPLATE
def test_every_task_of_every_country_has_words(template: str) -> None:
    assert len(LABELS) == 40 * 9
    for group, subject, level, country in LABELS:
        asked = question(group=group, subject=subject, level=level, country=country)
        text = render(asked, template).text
        if template in PUBLISHED:
            assert text == PUBLISHED[template](row_of(asked))


def test_no_context_leaves_no_trace_and_a_context_stands_before_its_question() -> None:
    text = render(question(context="نص"), "en-latin").text
    assert "Question: نص\n\nما ناتج" in text
    assert render(question(), "en-latin").text == text.replace("نص\n\n", "")


@EVERY_TEMPLATE
def test_a_shot_is_a_prompt_with_its_answer_and_a_blank_line(template: str) -> None:
    shots = (question(text="أول", answer=0), question(5, text="ثان", answer=4))
    separator = " " if template == "lm-eval" else ""
    letters = PROMPT_TEMPLATES[template].letters
    alone = [render(asked, template).text for asked in (*shots, question())]
    prompt = render(question(), template, shots)
    assert prompt.n_shots == 2
    assert prompt.text == (
        f"{alone[0]}{separator}{letters[0]}\n\n{alone[1]}{separator}{letters[4]}\n\n{alone[2]}"
    )


@EVERY_TEMPLATE
def test_moving_the_cues_space_to_the_letter_keeps_a_shots_text(template: str) -> None:
    moved = wording_of(template, space_with_letter=True)
    text = render(question(), template).text
    assert moved.write(question()) == text.removesuffix(" ")
    assert moved.letter_prefix == " "


@pytest.mark.parametrize("n_options", [2, 3, 4, 5])
def test_a_rotation_moves_the_options_in_a_circle_and_the_answer_with_them(n_options: int) -> None:
    plain = question(n_options)
    seen = set()
    for places in range(n_options):
        turned = rotate(plain, places)
        assert turned.options[turned.answer] == plain.options[plain.answer]
        assert sorted(turned.options) == sorted(plain.options)
        seen.add(turned.answer)
    assert seen == set(range(n_options))
    assert rotate(plain, 0) == plain


def test_a_rotated_prompt_is_the_prompt_of_the_rotated_question() -> None:
    prompt = render(question(), "ar-arabic", rotation=3)
    assert prompt == replace(render(rotate(question(), 3), "ar-arabic"), rotation=3)
