"""Question -> Prompt; add or change a wording in PROMPT_TEMPLATES at the end of this file.

Source of the four paper templates: mbzuai-nlp/ArabicMMLU, util_prompt.py at 8d5b148, byte for byte
(the two spaces before the Arabic name of Political Science are the authors' own). A published
template's name never changes meaning: new wording, new name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_eval.letters import ARABIC, LATIN
from edge_eval.schema import Prompt, Question

LEVELS_EN = {
    "Primary": "primary school",
    "Middle": "middle school",
    "High": "high school",
    "Univ": "university",
    "Prof": "professional",
}

LEVELS_AR = {
    "Primary": "للمرحلة الابتدائية",
    "Middle": "للمرحلة المتوسطة",
    "High": "للمرحلة الثانوية",
    "Univ": "للجامعات",
    "Prof": "للمحترفين",
}

COUNTRIES_AR = {
    "UAE": "في دولة الإمارات العربية المتحدة",
    "Egypt": "في مصر",
    "Lebanon": "في لبنان",
    "Jordan": "في الأردن",
    "Kuwait": "في الكويت",
    "KSA": "في المملكة العربية السعودية",
    "Palestine": "في فلسطين",
    "Morocco": "في المغرب",
}

SUBJECTS_AR = {
    "Islamic Studies": "في الدراسات الإسلامية",
    "Driving Test": "اختبار القيادة",
    "Natural Science": "في العلوم الطبيعية",
    "History": "في التاريخ",
    "General Knowledge": "في المعلومات العامة",
    "Law": "في القانون",
    "Physics": "في الفيزياء",
    "Social Science": "في العلوم الاجتماعية",
    "Management": "في الإدارة",
    "Arabic Language": "في اللغة العربية",
    "Political Science": " في العلوم السياسية",
    "Philosophy": "في الفلسفة",
    "Accounting": "في المحاسبة",
    "Computer Science": "في علوم الحاسوب",
    "Geography": "في الجغرافيا",
    "Math": "في الرياضيات",
    "Biology": "في علم الأحياء",
    "Economics": "في الاقتصاد",
    "Arabic Language (General)": "في اللغة العربية (عام)",
    "Arabic Language (Grammar)": "في اللغة العربية (قواعد النحو)",
    "Civics": "في التربية المدنية",
}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A wording: how a question is put, and what stands between the cue and the letter."""

    write: Callable[[Question], str]
    letters: tuple[str, ...]  # one alphabet's five
    letter_prefix: str = ""  # part of the answer, not of the prompt: lm-eval scores " A"


def _question(question: Question) -> str:
    return f"{question.context}\n\n{question.text}" if question.context else question.text


def _options(question: Question, letters: Sequence[str], mark: str) -> str:
    lettered = zip(letters, question.options, strict=False)  # fewer options than letters
    return "\n".join(f"{letter}{mark}{text}" for letter, text in lettered)


def _english(letters: tuple[str, ...], mark: str, cue: str) -> Callable[[Question], str]:
    def write(question: Question) -> str:
        level = f" for {LEVELS_EN[question.level]}" if question.level else ""
        country = f" in {question.country}" if question.country else ""
        return (
            f"This is a {question.subject} question{level}{country}. Select the correct answer!\n\n"
            f"Question: {_question(question)}\n{_options(question, letters, mark)}\n\n{cue}"
        )

    return write


def _arabic(letters: tuple[str, ...], mark: str, cue: str) -> Callable[[Question], str]:
    def write(question: Question) -> str:
        level = f" {LEVELS_AR[question.level]}" if question.level else ""
        country = f" {COUNTRIES_AR[question.country]}" if question.country else ""
        return (
            f"هذا سؤال {SUBJECTS_AR[question.subject]}{level}{country}. اختر الإجابة الصحيحة!\n\n"
            f"سؤال: {_question(question)}\n{_options(question, letters, mark)}\n\n{cue}"
        )

    return write


# The leaderboard's fifth letter is heh + tatweel, two code points.
OALL_LETTERS = (*ARABIC[:4], ARABIC[4] + "\u0640")


def _oall(question: Question) -> str:
    return (
        "السؤال التالي هو سؤال متعدد الإختيارات. اختر الإجابة الصحيحة:\n\n"
        f"{question.text}\n{_options(question, OALL_LETTERS, '. ')}\nالإجابة:"
    )


def wording_of(template: str, *, space_with_letter: bool = False) -> PromptTemplate:
    """A template, on demand with the cue's last space moved from the prompt to the letter.

    Behind shots most tokenizers read "Answer: A" with the space inside the letter's token; the
    letter scored must be the one the shots show, so there the space is part of the answer.
    """
    wording = PROMPT_TEMPLATES[template]
    if not space_with_letter or wording.letter_prefix:
        return wording
    return replace(wording, write=lambda q: wording.write(q).removesuffix(" "), letter_prefix=" ")


def rotate(question: Question, places: int) -> Question:
    """The same question with its options moved up in a circle, and its answer with them."""
    options = question.options[places:] + question.options[:places]
    return replace(
        question, options=options, answer=(question.answer - places) % len(question.options)
    )


def render(
    question: Question,
    template: str,
    shots: Sequence[Question] = (),
    *,
    space_with_letter: bool = False,
    rotation: int = 0,
) -> Prompt:
    """The prompt for a question; each shot goes before it with its answer, a blank line between.

    shots: few-shot rows of the question's task, in file order. The joining is that of
    lm-evaluation-harness and lighteval, since the paper's repository has no few-shot code.
    """
    wording = wording_of(template, space_with_letter=space_with_letter)
    before = "".join(f"{shot_text(shot, wording)}\n\n" for shot in shots)
    return Prompt(
        question_id=question.id,
        text=before + wording.write(rotate(question, rotation)),
        letters=wording.letters[: len(question.options)],
        n_shots=len(shots),
        rotation=rotation,
    )


def shot_text(shot: Question, wording: PromptTemplate) -> str:
    """A few-shot row with its answer."""
    return f"{wording.write(shot)}{wording.letter_prefix}{wording.letters[shot.answer]}"


PROMPT_TEMPLATES: dict[str, PromptTemplate] = {
    "en-latin": PromptTemplate(_english(LATIN, ". ", "Answer: "), LATIN),
    "en-arabic": PromptTemplate(_english(ARABIC, "- ", "Answer: "), ARABIC),
    "ar-latin": PromptTemplate(_arabic(LATIN, ". ", "إجابة: "), LATIN),
    "ar-arabic": PromptTemplate(_arabic(ARABIC, "- ", "إجابة: "), ARABIC),
    # Source: lm-evaluation-harness 0.4, task arabicmmlu: the paper's text but for the last space.
    "lm-eval": PromptTemplate(_english(LATIN, ". ", "Answer:"), LATIN, letter_prefix=" "),
    # Source: lighteval, tasks/multilingual/tasks/arabic.py at 3fd1526: no metadata, no context.
    "oall": PromptTemplate(_oall, OALL_LETTERS),
}
