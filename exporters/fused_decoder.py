"""Loaded decoder -> the same decoder in onnxruntime's fused operators; add a family to FAMILIES.

A traced Hugging Face decoder spends two thirds of its time on masks, repeated heads, rotary
embedding and shape arithmetic. This module computes the same function from the same weights with
one operator for attention (grouped heads, rotary, window, soft-cap and past inside it), one
for a norm with its residual, packed q/k/v products, and the last position alone after the last
attention. exporters/verify.py holds every export against the original.

Source of the mathematics: the modeling files of transformers 4.57 for the families below; of the
operators: onnxruntime's ContribOperators.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from llama's."""

    norm_offset: float = 0.0  # Gemma stores a norm's weight minus one
    sandwich_norms: bool = False  # a norm behind attention and MLP too, before the residual
    embedding_scale: Callable[[Any], float] = lambda config: 1.0  # noqa: ARG005 - a rule of the config


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "gemma2": Family(1.0, True, lambda config: float(config.hidden_size**0.5)),
    "gemma3_text": Family(1.0, True, lambda config: float(config.hidden_size**0.5)),
}

# Rotary embeddings whose frequencies do not depend on the length of the prompt.
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


def why_not_fused(config: Any) -> str | None:
    """None when FusedDecoder computes this architecture, else the reason it does not."""
    if config.model_type not in FAMILIES:
        return f"architecture {config.model_type} has no fused form"
    rope = getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in STATIC_ROPE_TYPES:
        return f"rotary scaling {rope_type!r} depends on the prompt's length"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention is bidirectional"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 16:
        return f"onnxruntime's fused attention wants heads of a multiple of 16, not {head_dim}"
    return None


