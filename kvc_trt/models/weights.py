"""The protocol of a source of weights, the tensors that a decoder needs, and the check that a source has them.

Nothing here holds a model in memory: a source hands out one tensor, or a range of its rows, at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.config import Experts, Linear, ModelConfig

Array = NDArray[Any]
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
CHUNK_ELEMENTS = 1 << 23
"""Elements in one chunk of rows: 32 MiB of float32."""

ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM = "post_self_attn_layernorm", "post_mlp_layernorm"
"""The norms of the updates that attention and feed-forward add to the residual stream."""

POSITIONS = "model.embed_positions.weight"
"""The vectors of positions [positions,hidden], where they are learned."""
ROUTER, SHARED_EXPERT, SHARED_GATE = "mlp.gate.weight", "mlp.shared_expert", "mlp.shared_expert_gate.weight"
"""The router [experts,hidden]; the expert that reads every token, and the row whose product is its sigmoid's input."""
ATTENTION_GATE = "self_attn.gate_proj"
"""The matrix of the gate of attention's result (`Attention.gated`)."""
LINEAR = "linear_attn"
"""The part of a layer that is linear (`Attention.linear`)."""
LINEAR_INPUTS = tuple(f"{LINEAR}.{name}_proj" for name in "qkvzba")
"""Its matrices: queries, keys and values before the convolution, the gate of its result, and of each value head the
input of the sigmoid that writes and the one of the decay."""
LINEAR_MIXED, (LINEAR_GATE, LINEAR_WRITE, LINEAR_DECAY) = LINEAR_INPUTS[:3], LINEAR_INPUTS[3:]
LINEAR_OUTPUT, LINEAR_NORM = f"{LINEAR}.out_proj", f"{LINEAR}.norm.weight"
CONVOLUTION, DECAY, DECAY_BIAS = f"{LINEAR}.conv1d.weight", f"{LINEAR}.A_log", f"{LINEAR}.dt_bias"
"""The convolution [channels,1,kernel] of queries, then keys, then values; logarithm and bias of each head's decay."""
EXPERT_MATRICES = tuple(f"mlp.experts.{projection}_proj.weight" for projection in ("gate", "up", "down"))
"""The matrices of all experts of a layer, one expert's rows under those of the one before."""
ROUTER_BIAS = "mlp.gate.bias"
EXPERT_BIASES = tuple(name.removesuffix(".weight") + ".bias" for name in EXPERT_MATRICES)
"""The biases of the router [experts], and of all experts' matrices, where the gate is clamped."""
SINKS = "self_attn.sinks"
"""The sinks of a layer's query heads [heads], where attention has some."""

# Tensors that some exporters store although they follow from the configuration, and those of layers that predict the
# tokens after the next one, on which no logits depend.
_HARMLESS = re.compile(
    r"mtp\..*|(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.(self_attn|attention)\.(bias|masked_bias)"
)


class WeightSource(Protocol):
    """Tensors by Hugging Face name, read on demand."""

    def names(self) -> list[str]:
        """Every tensor of the source."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored: matrices are [out, in]."""
        ...

    def dtype(self, name: str) -> str:
        """`float32`, `float16` or `bfloat16`."""
        ...

    def read(self, name: str) -> Array:
        """The whole tensor: float32, float16 or `ml_dtypes.bfloat16`."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """`read(name)[start:stop]` without reading the rest; the values never depend on how a tensor is cut."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 (hex) that is equal for two sources only if all their tensors are equal."""
        ...


def row_chunks(shape: tuple[int, ...], elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) that cover the first axis, each about `elements` elements large."""
    rows = shape[0]
    step = max(1, elements // max(1, int(np.prod(shape[1:], dtype=np.int64))))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the decoder reads, in the order it reads them."""
    hidden = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if config.description.learned_positions:
        tensors[POSITIONS] = (config.max_position_embeddings, hidden)
    for layer in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config, layer).items()}
    tensors |= _norm(config, "model.norm", hidden)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, norms, attention = config.hidden_size, config.description.norms, config.attention(layer)
    tensors: dict[str, tuple[int, ...]] = {}
    if norms.reads_norm:
        tensors |= _norm(config, "input_layernorm", hidden)
    if attention.linear is None:
        tensors |= _attention_tensors(config, gated=attention.gated)
    else:
        tensors |= _linear_tensors(attention.linear, hidden)
    if norms.adds_norm:
        tensors |= _norm(config, ATTENTION_RESULT_NORM, hidden)
    if norms.reads_norm and norms.place != "shared":
        tensors |= _norm(config, "post_attention_layernorm", hidden)
    experts = config.experts(layer)
    tensors |= (
        _feed_forward_tensors(config)
        if experts is None
        else _expert_tensors(experts, hidden, biases=config.description.clamped_gate is not None)
    )
    if norms.adds_norm:
        tensors |= _norm(config, FEED_FORWARD_RESULT_NORM, hidden)
    return tensors


