"""One rank's part of the engine's weight file, read through a mapping: only the pages that hold it are touched.

A rank is a process of its own, so a file that shrinks under the mapping ends the rank, which the caller reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.graph.weights import HEAD, EngineWeights, GraphWeights
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.weights import EXPERT_BIASES

if TYPE_CHECKING:
    import torch

    from kvc_trt.files.held import HeldFile
    from kvc_trt.models.sharding import Extent, Shard


_DOWN_BIASES = {"mlp.down_proj.bias", EXPERT_BIASES[2]}
"""Biases that every rank holds. The ranks' results are added up, so all ranks but the first have zeros."""


class ShardedSource:
    """A `WeightSource` with the rank's part of each tensor; shapes are those of the parts."""

    def __init__(self, file: HeldFile, shard: Shard) -> None:
        self._whole, self._places, self._shard = EngineWeights(file), GraphWeights(file), shard
        self._bytes = np.frombuffer(file.map(), np.uint8)

    def names(self) -> list[str]:
        """Return the Hugging Face names in file order."""
        return self._whole.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(map(len, self._extent(name)))

    def dtype(self, name: str) -> str:
        """Return the type that is stored."""
        return self._whole.dtype(name)

    def read(self, name: str) -> NDArray[Any]:
        """Return the whole part."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop) of the part: a view of the file where they stand together in it."""
        stored, (rows, *columns) = self._places.stored(name), self._extent(name)
        values = self._bytes[stored.offset : stored.offset + stored.nbytes].view(numpy_dtype(stored.dtype))
        found: NDArray[Any] = values.reshape(stored.shape)[tuple(map(_index, (rows[start:stop], *columns)))]
        return found

    def fingerprint(self) -> str:
        """Return the SHA-256 of the whole file."""
        return self._whole.fingerprint()

    def _extent(self, name: str) -> Extent:
        return self._shard.extent(name, self._whole.shape(name))


def _index(axis: Sequence[int]) -> slice | list[int]:
    return slice(axis.start, axis.stop) if isinstance(axis, range) else list(axis)


def read_shard(file: HeldFile, shard: Shard, device: torch.device, dtype: torch.dtype) -> TorchWeights:
    """Read a rank's weights onto its device; UnsupportedEnvironment if they do not fit."""
    needed = memory.shard_bytes(shard, dtype.itemsize)
    what = f"the weights of rank {shard.rank} of {shard.ranks} need"
    memory.require(needed, what, device, "more ranks (build --tp), or --weights bf16 or fp16")
    source = ShardedSource(file, shard)
    found = TorchWeights.read(shard.local, source, device, dtype)
    if shard.rank > 0:
        for layer in found.layers:
            for name in _DOWN_BIASES.intersection(layer):
                layer[name].zero_()
    if HEAD in source.names():
        return found
    part = shard.vocabulary
    return TorchWeights(
        found.layers,
        found.embedding,
        found.embedding[part.start : part.stop],
        found.norm,
        found.norm_bias,
        found.positions,
    )
