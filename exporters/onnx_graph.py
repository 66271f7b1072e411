"""Loaded causal model -> model.onnx: what the exported graph takes and gives, by optimum.

The graph begins at the embedded tokens and ends at the last hidden state; the embedding table and
the vocabulary head stay beside it, where numpy reads only the rows it needs. Both of optimum's
own ways leave that out: text-generation computes every position's logits over the whole
vocabulary, feature-extraction has no past inputs and may reload other weights. So the
architecture's own text-generation configuration is kept, and only its inputs and outputs change.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.fused_decoder import FusedDecoder, why_not_fused

OPSET = 18


def hidden_state_configuration(decoder: Any, *, fused: bool) -> Any:
    """Optimum's text-generation configuration of this architecture, ours at both ends.

    Inputs: inputs_embeds, past_key_values.*, and what the plain architecture wants beside them.
    Outputs: last_hidden_state, present.*.
    """
    from optimum.exporters.tasks import TasksManager

    constructor = TasksManager.get_exporter_config_constructor(
        exporter="onnx",
        model_type=decoder.config.model_type,
        task="text-generation",
        library_name="transformers",
    )
    base = constructor.func if hasattr(constructor, "func") else constructor

    class HiddenStateConfiguration(base):  # type: ignore[misc, valid-type]
        @property
        def inputs(self) -> dict[str, dict[int, str]]:
            inputs = {"inputs_embeds": {0: "batch_size", 1: "sequence_length"}}
            kept = {name: axes for name, axes in super().inputs.items() if name != "input_ids"}
            if fused:
                kept = {name: axes for name, axes in kept.items() if name.startswith("past")}
            return inputs | kept

        @property
        def outputs(self) -> dict[str, dict[int, str]]:
            outputs = {
                ("last_hidden_state" if name == "logits" else name): axes
                for name, axes in super().outputs.items()
            }
            if fused:
                outputs["last_hidden_state"] = {0: "batch_size"}
            return outputs

        def generate_dummy_inputs(self, **_: Any) -> dict[str, Any]:
            seq, past = 6, 4
            generator = self.DUMMY_PKV_GENERATOR_CLASS(
                task=self.task,
                normalized_config=self._normalized_config,
                batch_size=1,
                sequence_length=past,
            )
            hidden_size = decoder.config.hidden_size
            dummies: dict[str, Any] = {"inputs_embeds": torch.randn(1, seq, hidden_size)}
            if "attention_mask" in self.inputs:
                dummies["attention_mask"] = torch.ones(1, past + seq, dtype=torch.int64)
            if "position_ids" in self.inputs:
                dummies["position_ids"] = torch.arange(past, past + seq)[None]
            dummies["past_key_values"] = generator.generate("past_key_values", framework="pt")
            return dummies

    # A fresh class each time: optimum's patcher appends to the class's list of patches.
    return HiddenStateConfiguration(
        decoder.config, task="text-generation", use_past=True, use_past_in_inputs=True
    )


def export_graph(decoder: Any, path: Path, *, fused: bool = True) -> str:
    """Write the decoder's graph to ``path``, weights in ``path`` + "_data"; "fused" or "plain".

    decoder: the model inside a causal model (no head), in float32 and evaluation mode.
    """
    from optimum.exporters.onnx import export

    form = "fused" if fused and why_not_fused(decoder.config) is None else "plain"
    model: nn.Module = FusedDecoder(decoder) if form == "fused" else decoder
    configuration = hidden_state_configuration(decoder, fused=form == "fused")
    with torch.no_grad(), weights_beside_the_graph():
        export(model, configuration, path, opset=OPSET, disable_dynamic_axes_fix=True)
    return form


@contextlib.contextmanager
def weights_beside_the_graph() -> Iterator[None]:
    """Optimum's switch for external data: onnxruntime maps a file and copies what is in a graph."""
    before = os.environ.get("FORCE_ONNX_EXTERNAL_DATA")
    os.environ["FORCE_ONNX_EXTERNAL_DATA"] = "1"
    try:
        yield
    finally:
        del os.environ["FORCE_ONNX_EXTERNAL_DATA"]
        if before is not None:
            os.environ["FORCE_ONNX_EXTERNAL_DATA"] = before
