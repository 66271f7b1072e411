"""The ten letters are exact code points: look-alikes are other tokens."""

import unicodedata

import pytest

from edge_eval.letters import ALPHABETS, ARABIC, LATIN, OPTION_LETTERS, describe_letter

CODE_POINTS = {
    "latin": [0x41, 0x42, 0x43, 0x44, 0x45],
    "arabic": [0x0623, 0x0628, 0x062C, 0x062F, 0x0647],
}


def test_an_alphabet_is_these_code_points_in_this_order() -> None:
    assert {name: [ord(x) for x in letters] for name, letters in ALPHABETS.items()} == CODE_POINTS


def test_a_row_of_ten_logits_is_latin_then_arabic() -> None:
    assert OPTION_LETTERS == LATIN + ARABIC
    assert len(set(OPTION_LETTERS)) == 10


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_no_letter_is_a_presentation_form_or_a_sequence(form: str) -> None:
    assert [unicodedata.normalize(form, letter) for letter in OPTION_LETTERS] == [*OPTION_LETTERS]


@pytest.mark.parametrize(
    ("letter", "words"),
    [("A", "A (U+0041)"), ("\u0647", "\u0647 (U+0647)"), ("هـ", "هـ (U+0647 U+0640)")],
)
def test_a_letter_is_named_by_its_code_points(letter: str, words: str) -> None:
    assert describe_letter(letter) == words
