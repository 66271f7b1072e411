"""RunConfig -> Preparation: all of a run that needs no forward pass, and what must fail before one.

Questions are read, prompts rendered and tokenised (asking.py), letters found; a setting that
contradicts another, a model that does not fit the memory and a prompt of another vocabulary end
here. So do the texts: what is left of a question is what its prediction records.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge_eval import __version__
from edge_eval.asking import AskedPrompts, Asker
from edge_eval.chat import has_chat_template, load_chat_template
from edge_eval.endpoint import check_url
from edge_eval.environment import (
    describe_machine,
)
from edge_eval.errors import DataError, ModelError, OptionError, ScoringError
from edge_eval.letters import ARABIC, LATIN, describe_letter
from edge_eval.model_dir import TOKENIZER, UNKNOWN, graphs_of, unknown_manifest
from edge_eval.onnx_folder import is_as_found, read_any_manifest
from edge_eval.prompts import PromptTemplate
from edge_eval.questions import fingerprint_questions, load_questions
from edge_eval.schema import DataFingerprint, ExportManifest, QuestionSet, RunConfig
from edge_eval.scoring import (
    PROTOCOLS,
    SCORING_METHODS,
    TEXT_SCORING_METHODS,
    decoder_input_ids,
)
from edge_eval.tokenization import (
    LetterTokens,
    letter_tokens,
    load_tokenizer,
    vocabulary_size,
)

# Measured on 200 questions of 83 tokens on average, AVX2, 2 threads; the head is in every position.
AS_FOUND_NOTE = (
    "{0} is an ONNX folder and runs as it is, its vocabulary head inside the graph. `edge-eval export "
    "{0} -o DIR` takes the head out: 2.2 times as fast with Gemma 3 270M (262,144 tokens), less with "
    "a smaller vocabulary; an export of that checkpoint was 2.4 times as fast."
)

# What Python, numpy and onnxruntime take without a model.
OWN_MEMORY_BYTES = 64 << 20
OWN_ADDRESS_SPACE_BYTES = 512 << 20  # beyond that: libraries, the stacks of threads, reserves
TOKENIZER_GROWTH = 9  # a tokenizer.json in memory, over its size on disk

MAX_NEW_TOKENS = 256  # of a text that is read for an answer
MAX_TOP_LOGPROBS = 1000


@dataclass(frozen=True, slots=True)
class Preparation:
    """All of a run that needs no forward pass."""

    manifest: ExportManifest
    data: DataFingerprint
    asked: AskedPrompts
    letters: LetterTokens  # the ten measured, in the order of letter_logits
    notes: tuple[str, ...]
    shots_sha256: str | None
    chat_template_sha256: str | None


def prepare(
    config: RunConfig, *, hashes: bool = True, manifest: ExportManifest | None = None
) -> Preparation:
    """Read the questions, render and tokenise every prompt, find the letters' ids.

    manifest: the model's, where it was read and checked already.
    Errors: DataError, ModelError, ScoringError, each before the model is loaded.
    """
    if config.endpoint:
        return _prepare_endpoint(config)
    directory = Path(config.model)
    if manifest is None:
        manifest = read_any_manifest(directory, config.file, hashes=hashes)
    check_memory(manifest, describe_machine())
    if manifest.encoder_decoder and config.chat_template != "off":
        raise OptionError(
            f"{manifest.name} is an encoder-decoder, which has no turns for a chat template to "
            "mark: leave --chat-template out."
        )
    own_text = manifest.encoder_decoder
    questions = load_questions(config)
    tokenizer = load_tokenizer(directory)
    chat = load_chat_template(config.chat_template, directory)
    asker = Asker(config, questions, tokenizer, chat, manifest.max_length, own_text=own_text)
    asked = asker.ask_all()
    reads_text = config.scoring in TEXT_SCORING_METHODS
    spell = _unspelt_letters if reads_text else partial(ten_letters, tokenizer, own_text=own_text)
    letters = spell(asker.wording)
    check_vocabulary(directory, manifest, asked, tokenizer)
    if asked.n_tokens.min() > manifest.max_length:
        raise DataError(
            f"every prompt is longer than the {manifest.max_length} tokens that {manifest.name} "
            "can take: nothing can be scored."
        )
    notes = _notes(config, manifest, letters, asked)
    if manifest.encoder_decoder:
        notes += _encoder_decoder_notes(config, manifest, tokenizer, asked, letters)
    return Preparation(
        manifest,
        questions.fingerprint,
        asked,
        letters,
        tuple(notes),
        _hash_shots(config, questions),
        chat.sha256 if chat else None,
    )


def _prepare_endpoint(config: RunConfig) -> Preparation:
    """The same for an endpoint, which tokenises what it is sent in its own way."""
    questions = load_questions(config)
    asker = Asker(config, questions, None, None, 0)
    manifest = unknown_manifest(
        config.model, check_url(config.endpoint), {"edge_eval": __version__}
    )
    notes = []
    if config.chat_template != "server":
        notes.append(
            "the prompts are sent as they are; how the server's tokenizer reads their beginning and "
            "their end is unknown"
            + ("" if asker.wording.letter_prefix else " (--protocol lm-eval ends without a space)")
            + "."
        )
    return Preparation(
        manifest,
        questions.fingerprint,
        asker.request_all(),
        _unspelt_letters(asker.wording),
        tuple(notes),
        _hash_shots(config, questions),
        "the server's" if config.chat_template == "server" else None,
    )


def _hash_shots(config: RunConfig, questions: QuestionSet) -> str | None:
    shots = [shot for rows in questions.shots.values() for shot in rows[: config.shots]]
    return fingerprint_questions(shots) if config.shots else None


def _unspelt_letters(template: PromptTemplate) -> LetterTokens:
    """The ten letters where the tokenizer is unknown; pieces are the texts an endpoint tells of."""
    other = ARABIC if template.letters == LATIN else LATIN
    ten = template.letters + other if template.letters == LATIN else other + template.letters
    pieces = tuple((template.letter_prefix + letter,) for letter in ten)
    return LetterTokens(ten, ((),) * len(ten), pieces)


def _notes(
    config: RunConfig, manifest: ExportManifest, letters: LetterTokens, asked: AskedPrompts
) -> list[str]:
    """What a user should know about this run before it begins."""
    directory = Path(config.model)
    notes = [AS_FOUND_NOTE.format(directory)] if is_as_found(manifest) else []
    if config.chat_template == "off" and has_chat_template(directory):
        notes.append(
            "this model carries a chat template and the run does not use it (--chat-template auto "
            "does); the paper scores without."
        )
    if config.shots and has_chat_template(directory):
        notes.append("models tuned for chat tend to lose by shots, base models to gain (paper).")
    several = [
        describe_letter(letter)
        for letter, ids in zip(letters.letters, letters.ids, strict=True)
        if len(ids) > 1
    ]
    if several:
        notes.append(f"scored in several steps, having no token of their own: {', '.join(several)}")
    if fewer := asked.n_with_fewer_shots(config.shots):
        notes.append(f"{fewer:,} prompts have fewer than {config.shots} shots.")
    return notes


def _encoder_decoder_notes(
    config: RunConfig,
    manifest: ExportManifest,
    tokenizer: Any,
    asked: AskedPrompts,
    letters: LetterTokens,
) -> list[str]:
    """What is particular to asking an encoder-decoder."""
    given = decoder_input(config, manifest)
    pieces = " ".join(str(tokenizer.id_to_token(token_id)) for token_id in given)
    notes = [f"an encoder-decoder: the answer is read behind {pieces} in its decoder"]
    if given == manifest.decoder_start_ids:
        notes[0] += ", where generation begins."
    else:
        notes[0] += (
            ", as the paper's code does; --protocol lm-eval reads it where generation begins."
        )
    if config.protocol == "paper" and any(len(ids) > 1 for ids in letters.ids):
        notes.append(
            "the paper's code reads the first token alone of a letter that has none of its own, a "
            "word-start piece; here all of the letter's tokens count."
        )
    if config.reuse == "shared":
        notes.append(
            "an encoder reads a prompt from both ends, so no beginning can be shared: every prompt "
            "is computed whole (--reuse none)."
        )
    if longer := int((asked.n_tokens > (manifest.trained_length or math.inf)).sum()):
        notes.append(
            f"{longer:,} prompts are longer than the {manifest.trained_length:,} tokens this model "
            "states; its positions are relative, and they are asked whole, as the paper's code does."
        )
    return notes


def decoder_input(config: RunConfig, manifest: ExportManifest) -> tuple[int, ...]:
    """What an encoder-decoder's decoder is given first; a text begins as generation does."""
    if config.scoring in TEXT_SCORING_METHODS:
        return manifest.decoder_start_ids
    return decoder_input_ids(manifest, config.template)


