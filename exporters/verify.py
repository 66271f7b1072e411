"""Model directory + loaded checkpoint -> how well they agree; thresholds at the top.

An export that fails here leaves nothing behind. The reference's letter logits stay in the
manifest, so that `edge-eval verify DIR` can hold the graph against them again without torch.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from edge_eval.environment import usable_cores
from edge_eval.errors import ExportError, ModelError, ScoringError
from edge_eval.letters import OPTION_LETTERS, describe_letter
from edge_eval.model import LetterModel, Model, open_model
from edge_eval.model_dir import MANIFEST, read_manifest, verify_hashes
from edge_eval.onnx_folder import open_folder
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import ExportManifest, Float32Array, Int64Array, Prompt, RunConfig
from edge_eval.tokenization import encode_prompts, letter_tokens, load_tokenizer

N_PROMPTS = 8
TEMPLATES = ("en-latin", "ar-arabic", "en-arabic", "ar-latin")

# Of the logits' largest magnitude. fp32 sums in another order differ by 1e-5; a lost window,
# a missing norm or a wrong rotary table by more than this.
MAX_DIFFERENCE = 1e-2

# A quantised graph is held against what it did when it was made: another processor rounds
# otherwise, a broken one is off by far more.
MAX_GROWTH = 2.0
MAX_OTHER_LETTERS = 2

# A prompt past the window by this many tokens shows whether the window survived the export.
BEYOND_WINDOW = 64


def verification_prompts(tokenizer: Any, window: int | None, max_length: int) -> list[Prompt]:
    """Eight prompts of the bundled sample in all four templates; the last is beyond the window.

    window: tokens, or None for full attention. A prompt is never longer than ``max_length``.
    """
    questions = load_questions(RunConfig(data="sample"))
    step = len(questions.test) // N_PROMPTS
    chosen = questions.test[::step][:N_PROMPTS]
    prompts = [render(q, t) for q, t in zip(chosen, cycle(TEMPLATES), strict=False)]
    if window is not None and window < max_length:
        shots = [shot for task in questions.shots.values() for shot in task]
        for n_shots in range(len(shots)):
            prompt = render(chosen[-1], TEMPLATES[0], shots[:n_shots])
            n_tokens = len(next(iter(encode_prompts(tokenizer, [prompt]))).input_ids)
            if n_tokens > max_length:
                break
            prompts[-1] = prompt
            if n_tokens > window + BEYOND_WINDOW:
                break
    return prompts


def single_letter_ids(tokenizer: Any) -> list[int]:
    """One id for each of the ten letters: its last, which is all of it in most vocabularies."""
    ids = []
    for letter in OPTION_LETTERS:
        encoding = tokenizer.encode(letter, add_special_tokens=False)
        ids.append(encoding.ids[-1] if encoding.ids else 0)
    return ids


def our_logits(
    model: LetterModel, encoded: Sequence[Int64Array], ids: Sequence[int]
) -> Float32Array:
    """The letters' logits (prompts, 10) as edge-eval computes them."""
    rows = model.head_rows(ids)
    return np.stack([model.logits(model.run(input_ids)[0], rows) for input_ids in encoded])


def continued_logits(model: LetterModel, input_ids: Int64Array, ids: Sequence[int]) -> Float32Array:
    """The letters' logits (10,) with the prompt's first half run apart and continued from.

    Of an encoder-decoder, whose prompt is read whole: what its decoder is given, so divided.
    """
    if isinstance(model, Model) and model.answers is not None:
        given = model.answers.input_ids
        if len(given) > 1:
            _, past = model.answering_behind(given[:1]).run(input_ids, keep=True)
            return model.logits(model.run(given[1:], past)[0], model.head_rows(ids))
        return model.logits(model.run(input_ids)[0], model.head_rows(ids))
    half = len(input_ids) // 2
    _, past = model.run(input_ids[:half], keep=True)
    return model.logits(model.run(input_ids[half:], past)[0], model.head_rows(ids))


def _torch_pass(
    torch_model: Any, decoder: Any, input_ids: Int64Array, given: Sequence[int]
) -> tuple[Float32Array, Float32Array]:
    """The last hidden state (hidden,) and logits (vocab,) of a prompt by the checkpoint's network."""
    import torch

    batch = torch.from_numpy(input_ids)[None]
    with torch.no_grad():
        if not given:
            states = decoder(input_ids=batch, use_cache=False).last_hidden_state
            logits = torch_model(input_ids=batch, use_cache=False).logits
        else:
            found = torch_model(
                input_ids=batch,
                decoder_input_ids=torch.tensor([given]),
                use_cache=False,
                output_hidden_states=True,
            )
            states, logits = found.decoder_hidden_states[-1], found.logits
    return states[0, -1].numpy(), logits[0, -1].numpy()