class _GroupQueryAttention(torch.autograd.Function):
    """com.microsoft::GroupQueryAttention; forward gives shapes only, the export gives the node."""

    @staticmethod
    def forward(
        _: Any,
        query: Tensor,
        key: Tensor | None,  # noqa: ARG004 - an input of the node; None: packed into the query
        value: Tensor | None,  # noqa: ARG004
        past_key: Tensor,
        past_value: Tensor,
        seqlens_k: Tensor,  # noqa: ARG004 - an input of the node
        total_length: Tensor,  # noqa: ARG004
        cos: Tensor,  # noqa: ARG004
        sin: Tensor,  # noqa: ARG004
        num_heads: int,
        kv_heads: int,
        scale: float,  # noqa: ARG004
        window: int,  # noqa: ARG004
        softcap: float,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _width = query.shape
        past, head_dim = past_key.shape[2:]
        shape = (batch, kv_heads, past + seq, head_dim)
        out = query.new_zeros(batch, seq, num_heads * head_dim)
        return out, past_key.new_zeros(shape), past_value.new_zeros(shape)

    @staticmethod
    def symbolic(
        g: Any,
        query: Any,
        key: Any,
        value: Any,
        past_key: Any,
        past_value: Any,
        seqlens_k: Any,
        total_length: Any,
        cos: Any,
        sin: Any,
        num_heads: int,
        kv_heads: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Any:
        if key is None:
            # A None as input ends the process: the node wants the constant that says so.
            key = value = g.op("prim::Constant")
            key.setType(torch._C.OptionalType.ofTensor())
        outputs = g.op(
            "com.microsoft::GroupQueryAttention",
            query, key, value, past_key, past_value, seqlens_k, total_length, cos, sin,
            num_heads_i=num_heads,
            kv_num_heads_i=kv_heads,
            scale_f=scale,
            local_window_size_i=window,
            softcap_f=softcap,
            do_rotary_i=1,
            outputs=3,
        )  # fmt: skip
        # Their true shapes: inference would give the first output the width of its input.
        for output, like, rank in zip(
            outputs, (query, past_key, past_value), (3, 4, 4), strict=True
        ):
            output.setType(like.type().with_sizes([None] * rank))
        return outputs


class _Norm(torch.autograd.Function):
    """SimplifiedLayerNormalization: x / rms(x) * weight over the last axis."""

    @staticmethod
    def forward(_: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    def symbolic(g: Any, x: Any, weight: Any, epsilon: float) -> Any:
        output = g.op("SimplifiedLayerNormalization", x, weight, axis_i=-1, epsilon_f=epsilon)
        output.setType(x.type())
        return output


class _SkipNorm(torch.autograd.Function):
    """SkipSimplifiedLayerNormalization: the norm of x + skip, and x + skip."""

    @staticmethod
    def forward(
        _: Any, x: Tensor, skip: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = x + skip
        return nn.functional.rms_norm(total, weight.shape, weight, epsilon), total

    @staticmethod
    def symbolic(g: Any, x: Any, skip: Any, weight: Any, epsilon: float) -> Any:
        outputs = g.op(
            "com.microsoft::SkipSimplifiedLayerNormalization",
            x, skip, weight,
            epsilon_f=epsilon,
            outputs=4,
        )  # fmt: skip
        for output in outputs:
            output.setType(x.type())
        return outputs[0], outputs[3]


class _Heads(torch.autograd.Function):
    """(batch, seq, heads * head_dim) to (batch, seq, heads, head_dim), by a constant shape."""

    @staticmethod
    def forward(_: Any, x: Tensor, heads: int, head_dim: int) -> Tensor:
        return x.unflatten(-1, (heads, head_dim))

    @staticmethod
    def symbolic(g: Any, x: Any, heads: int, head_dim: int) -> Any:
        shape = g.op("Constant", value_t=torch.tensor([0, -1, heads, head_dim]))
        output = g.op("Reshape", x, shape)
        output.setType(x.type().with_sizes([None] * 4))
        return output


class _Flat(torch.autograd.Function):
    """The way back from _Heads."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.flatten(-2)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        output = g.op("Reshape", x, g.op("Constant", value_t=torch.tensor([0, 0, -1])))
        output.setType(x.type().with_sizes([None] * 3))
        return output


class _Activation(torch.autograd.Function):
    """The MLP's activation as one operator: silu is QuickGelu with alpha 1."""

    OPERATORS = {  # noqa: RUF012 - a constant table
        "silu": ("com.microsoft::QuickGelu", {"alpha_f": 1.0}),
        "gelu_pytorch_tanh": ("com.microsoft::FastGelu", {}),
        "gelu": ("com.microsoft::Gelu", {}),
    }

    @staticmethod
    def forward(_: Any, x: Tensor, name: str) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, name: str) -> Any:
        operator, attributes = _Activation.OPERATORS[name]
        output = g.op(operator, x, **attributes)
        output.setType(x.type())
        return output


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous(), requires_grad=False)


class _Product(nn.Module):
    """x @ weight (+ bias), the weight stored as onnxruntime multiplies it: (in, out)."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.weight = _parameter(torch.cat([linear.weight for linear in linears]).T)
        biases = [linear.bias for linear in linears]
        self.bias = _parameter(torch.cat(biases)) if biases[0] is not None else None

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        return product if self.bias is None else product + self.bias


class _RmsNorm(nn.Module):
    def __init__(self, norm: Any, offset: float) -> None:
        super().__init__()
        self.weight = _parameter(norm.weight.float() + offset)
        self.epsilon = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.epsilon)

    def add(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + skip`` and the sum itself, the next residual."""
        return _SkipNorm.apply(x, skip, self.weight, self.epsilon)


class _Layer(nn.Module):
    """One decoder layer; its norms are applied by FusedDecoder, which owns the residual."""

    def __init__(self, layer: Any, config: Any, family: Family) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = hasattr(attention, "q_norm")
        if hasattr(attention, "qkv_proj"):
            self.qkv = _Product(attention.qkv_proj)
        elif head_norms:
            # Norms stand between these products and attention: packed, they would be split again.
            self.q, self.k = _Product(attention.q_proj), _Product(attention.k_proj)
            self.v = _Product(attention.v_proj)
        else:
            self.qkv = _Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = _Product(attention.o_proj)
        if hasattr(mlp, "gate_up_proj"):
            gate, up = _halves(mlp.gate_up_proj)
        else:
            gate, up = mlp.gate_proj, mlp.up_proj
        self.gate, self.up, self.down = _Product(gate), _Product(up), _Product(mlp.down_proj)
        self.activation = getattr(config, "hidden_activation", None) or config.hidden_act

        self.num_heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.window = _window(attention, config)
        self.softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0.0)
        self.local_rotary = bool(getattr(attention, "is_sliding", False))

        offset = family.norm_offset
        self.q_norm = _RmsNorm(attention.q_norm, offset) if head_norms else None
        self.k_norm = _RmsNorm(attention.k_norm, offset) if head_norms else None
        self.before_attention = _RmsNorm(layer.input_layernorm, offset)
        if family.sandwich_norms:
            self.after_attention = _RmsNorm(layer.post_attention_layernorm, offset)
            self.before_mlp = _RmsNorm(layer.pre_feedforward_layernorm, offset)
            self.after_mlp = _RmsNorm(layer.post_feedforward_layernorm, offset)
        else:
            self.before_mlp = _RmsNorm(layer.post_attention_layernorm, offset)
            self.after_attention = self.after_mlp = nn.Identity()

    def attend(self, x: Tensor, past: tuple[Tensor, Tensor], positions: Any) -> Any:
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(_Heads.apply(self.q(x), self.num_heads, self.head_dim))
            k = self.k_norm(_Heads.apply(self.k(x), self.kv_heads, self.head_dim))
            qkv = (_Flat.apply(q), _Flat.apply(k), self.v(x))
        else:
            qkv = (self.qkv(x), None, None)
        cos, sin = positions.rotary[self.local_rotary]
        return _GroupQueryAttention.apply(
            *qkv, *past, positions.last, positions.total, cos, sin,
            self.num_heads, self.kv_heads, self.scale, self.window, self.softcap,
        )  # fmt: skip

    def mlp(self, x: Tensor) -> Tensor:
        gate = _Activation.apply(self.gate(x), self.activation)
        return self.down(gate * self.up(x))


def _halves(packed: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Phi-3's gate_up product as its two halves: unpacked, their outputs need no split."""
    halves = []
    for weight in packed.weight.chunk(2):
        half = nn.Linear(packed.in_features, packed.out_features // 2, bias=False)
        half.weight = nn.Parameter(weight)
        halves.append(half)
    return halves[0], halves[1]


def _window(attention: Any, config: Any) -> int:
    """The layer's attention window in tokens, the current one included; -1 for none."""
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif config.model_type in {"mistral", "phi3"}:  # the whole model slides
        window = getattr(config, "sliding_window", None)
    else:
        window = None
    return int(window) if window else -1


@dataclass(frozen=True, slots=True)
class _Positions:
    last: Tensor  # (batch,) int32: the last position's index, past included
    total: Tensor  # () int32: tokens, past included
    rotary: dict[bool, tuple[Tensor, Tensor]]  # local? -> cos, sin (total, rotary_dim / 2)


class FusedDecoder(nn.Module):
    """inputs_embeds (1, seq, hidden) and past -> last_hidden_state (1, 1, hidden) and present.

    Only the last position leaves the last layer: a prompt's other positions are never read.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config
        family = FAMILIES[self.config.model_type]
        self.layers = nn.ModuleList(_Layer(layer, self.config, family) for layer in decoder.layers)
        self.norm = _RmsNorm(decoder.norm, family.norm_offset)
        rotary = {False: decoder.rotary_emb}
        rotary[True] = getattr(decoder, "rotary_emb_local", decoder.rotary_emb)
        self.rotary_scaling = {k: float(v.attention_scaling) for k, v in rotary.items()}
        self.register_buffer("inv_freq", rotary[False].inv_freq.float())
        self.register_buffer("inv_freq_local", rotary[True].inv_freq.float())
        self.has_local_rotary = hasattr(decoder, "rotary_emb_local")

    def _positions(self, inputs_embeds: Tensor, past_key: Tensor) -> _Positions:
        total = torch.onnx.operators.shape_as_tensor(inputs_embeds)[1]
        total = total + torch.onnx.operators.shape_as_tensor(past_key)[2]
        steps = torch.arange(total, dtype=torch.float32)
        rotary: dict[bool, tuple[Tensor, Tensor]] = {}
        for local, frequencies in ((False, self.inv_freq), (True, self.inv_freq_local)):
            if local and not self.has_local_rotary:
                rotary[True] = rotary[False]
                continue
            angles = steps[:, None] * frequencies[None, :]
            scaling = self.rotary_scaling[local]
            cos, sin = angles.cos(), angles.sin()
            rotary[local] = (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)
        total32 = total.to(torch.int32)
        return _Positions((total32 - 1).reshape(1), total32, rotary)

    def forward(self, inputs_embeds: Tensor, past_key_values: Past) -> dict[str, Any]:
        positions = self._positions(inputs_embeds, past_key_values[0][0])
        present: Past = []
        residual = inputs_embeds
        normed = self.layers[0].before_attention(residual)
        for index, (layer, past) in enumerate(zip(self.layers, past_key_values, strict=True)):
            attended, key, value = layer.attend(normed, past, positions)
            present.append((key, value))
            following = self.norm
            if index + 1 < len(self.layers):
                following = self.layers[index + 1].before_attention
            else:
                attended, residual = attended[:, -1:], residual[:, -1:]
            x = layer.after_attention(layer.o(attended))
            normed, residual = layer.before_mlp.add(x, residual)
            x = layer.after_mlp(layer.mlp(normed))
            normed, residual = following.add(x, residual)
        return {"last_hidden_state": normed, "past_key_values": present}
