"""A checkpoint's tensors under the names, and with the order of rows, that all parts of kvc-trt know.

A family stores queries, keys and values in one matrix or in three, and the channels of a head in one of several orders.
Rows are moved, and norms that multiply by more than their weight get it added: nothing else has to know how a family
stores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import WeightSource, expected_tensors

_ROTATED = re.compile(r".*\.self_attn\.([qk])_(proj|norm)\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one tensor of a checkpoint: `blocks` of `size` rows, the first at `start`, one each `step` rows."""

    name: str
    start: int = 0
    size: int | None = None
    """None: all rows."""
    blocks: int = 1
    step: int = 0
    plus: float = 0.0
    """Added to every element, which is then a float32."""
    order: NDArray[np.int64] | None = None
    """The rows one by one, in place of blocks."""
    columns: NDArray[np.int64] | None = None
    """The checkpoint's column of each column; None: they are alike."""

    @property
    def count(self) -> int | None:
        """The number of rows; None for all that the tensor has."""
        if self.order is not None:
            return len(self.order)
        return None if self.size is None else self.blocks * self.size

    @property
    def end(self) -> int | None:
        """The row after the last; None if all rows are taken."""
        if self.order is not None:
            return int(self.order.max()) + 1
        return None if self.size is None else self.start + (self.blocks - 1) * self.step + self.size

    def indices(self, rows: int) -> NDArray[np.int64]:
        """Return the places in the checkpoint's tensor of `rows` rows."""
        if self.order is not None:
            return self.order
        size = rows if self.size is None else self.size
        starts = self.start + np.arange(self.blocks) * self.step
        return (starts[:, None] + np.arange(size)).reshape(-1)


def renamed_in_layers(config: ModelConfig, prefix: str, names: Mapping[str, str]) -> dict[str, Rows]:
    """Return where a checkpoint has weights and biases of every layer: our names -> its own behind `prefix.LAYER.`."""
    return {
        f"model.layers.{layer}.{ours}.{part}": Rows(f"{prefix}.{layer}.{theirs}.{part}")
        for layer in range(config.num_hidden_layers)
        for ours, theirs in names.items()
        for part in ("weight", "bias")
    }


def joined_by_kv_head(config: ModelConfig, prefix: str, joined: str) -> dict[str, Rows]:
    """Return where queries, keys and values are in one matrix of every layer, `prefix.LAYER.joined`.

    It holds one KV head after the other: the query heads that share it, its keys, its values.
    """
    size, group, kv_heads = config.head_size, config.group_size, config.num_key_value_heads
    parts = {"q": (0, group * size), "k": (group * size, size), "v": ((group + 1) * size, size)}
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.{part}": Rows(
            f"{prefix}.{layer}.{joined}.{part}", start, rows, kv_heads, (group + 2) * size
        )
        for layer in range(config.num_hidden_layers)
        for name, (start, rows) in parts.items()
        for part in ("weight", "bias")
    }


