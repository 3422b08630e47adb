"""Seeded random weights of any architecture, for building at real size without a checkpoint.

Values are uniform (three times cheaper to draw than normal ones, and a matrix product makes them normal again), scaled
so that activations stay near one through any depth: 1/sqrt(fan in) for projections, those that write into the
residual stream reduced by sqrt(2 * layers); norms scatter around one. Each block of rows has its own generator, so the
values depend on seed, name and shape alone, never on the order or the size of the reads.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import expected_tensors

_ALGORITHM = "uniform-sfc64-1"
"""Identifies how values are drawn; part of the fingerprint, so change it whenever that changes."""
_BLOCK_ELEMENTS = 1 << 20


class RandomWeights:
    """A `WeightSource` that draws its float32 tensors when they are read. Seeds are integers >= 0."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        if seed < 0:
            raise InputError(f"--random-weights {seed}: expected a seed of at least 0")
        self.config = config
        self.seed = seed
        self._shapes = expected_tensors(config)

    def names(self) -> list[str]:
        """Exactly the tensors the decoder needs."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """Always `float32`."""
        return "float32"

    def read(self, name: str) -> NDArray[np.float32]:
        """The whole tensor, float32."""
        return self.read_rows(name, 0, self._shapes[name][0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop): the same values as in the whole tensor."""
        shape = self._shapes[name]
        if not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"{name}: rows {start}..{stop} of {shape[0]}")
        width = math.prod(shape[1:])
        block_rows = max(1, _BLOCK_ELEMENTS // width)
        mean, deviation = self._scale(name, shape)
        result = np.empty((stop - start, width), np.float32)
        row = start
        while row < stop:
            block, offset = divmod(row, block_rows)
            end = min(stop, (block + 1) * block_rows)
            values = self._draw(name, block, (offset + end - row) * width)[offset * width :]
            values *= np.float32(2 * math.sqrt(3) * deviation)
            values += np.float32(mean - math.sqrt(3) * deviation)
            result[row - start : end - start] = values.reshape(end - row, width)
            row = end
        return result.reshape(stop - start, *shape[1:])

    def fingerprint(self) -> str:
        """SHA-256 of seed, algorithm and shapes; nothing is drawn."""
        return hashlib.sha256(repr((_ALGORITHM, self.seed, sorted(self._shapes.items()))).encode()).hexdigest()

    def _draw(self, name: str, block: int, count: int) -> NDArray[np.float32]:
        """The first `count` values of a block, uniform in [0, 1)."""
        key = hashlib.sha256(f"{_ALGORITHM}/{self.seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
        return generator.random(count, dtype=np.float32)

    def _scale(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and standard deviation of one tensor."""
        if name.endswith(".bias"):
            return 0.0, 0.1
        if len(shape) == 1:
            return 1.0, 0.05
        if name == "model.embed_tokens.weight" and not self.config.tie_word_embeddings:
            return 0.0, 1.0
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.0, 1 / math.sqrt(shape[-1] * (2 * self.config.num_hidden_layers if residual else 1))
