"""GGUF file -> model directory: the weights dequantised by transformers, the tokenizer our own.

transformers' tokenizer for a GGUF file is not used: for several vocabularies it gives other
tokens than llama.cpp does (exporters/gguf_tokenizer.py).
"""

import math
import mmap
import shutil
import struct
import tempfile
from pathlib import Path

from edge_eval.errors import ExportError
from edge_eval.schema import ExportManifest
from exporters.checkpoint import Source
from exporters.gguf_tokenizer import Cursor, read_metadata, write_tokenizer_files
from exporters.huggingface import load_causal_model, quiet, write_model_directory
from exporters.settings import MAX_COUNT

DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16  # bytes, of the tensors' data
UINT32, ARRAY = 4, 9  # types of values
# Beyond these the gguf package reads for ever, or overflows.
MAX_DIMENSIONS, MAX_WEIGHTS = 4, 1 << 40


def export_gguf(path: Path, output: Path, *, fused: bool = True) -> ExportManifest:
    """Export a .gguf file to the model directory ``output``.

    Errors: ExportError for a file that is no GGUF, an architecture transformers cannot load
    from one, or a vocabulary whose rules are not known.
    """
    if not path.is_file():
        raise ExportError(f"{path} is not a file.")
    metadata = read_metadata(path)
    _check_sizes(path, metadata)
    with quiet():
        with tempfile.TemporaryDirectory() as scratch:
            copy_without_vocabulary(path, Path(scratch) / path.name, metadata)
            model = load_causal_model(Path(scratch), path.name)
        return write_model_directory(
            model,
            lambda directory: write_tokenizer_files(metadata, directory),
            Source(path.name),
            output,
            fused=fused,
        )


def _check_sizes(path: Path, metadata: dict[str, object]) -> None:
    """Raise ExportError for a network that transformers would build for hours."""
    architecture = metadata.get("general.architecture")
    n_layers = metadata.get(f"{architecture}.block_count")
    if not isinstance(n_layers, int) or not 0 < n_layers <= MAX_COUNT:
        raise ExportError(
            f"{path}: {architecture}.block_count is {str(n_layers)[:40]}, and not 1 to {MAX_COUNT:,}: "
            "convert it again."
        )
    n_bits = 8 * path.stat().st_size
    width = metadata.get(f"{architecture}.embedding_length")
    for name in ("vocab_size", "feed_forward_length"):
        size = metadata.get(f"{architecture}.{name}", 1)
        # No weight takes less than a bit.
        if isinstance(size, int) and isinstance(width, int) and size * width > n_bits:
            raise ExportError(
                f"{path}: {architecture}.{name} is {size:,} and embedding_length {width:,}, which do "
                f"not fit in {n_bits // 8:,} bytes: convert it again."
            )


def copy_without_vocabulary(path: Path, target: Path, metadata: dict[str, object]) -> None:
    """A copy of a GGUF file with the same tensors and settings but no list of tokens.

    The gguf package, which transformers reads with, takes 35 s for 262,144 tokens, twice, and the
    tokens are not needed for the weights; their number is, and takes the list's place.
    """
    architecture = metadata.get("general.architecture")
    tokens = metadata.get("tokenizer.ggml.tokens")
    size_key = f"{architecture}.vocab_size"
    kept: list[bytes] = []
    if isinstance(tokens, list) and size_key not in metadata:
        name = size_key.encode()
        kept.append(struct.pack("<Q", len(name)) + name + struct.pack("<II", UINT32, len(tokens)))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = Cursor(data)
        try:
            head, n_tensors = _keep_keys(cursor, kept)
            infos_start = cursor.at
            for _ in range(n_tensors):
                cursor.text()
                (n_dimensions,) = cursor.numbers("I")
                if n_dimensions > MAX_DIMENSIONS:
                    raise ValueError(f"a tensor of {n_dimensions} dimensions")
                if math.prod(cursor.numbers("Q", n_dimensions)) > MAX_WEIGHTS:
                    raise ValueError(f"a tensor of over {MAX_WEIGHTS:,} weights")
                cursor.take(4 + 8)  # its type and offset
        except ValueError as error:
            raise ExportError(
                f"{path}: not a GGUF file that can be read ({error}): download or convert it again"
            ) from error
        infos = data[infos_start : cursor.at]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise ExportError(f"{path}: general.alignment is {alignment!r:.40}: convert it again.")
        body = b"".join((head, struct.pack("<QQ", n_tensors, len(kept)), *kept, infos))
        file.seek(-(-cursor.at // alignment) * alignment)
        with target.open("wb") as copy:
            copy.write(body + b"\0" * (-len(body) % alignment))
            shutil.copyfileobj(file, copy, 2**24)


def _keep_keys(cursor: Cursor, kept: list[bytes]) -> tuple[bytes, int]:
    """Add what is not a list of tokens to ``kept``; magic with version, and the tensors' number."""
    head = cursor.take(8)
    n_tensors, n_keys = cursor.numbers("Q", 2)
    for _ in range(n_keys):
        start = cursor.at
        key = cursor.text()
        (kind,) = struct.unpack_from("<I", cursor.data, cursor.at)
        cursor.value(key)
        if not (key.startswith("tokenizer.") and kind == ARRAY):
            kept.append(cursor.data[start : cursor.at])
    return head, n_tensors
