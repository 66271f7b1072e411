"""A stranger's settings -> those that transformers may be told; it does as they say, whatever they say.

transformers takes from config.json and tokenizer_config.json which classes to build, which files to
read, which code to run and how much memory to fill, before a weight is looked at, and no version
checks much of it. So names that lead elsewhere are left out, networks and tokenizers are those of
language models, and sizes are held against the weights that are there. A new trick is a name more in
LEFT_OUT, or a bound more in _check_sizes().
"""

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from edge_eval.errors import ExportError
from edge_eval.tokenization import MAX_TEXT_BYTES, MAX_TEXTS

# Which implementation computes (ours to say), names of files and of repositories, and lists of labels
# as long as a number says; at any depth of either file.
LEFT_OUT = re.compile(
    r"__.*|.*(attn|experts)_implementation.*|use_kernels|.*_file|_?name_or_path|transformers_weights"
    r"|num_labels|id2label|label2id|init_inputs",
    re.DOTALL,
)
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
MAX_DEPTH = 64
MAX_COUNT = 1000  # layers, heads, experts: some hundreds at most in what is published
MAX_SIZE = 1 << 24  # channels, tokens of a vocabulary
_COUNT = re.compile(
    r"n_(layers?|heads?)|num_\w*(layers|heads|experts)\w*|(en|de)coder_(layers|attention_heads)"
)
_SIZE = re.compile(
    r"(hidden|vocab|intermediate|moe_intermediate|ffn_hidden|shared_intermediate)_size"
    r"|n_embd|n_inner|d_model|d_ff|d_kv|head_dim|ffn_dim"
)
_NUMBER = re.compile(
    r"\w*(eps|epsilon|theta|softcapping|multiplier|_token_id)|logit_scale|query_pre_attn_scalar"
    r"|sliding_window|max_position_embeddings|n_positions"
)
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


def exportable() -> frozenset[str]:
    """The architectures (model_type) that optimum has an export for, among language models."""
    import optimum.exporters.onnx.model_configs  # noqa: F401 - makes itself known
    from optimum.exporters.tasks import TasksManager
    from transformers.models.auto import modeling_auto

    from exporters.encoder_decoder import FAMILIES

    known = TasksManager.get_supported_model_type_for_task("text-generation", exporter="onnx")
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    both = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return frozenset((set(known) & causal) - both) | frozenset(FAMILIES)


def clean_config(source: str, config: Mapping[str, Any], weight_bytes: int) -> dict[str, Any]:
    """What of a config.json transformers may be told.

    weight_bytes: of all the checkpoint's weights; no table can be larger.
    Errors: ExportError for code of a model's own, for networks that are not exported, and for
    sizes that no such weights have.
    """
    from transformers import PretrainedConfig

    # What the class itself has is no setting: methods, and names of names.
    own = {name for name in dir(PretrainedConfig) if name != "model_type"}
    cleaned: dict[str, Any] = without(config, own)
    known = exportable()
    for part in _objects(cleaned):
        wish = next((name for name in ("auto_map", "trust_remote_code") if part.get(name)), None)
        if wish is not None:
            raise ExportError(
                f"{source} wants to run code of its own ({wish} in config.json). edge-eval runs no "
                "code of a model's: export a checkpoint whose architecture transformers knows."
            )
        if any(part.get(n) is not None for n in ("quantization_config", "compression_config")):
            raise ExportError(
                f"{source} is quantised already (quantization_config in config.json): export the "
                "checkpoint that it was made from, and make it smaller with `edge-eval quantize`."
            )
        architecture = part.get("model_type")
        if (part is cleaned or architecture is not None) and str(architecture) not in known:
            raise ExportError(
                f"{source} is, or has in it, a network of architecture {str(architecture)[:60]!r}, "
                "which cannot be exported: only decoders that optimum and transformers know, and "
                "encoder-decoders like T5 and mT5 (mT0, AraT5)."
            )
        _check_sizes(source, part, weight_bytes)
        _check_tokenizer_class(source, CONFIG, part.get("tokenizer_class"))
    return cleaned


