"""Hub id or folder -> a folder that transformers may read: a stranger's checkpoint without its tricks.

transformers does as a checkpoint's settings say, whatever trust_remote_code is: some versions run code
of other folders that a nested config names, write chat templates to any path, take kernels from the
Hub. So it never sees the checkpoint's own folder, only one made here: its weights and vocabularies,
linked, and its settings written anew. See ALLOWED for files, LEFT_OUT for settings; a new kind of
trick is one more of those.
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

# What a checkpoint is made of: no pickles, no code.
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
ALLOWED = (
    WEIGHTS,
    INDEX,
    TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.model",
    "chat_template.jinja",
)
# Settings of either file: which implementation computes (ours to say), and paths of files.
LEFT_OUT = re.compile(
    r".*(attn|experts)_implementation.*|use_kernels|.*_file|_?name_or_path", re.DOTALL
)

MAX_DEPTH = 64


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
    name = folder.resolve().name if Path(source).exists() else source
    config = _without(read_json(folder / CONFIG))
    _check_files(source, folder)
    _check_config(source, config)
    if (folder / TOKENIZER).is_file():
        check_tokenizer_file(folder / TOKENIZER)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch).resolve()
        for path in (path for pattern in ALLOWED for path in folder.glob(pattern)):
            if path.is_file():
                _link(path, copy / path.name)
        _write_json(copy / CONFIG, config)
        if (folder / TOKENIZER_CONFIG).is_file():
            settings = _without(read_json(folder / TOKENIZER_CONFIG))
            _write_json(copy / TOKENIZER_CONFIG, _with_one_template(settings))
        try:
            yield Checkpoint(copy, config, Source(name, found_revision))
        except ExportError as error:
            raise ExportError(str(error).replace(str(copy), str(folder))) from error


def _find_folder(source: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(source)
    if path.is_dir():
        return path, None
    if path.exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise ExportError(
            f"{source} is neither a folder nor a .gguf file nor a Hub id (name/model)."
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
    """The object in a JSON file. Errors: ExportError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(
            f"{path.parent} has no {path.name}: it is not a Hugging Face checkpoint."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path} is not a JSON object.")
    return value


def _check_files(source: str, folder: Path) -> None:
    """Raise ExportError for a folder whose weights are not all in it, or not all of a model's."""
    if (folder / "adapter_config.json").is_file():
        raise ExportError(
            f"{source} holds an adapter (adapter_config.json): merge it into its base model first."
        )
    names = {path.name for path in folder.glob(WEIGHTS)}
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


def _check_config(source: str, config: Mapping[str, Any]) -> None:
    """Raise ExportError for code of a model's own, and for networks that are not exported."""
    known = exportable()
    for part in _objects(config):
        wish = next((name for name in ("auto_map", "trust_remote_code") if part.get(name)), None)
        if wish is not None:
            raise ExportError(
                f"{source} wants to run code of its own ({wish} in config.json). edge-eval runs no "
                "code of a model's: export a checkpoint whose architecture transformers knows."
            )
        architecture = part.get("model_type")
        if (part is config or architecture is not None) and str(architecture) not in known:
            raise ExportError(
                f"{source} is, or has in it, a network of architecture {str(architecture)[:60]!r}, "
                "which cannot be exported: only language models that optimum and transformers know."
            )


def exportable() -> frozenset[str]:
    """The architectures (model_type) that optimum has an export for, among language models."""
    import optimum.exporters.onnx.model_configs  # noqa: F401 - makes itself known
    from optimum.exporters.tasks import TasksManager
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from exporters.encoder_decoder import FAMILIES

    found = TasksManager.get_supported_model_type_for_task("text-generation", exporter="onnx")
    return frozenset({*found, *FAMILIES} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """A JSON value's objects, at any depth."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _objects(inner)


def _without(value: Any, depth: int = 0) -> Any:
    """A JSON value without the settings that are left out, at any depth.

    Errors: ExportError when that is deeper than settings are.
    """
    if depth > MAX_DEPTH:
        raise ExportError(f"a setting of the checkpoint's is nested over {MAX_DEPTH} deep.")
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if not LEFT_OUT.fullmatch(name)}
        return {name: _without(inner, depth + 1) for name, inner in kept.items()}
    if isinstance(value, list):
        return [_without(inner, depth + 1) for inner in value]
    return value


def _with_one_template(settings: dict[str, Any]) -> dict[str, Any]:
    """Only the default chat template: of several the names would become names of files."""
    templates = settings.pop("chat_template", None)
    if isinstance(templates, list):
        templates = next((t.get("template") for t in templates if t.get("name") == "default"), None)
    return settings | ({"chat_template": templates} if isinstance(templates, str) else {})


def _link(source: Path, target: Path) -> None:
    """Weights of gigabytes are not copied where the system has links."""
    source = source.resolve()
    for link in (target.symlink_to, target.hardlink_to):
        with contextlib.suppress(OSError, NotImplementedError):
            link(source)
            return
    shutil.copyfile(source, target)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