def compare_with_checkpoint(
    directory: Path, manifest: ExportManifest, torch_model: Any, decoder: Any
) -> dict[str, Any]:
    """The figures of a fresh export against the torch model it came from.

    decoder: the network inside a causal model; None for an encoder-decoder, whose hidden states
    are held against the model's behind both of the manifest's decoder inputs.
    Errors: ExportError when they differ by more than MAX_DIFFERENCE or choose other letters.
    """
    tokenizer = load_tokenizer(directory)
    prompts = verification_prompts(tokenizer, manifest.sliding_window, manifest.max_length)
    encoded = [item.input_ids for item in encode_prompts(tokenizer, prompts)]
    ids = single_letter_ids(tokenizer)
    # The manifest's own decoder input last: its logits are the reference that is kept.
    inputs = [given for given in (manifest.decoder_start_ids, manifest.decoder_paper_ids) if given]
    hidden_reference, logits_reference = [], []
    for input_ids in encoded:
        for given in inputs or [()]:
            hidden, logits = _torch_pass(torch_model, decoder, input_ids, given)
            hidden_reference.append(hidden)
        logits_reference.append(logits[ids])
    model = open_model(directory, manifest, usable_cores())
    ways = [model.answering_behind(given) for given in inputs] or [model]
    hidden_ours = [way.run(input_ids)[0] for input_ids in encoded for way in ways]
    report = _differences(
        our_logits(model, encoded, ids),
        np.stack(logits_reference),
        continued_logits(model, encoded[-1], ids),
    )
    report |= {
        "hidden_max_difference": _largest(np.stack(hidden_ours) - np.stack(hidden_reference)),
        "hidden_scale": _largest(np.stack(hidden_reference)),
        "n_prompts": len(encoded),
        "longest_tokens": max(map(len, encoded)),
        "letter_ids": ids,
        "reference_logits": [[round(float(v), 5) for v in row] for row in logits_reference],
    }
    _judge(report, "Nothing was written; please report the architecture.")
    check_letters(tokenizer)
    return report


def compare_with_uncut(
    directory: Path, manifest: ExportManifest, source: Path, found: ExportManifest
) -> dict[str, Any]:
    """The figures of a cut graph against the ONNX folder's own, which gives the logits itself.

    Errors: ExportError when they differ by more than MAX_DIFFERENCE or choose other letters.
    """
    tokenizer = load_tokenizer(directory)
    prompts = verification_prompts(tokenizer, manifest.sliding_window, manifest.max_length)
    encoded = [item.input_ids for item in encode_prompts(tokenizer, prompts)]
    ids = single_letter_ids(tokenizer)
    # One after the other: both would be twice the weights.
    reference = our_logits(open_folder(source, found, usable_cores()), encoded, ids)
    model = open_model(directory, manifest, usable_cores())
    report = _differences(
        our_logits(model, encoded, ids), reference, continued_logits(model, encoded[-1], ids)
    )
    report |= {
        "reference": "uncut graph",
        "n_prompts": len(encoded),
        "longest_tokens": max(map(len, encoded)),
        "letter_ids": ids,
        "reference_logits": [[round(float(v), 5) for v in row] for row in reference],
    }
    _judge(report, "Nothing was written; `edge-eval run` takes the folder as it is.")
    check_letters(tokenizer)
    return report


def _largest(values: Float32Array) -> float:
    return float(np.abs(values).max())


def _differences(
    ours: Float32Array, reference: Float32Array, continued: Float32Array
) -> dict[str, Any]:
    chosen = reference[np.arange(len(ours)), ours.argmax(axis=1)]
    return {
        "logit_max_difference": _largest(ours - reference),
        "logit_scale": _largest(reference),
        # Two letters may be equal in the reference, in float16 above all: either will do.
        "n_same_letter": int((chosen == reference.max(axis=1)).sum()),
        "past_max_difference": _largest(continued - ours[-1]),
    }


