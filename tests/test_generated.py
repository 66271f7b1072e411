"""An answer is read where a text gives one, and nowhere else."""

import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_eval.generated import MAX_CHARACTERS, bounded, draw_option, read_answer
from edge_eval.letters import ARABIC, LATIN
from edge_eval.prompts import PROMPT_TEMPLATES
from edge_eval.scoring import TEXT_SCORING_METHODS

LETTERS = LATIN[:4]
ARABIC_LETTERS = ARABIC[:4]
OALL = PROMPT_TEMPLATES["oall"].letters


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        # the text begins with it
        *((text, "B") for text in ("B", " B", "B\n", "B.", "(B)", "[B]", "**B**", '"B"', "B)")),
        *((text, "B") for text in ("B) Cairo", "B. Cairo", "B: Cairo", "B - Cairo", "- B", "Ｂ")),
        *((text, "A") for text in ("A", "A.", "A, because B is wrong", "A\nBecause", "A is right")),
        ("B because of the river", "B"),
        ("A. Cairo\n\nQuestion: another\nA. one\nB. two\nAnswer: B", "A"),
        ("b", "B"),
        ("c) three", "C"),
        ("(d)", "D"),
        # behind a cue
        ("Answer: C", "C"),
        ("Answer:C", "C"),
        ("ANSWER: D", "D"),
        ("**Answer:** C", "C"),
        ("<answer>B</answer>", "B"),
        ("answer: b.", "B"),
        ("The answer is D", "D"),
        ("The answer is a", "A"),
        ("The answer is A because of that", "A"),
        ("The correct answer is (D)", "D"),
        ("The correct answer is: **C) Cairo**", "C"),
        ("The best option is B", "B"),
        ("I would choose option C", "C"),
        ("The answer is C and the others are wrong", "C"),
        ("The answer is not A. The answer is B", "B"),
        ("A. one\nB. two\nC. three\n\nAnswer: B", "B"),
        # before a verdict, or alone in brackets
        ("So B is correct.", "B"),
        ("Option A is wrong. Option B is correct", "B"),
        ("I think (C) fits", "C"),
        (r"$\boxed{B}$", "B"),
        (r"It is \boxed{\text{B}}", "B"),
    ],
)
def test_latin_answers_are_read(text: str, letter: str) -> None:
    assert read_answer(text, LETTERS) == LETTERS.index(letter)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *((text, "ب") for text in ("ب", "ب.", "(ب)", "«ب»", "بـ", "بِ", "\u200fب", "ﺏ", "ب- نص")),
        *((text, "أ") for text in ("أ", "ا", "إ", "آ", "أ- نص", "إجابة: أ", "الإجابة الصحيحة: ا")),
        ("ب لأن النهر طويل", "ب"),
        ("الإجابة: ب", "ب"),
        ("الاجابه هي ب", "ب"),
        ("الجواب هو ج", "ج"),
        ("الإجابة الصحيحة هي (د)", "د"),
        ("والإجابة الصحيحة هي ب", "ب"),
        ("الخيار الصحيح هو: ج", "ج"),
        ("الخيار ب", "ب"),
        ("أختار ب", "ب"),
        ("ب هي الإجابة الصحيحة", "ب"),
        ("أعتقد أن (ب) صحيح", "ب"),
    ],
)
def test_arabic_answers_are_read(text: str, letter: str) -> None:
    assert read_answer(text, ARABIC_LETTERS) == ARABIC_LETTERS.index(letter)


@pytest.mark.parametrize("letters", [ARABIC, OALL], ids=["paper", "oall"])
@pytest.mark.parametrize("text", ["ه", "هـ", "(هـ)", "هـ. نص", "الإجابة: هـ"])
def test_heh_is_read_with_tatweel_and_without(text: str, letters: tuple[str, ...]) -> None:
    assert read_answer(text, letters) == 4


