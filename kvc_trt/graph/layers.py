"""Building blocks of a decoder graph: weights by reference, linear layers, norms, rotary positions, the MLP.

Activations are token-major, [T, width], both in prefill (T = batch * sequence) and in decode (T = batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from kvc_trt.graph.weight_plans import KEEP, OFFSETS, PACKED, SCALES, rotary_names
from kvc_trt.graph.weights import EMBEDDING, HEAD, GraphWeights, StoredInitializer
from kvc_trt.methods.base.graph_context import Angles
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.quantisation import BLOCK
from kvc_trt.models.rope import query_scale
from kvc_trt.models.sources.fp8 import FP8
from kvc_trt.models.weights import (
    EXPERT_BIASES,
    EXPERT_MATRICES,
    LINEAR,
    POSITIONS,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SHARED_GATE,
    SINKS,
)
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.experts import (
    CLAMPED_EXPERTS,
    EXPERTS,
    GATE_GAIN,
    GATE_LIMIT,
    MATRICES,
    QUANTISED_CLAMPED_EXPERTS,
    QUANTISED_EXPERTS,
)
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.operators.softmax import SINK_LOGITS, SoftmaxForm

ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "uint8": TensorProto.UINT8,
    FP8: TensorProto.FLOAT8E4M3FN,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
}


class Layers:
    """Writes layers into `emit` and collects the initializers they refer to."""

    def __init__(self, emit: Emitter, config: ModelConfig, weights: GraphWeights) -> None:
        self.emit = emit
        self.config = config
        self.weights = weights
        self.initializers: dict[str, TensorProto] = {}

    def embed(self, token_ids: Value, positions: Value) -> Value:
        """Gather the rows of the embedding for `token_ids` [T], times the model's scale.

        Where positions are learned, add the rows of `positions`, one for each token in any shape.
        """
        rows = self._scaled(self._rows(token_ids), self.config.description.embedding_scale)
        if not self.config.description.learned_positions:
            return rows
        learned = self.emit.Gather(self.tensor(POSITIONS), self.emit.Reshape(positions, [-1]))
        return str(self.emit.Add(rows, learned))

    def _rows(self, token_ids: Value) -> Value:
        if EMBEDDING + PACKED in self.weights:
            inputs = {"rows": token_ids, **self._quantised(EMBEDDING)}
            rows = QUANTISED_ROWS.call(self.emit, inputs, bits=self._bits(EMBEDDING), block=BLOCK)["y"]
            return self._with_offsets(rows, token_ids) if EMBEDDING + OFFSETS in self.weights else rows
        return str(self.emit.Gather(self.tensor(EMBEDDING), token_ids))

    def norm(self, x: Value, name: str) -> Value:
        """Apply the model's kind of norm over the last axis."""
        norms, epsilon = self.config.description.norms, self.config.norm_epsilon
        weights = [self.tensor(f"{name}.weight")] if norms.weight else [self._ones(self.config.hidden_size)]
        weights += [self.tensor(f"{name}.bias")] if norms.bias else []
        if norms.kind == "rms":
            return str(self.emit.RMSNormalization(x, *weights, axis=-1, epsilon=epsilon))
        return str(self.emit.LayerNormalization(x, *weights, axis=-1, epsilon=epsilon))

    def _ones(self, size: int) -> Value:
        """Return the weights of a norm that has none: the operators ask for some."""
        return str(self.emit.Expand(self._constant(np.float32(1)), [size]))

    def linear(self, x: Value, name: str) -> Value:
        """Multiply `x` [T,in] by the matrix NAME.weight [out,in] and add NAME.bias if the model has one."""
        bias = f"{name}.bias" if f"{name}.bias" in self.weights else None
        return self._multiply(x, [f"{name}.weight"], [bias] if bias else [])

    def linear_joined(self, x: Value, names: Sequence[str]) -> Value:
        """Apply several linear layers to one input and concatenate their outputs."""
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.weights]
        return self._multiply(x, [f"{name}.weight" for name in names], biases)

    def feed_forward(self, x: Value, layer: str) -> Value:
        """Apply the feed-forward block to normed activations [T,hidden]."""
        if f"{layer}.{ROUTER}" in self.weights:
            return self._experts(x, layer)
        if not self.config.description.feed_forward.gated:
            return self._plain_feed_forward(x, layer)
        gate, up = self.linear(x, f"{layer}.mlp.gate_proj"), self.linear(x, f"{layer}.mlp.up_proj")
        return self.linear(self._gated(gate, up), f"{layer}.mlp.down_proj")

    def feed_forward_joined(self, x: Value, layer: str) -> Value:
        """Apply `feed_forward` with one matrix product for gate and up, which saves launches when T is small."""
        if f"{layer}.{ROUTER}" in self.weights:
            return self._experts(x, layer)
        if not self.config.description.feed_forward.gated:
            return self._plain_feed_forward(x, layer)
        gate_and_up = self.linear_joined(x, [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"])
        gate, up = self.emit.Split(gate_and_up, axis=-1, num_outputs=2, outputs=2)
        return self.linear(self._gated(gate, up), f"{layer}.mlp.down_proj")

    def _experts(self, x: Value, layer: str) -> Value:
        experts = self.config.description.experts
        assert experts is not None
        names = [f"{layer}.{name}" for name in EXPERT_MATRICES]
        inputs = {"x": x, "router": self.tensor(f"{layer}.{ROUTER}")}
        numbers = {"chosen": experts.chosen, "normalised": int(experts.normalised)}
        clamped = self.config.description.clamped_gate
        if clamped is not None:
            biases = zip(MATRICES, EXPERT_BIASES, strict=True)
            inputs |= {f"{matrix}_bias": self._by_expert(f"{layer}.{name}") for matrix, name in biases}
            inputs["router_bias"] = self.tensor(f"{layer}.{ROUTER_BIAS}")
            gate = {GATE_LIMIT: clamped.limit, GATE_GAIN: clamped.gain}
            inputs |= {name: self.emit.constant(np.array([value], np.float32)) for name, value in gate.items()}
        if names[0] + PACKED in self.weights:
            parts = {"packed": PACKED, "scales": SCALES}
            for matrix, name in zip(MATRICES, names, strict=True):
                inputs |= {f"{matrix}_{part}": self._by_expert(name + end) for part, end in parts.items()}
            stored = {"bits": self._bits(names[0]), "block": BLOCK, "wide_input": int(self._reads_wide(names[0]))}
            operator = QUANTISED_EXPERTS if clamped is None else QUANTISED_CLAMPED_EXPERTS
            update = operator.call(self.emit, inputs, None, **numbers, **stored)["y"]
        else:
            inputs |= {matrix: self._by_expert(name) for matrix, name in zip(MATRICES, names, strict=True)}
            operator = EXPERTS if clamped is None else CLAMPED_EXPERTS
            update = operator.call(self.emit, inputs, None, **numbers)["y"]
        return str(self.emit.Add(update, self._shared_expert(x, layer))) if experts.shared_size else update

    def _shared_expert(self, x: Value, layer: str) -> Value:
        """Apply the expert that reads every token, times the sigmoid of the token's product with a row."""
        expert = f"{layer}.{SHARED_EXPERT}"
        gate_and_up = self.linear_joined(x, [f"{expert}.gate_proj", f"{expert}.up_proj"])
        gate, up = self.emit.Split(gate_and_up, axis=-1, num_outputs=2, outputs=2)
        result = self.linear(self._gated(gate, up), f"{expert}.down_proj")
        product = self.emit.ReduceSum(self.emit.Mul(x, self.tensor(f"{layer}.{SHARED_GATE}")), [1], keepdims=1)
        return str(self.emit.Mul(result, self.emit.Sigmoid(product)))

    def _by_expert(self, name: str) -> Value:
        """Return a tensor of all experts' rows with an axis of experts before them."""
        stored, experts = self.weights.stored(name), self.config.description.experts
        assert experts is not None
        rows, *rest = stored.shape
        return self._initializer(replace(stored, shape=(experts.count, rows // experts.count, *rest)))

    def _plain_feed_forward(self, x: Value, layer: str) -> Value:
        return self.linear(self._activated(self.linear(x, f"{layer}.mlp.up_proj")), f"{layer}.mlp.down_proj")

    def residual(self, x: Value, update: Value) -> Value:
        """Add the result of attention or feed-forward [T,hidden], times the model's scale, to the residual stream."""
        return str(self.emit.Add(x, self._scaled(update, self.config.description.residual_scale)))

    def head(self, x: Value) -> Value:
        """Return the FLOAT logits [T,vocab] of hidden states [T,hidden]."""
        normed = self.norm(x, "model.norm")
        own = any(name in self.weights for name in (HEAD, HEAD + PACKED))
        logits = self._multiply(normed, [HEAD if own else EMBEDDING], [])
        logits = str(self.emit.Cast(logits, to=TensorProto.FLOAT))
        scale = self.config.description.logit_scale
        logits = logits if scale == 1 else str(self.emit.Mul(logits, np.float32(scale)))
        return SoftmaxForm(self.config.description.logit_softcap).capped(self.emit, logits)

    def norm_heads(self, x: Value, name: str) -> Value:
        """Apply the norm of queries or keys to `x` [B,S,heads*D], as the model does."""
        if self.config.description.norms.heads == "together":
            return self.norm_rows(x, name)
        split = self.emit.Reshape(x, [0, 0, -1, self.config.head_size])
        if self.config.description.norms.heads == "apart":
            ones, epsilon = self._ones(self.config.head_size), self.config.norm_epsilon
            own = self.emit.Reshape(self.tensor(name), [-1, self.config.head_size])
            normed = self.emit.Mul(self.emit.LayerNormalization(split, ones, axis=-1, epsilon=epsilon), own)
            return str(self.emit.Reshape(normed, [0, 0, -1]))
        return str(self.emit.Reshape(self.norm_rows(split, name), [0, 0, -1]))

    def norm_rows(self, x: Value, name: str) -> Value:
        """Apply a root-mean-square norm with the weights of that name to the last axis."""
        return str(self.emit.RMSNormalization(x, self.tensor(name), axis=-1, epsilon=self.config.norm_epsilon))

    def sinks(self, layer: int) -> dict[str, Value]:
        """Return the sinks of a layer's query heads by the name of an operator's input; nothing if there are none."""
        if not self.config.description.attention_sinks:
            return {}
        return {SINK_LOGITS: self.tensor(f"model.layers.{layer}.{SINKS}")}

    def scale_queries(self, x: Value, layer: int) -> Value:
        """Multiply queries `x` [B,S,H*D] by the factor that a layer's attention has beyond 1/sqrt(D)."""
        factors = query_scale(self.config, layer)
        if factors is None:
            return x
        alike = bool((factors == factors[0]).all())
        tiled = factors[0] if alike else np.tile(factors, self.config.num_attention_heads)
        return str(self.emit.Mul(x, self._constant(tiled)))

    def rotary(self, positions: Value) -> Angles:
        """Return cosine and sine, FLOAT [B,S,D/2], of `positions` [B,S]; layers of the same base share them."""
        layers = map(self.config.attention, range(self.config.num_hidden_layers))
        bases = dict.fromkeys(attention.rotary_base for attention in layers)
        return {base: self._angles(base, positions) for base in bases}

    def _angles(self, base: float | None, positions: Value) -> tuple[Value, Value]:
        cosine, sine = (str(self.emit.Gather(self.tensor(name), positions)) for name in rotary_names(base))
        return cosine, sine

    def rotary_tables(self) -> tuple[Value, Value]:
        """Return cosine and sine of every position, FLOAT [S,D/2], in layers without a base of their own."""
        cosine, sine = (self.tensor(name) for name in rotary_names(None))
        return cosine, sine

    def rotate(self, x: Value, angles: Angles, heads: int, layer: int) -> Value:
        """Rotate `x` [B,S,heads*D] in fp32, in a layer that rotates; `angles` is the result of `rotary`."""
        attention = self.config.attention(layer)
        if not attention.rotary:
            return x
        wide = self.emit.Cast(x, to=TensorProto.FLOAT)
        return self._cast(self.emit.RotaryEmbedding(wide, *angles[attention.rotary_base], num_heads=heads))

    def _gated(self, gate: Value, up: Value) -> Value:
        return str(self.emit.Mul(self._activated(gate), up))

    def _activated(self, x: Value) -> Value:
        activation = self.config.description.feed_forward.activation
        if activation == "silu":
            return str(self.emit.Mul(x, self.emit.Sigmoid(x)))
        if activation == "relu":
            return str(self.emit.Relu(x))
        return str(self.emit.Gelu(x, approximate="tanh" if activation == "gelu-tanh" else "none"))

    def _scaled(self, x: Value, factor: float) -> Value:
        return x if factor == 1 else str(self.emit.Mul(x, self._constant(np.float32(factor))))

    def _constant(self, value: NDArray[np.float32] | np.float32) -> NDArray[Any]:
        """Return a constant in the type of activations."""
        return np.asarray(value).astype(numpy_dtype(self.weights.dtype))

    def _cast(self, x: Value) -> Value:
        return str(self.emit.Cast(x, to=ELEMENT_TYPES[self.weights.dtype]))

    def _multiply(self, x: Value, matrices: list[str], biases: list[str]) -> Value:
        if any(name + PACKED in self.weights for name in matrices):
            product = self._multiply_quantised(x, matrices)
            return product if not biases else str(self.emit.Add(product, self._joined(biases)))
        bias = [self._joined(biases)] if biases else []
        return str(self.emit.Gemm(x, self._matrix(matrices), *bias, transB=1))

    def _matrix(self, names: list[str]) -> Value:
        """Return the rows of several matrices, [out,in]; fp8 rows are multiplied by their scales and rounded once."""
        in_fp8 = [self.weights.is_fp8(name) for name in names]
        if not any(in_fp8):
            return self._joined(names)
        scales = [name + SCALES for name in names]
        if len(names) > 1 and not (all(in_fp8) and self._touch(names) and self._touch(scales)):
            return str(self.emit.Concat(*(self._matrix([name]) for name in names), axis=0))
        rows, factors = self._joined(names), self._joined(scales)
        computed = ELEMENT_TYPES[self.weights.dtype]
        return str(self.emit.DequantizeLinear(rows, factors, axis=0, output_dtype=computed))

    def _touch(self, names: list[str]) -> bool:
        if not all(name in self.weights for name in names):
            return False
        return self.weights.joined(names[0], names) is not None

    def _multiply_quantised(self, x: Value, matrices: list[str]) -> Value:
        suffixes = [
            suffix for suffix in (PACKED, SCALES, OFFSETS) if any(name + suffix in self.weights for name in matrices)
        ]
        parts = [[name + suffix for name in matrices] for suffix in suffixes]
        if len(matrices) > 1 and not all(self._touch(names) for names in parts):
            return str(self.emit.Concat(*(self._multiply(x, [name], []) for name in matrices), axis=-1))
        packed, scales, *offsets = (self._joined(names) for names in parts)
        shapes = [self.weights.stored(name).shape for name in parts[1]]
        product = QUANTISED_LINEAR.call(
            self.emit, {"x": x, "packed": packed, "scales": scales}, bits=self._bits(matrices[0]), block=BLOCK,
            in_features=shapes[0][1] * BLOCK, out_features=sum(rows for rows, _ in shapes),
            wide_input=int(self._reads_wide(matrices[0])),
        )["y"]  # fmt: skip
        if not offsets:
            return product
        sums = self.emit.ReduceSum(self.emit.Reshape(x, [0, -1, BLOCK]), [2], keepdims=0)
        return str(self.emit.Gemm(sums, offsets[0], product, transB=1))

    def _reads_wide(self, matrix: str) -> bool:
        """True if the input of a product with quantised `matrix` is rounded to 15 bits instead of 8 (decision 0016).

        Kept blocks are to answer as their checkpoint. A linear layer adds up its rounding over all tokens; in a model
        that has some, a wrong choice of experts would stay in their memory too. In a model with sinks, rounding in
        attention moves logits, and choices of experts, more than all else.
        """
        if self.weights.precision == KEEP or (self.config.description.attention_sinks and "self_attn" in matrix):
            return True
        remembered = any(part in matrix for part in (LINEAR, "mlp.experts", SHARED_EXPERT))
        return bool(self.config.linear_layers) and remembered

    def _with_offsets(self, rows: Value, token_ids: Value) -> Value:
        """Add to every element of the embedding's rows [T,in] the offset of its block."""
        offsets = self.emit.Unsqueeze(self.emit.Gather(self.tensor(EMBEDDING + OFFSETS), token_ids), [2])
        return str(self.emit.Reshape(self.emit.Add(self.emit.Reshape(rows, [0, -1, BLOCK]), offsets), [0, -1]))

    def _quantised(self, name: str) -> dict[str, Value]:
        return {"packed": self.tensor(name + PACKED), "scales": self.tensor(name + SCALES)}

    def _bits(self, name: str) -> int:
        return self.weights.stored(name + PACKED).shape[-1] * 8 // BLOCK

    def tensor(self, name: str) -> Value:
        """Return a tensor of the model as it is stored."""
        return self._initializer(self.weights.stored(name))

    def _joined(self, names: list[str]) -> Value:
        if len(names) == 1:
            return self._initializer(self.weights.stored(names[0]))
        stem, _, rest = names[0].rpartition("_proj")
        projections = "_".join(name.rpartition("_proj")[0].rpartition(".")[2] for name in names)
        whole = self.weights.joined(f"{stem.rpartition('.')[0]}.{projections}_proj{rest}", names)
        if whole is None:  # tensors whose size is not a multiple of the file's alignment
            return str(self.emit.Concat(*(self.tensor(name) for name in names), axis=0))
        return self._initializer(whole)

    def _initializer(self, stored: StoredInitializer) -> Value:
        if stored.name not in self.initializers:
            tensor = TensorProto(name=stored.name, data_type=ELEMENT_TYPES[stored.dtype])
            tensor.dims[:] = stored.shape
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": self.weights.location, "offset": stored.offset, "length": stored.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            self.initializers[stored.name] = tensor
        return stored.name