def _attention_tensors(config: ModelConfig, *, gated: bool) -> dict[str, tuple[int, ...]]:
    hidden, norms = config.hidden_size, config.description.norms
    query, key = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    tensors: dict[str, tuple[int, ...]] = {}
    for projection, width in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        tensors[f"self_attn.{projection}.weight"] = (width, hidden)
        if config.qkv_bias:
            tensors[f"self_attn.{projection}.bias"] = (width,)
    if gated:
        tensors[f"{ATTENTION_GATE}.weight"] = (query, hidden)
        if config.qkv_bias:
            tensors[f"{ATTENTION_GATE}.bias"] = (query,)
    if config.qk_norm:
        for name, width in (("q", query), ("k", key)):
            tensors[f"self_attn.{name}_norm.weight"] = (config.head_size if norms.heads == "each" else width,)
    if config.description.attention_sinks:
        tensors[SINKS] = (config.num_attention_heads,)
    tensors["self_attn.o_proj.weight"] = (hidden, query)
    if config.output_bias:
        tensors["self_attn.o_proj.bias"] = (hidden,)
    return tensors


def _linear_tensors(part: Linear, hidden: int) -> dict[str, tuple[int, ...]]:
    widths = part.keys, part.keys, part.values, part.values, part.value_heads, part.value_heads
    tensors: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (width, hidden) for name, width in zip(LINEAR_INPUTS, widths, strict=True)
    }
    return tensors | {
        CONVOLUTION: (part.channels, 1, part.kernel),
        DECAY: (part.value_heads,),
        DECAY_BIAS: (part.value_heads,),
        LINEAR_NORM: (part.value_size,),
        f"{LINEAR_OUTPUT}.weight": (hidden, part.values),
    }


def _feed_forward_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, part = config.hidden_size, config.intermediate_size, config.description.feed_forward
    tensors: dict[str, tuple[int, ...]] = {}
    for projection in ("gate_proj", "up_proj") if part.gated else ("up_proj",):
        tensors[f"mlp.{projection}.weight"] = (inner, hidden)
        if part.bias:
            tensors[f"mlp.{projection}.bias"] = (inner,)
    tensors["mlp.down_proj.weight"] = (hidden, inner)
    if part.bias:
        tensors["mlp.down_proj.bias"] = (hidden,)
    return tensors


def _expert_tensors(experts: Experts, hidden: int, *, biases: bool) -> dict[str, tuple[int, ...]]:
    gate, up, down = EXPERT_MATRICES
    inner = (experts.count * experts.size, hidden)
    tensors: dict[str, tuple[int, ...]] = {
        ROUTER: (experts.count, hidden),
        gate: inner,
        up: inner,
        down: (experts.count * hidden, experts.size),
    }
    if biases:
        matrices = zip(EXPERT_BIASES, EXPERT_MATRICES, strict=True)
        tensors |= {ROUTER_BIAS: (experts.count,), **{bias: tensors[matrix][:1] for bias, matrix in matrices}}
    if experts.shared_size:
        for projection in ("gate_proj", "up_proj"):
            tensors[f"{SHARED_EXPERT}.{projection}.weight"] = (experts.shared_size, hidden)
        tensors[f"{SHARED_EXPERT}.down_proj.weight"] = (hidden, experts.shared_size)
        tensors[SHARED_GATE] = (1, hidden)
    return tensors


def _norm(config: ModelConfig, name: str, width: int) -> dict[str, tuple[int, ...]]:
    norms = config.description.norms
    parts = (("weight", norms.weight), ("bias", norms.bias))
    return {f"{name}.{part}": (width,) for part, there in parts if there}


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the model (a tied embedding counts once)."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in expected_tensors(config).values())


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Raise `InputError` unless the source holds exactly the decoder's tensors, in their shapes, as floats.

    Tensors that follow from the configuration or repeat others (rotary tables, the head of a tied embedding) are
    ignored.
    """
    expected, found = expected_tensors(config), set(source.names())
    missing = [name for name in expected if name not in found]
    if missing:
        raise InputError(f"weights: {_listing(missing)} missing; {config.architecture} needs {len(expected)} tensors")
    harmless = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = sorted(name for name in found - set(expected) - harmless if not _HARMLESS.fullmatch(name))
    if extra:
        raise InputError(f"weights: {_listing(extra)} not part of the {config.architecture} that config.json describes")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise InputError(f"weights: {name} has shape {list(source.shape(name))}, expected {list(shape)}")
        if source.dtype(name) not in FLOAT_DTYPES:
            raise InputError(f"weights: {name} is {source.dtype(name)}, expected one of {', '.join(FLOAT_DTYPES)}")


def _listing(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(describe(name)[1:-1] for name in names[:shown]) + rest
