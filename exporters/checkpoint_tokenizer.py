"""Checkpoint folder -> tokenizer.json, proved on the bundled sample; the bound is MAX_SHARE.

A checkpoint may hold its tokenizer as tokenizer.json (fast), as the files of transformers' older Python
classes (slow: tokenizer.model, spiece.model, vocab.json + merges.txt), or as both. What is not
there is converted by transformers. Two tokenizers of one checkpoint should give the same ids; all
the sample's prompts in the paper's four templates are asked, and the ten letters.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_eval.errors import ExportError
from edge_eval.letters import OPTION_LETTERS, describe_letter
from edge_eval.model_dir import TOKENIZER
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
from edge_eval.tokenization import encode_prompts, load_tokenizer
from exporters.verify import TEMPLATES

# A conversion may give other ids for so many of the prompts: odd spaces and rare code points, not a
# rule that every prompt meets.
MAX_SHARE = 0.01

SLOW_FILES = ("*.model", "merges.txt", "vocab.txt")

SHOWN = 4  # pieces on each side of the first that differs


def write_tokenizer(folder: Path, directory: Path) -> dict[str, Any]:
    """Write a model directory's tokenizer files; returns what was compared, for the manifest.

    Where the checkpoint has no tokenizer.json the slow tokenizer is the only truth: a conversion
    that spells a letter otherwise, or more than MAX_SHARE of the prompts, is refused, since
    the score would be of another input. Where it has both, tokenizer.json is the authors' own
    choice and what transformers, the paper's code and every server load, so a difference is the
    checkpoint's: it is kept, counted and told.
    Errors: ExportError for a tokenizer that does not load, or was converted and is not proved.
    """
    from transformers import AutoTokenizer

    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        fast = AutoTokenizer.from_pretrained(str(folder), use_fast=True, **options)
    except Exception as error:  # of any kind: the settings are a stranger's
        why = " ".join(str(error).split())[:200]  # it may list every class there is
        raise ExportError(f"{folder} has no tokenizer that transformers can load: {why}") from error
    if not fast.is_fast:
        raise ExportError(
            f"{folder} has only a slow tokenizer ({type(fast).__name__}) that transformers cannot "
            f"convert, and no {TOKENIZER}."
        )
    with tempfile.TemporaryDirectory() as scratch:
        fast.save_pretrained(scratch)
        for name in (TOKENIZER, "tokenizer_config.json", "chat_template.jinja"):
            if (Path(scratch) / name).is_file():
                shutil.copyfile(Path(scratch) / name, directory / name)
    facts = _compare(fast, directory)
    if facts["n_different"] or facts["letters"]:
        raise ExportError(
            f"{TOKENIZER} and the checkpoint's tokenizer ({type(fast).__name__}) give different "
            f"tokens for {facts['n_different']} of {facts['n_prompts']} sample prompts. Nothing was "
            "written."
        )
    converted = not (folder / TOKENIZER).is_file()
    slow = _slow_tokenizer(folder)
    if slow is None and converted:
        raise ExportError(
            f"{folder} has no {TOKENIZER}, and transformers loads no other tokenizer of it to prove a "
            f"converted one on: save the checkpoint's tokenizer with a {TOKENIZER}."
        )
    facts = _compare(slow, directory) if slow is not None else {}
    facts = {"converted": converted, "slow": slow and type(slow).__name__} | facts
    note = tokenizer_note(facts)
    if converted and note and (facts["letters"] or _share(facts) > MAX_SHARE):
        raise ExportError(f"{folder} has no {TOKENIZER}, and the converted one is wrong: {note}")
    return facts


def _slow_tokenizer(folder: Path) -> Any:
    """The checkpoint's slow tokenizer; None where it has no files of one that load."""
    from transformers import AutoTokenizer

    if not any(path for pattern in SLOW_FILES for path in folder.glob(pattern)):
        return None
    try:
        slow = AutoTokenizer.from_pretrained(
            str(folder), use_fast=False, trust_remote_code=False, local_files_only=True
        )
    # RuntimeError is sentencepiece's, for a .model that is another program's.
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return None if slow.is_fast else slow


def _compare(theirs: Any, directory: Path) -> dict[str, Any]:
    """A transformers tokenizer against the tokenizer.json in a directory, on the sample.

    letters: those spelt otherwise. example: the first prompt that differs, around its first
    token that does.
    """
    ours = load_tokenizer(directory)
    questions = load_questions(RunConfig(data="sample")).test
    prompts = [render(question, name) for name in TEMPLATES for question in questions]
    expected = theirs([prompt.text for prompt in prompts])["input_ids"]
    n_different, example = 0, None
    for index, (a, encoded) in enumerate(zip(expected, encode_prompts(ours, prompts), strict=True)):
        b = encoded.input_ids.tolist()
        if a == b:
            continue
        n_different += 1
        if example is None:
            length = min(len(a), len(b))
            at = next((i for i in range(length) if a[i] != b[i]), length)
            near = slice(max(0, at - SHOWN), at + SHOWN)
            example = {
                "question": encoded.question_id,
                "template": TEMPLATES[index // len(questions)],
                "token": at,
                "slow": [str(piece) for piece in theirs.convert_ids_to_tokens(a[near])],
                "fast": [str(ours.id_to_token(token_id)) for token_id in b[near]],
            }
    letters = [
        letter
        for letter in OPTION_LETTERS
        if theirs(letter, add_special_tokens=False)["input_ids"]
        != ours.encode(letter, add_special_tokens=False).ids
    ]
    return {
        "n_prompts": len(prompts),
        "n_different": n_different,
        "letters": letters,
        "example": example,
    }


def _share(facts: Mapping[str, Any]) -> float:
    return float(facts["n_different"] / facts["n_prompts"])


def tokenizer_note(facts: Mapping[str, Any] | None) -> str | None:
    """What a user should know of a checkpoint's two tokenizers, or None where they agree."""
    if not facts or not (facts.get("n_different") or facts.get("letters")):
        return None
    words = (
        f"on {facts['n_different']:,} of {facts['n_prompts']:,} sample prompts {TOKENIZER} gives other "
        f"tokens than the checkpoint's slow tokenizer ({facts['slow']})"
    )
    if facts["letters"]:
        words += f", and for {', '.join(map(describe_letter, facts['letters']))}"
    if example := facts["example"]:
        slow, fast = (" ".join(example[name]) for name in ("slow", "fast"))
        words += (
            f"; first at token {example['token']} of {example['question']} ({example['template']}): "
            f"slow {slow} / {TOKENIZER} {fast}"
        )
    return words + "."