def _check_sizes(source: str, part: Mapping[str, Any], weight_bytes: int) -> None:
    """Raise ExportError for a number that would fill time or memory before it is found wrong."""
    width = next((part[name] for name in _WIDTHS if isinstance(part.get(name), int)), 1)
    for name, value in part.items():
        if value is None:
            continue
        if _NUMBER.fullmatch(name) and not isinstance(value, int | float | list):
            raise ExportError(f"{source}: {name} in config.json is {str(value)[:40]}, no number.")
        is_size = _SIZE.fullmatch(name) is not None
        if not (is_size or _COUNT.fullmatch(name)):
            continue
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        least, largest = int(name in _LAYERS), MAX_SIZE if is_size else MAX_COUNT
        table = width * value if is_whole and is_size and name not in _WIDTHS else 0
        if not is_whole or not least <= value <= largest or table > weight_bytes:
            raise ExportError(
                f"{source}: {name} in config.json is {str(value)[:40]}, and its weights have "
                f"{weight_bytes:,} bytes: that does not fit. Download the checkpoint again."
            )


def clean_tokenizer_settings(source: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a tokenizer_config.json transformers may be told.

    Errors: ExportError for a class that is no language model's tokenizer, and as check_texts().
    """
    cleaned: dict[str, Any] = without(settings)
    _check_tokenizer_class(source, TOKENIZER_CONFIG, cleaned.get("tokenizer_class"))
    if not isinstance(cleaned.get("model_max_length"), int | float | None):
        raise ExportError(f"{source}: model_max_length in tokenizer_config.json is no number.")
    # Of several chat templates the names would become names of files: only the default is kept.
    templates = cleaned.pop("chat_template", None)
    if isinstance(templates, list):
        named = [t for t in templates if isinstance(t, dict) and t.get("name") == "default"]
        templates = named[0].get("template") if named else None
    # Each becomes an attribute of the tokenizer by its name.
    extra = cleaned.get("extra_special_tokens")
    if isinstance(extra, dict):
        cleaned["extra_special_tokens"] = {
            name: token for name, token in extra.items() if re.fullmatch(r"\w+_token", name)
        }
    check_texts(source, cleaned)
    return cleaned | ({"chat_template": templates} if isinstance(templates, str) else {})


def _check_tokenizer_class(source: str, file: str, name: object) -> None:
    """Raise ExportError for a name that transformers would take any of its classes by."""
    if name is not None and not {str(name), f"{name}Fast"} & tokenizer_classes():
        raise ExportError(
            f"{source}: {file} wants a {str(name)[:60]!r}, which is no tokenizer of the language "
            "models that can be exported. Save the tokenizer again with transformers 4.57."
        )


def tokenizer_classes() -> set[str]:
    """The names of transformers' tokenizers for what is exportable()."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    pairs = [TOKENIZER_MAPPING_NAMES.get(architecture, ()) for architecture in exportable()]
    return {name for pair in pairs for name in pair if name} | {"PreTrainedTokenizerFast"}


def check_texts(source: str, value: Any) -> None:
    """Raise ExportError for tokens that the tokenizers library would take hours to add."""
    for n_texts, text in enumerate(_texts(value), start=1):
        if n_texts > MAX_TEXTS or len(text) > MAX_TEXT_BYTES:
            raise ExportError(
                f"{source} has over {MAX_TEXTS:,} added tokens, or one of over {MAX_TEXT_BYTES:,} "
                "characters, as no published tokenizer does. Do not trust this model."
            )


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """A JSON value's objects, at any depth."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _objects(inner)


def _texts(value: Any) -> Iterator[str]:
    """A JSON value's texts, at any depth; names are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def without(value: Any, names: Set[str] = frozenset(), depth: int = 0) -> Any:
    """A JSON value without ``names`` and what is left out always, at any depth.

    Errors: ExportError when that is deeper than settings are.
    """
    if depth > MAX_DEPTH:
        raise ExportError(f"a setting of the checkpoint's is nested over {MAX_DEPTH} deep.")
    if isinstance(value, dict):
        return {
            name: without(inner, names, depth + 1)
            for name, inner in value.items()
            if name not in names and not LEFT_OUT.fullmatch(name)
        }
    if isinstance(value, list):
        return [without(inner, names, depth + 1) for inner in value]
    return value
