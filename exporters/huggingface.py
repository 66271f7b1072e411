"""Hugging Face checkpoint (Hub id or folder) -> model directory, the graph by optimum.

write_model_directory() is the one place that lays a directory out; gguf.py ends in it too.
"""

import contextlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from edge_eval.errors import ExportError
from edge_eval.model_dir import (
    EMBEDDING,
    GRAPH,
    HEAD,
    HEAD_BIAS,
    SCHEMA_VERSION,
    describe_files,
    write_manifest,
)
from edge_eval.schema import ExportManifest
from exporters.checkpoint import Source, open_checkpoint, read_json

# A prompt's length where the checkpoint states none (BLOOM: trained at 2,048 tokens).
FALLBACK_MAX_LENGTH = 2048

TOOLS = ("edge-eval", "optimum-onnx", "transformers", "torch", "onnx", "onnxruntime", "tokenizers")


def export_checkpoint(
    source: str, output: Path, *, revision: str | None = None, fused: bool = True
) -> ExportManifest:
    """Export a local folder or a Hub id to the model directory ``output``.

    Errors: ExportError as open_checkpoint(), and for what does not load or does not survive
    verification.
    """
    from exporters.checkpoint_tokenizer import write_tokenizer

    with quiet(), open_checkpoint(source, revision) as checkpoint:
        folder = checkpoint.folder
        if checkpoint.config.get("is_encoder_decoder"):
            from exporters.encoder_decoder import load_encoder_decoder

            model = load_encoder_decoder(folder, checkpoint.config.get("model_type"))
        else:
            model = load_causal_model(folder)
        return write_model_directory(
            model,
            lambda directory: write_tokenizer(folder, directory),
            checkpoint.source,
            output,
            fused=fused,
        )


def load_causal_model(folder: Path, gguf_file: str | None = None) -> Any:
    """The checkpoint in float32 and evaluation mode, with no code of its own."""
    from transformers import AutoModelForCausalLM

    return load_weights(AutoModelForCausalLM, folder, gguf_file)


def load_weights(auto_class: Any, folder: Path, gguf_file: str | None = None) -> Any:
    """A model of one of transformers' auto classes, every weight of it from the checkpoint.

    Errors: ExportError when it does not load, or when weights are missing, which transformers
    would fill with random ones.
    """
    import torch

    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    try:
        model, found = auto_class.from_pretrained(
            str(folder),
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="eager",
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        # Of any kind: wrong settings of a stranger's surface anywhere in the network's classes.
        raise ExportError(
            f"{gguf_file or folder} cannot be loaded by transformers: {error}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ExportError(
            f"{gguf_file or folder} lacks {len(missing)} of the weights of a {type(model).__name__} "
            f"({missing[0]}): it is part of another model, and random weights would take their place."
        )
    return model.eval()


def decoder_of(causal_model: Any) -> Any:
    """The network inside a causal model, without its head."""
    decoder = causal_model.get_decoder()
    # Some architectures answer with themselves, and name the decoder as their base.
    return causal_model.base_model if decoder is causal_model else decoder


def write_model_directory(
    model: Any,
    write_tokenizer: Callable[[Path], dict[str, Any] | None],
    source: Source,
    output: Path,
    *,
    fused: bool,
) -> ExportManifest:
    """Export, verify, and only then give the directory its name.

    write_tokenizer: writes the tokenizer's files and returns the manifest's words on them.
    Errors: ExportError; then nothing is left at ``output``.
    """
    from exporters.fused_decoder import FAMILIES
    from exporters.onnx_graph import export_graph
    from exporters.verify import compare_with_checkpoint

    with new_directory(output) as directory:
        tokenizer = write_tokenizer(directory)
        model.config.to_json_file(directory / "config.json")
        config = model.config
        if config.is_encoder_decoder:
            from exporters.encoder_decoder import decoder_inputs, export_halves

            decoder, form, n_layers = None, "plain", config.num_layers + config.num_decoder_layers
            export_halves(model, directory)
            stated = _stated_length(config, directory)
            kind = decoder_inputs(config, directory) | {"trained_length": stated}
            # Relative positions end nowhere, and the paper's code cuts no prompt.
            max_length = max(stated or 0, FALLBACK_MAX_LENGTH)
        else:
            decoder, n_layers, kind = decoder_of(model), config.num_hidden_layers, {}
            form = export_graph(decoder, directory / GRAPH, fused=fused)
            max_length = _max_length(config)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head.weight.data_ptr() == embedding.weight.data_ptr()
        save_table(directory / HEAD, head.weight)
        if not tied:
            save_table(directory / EMBEDDING, embedding.weight)
        if head.bias is not None:
            np.save(directory / HEAD_BIAS, head.bias.detach().numpy())
        scale = float(getattr(embedding, "embed_scale", 1.0))
        if form == "fused":
            scale = FAMILIES[config.model_type].embedding_scale(config)
        manifest = ExportManifest(
            schema_version=SCHEMA_VERSION,
            name=source.name.removesuffix(".gguf"),
            source=source.name,
            revision=source.revision,
            architecture=config.model_type,
            precision="fp32",
            graph=form,
            n_layers=int(n_layers),
            hidden_size=int(config.hidden_size),
            vocab_size=int(embedding.weight.shape[0]),
            max_length=max_length,
            sliding_window=_sliding_window(config),
            tied_embedding=tied,
            embedding_scale=scale,
            head_bias=head.bias is not None,
            head_scale=_head_scale(config),
            head_softcap=getattr(config, "final_logit_softcapping", None),
            files={},
            tools=tool_versions(),
            parity={},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tokenizer=tokenizer,
            **kind,
        )
        parity = compare_with_checkpoint(directory, manifest, model, decoder)
        manifest = replace(manifest, parity=parity)
        files = [path.name for path in directory.iterdir()]
        manifest = replace(manifest, files=describe_files(directory, files))
        write_manifest(directory, manifest)
    return manifest


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its name when the block ends well."""
    if output.exists():
        raise ExportError(f"{output} exists already: name another place with -o, or remove it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error.strerror}.") from error
    try:
        yield temporary
        # Made private by tempfile and onnx: a model is for whoever may read the folder above it.
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.rename(output)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_table(path: Path, weight: Any) -> None:
    """A table (vocab, hidden) as .npy, which numpy maps without copying."""
    np.save(path, weight.detach().numpy())


def _max_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return FALLBACK_MAX_LENGTH


def _stated_length(config: Any, directory: Path) -> int | None:
    """The length in tokens that an encoder-decoder was trained at, where its files state one."""
    settings = read_json(directory / "tokenizer_config.json")
    stated = getattr(config, "n_positions", None) or settings.get("model_max_length")
    # transformers writes 10^30 where none is known.
    return int(stated) if isinstance(stated, int) and 0 < stated < 1 << 20 else None


def _sliding_window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return None
    return int(window)


def _head_scale(config: Any) -> float:
    """What the logits are multiplied with behind the head, in the families that do so."""
    if config.model_type == "granite":
        return 1.0 / float(config.logits_scaling)
    if config.model_type in {"cohere", "cohere2"}:
        return float(config.logit_scale)
    if config.model_type in {"mt5", "t5"} and config.tie_word_embeddings:
        return float(config.d_model) ** -0.5
    return 1.0


def tool_versions() -> dict[str, str]:
    """The versions of what made the export."""
    return {name: importlib.metadata.version(name) for name in TOOLS}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' own logs and progress bars: what goes wrong is raised, not logged."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("optimum", "torch.onnx", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
