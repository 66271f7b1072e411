"""Alphabet name -> the five option letters; change a letter's code point here and nowhere else.

Source: mbzuai-nlp/ArabicMMLU, util_prompt.py at 8d5b148. The fifth Arabic letter is bare heh
(U+0647); other tools use heh + tatweel (U+0647 U+0640), which is another string and another token.
"""

LATIN = ("A", "B", "C", "D", "E")

ARABIC = (
    "\u0623",  # alef with hamza above
    "\u0628",  # beh
    "\u062c",  # jeem
    "\u062f",  # dal
    "\u0647",  # heh
)

# The order of every ten-logit row in the project: A-E, then the Arabic five.
OPTION_LETTERS = LATIN + ARABIC

ALPHABETS = {"latin": LATIN, "arabic": ARABIC}


def describe_letter(letter: str) -> str:
    """A letter with its code points, since look-alikes are other letters: ``ه (U+0647)``."""
    return f"{letter} ({' '.join(f'U+{ord(character):04X}' for character in letter)})"
