"""A model's weights on one device in one type, read tensor by tensor; matrices that share an input are joined.

Reading the weights limits a decode step at a small batch: one product with the joined matrix of queries, keys and
values reads the same bytes as three, in fewer and larger pieces. The same holds for the gate and up projections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvc_trt.backends.torch.device import from_numpy
from kvc_trt.models.weights import LINEAR, POSITIONS, expected_tensors, row_chunks
from kvc_trt.reference.layers import EMBEDDING, HEAD

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource

FINAL_NORM = "model.norm"
Layer = Mapping[str, Tensor]
"""Tensors of one layer by name, with `self_attn.qkv_proj`, `linear_attn.qkvba_proj` and `mlp.gate_up_proj` in place of
their parts (of the last without a gate: `mlp.gate_up_proj` is then up alone)."""


class TorchWeights:
    """A model's tensors, which decoders of the same model under other policies can share."""

    def __init__(
        self,
        layers: list[Layer],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor | None,
        norm_bias: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.layers, self.embedding, self.head, self.norm = layers, embedding, head, norm
        self.norm_bias, self.positions = norm_bias, positions

    @classmethod
    def read(cls, config: ModelConfig, source: WeightSource, device: torch.device, dtype: torch.dtype) -> TorchWeights:
        """Read all tensors from a source in chunks of rows, which needs extra memory for only one chunk."""

        def load(parts: list[str]) -> Tensor:
            return _read_joined(source, parts, device, dtype)

        layers: list[Layer] = [
            {
                name: load([f"model.layers.{index}.{part}" for part in parts])
                for name, parts in joined_names(config, index)
            }
            for index in range(config.num_hidden_layers)
        ]
        embedding = load([EMBEDDING])
        # In older engines a quantised tied head differs from the embedding.
        head = load([HEAD]) if HEAD in source.names() else embedding
        norms = config.description.norms
        weight = load([f"{FINAL_NORM}.weight"]) if norms.weight else None
        bias = load([f"{FINAL_NORM}.bias"]) if norms.bias else None
        positions = load([POSITIONS]) if config.description.learned_positions else None
        return cls(layers, embedding, head, weight, bias, positions)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes; a tied head counts once."""
        tensors = [tensor for layer in self.layers for tensor in layer.values()]
        optional = self.norm, self.norm_bias, self.positions
        tensors += [self.embedding, *(one for one in optional if one is not None)]
        tensors += [] if self.head is self.embedding else [self.head]
        return sum(tensor.nbytes for tensor in tensors)


_JOINED = {
    rf"^({LINEAR})\.[qkvba]_proj\.": r"\1.qkvba_proj.",
    r"^(self_attn)\.[qkv]_proj\.": r"\1.qkv_proj.",
    r"^(mlp.*)\.(gate|up)_proj\.": r"\1.gate_up_proj.",
}
"""Names of a layer's tensors whose rows stand together -> the name of the joint tensor."""


def joined_names(config: ModelConfig, layer: int = 0) -> list[tuple[str, list[str]]]:
    """Return the name of each tensor of a layer with the names of the checkpoint's tensors whose rows it holds."""
    prefix = f"model.layers.{layer}."
    groups: dict[str, list[str]] = {}
    for name in expected_tensors(config):
        if name.startswith(prefix):
            inner = name[len(prefix) :]
            groups.setdefault(_joined_name(inner), []).append(inner)
    return list(groups.items())


def _joined_name(name: str) -> str:
    """Return the name of the tensor that holds the rows of a layer's tensor `name`."""
    for pattern, joined in _JOINED.items():
        name = re.sub(pattern, joined, name)
    return name


def _read_joined(source: WeightSource, parts: list[str], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Read the rows of several tensors into one."""
    shapes = [source.shape(part) for part in parts]
    joined = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
    first = 0
    for part, shape in zip(parts, shapes, strict=True):
        for start, stop in row_chunks(shape):
            joined[first + start : first + stop] = from_numpy(source.read_rows(part, start, stop))
        first += shape[0]
    return joined
