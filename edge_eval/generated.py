"""Generated text -> the option it answers with, or none; the rules are read_answer()'s.

Only the letters of the question's own options count, and only where one stands for an answer: alone
at the beginning, behind a cue ("Answer:", "الجواب هو"), before "is correct", or as the one letter
set in brackets. A letter in a word ("And", بسبب), an article ("A good question"), an abbreviation
("D.C.") or one of several ("A or B") is no answer. New phrasings go into the tables below.

Source of the rule that no match is a random option: Koto et al. 2024, arXiv:2402.12840, on closed
models. The paper prints no pattern; this one is ours.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache

# What a record keeps of a text: an answer stands near the beginning.
MAX_CHARACTERS = 1000


def read_answer(text: str, letters: Sequence[str]) -> int | None:
    r"""The index in ``letters`` of the option a text answers with; None where no rule finds one.

    The first rule that finds a letter decides, each at its first place:

    1. the text begins with it: ``B``, ``B.``, ``(B)``, ``**B**``, ``B) text``, ``B because ...``;
       but not as the first line of a list that repeats the options;
    2. behind a cue: ``Answer: C``, ``The correct answer is (D)``, ``الإجابة الصحيحة هي ب``;
    3. before a verdict: ``so B is correct``, ``د هي الإجابة``;
    4. the only letter in brackets: ``... (ب) ...``, ``\boxed{B}``.

    Latin letters may be small where nothing else follows. Of the Arabic ones, alef may be written
    أ, ا, إ or آ, heh with tatweel (هـ), and all in presentation forms.
    """
    plain = _plain(bounded(text))
    forms = _patterns(tuple(_plain(letter).strip() for letter in letters))
    for pattern in (forms.beginning, forms.behind_cue, forms.verdict):
        for match in pattern.finditer(plain):
            if pattern is forms.behind_cue and _DENIED.search(plain, 0, match.start()):
                continue
            return forms.index(match["letter"])
    bracketed = list(forms.bracketed.finditer(plain))
    found = {forms.index(match["letter"]) for match in bracketed}
    several = len(found) > 1 or any(match["several"] for match in bracketed)
    return None if several or not found else found.pop()


def draw_option(seed: int, question_id: str, rotation: int, n_options: int) -> int:
    """The random option that stands for an answer that cannot be read.

    The same for a question whatever the order, the model or the machine, so that two runs differ by
    what their models answered.
    """
    digest = hashlib.sha256(f"{seed}\0{question_id}\0{rotation}".encode("utf-8", "replace"))
    return int.from_bytes(digest.digest()[:8], "big") % n_options


def bounded(text: str) -> str:
    """As much of a text as a record keeps."""
    return text[:MAX_CHARACTERS]


# Marks that are written in or around a letter and change nothing: tatweel, diacritics (also in their
# isolated forms, which NFKC would part from their letter), direction marks, zero-width characters.
_MARKS = re.compile(
    "[\u0640\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\ufc5e-\ufc63\ufe70-\ufe7f"
    "\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_ALEFS = re.compile("[\u0623\u0625\u0622\u0671]")  # hamza above, below, madda, wasla -> bare alef


def _plain(text: str) -> str:
    """Text with one form for each letter; the alefs alike, since no other letter is one."""
    bare = _MARKS.sub("", text)
    return _ALEFS.sub("\u0627", _MARKS.sub("", unicodedata.normalize("NFKC", bare)))


class _Patterns:
    """The four rules for one set of letters."""

    def __init__(self, letters: tuple[str, ...]) -> None:
        self._letters = tuple(letter.upper() for letter in letters)
        upper = "|".join(map(re.escape, letters))
        any_case = "|".join(map(re.escape, dict.fromkeys([*letters, *map(str.lower, letters)])))
        # Not one of several: "A or B", "A, B", "أ و ب".
        several = (
            rf"{_CLOSE}*\s*(?:[,،/&+]|\bor\b|\band\b|\bاو\b|\bو)\s*{_OPEN}*(?:{any_case})(?!\w)"
        )
        whole = rf"(?![\w+#°]|['’]\w|-[a-z]|\.\w\b)(?!{several})"
        stop = rf"{_CLOSE}*(?:[.,:;!?،؛؟|–—-]|\s+[–—-]\s|\s*$|\s*\n)|{_CLOSE}"
        letter = rf"(?P<letter>(?:{upper}){whole}|(?:{any_case}){whole}(?={stop}))"
        # Before a small word A is the article, unless the word says why.
        not_article = rf"(?:(?<![Aa])|(?!\s+(?!(?:{_VERDICT})\b)[a-z]))"
        not_denied = rf"(?!{_CLOSE}*\s+(?:{_DENIAL})(?!\w))"
        self.beginning = re.compile(
            rf"\A\s*{_OPEN}*(?P<letter>(?:{upper}){whole}(?={stop}|\s+(?:{_VERDICT})(?!\w))"
            rf"|(?:{any_case}){whole}(?={_CLOSE}*(?:[.:]|\s*\Z)|[)\]]))"
            rf"{not_denied}{_not_a_list(letters)}"
        )
        self.behind_cue = re.compile(
            rf"(?<!\w)(?i:{_CUE})(?!\w)(?:{_BETWEEN}){{0,12}}(?<!\w){letter}"
            rf"{not_article}{not_denied}"
        )
        self.verdict = re.compile(
            rf"(?<![\w.'’-])(?<!or\s)(?<!and\s)(?<!او\s)(?<!و\s){_OPEN}*(?P<letter>{upper}){whole}{_CLOSE}*\s+(?:{_IS_RIGHT})(?!\w)"
        )
        self.bracketed = re.compile(
            rf"(?:(?<!\w)[(\[]|{{)\s*\**(?P<letter>{upper})\**\s*[.)\]}}](?P<several>{several})?"
        )

    def index(self, letter: str) -> int:
        return self._letters.index(letter.upper())


@cache
def _patterns(letters: tuple[str, ...]) -> _Patterns:
    return _Patterns(letters)


def _not_a_list(letters: tuple[str, ...]) -> str:
    """Forbids the first letter where the second one labels a line of the same paragraph."""
    if len(letters) < 2:
        return ""
    first, second = map(re.escape, letters[:2])
    return rf"(?!(?<={first})[.):-](?:(?!\n\s*\n)[\s\S])*?\n\s*\(?{second}[.):-])"


_OPEN = r"[\s(\[{\"'«“‘*_`#>$-]"
_CLOSE = r"[)\]}\"'»”’*_`$]"

# What the answer is announced by.
_CUE = (
    r"answers?|ans|options?|choice|letter|alternative|solution|choose|chose|pick|select"
    r"|(?:ال)?(?:اجابة|اجابه|جواب|حل|خيار|اختيار|حرف|بديل)|اجابتي|جوابي|اختار|نختار"
    r"|(?:ف|و)(?:ال)(?:اجابة|جواب|خيار)|الصحيح|الصحيحة|الصواب"
)

# What may stand between the cue and the letter.
_BETWEEN = (
    r"[\s:=(\[{\"'«“‘*_`$>–—-]"
    r"|(?i:\b(?:is|was|would|should|must|be|the|correct|right|best|most|likely|one|final|option"
    r"|choice|letter|answer|number|therefore|thus)\b)"
    r"|\\(?:boxed|text|textbf|mathrm)"
    r"|(?<!\w)(?:هي|هو|هى|الصحيحة|الصحيح|الصحيحه|الصائبة|الصائب|الاصح|الصواب|المناسبة|المناسب|الانسب"
    r"|الخيار|الاختيار|الحرف|الاجابة|الجواب|رقم|لهذا|السؤال)(?!\w)"
)

# What tells, behind a letter, that the letter was the answer.
_VERDICT = r"is|because|since|as|was|لان|لانه|لانها|هي|هو|صحيح|صحيحة|بسبب"
_IS_RIGHT = (
    r"(?:is|was|seems|would be|must be)\s+(?:the\s+)?(?:(?!not|never|in)\w+\s+)?(?:correct|right|best|true|answer)"
    r"|(?:هي|هو)\s+(?:ال)?(?:اجابة|جواب|خيار|اختيار|صحيحة|صحيح|صواب)|صحيح|صحيحة"
)
_DENIAL = r"(?:is|are|was)\s+(?:not|wrong|incorrect|false)|isn['’]t|(?:ليس|ليست|خاطئ|خاطئة|خطا)"

# What, right before a cue, turns it round: "not the answer".
_DENIED = re.compile(
    r"(?:\bnot|n['’]t|ليس|ليست)\s+(?:the\s+|an?\s+|هذه\s+)?(?:correct\s+|right\s+)?\Z"
)
