"""The operators of linear layers, alone, beside the reference that takes in a token at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvc_trt.backends.harness import Array, EngineOperator
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.weights import CONVOLUTION, DECAY, DECAY_BIAS
from kvc_trt.operators.linear.delta_rule import CHUNK, DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP
from kvc_trt.reference.linear import taken_in
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.rankings.array_errors import maximum_error

if TYPE_CHECKING:
    from kvc_trt.models.config import Linear, ModelConfig

OF_LINEAR_LAYERS = (DELTA_RULE.name, DELTA_STEP.name)
_WEIGHTS = {"convolution": CONVOLUTION, "decay_log": DECAY, "decay_bias": DECAY_BIAS}


@dataclass(frozen=True)
class LinearCase:
    """Inputs of one call by name, in the engine's type, and the tokens of each row."""

    part: Linear
    inputs: Mapping[str, Array]
    lengths: tuple[int, ...]

    def expected(self) -> tuple[Array, Array, Array]:
        """Return the values that the reference reads [B,n,H,Dv], zeros for padding, and its last inputs and memory
        afterwards."""
        given = {name: torch.from_numpy(value.astype(np.float64)) for name, value in self.inputs.items()}
        weights = {theirs: given[ours] for ours, theirs in _WEIGHTS.items()}
        last, memory = given["last_inputs"].clone(), given["memory"].clone()
        rows, heads = len(self.lengths), self.part.value_heads
        mixed, write, decay = (given[name].reshape(rows, -1, given[name].shape[-1]) for name in _TOKENS)
        read = torch.zeros(rows, mixed.shape[1], heads, self.part.value_size, dtype=torch.float64)
        for b, n in enumerate(self.lengths):
            tokens = mixed[b, :n], write[b, :n], decay[b, :n]
            read[b, :n] = taken_in(weights, self.part, *tokens, memory[b], last[b])
        return read.numpy(), last.numpy(), memory.numpy()

    def error(self, output: Array, last: Array, memory: Array) -> float:
        """Return the largest error of an operator's outputs, each tensor's relative to its largest element."""
        read, expected_last, expected_memory = self.expected()
        found = output.reshape(read.shape)
        real = np.arange(read.shape[1]) < np.array(self.lengths)[:, None]
        found = np.where(real[:, :, None, None], found, found.dtype.type(0))  # in its type: its rounding is forgiven
        pairs = (found, read), (last, expected_last), (memory, expected_memory)
        return max(maximum_error(one, other.astype(np.float32)) for one, other in pairs)


_TOKENS = ("mixed", "write", "decay")


def linear_case(
    part: Linear, rng: np.random.Generator, lengths: tuple[int, ...], *, step: bool = False, dtype: str = "float32",
    repeated: bool = False,
) -> LinearCase:  # fmt: skip
    """Draw a case; with `repeated` all tokens of a row are the same, so that keys repeat."""
    rows, kind = len(lengths), numpy_dtype(dtype)

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(kind)

    shape = (rows,) if step else (rows, max(lengths))
    inputs = {name: drawn(*shape, width) for name, width in zip(_TOKENS, _widths(part), strict=True)}
    if repeated and not step:
        inputs = {name: np.ascontiguousarray(np.broadcast_to(one[:, :1], one.shape)) for name, one in inputs.items()}
    if not step:
        inputs["lengths"] = np.array(lengths, np.int64)
    inputs |= {"convolution": drawn(part.channels, 1, part.kernel), "decay_log": drawn(part.value_heads)}
    inputs["decay_bias"] = (drawn(part.value_heads) - kind.type(3)).astype(kind)
    inputs["last_inputs"] = drawn(rows, part.kernel - 1, part.channels)
    inputs["memory"] = rng.standard_normal((rows, part.value_heads, part.key_size, part.value_size)).astype(np.float32)
    return LinearCase(part, inputs, lengths)


def _widths(part: Linear) -> tuple[int, int, int]:
    return part.channels, part.value_heads, part.value_heads


def check_linear(operator: EngineOperator, model: ModelConfig, bar: float, seed: int) -> list[Check]:
    """Run the operator on random tokens and on repeated ones, in rows of unequal lengths."""
    part = next(one.linear for one in model.description.attention if one.linear is not None)
    step, error = operator.name == DELTA_STEP.name, 0.0
    lengths = (1, 1) if step else (2 * CHUNK + 3, 1, CHUNK)
    for repeated in (False, True):
        rng = np.random.default_rng([seed, repeated])
        case = linear_case(part, rng, lengths, step=step, dtype=model.dtype, repeated=repeated)
        output, last, memory = operator.run(**case.inputs)
        error = max(error, case.error(output, last, memory))
    where = f"{operator.nodes} nodes: random and repeated tokens"
    return [at_most(f"{operator.name} values", "2 cases", error, bar, note=where)]
