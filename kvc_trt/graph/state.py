"""The tensors that a decoding engine carries from step to step; runtimes allocate and bind from this list alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvc_trt.models.config import ModelConfig
from kvc_trt.policies.parameters import PolicyParameters

Dtype = Literal["float32", "float16", "bfloat16"]

LOWEST: dict[str, float] = {
    "float32": -3.4028234663852886e38,
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
}
"""Lowest finite value of a cache type. Finite on purpose: zero times infinity would be NaN."""

ITEM_SIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class StateTensor:
    """One tensor of decode state: an input of the decode graph whose output alias takes its place."""

    layer: int
    cache: int
    """Row of the graph's `cache_lengths` that counts this cache's entries."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Without the batch dimension, which comes first: [G,C,D], or [G,2D,P] for page bounds."""
    fill: float
    """What an empty slot or page holds."""
    aliased_output: str

    def bytes_per_row(self) -> int:
        """Bytes of one sequence of the batch."""
        count = ITEM_SIZE[self.dtype]
        for size in self.shape:
            count *= size
        return count


def uses_pages(parameters: PolicyParameters, layer: int) -> bool:
    """Whether a layer selects tokens by page when it decodes, and so keeps page bounds."""
    return parameters.decode_selection == "hybrid" and layer >= parameters.skip_layers


def state_tensors(config: ModelConfig, parameters: PolicyParameters, dtype: str) -> tuple[StateTensor, ...]:
    """Every state tensor of a decode graph, in the order in which the graph lists them."""
    if dtype not in LOWEST:
        raise ValueError(f"dtype: expected one of {', '.join(LOWEST)}, found {dtype!r}")
    heads, size = config.num_key_value_heads, config.head_size
    tensors: list[StateTensor] = []
    for layer in range(config.num_hidden_layers):
        slots = (heads, parameters.layer_capacity(layer), size)
        tensors += [_tensor(layer, kind, dtype, slots, 0.0) for kind in ("k_cache", "v_cache")]
        if uses_pages(parameters, layer):
            pages = (heads, 2 * size, parameters.num_pages())
            tensors.append(_tensor(layer, "bounds", dtype, pages, LOWEST[dtype]))
    return tuple(tensors)


def _tensor(layer: int, kind: str, dtype: str, shape: tuple[int, ...], fill: float) -> StateTensor:
    return StateTensor(layer, layer, f"{kind}.{layer}", dtype, shape, fill, f"{kind}_out.{layer}")