class FamilyWeights:
    """A `WeightSource` with the names of `expected_tensors`, over a checkpoint that has others."""

    def __init__(
        self, source: WeightSource, places: Mapping[str, Rows], order: NDArray[np.int64] | None = None
    ) -> None:
        """Channel i of every head of queries and keys is the checkpoint's channel `order[i]`; None: they are alike.

        InputError for a joined tensor that does not end with its last part.
        """
        self._source, self._places, self._order = source, places, order
        self._check_joined()

    def names(self) -> list[str]:
        """Every tensor that is here, and those of the checkpoint that are part of none, under their own names."""
        stored = set(self._source.names())
        used = {rows.name for rows in self._places.values()}
        return [name for name, rows in self._places.items() if rows.name in stored] + sorted(stored - used)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        place = self._places.get(name)
        if place is None:
            return tuple(self._source.shape(name))
        rows, *rest = self._source.shape(place.name)
        return (rows if place.count is None else place.count, *rest)

    def dtype(self, name: str) -> str:
        """Stored type of one tensor."""
        return "float32" if self._plus(name) else self._source.dtype(self._stored(name))

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor; reads no more than lies between the first and the last of them."""
        place = self._places.get(name)
        if place is None:
            return self._source.read_rows(name, start, stop)
        rows = self._moved(name, place, start, stop)
        return rows.astype(np.float32) + np.float32(place.plus) if place.plus else rows

    def _moved(self, name: str, place: Rows, start: int, stop: int) -> NDArray[Any]:
        first, last, picks = self.source_rows(name, start, stop)
        rows = self._source.read_rows(place.name, first, last)
        moved = rows if picks is None else rows[picks]
        return np.ascontiguousarray(moved if place.columns is None else moved[:, place.columns])

    def source_rows(self, name: str, start: int, stop: int) -> tuple[int, int, NDArray[np.int64] | None]:
        """Return the range of the checkpoint's rows that holds rows [start, stop) of a tensor, and which of them.

        None: all of them, in order.
        """
        wanted = self._indices(name, self._places[name])[start:stop]
        if not len(wanted):
            return 0, 0, None
        first, last = int(wanted.min()), int(wanted.max()) + 1
        contiguous = last - first == len(wanted) and bool((np.diff(wanted) == 1).all())
        return first, last, None if contiguous else wanted - first

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self._source.fingerprint()

    def _plus(self, name: str) -> float:
        return self._places[name].plus if name in self._places else 0.0

    def _check_joined(self) -> None:
        """Raise InputError for a tensor that does not end with its last part; the shapes of parts would not show it."""
        expected: dict[str, int] = {}
        for rows in self._places.values():
            if rows.end is not None:
                expected[rows.name] = max(rows.end, expected.get(rows.name, 0))
        stored = set(self._source.names())
        for name, rows_of_parts in expected.items():
            found = list(self._source.shape(name)) if name in stored else [rows_of_parts]
            if found[0] != rows_of_parts:
                whole = [rows_of_parts, *found[1:]]
                raise InputError(f"weights: {name} has shape {found}, expected {whole}")

    def _stored(self, name: str) -> str:
        return self._places[name].name if name in self._places else name

    def _indices(self, name: str, place: Rows) -> NDArray[np.int64]:
        found = place.indices(self._source.shape(place.name)[0])
        if self._order is None or not _ROTATED.fullmatch(name):
            return found
        return found.reshape(-1, len(self._order))[:, self._order].reshape(-1)


def in_our_order(
    source: WeightSource, config: ModelConfig, places: Mapping[str, Rows] | None, *, interleaved: bool
) -> WeightSource:
    """Return a checkpoint's tensors as all parts know them; the source itself if it stores them so.

    `places` says where they are if not under the same names, `interleaved` that neighbouring channels form pairs.
    """
    order = channel_order(config, interleaved=interleaved)
    if order is None and places is None:
        return source
    return FamilyWeights(source, {name: Rows(name) for name in expected_tensors(config)} | dict(places or {}), order)


def in_one_matrix(layer: int, joined: str, widths: Mapping[str, int]) -> dict[str, Rows]:
    """Return the places of matrices that a checkpoint stacks in one tensor, each with its number of rows.

    `joined` and the keys of `widths` are names within a layer, such as `self_attn.qkv_proj.weight`.
    """
    prefix, starts = f"model.layers.{layer}", accumulate(widths.values(), initial=0)
    return {
        f"{prefix}.{name}": Rows(f"{prefix}.{joined}", start, rows)
        for (name, rows), start in zip(widths.items(), starts, strict=False)
    }


def channel_order(config: ModelConfig, *, interleaved: bool) -> NDArray[np.int64] | None:
    """Return the checkpoint's channel of each channel of a head, int64 [D]; None if they are in order.

    Pair i are the channels i and i + D/2 here, those that rotate first. In a checkpoint the channels that rotate are
    the first R of a head: i and i + R/2 form pair i, or neighbours if `interleaved`.
    """
    size, channels = config.head_size, config.rotary_channels
    first, second = np.arange(0, channels, 2), np.arange(1, channels, 2)
    if not interleaved:
        first, second = np.arange(channels // 2), np.arange(channels // 2, channels)
    still = np.arange(channels, size)
    middle = len(still) // 2
    order = np.concatenate([first, still[:middle], second, still[middle:]])
    return None if (order == np.arange(size)).all() else order
