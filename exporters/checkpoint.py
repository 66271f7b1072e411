"""Hub id or folder -> a folder that transformers may read: a stranger's checkpoint without its tricks.

transformers never sees the checkpoint's own folder, only a copy made here: its weights and
vocabularies, linked, nothing from outside the folder, and its settings as settings.py leaves them.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_eval.errors import ExportError
from edge_eval.model_dir import TOKENIZER
from edge_eval.tokenization import check_tokenizer_file
from exporters.settings import (
    CONFIG,
    TOKENIZER_CONFIG,
    check_texts,
    clean_config,
    clean_tokenizer_settings,
    without,
)

# What a checkpoint is made of: no pickles, no code.
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
LINKED = (
    WEIGHTS,
    INDEX,
    TOKENIZER,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.model",
    "chat_template.jinja",
)
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
MAX_JSON_BYTES = 64 << 20
_HUB_ID = re.compile(r"(?=.{3,200}$)[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint came from, as the manifest tells it."""

    name: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that transformers may read."""

    folder: Path
    config: Mapping[str, Any]
    source: Source


@contextlib.contextmanager
def open_checkpoint(source: str, revision: str | None = None) -> Iterator[Checkpoint]:
    """A checkpoint's copy for transformers, gone when the block ends; weights are links.

    Errors: ExportError for a source that is not there, wants to run code, has only pickled
    weights, is an adapter, or is no language model that can be exported; ModelError for a
    tokenizer that would take hours to read. An ExportError that is raised within the block names
    the source's folder where it names the copy.
    """
    folder, found_revision = _find_folder(source, revision)
    name = folder.resolve().name if found_revision is None else source
    files = _check_files(source, folder)
    weight_bytes = sum(path.stat().st_size for path in files if path.match(WEIGHTS))
    config = clean_config(source, read_json(folder / CONFIG), weight_bytes)
    if (folder / TOKENIZER).is_file():
        check_tokenizer_file(folder / TOKENIZER)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch).resolve()
        for path in files:
            _link(path, copy / path.name)
        cleaned = {CONFIG: config} | _clean_others(source, folder)
        for file, settings in cleaned.items():
            # In ASCII: half of a surrogate pair, which a text may hold, can be written no other way.
            (copy / file).write_text(json.dumps(settings), encoding="utf-8")
        try:
            yield Checkpoint(copy, config, Source(name, found_revision))
        except ExportError as error:
            raise ExportError(str(error).replace(str(copy), str(folder))) from error


def _find_folder(source: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(source)
    with contextlib.suppress(OSError, ValueError):  # what can be no path is no folder
        if path.is_dir():
            return path, None
    if not _HUB_ID.fullmatch(source) or ".." in source or path.exists():
        raise ExportError(
            f"{source[:200]} is neither a folder nor a .gguf file nor a Hub id (name/model)."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = Path(snapshot_download(source, revision=revision, allow_patterns=list(DOWNLOADED)))
    except GatedRepoError as error:
        raise ExportError(
            f"{source} is gated: accept its terms on the Hub and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ExportError(f"the Hub has no model {source} (or it is private).") from error
    except RevisionNotFoundError as error:
        raise ExportError(f"the Hub's {source} has no revision {revision}.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ExportError(
            f"the Hub cannot be reached and {source} is not in the local cache. Check the network and "
            "HTTPS_PROXY, or give the folder of a checkpoint you have."
        ) from error
    return found, found.name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of some megabytes at most. Errors: ExportError."""
    if not path.exists():
        raise ExportError(f"{path.parent} has no {path.name}: it is not a Hugging Face checkpoint.")
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it is no file, or over {MAX_JSON_BYTES:,} bytes long")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path} is not a JSON object.")
    return value


def _check_files(source: str, folder: Path) -> list[Path]:
    """The files that are linked; ExportError for what is not in the folder, or no whole model."""
    if (folder / "adapter_config.json").is_file():
        raise ExportError(
            f"{source} holds an adapter (adapter_config.json): merge it into its base model first."
        )
    files = [path for pattern in LINKED for path in folder.glob(pattern) if path.is_file()]
    # The Hub's cache keeps every file of a repository beside its snapshots, and links to it.
    cache = folder.parent.parent
    is_cached = folder.parent.name == "snapshots" and cache.name.startswith("models--")
    root = cache if is_cached else folder
    settings = map(folder.joinpath, (CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS))
    for path in (*files, *settings):
        if not path.resolve().is_relative_to(root.resolve()):
            raise ExportError(
                f"{path} points outside its folder, to {path.resolve()}: not opened. Put the file "
                "itself there."
            )
    names = {path.name for path in files if path.match(WEIGHTS)}
    if not names:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f" ({', '.join(pickled)}: pickles, which can run code)" if pickled else ""
        raise ExportError(
            f"{source} has no .safetensors weights{found}. Convert the checkpoint to safetensors."
        )
    if (folder / INDEX).is_file():
        weights = read_json(folder / INDEX).get("weight_map")
        wanted = weights.values() if isinstance(weights, dict) else [weights]
        for name in wanted:
            if not isinstance(name, str) or name not in names:
                raise ExportError(
                    f"{folder / INDEX} names weights that are not in the folder: {str(name)[:80]!r}. "
                    "Download the checkpoint again."
                )
    return files


def _clean_others(source: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What the copy holds of the other files of settings, by name."""
    names = (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
    found = {n: without(read_json(folder / n)) for n in names if (folder / n).is_file()}
    if TOKENIZER_CONFIG in found:
        found[TOKENIZER_CONFIG] = clean_tokenizer_settings(source, found[TOKENIZER_CONFIG])
    check_texts(source, found.get(SPECIAL_TOKENS, {}))
    check_texts(source, list(found.get(ADDED_TOKENS, {})))  # the names are the tokens
    return found


def _link(source: Path, target: Path) -> None:
    """Weights of gigabytes are not copied where the system has links."""
    source = source.resolve()
    for link in (target.symlink_to, target.hardlink_to):
        with contextlib.suppress(OSError, NotImplementedError):
            link(source)
            return
    shutil.copyfile(source, target)