def _judge(report: dict[str, Any], then: str) -> None:
    """Raise ExportError, ending in ``then``, when the figures are not one model's."""
    reference = report.get("reference", "checkpoint")
    worst = max(report["logit_max_difference"], report["past_max_difference"])
    # Not "worst > bound": a NaN must fail.
    if not worst <= MAX_DIFFERENCE * report["logit_scale"]:
        raise ExportError(
            f"the exported graph and the {reference} disagree: letter logits differ by up to {worst:.3g} "
            f"where the largest is {report['logit_scale']:.3g}. {then}"
        )
    hidden = report.get("hidden_max_difference")  # not kept by an export: only a fresh one has it
    if hidden is not None and not hidden <= MAX_DIFFERENCE * report["hidden_scale"]:
        raise ExportError(
            "the exported graph and the checkpoint disagree: last hidden states differ by up to "
            f"{hidden:.3g} where the largest is {report['hidden_scale']:.3g}. {then}"
        )
    if report["n_same_letter"] != report["n_prompts"]:
        raise ExportError(
            f"the exported graph and the {reference} choose the same letter for only "
            f"{report['n_same_letter']} of {report['n_prompts']} prompts. {then}"
        )


def _judge_quantised(report: dict[str, Any], made: Mapping[str, Any]) -> None:
    """Raise ModelError when a quantised graph is further off than when it was made."""
    worst, bound = report["logit_max_difference"], made["logit_max_difference"] * MAX_GROWTH
    n, n_made = report["n_same_letter"], made["n_same_letter"]
    if not worst <= bound or n < n_made - MAX_OTHER_LETTERS:
        raise ModelError(
            f"the quantised graph is further from its checkpoint than when it was made: letter "
            f"logits differ by up to {worst:.3g} ({made['logit_max_difference']:.3g} then), "
            f"{n} of {report['n_prompts']} best letters are the same ({n_made} then). "
            "Quantize again on this machine."
        )


def check_letters(tokenizer: Any) -> dict[str, str]:
    """What is wrong with each letter the tokenizer cannot give back, by alphabet; empty is good.

    A vocabulary without Arabic letters is no fault of an export: doctor and run say so.
    Errors: ExportError when not even the Latin letters come back.
    """
    findings = {}
    for letter in OPTION_LETTERS:
        try:
            ids = letter_tokens(tokenizer, [letter]).ids[0]
        except ScoringError as error:
            findings[letter] = str(error)
            continue
        if tokenizer.decode(list(ids)).strip() != letter:
            findings[letter] = f"{describe_letter(letter)} does not come back from its tokens"
    if all(letter in findings for letter in OPTION_LETTERS[:5]):
        raise ExportError(
            "the tokenizer gives none of the letters A-E back, so it is not this model's: "
            + "; ".join(findings.values())
        )
    return findings


def _reference(
    directory: Path, manifest: ExportManifest, n_prompts: int
) -> tuple[list[int], Float32Array]:
    """The letters' ids (10,) and the checkpoint's logits (prompts, 10) that an export kept."""
    try:
        ids = np.array(manifest.parity["letter_ids"], dtype=np.int64)
        logits = np.array(manifest.parity["reference_logits"], dtype=np.float32)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(
            f"{directory / MANIFEST} keeps no reference to verify against ({error!r}): export again."
        ) from error
    n = len(OPTION_LETTERS)
    if ids.shape != (n,) or logits.shape != (n_prompts, n) or ids.max() >= manifest.vocab_size:
        raise ModelError(
            f"{directory / MANIFEST} keeps a reference of another shape or vocabulary: export again."
        )
    return ids.tolist(), logits


def verify_directory(directory: Path) -> dict[str, Any]:
    """A model directory held against what its manifest says; needs no torch.

    Checks: every file's hash, the graph's loading, the letters' round trip, the letter logits
    of the export's own prompts against the checkpoint's, with and without past.
    Errors: ModelError or ExportError naming what failed.
    """
    report = measure_directory(directory)
    if report["precision"] == "fp32":
        _judge(report, "Export the model again.")
    else:
        _judge_quantised(report, read_manifest(directory).parity)
    return report


def measure_directory(directory: Path) -> dict[str, Any]:
    """verify_directory's figures, not judged. Errors: as there, but for the differences."""
    manifest = read_manifest(directory)
    verify_hashes(directory, manifest)
    tokenizer = load_tokenizer(directory)
    findings = check_letters(tokenizer)
    prompts = verification_prompts(tokenizer, manifest.sliding_window, manifest.max_length)
    encoded = [item.input_ids for item in encode_prompts(tokenizer, prompts)]
    ids, reference = _reference(directory, manifest, len(encoded))
    model = open_model(directory, manifest, usable_cores())
    report = _differences(
        our_logits(model, encoded, ids), reference, continued_logits(model, encoded[-1], ids)
    )
    report |= {
        "reference": manifest.parity.get("reference", "checkpoint"),
        "n_prompts": len(encoded),
        "longest_tokens": max(map(len, encoded)),
    }
    return report | {"letters": findings, "precision": manifest.precision}