@pytest.mark.parametrize(
    "text",
    [
        *("", "?", "And", "Because", "Apple", "Can be", "Answer", "Vitamin B1", "B1", "A1", "C++"),
        *(
            "A good question",
            "Select A good one",
            "the answer is a dog",
            "C major",
            "A's",
            "A-level",
        ),
        *("D.C.", "A.M.", "I don't know", "E", "Answer: E"),
        *(
            "A or B",
            "A and C",
            "A, B",
            "A/B",
            "Options A and B are wrong",
            "(A) or (B)",
            "A or B is correct",
        ),
        *("Not B", "B is not correct", "B is wrong", "The answer is not A", "not the answer: A"),
        "A. one\nB. two\nC. three",
        "ب",
    ],
)
def test_a_latin_letter_that_is_no_answer_is_not_read(text: str) -> None:
    assert read_answer(text, LETTERS) is None


@pytest.mark.parametrize(
    "text",
    [
        *("بسبب", "أن", "جميل", "دار", "هذا", "الإجابة: أعتقد", "سنة 1445 هـ", "ه", "A"),
        *("أ أو ب", "أ و ب", "ب، ج", "ليست الإجابة أ", "الإجابة ليست ب"),
        "أ- نص\nب- نص\nج- نص",
    ],
)
def test_an_arabic_letter_that_is_no_answer_is_not_read(text: str) -> None:
    assert read_answer(text, ARABIC_LETTERS) is None


@pytest.mark.parametrize("method", TEXT_SCORING_METHODS.values(), ids=TEXT_SCORING_METHODS.keys())
@pytest.mark.parametrize("name", PROMPT_TEMPLATES)
def test_every_letter_of_every_template_is_read_alone_and_behind_its_cue(
    name: str, method: object
) -> None:
    assert callable(method)
    letters = PROMPT_TEMPLATES[name].letters
    for n in range(2, 6):
        for index, letter in enumerate(letters[:n]):
            assert method(letter, letters[:n]) == index
            assert method(f" {letter}.", letters[:n]) == index
            assert method(f"الإجابة: {letter}", letters[:n]) == index
        for letter in letters[n:]:
            assert method(letter, letters[:n]) is None


@given(st.text(), st.sampled_from([LATIN, ARABIC, OALL]), st.integers(2, 5))
def test_any_text_is_read_as_an_option_or_as_none(
    text: str, letters: tuple[str, ...], n: int
) -> None:
    assert read_answer(text, letters[:n]) in {None, *range(n)}


@given(st.text(st.characters(categories=["Lu", "Ll", "Lo"]), min_size=2))
def test_a_word_is_no_answer(word: str) -> None:
    # What is compatible with more than one character, as a ligature, may hold a space.
    if len(unicodedata.normalize("NFKC", word).split()) == 1:
        assert read_answer(word, LATIN) is None


@pytest.mark.parametrize(
    "part", ["answer ", "answer is the ", "A. x\n", "(", " ", "\n", "الإجابة ", "\\boxed{", "*"]
)
def test_what_a_record_keeps_is_read_in_no_time(part: str) -> None:
    import time

    start = time.perf_counter()
    read_answer(part * 100_000, LATIN)
    assert time.perf_counter() - start < 5  # an exponential pattern would take years


def test_only_the_beginning_that_a_record_keeps_is_read() -> None:
    text = "x" * MAX_CHARACTERS + " Answer: B"
    assert read_answer(text, LATIN) is None
    assert len(bounded(text)) == MAX_CHARACTERS


def test_a_drawn_option_depends_on_seed_question_and_rotation_alone() -> None:
    assert draw_option(0, "q1", 0, 4) == draw_option(0, "q1", 0, 4)
    for other in ((1, "q{}", 0), (0, "r{}", 0), (0, "q{}", 1)):
        seed, name, rotation = other
        same = sum(
            draw_option(0, f"q{n}", 0, 4) == draw_option(seed, name.format(n), rotation, 4)
            for n in range(400)
        )
        assert 60 < same < 140  # as often as two independent draws


@pytest.mark.parametrize("n_options", [2, 3, 4, 5])
def test_every_option_is_drawn_as_often(n_options: int) -> None:
    counts = Counter(draw_option(0, f"سؤال {n}", 0, n_options) for n in range(4000))
    assert set(counts) == set(range(n_options))
    assert max(counts.values()) < 1.2 * 4000 / n_options