def check_vocabulary(
    directory: Path, manifest: ExportManifest, asked: AskedPrompts, tokenizer: Any
) -> None:
    """Raise ModelError when the prompts hold ids the embedding table has no row for."""
    if (largest := asked.largest_token_id()) >= manifest.vocab_size:
        raise ModelError(
            f"the tokenizer in {directory} makes token {largest} and the model has "
            f"{manifest.vocab_size} (the tokenizer knows {vocabulary_size(tokenizer)}): it belongs to another model."
        )


def ten_letters(
    tokenizer: object, template: PromptTemplate, *, own_text: bool = False
) -> LetterTokens:
    """The token ids of the template's five letters, and of the other five where they have one.

    own_text: as for letter_tokens().
    Errors: ScoringError when the template's own letters cannot be scored.
    """
    prefix = template.letter_prefix
    own = letter_tokens(tokenizer, template.letters, prefix, own_text=own_text)
    other_letters = ARABIC if template.letters == LATIN else LATIN
    try:
        other = letter_tokens(tokenizer, other_letters, prefix, own_text=own_text)
    except ScoringError:
        other = LetterTokens(other_letters, ((),) * 5, ((),) * 5)
    # Diagnostics are not worth a second pass: only the run's own letters may take several steps.
    ids = tuple(spelling if len(spelling) == 1 else () for spelling in other.ids)
    other = LetterTokens(other.letters, ids, other.pieces)
    first, second = (own, other) if template.letters == LATIN else (other, own)
    return LetterTokens(
        first.letters + second.letters, first.ids + second.ids, first.pieces + second.pieces
    )


