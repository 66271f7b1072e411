"""Small real things shared by the tests: a trained tokenizer, tiny random checkpoints, exports.

What is made with torch is not made where there is none, and the tests that need it are skipped;
but a model directory runs without torch, so the exports are looked for in the folder that
EDGE_EVAL_TEST_MODELS names, and left there by whoever can make them.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from edge_eval.letters import ARABIC, LATIN
from edge_eval.questions import load_questions
from edge_eval.schema import Question, RunConfig

# How long an example takes tells of the machine's other work, not of the code.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

NEEDS_TORCH = "made with torch and transformers, of the export extra"
KEPT_MODELS = os.environ.get("EDGE_EVAL_TEST_MODELS")
REAL_ROWS = Path(__file__).parents[2] / "shared" / "data" / "arabicmmlu_egypt.csv"

# Every family's smallest network that still has what makes it special: grouped heads, a window
# shorter than the prompts, two rotary bases, biases.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SLIDING = {"sliding_window": 48, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mistral": TINY | {"sliding_window": 48},
    "qwen2": TINY | {"use_sliding_window": True} | SLIDING,
    "qwen3": TINY,
    "phi3": TINY | {"sliding_window": None},
    "gemma2": TINY | SLIDING | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": TINY | SLIDING | {"query_pre_attn_scalar": 16},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.2},
}

# Heads whose width is not hidden size over heads, stacks of different depth, more tokens in the
# table than in the tokenizer: as the published ones are.
TINY_T5 = {
    "vocab_size": 608,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "mt5": TINY_T5,  # gated gelu, a head of its own
    "t5": TINY_T5 | {"n_positions": 512},  # relu, head and embedding tied
}


@pytest.fixture(scope="session")
def real_rows() -> Path:
    """The benchmark's own rows, which may not be kept in the project."""
    if not REAL_ROWS.is_file():
        pytest.skip("the licensed rows (shared/data/arabicmmlu_egypt.csv) are not here")
    return REAL_ROWS


@pytest.fixture(scope="session")
def sample_questions() -> tuple[Question, ...]:
    return load_questions(RunConfig(data="sample")).test


@pytest.fixture(scope="session")
def write_tokenizer(sample_questions: tuple[Question, ...]) -> Callable[[Path], int]:
    """Writes a byte-level BPE tokenizer trained on the sample; returns its vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for q in sample_questions for text in (q.text, *q.options)]
    tokenizer.train_from_iterator([*texts, *(["أ", "ب", "ج", "د", "ه"] * 20)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )

    def write(directory: Path) -> int:
        tokenizer.save(str(directory / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return int(tokenizer.get_vocab_size())

    return write


@pytest.fixture(scope="session")
def train_sentencepiece(
    sample_questions: tuple[Question, ...],
) -> Callable[..., Path]:
    """Trains a sentencepiece model on the sample; settings are the trainer's own."""
    import sentencepiece

    texts = [text for q in sample_questions for text in (q.text, *q.options)]
    # Alone and inside a word, or a letter that is rare elsewhere gets no piece with its word-start.
    texts += [text for letter in (*LATIN, *ARABIC) for text in (letter, letter * 2)] * 100

    def train(path: Path, **settings: Any) -> Path:
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=file,
                vocab_size=500,
                hard_vocab_limit=False,
                minloglevel=2,
                **settings,
            )
        return path

    return train


@pytest.fixture(scope="session")
def write_t5_tokenizer(train_sentencepiece: Callable[..., Path]) -> Callable[[Path], None]:
    """Writes a T5 tokenizer, a sentencepiece unigram and what transformers makes of it."""

    def write(directory: Path) -> None:
        transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
        train_sentencepiece(directory / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 4}))
        # By from_pretrained: the class itself, given the file, forgets the word-start piece.
        fast = transformers.AutoTokenizer.from_pretrained(directory)
        fast.backend_tokenizer.save(str(directory / "tokenizer.json"))

    return write


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    write_tokenizer: Callable[[Path], int],
    write_t5_tokenizer: Callable[[Path], None],
) -> Callable[..., Path]:
    """Writes a tiny random checkpoint of an architecture, as the Hub would hold it."""

    def make(model_type: str, **changes: Any) -> Path:
        torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        folder = tmp_path_factory.mktemp(f"checkpoint-{model_type}")
        if model_type in ENCODER_DECODERS:
            write_t5_tokenizer(folder)
            auto: Any = AutoModelForSeq2SeqLM
            settings = ENCODER_DECODERS[model_type] | changes
        else:
            auto = AutoModelForCausalLM
            settings = ARCHITECTURES[model_type] | {"vocab_size": write_tokenizer(folder)} | changes
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(model_type, **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms and biases start at 0 or 1, where an export that drops them looks right.
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder, safe_serialization=True)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="session")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Path]:
    """Makes an export under a name once a session, or finds it where an earlier one left it."""
    models = Path(KEPT_MODELS).resolve() if KEPT_MODELS else tmp_path_factory.mktemp("models")

    def keep(name: str, make: Callable[[Path], Any]) -> Path:
        if not (models / name).exists():
            models.mkdir(exist_ok=True)
            make(models / name)
        return models / name

    return keep


@pytest.fixture(scope="session")
def tiny_encoder_decoder(make_checkpoint: Callable[..., Path], keep: Callable[..., Path]) -> Path:
    """A model directory of a tiny mt5."""
    from exporters.huggingface import export_checkpoint

    return keep("tiny-mt5", lambda output: export_checkpoint(str(make_checkpoint("mt5")), output))


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest, keep: Callable[..., Path]) -> Path:
    """A model directory of a tiny llama: everything real but the weights."""
    from exporters.huggingface import export_checkpoint

    def make(output: Path) -> None:
        export_checkpoint(str(request.getfixturevalue("tiny_checkpoint")), output)

    return keep("tiny-llama", make)
