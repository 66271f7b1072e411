"""Loaded encoder-decoder -> encoder.onnx and decoder.onnx, by optimum; a family is a line of FAMILIES.

As in onnx_graph.py, both graphs begin at embedded tokens and end at hidden states. The encoder gives
the states of the whole prompt; the decoder takes them with the embedded tokens of the answer so far
and gives the last hidden state. An answer is a few tokens, so the decoder has no past: continuing it
runs it again on one token more. Prompts are run one at a time, so neither graph has a mask.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from edge_eval.errors import ExportError
from edge_eval.model_dir import DECODER, ENCODER, TOKENIZER
from exporters.huggingface import load_weights
from exporters.onnx_graph import OPSET, weights_beside_the_graph

# Relative positions, no bias behind the head, the two stacks called alike: t5's own modeling file.
FAMILIES = ("mt5", "t5")


class _Encoder(nn.Module):
    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack, self.config = stack, stack.config

    def forward(self, inputs_embeds: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.stack(inputs_embeds=inputs_embeds).last_hidden_state}


class _Decoder(nn.Module):
    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack, self.config = stack, stack.config

    def forward(self, inputs_embeds: Tensor, encoder_hidden_states: Tensor) -> dict[str, Tensor]:
        found = self.stack(
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            use_cache=False,
        )
        return {"last_hidden_state": found.last_hidden_state}


def half_configuration(config: Any, half: str) -> Any:
    """Optimum's text2text-generation configuration of one half, ours at both ends.

    half: "encoder" or "decoder".
    """
    from optimum.exporters.tasks import TasksManager

    constructor = TasksManager.get_exporter_config_constructor(
        exporter="onnx",
        model_type=config.model_type,
        task="text2text-generation",
        library_name="transformers",
    )
    base = constructor.func if hasattr(constructor, "func") else constructor

    class HalfConfiguration(base):  # type: ignore[misc, valid-type]
        @property
        def inputs(self) -> dict[str, dict[int, str]]:
            inputs = {"inputs_embeds": {1: "sequence_length"}}
            if half == "decoder":
                inputs["encoder_hidden_states"] = {1: "encoder_sequence_length"}
            return inputs

        @property
        def outputs(self) -> dict[str, dict[int, str]]:
            return {"last_hidden_state": {1: "sequence_length"}}

        @property
        def torch_to_onnx_input_map(self) -> dict[str, str]:
            return {}  # the halves' arguments have the inputs' own names

        def generate_dummy_inputs(self, **_: Any) -> dict[str, Any]:
            lengths = {"inputs_embeds": 6, "encoder_hidden_states": 9}
            return {name: torch.randn(1, lengths[name], config.d_model) for name in self.inputs}

    return HalfConfiguration(config, task="text2text-generation", behavior=half)


def load_encoder_decoder(folder: Path, model_type: object) -> Any:
    """The checkpoint in float32 and evaluation mode, with no code of its own.

    Errors: ExportError for an architecture that is not in FAMILIES, or that does not load.
    """
    from transformers import AutoModelForSeq2SeqLM

    if model_type not in FAMILIES:
        raise ExportError(
            f"{folder} is an encoder-decoder of architecture {model_type}, which edge-eval does not "
            f"export: it knows {' and '.join(FAMILIES)} (mT0 and AraT5 are of these)."
        )
    return load_weights(AutoModelForSeq2SeqLM, folder)


def export_halves(model: Any, directory: Path) -> None:
    """Write encoder.onnx and decoder.onnx, weights beside each in a file with "_data" behind.

    model: as load_encoder_decoder() gives it.
    """
    from optimum.exporters.onnx import export

    halves = {ENCODER: _Encoder(model.get_encoder()), DECODER: _Decoder(model.get_decoder())}
    with torch.no_grad(), weights_beside_the_graph():
        for name, half in halves.items():
            configuration = half_configuration(model.config, name.removesuffix(".onnx"))
            export(
                half, configuration, directory / name, opset=OPSET, disable_dynamic_axes_fix=True
            )


def decoder_inputs(config: Any, directory: Path) -> dict[str, Any]:
    """The manifest's fields on what the decoder is given before its answer, and on lengths.

    The paper's code gives the decoder tokenizer("<pad>"), its special token read as one and every
    token that the tokenizer adds to a text behind it.
    Errors: ExportError when the checkpoint names no token that an answer starts with.
    """
    start = config.decoder_start_token_id
    if start is None:
        start = config.pad_token_id
    if start is None:
        raise ExportError(
            "config.json has neither decoder_start_token_id nor pad_token_id, so it does not say how "
            "an answer begins: add the one it was trained with."
        )
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    return {
        "kind": "encoder-decoder",
        "decoder_start_ids": (int(start),),
        "decoder_paper_ids": tuple(tokenizer.encode("<pad>").ids),
    }