def check_memory(manifest: ExportManifest, environment: Mapping[str, Any]) -> None:
    """Raise ModelError when the model cannot be held in this process's memory.

    The head and the embedding are not counted: they are mapped, and only the rows used are read.
    They count where the address space itself is limited (ulimit -v). The tokenizer is let go
    before the graph is loaded, so the larger of the two decides.
    """
    sizes = {name: int(facts["size_bytes"]) for name, facts in manifest.files.items()}
    graphs = graphs_of(manifest)
    graph = sum(
        size
        for name, size in sizes.items()
        if name.startswith(graphs) or (is_as_found(manifest) and not name.endswith(".json"))
    )
    needed = OWN_MEMORY_BYTES + max(graph, TOKENIZER_GROWTH * sizes.get(TOKENIZER, 0))
    mapped = sum(size for name, size in sizes.items() if name.endswith(".npy"))
    for name, more in (
        ("memory_limit_bytes", 0),
        ("memory_total_bytes", 0),
        ("address_space_limit_bytes", mapped + OWN_ADDRESS_SPACE_BYTES),
    ):
        limit = environment.get(name)
        if limit is not None and needed + more > limit:
            raise ModelError(
                f"{manifest.name} needs {(needed + more) / 1e6:,.0f} MB of memory at least, and this "
                f"process may have {limit / 1e6:,.0f} MB: raise the limit, or take a lower precision "
                "(edge-eval quantize)."
            )


