"""Norms of queries and keys whose weights a checkpoint stores head by head, [heads,D], as vectors [heads*D]."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import WeightSource

_NORMS = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")


class NormsByHead:
    """A `WeightSource` over a checkpoint that has such norms; its other tensors are as they are."""

    def __init__(self, source: WeightSource, _config: ModelConfig) -> None:
        self._source = source

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; a norm of another shape than [heads,D] keeps it."""
        shape = tuple(self._source.shape(name))
        return (shape[0] * shape[1],) if name.endswith(_NORMS) and len(shape) == 2 else shape

    def dtype(self, name: str) -> str:
        """Stored type of one tensor."""
        return self._source.dtype(name)

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self._source.read(name).reshape(self.shape(name))

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor; a norm is read whole."""
        return self.read(name)[start:stop] if name.endswith(_NORMS) else self._source.read_rows(name, start, stop)

    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint."""
        return self._source.fingerprint()
