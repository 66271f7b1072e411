"""GGUF file -> model directory: the weights dequantised by transformers, the tokenizer our own.

transformers' tokenizer for a GGUF file is not used: for several vocabularies it gives other
tokens than llama.cpp does (exporters/gguf_tokenizer.py).
"""

from pathlib import Path

from edge_eval.errors import ExportError
from edge_eval.schema import ExportManifest
from exporters.gguf_tokenizer import read_metadata, write_tokenizer_files
from exporters.huggingface import Source, load_causal_model, quiet, write_model_directory


def export_gguf(path: Path, output: Path, *, fused: bool = True) -> ExportManifest:
    """Export a .gguf file to the model directory ``output``.

    Errors: ExportError for a file that is no GGUF, an architecture transformers cannot load
    from one, or a vocabulary whose rules are not known.
    """
    if not path.is_file():
        raise ExportError(f"{path} is not a file.")
    metadata = read_metadata(path)
    with quiet():
        model = load_causal_model(path.parent, path.name)
        return write_model_directory(
            model,
            lambda directory: write_tokenizer_files(metadata, directory),
            Source(path.name),
            output,
            fused=fused,
        )