def scoring_facts(cell: Preparation, config: RunConfig) -> dict[str, Any]:
    """What decides the answers beside the config: read back, it tells whether a run is the same."""
    several = any(len(ids) > 1 for ids in cell.letters.ids)
    asked = {"endpoint_model": config.model, "tokenizer": UNKNOWN} if config.endpoint else {}
    normalized = PROTOCOLS[config.protocol].normalized or several or bool(config.endpoint)
    given = decoder_input(config, cell.manifest)
    return asked | {
        **({"decoder_input_ids": given} if given else {}),
        "shots_sha256": cell.shots_sha256,
        "chat_template_sha256": cell.chat_template_sha256,
        "prompts_sha256": cell.asked.sha256,  # questions with their tokens or texts, in order
        "letters": cell.letters.letters,
        "letter_ids": cell.letters.ids,
        "letter_pieces": cell.letters.pieces,
        "normalized": normalized and config.scoring not in TEXT_SCORING_METHODS,
    }


def check_settings(config: RunConfig) -> None:
    """Raise OptionError for settings that contradict each other."""
    protocol = PROTOCOLS.get(config.protocol)
    if protocol is None:
        raise OptionError(f"no protocol {config.protocol!r}: there are {', '.join(PROTOCOLS)}.")
    for name in ("prompt", "letters"):
        fixed, asked = getattr(protocol, name), getattr(config, name)
        if fixed is not None and fixed != asked:
            raise OptionError(
                f"protocol {config.protocol} has {name} {fixed}, and {asked} was asked for: leave "
                f"--{name} out, or take --protocol paper."
            )
    if config.system_prompt and config.chat_template == "off":
        raise OptionError("a system prompt needs a chat template: add --chat-template auto.")
    reads_text = config.scoring in TEXT_SCORING_METHODS
    if not reads_text and config.scoring not in SCORING_METHODS:
        known = ", ".join((*SCORING_METHODS, *TEXT_SCORING_METHODS))
        raise OptionError(f"no scoring {config.scoring!r} in a run: there are {known}.")
    if config.scoring == "per-character" and not protocol.normalized:
        raise OptionError("per-character scoring needs log-probabilities: add --protocol oall.")
    if not 0 < config.max_new_tokens <= MAX_NEW_TOKENS:
        raise OptionError(
            f"--max-new-tokens is 1 to {MAX_NEW_TOKENS}, not {config.max_new_tokens}."
        )
    if config.max_new_tokens > 1 and not reads_text:
        raise OptionError("--max-new-tokens is of texts that are read: add --scoring generated.")
    if config.permute and (reads_text or config.endpoint):
        raise OptionError(
            "--permute averages every letter's probability, which only a model directory scored by "
            "letters gives: leave it out."
        )
    if config.endpoint:
        _check_endpoint(config)
    elif config.chat_template == "server" or config.scenario == "endpoint":
        raise OptionError("a server's chat template is asked for with --endpoint URL.")


def _check_endpoint(config: RunConfig) -> None:
    check_url(config.endpoint)
    if not config.model:
        raise OptionError("an endpoint serves models by name: add --model NAME.")
    if config.chat_template not in {"off", "server"}:
        raise OptionError(
            "an endpoint's chat template is the server's own: leave --chat-template out, and take "
            "--endpoint-kind chat."
        )
    if (config.scenario, config.reuse, config.threads) != ("endpoint", "none", None):
        raise OptionError(
            "--scenario, --reuse and --threads are of a model that runs here: leave them out with "
            "--endpoint (--concurrency says how many requests are sent at once)."
        )
    if config.scoring == "per-character":
        raise OptionError(
            "per-character scoring needs log-probabilities of whole letters, and an endpoint tells of "
            "single tokens: add --scoring argmax or generated."
        )
    if not 0 < config.top_logprobs <= MAX_TOP_LOGPROBS:
        raise OptionError(f"--top-logprobs is 1 to {MAX_TOP_LOGPROBS}, not {config.top_logprobs}.")
