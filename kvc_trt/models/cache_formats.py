"""The formats in which kept keys and values are stored: names, tensors and sizes.

A vector is one token's key or value of one KV head, D channels. `reference/stored.py` defines its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
"""Consecutive channels that share a scale and a minimum in `int4`."""


@dataclass(frozen=True)
class VectorFormat:
    """How one vector is stored: codes, and numbers that turn them into values."""

    name: str
    code_bits: int
    scale_bytes: int
    """Size of one scale: 2 for fp16, 1 for the exponent of a power of two."""
    grouped: bool = False
    """True if groups of channels have scales and minima of their own."""

    def groups(self, head_size: int) -> int:
        """Return the number of groups of a vector: of 32 channels, or one where 32 does not divide the head size."""
        return head_size // GROUP if self.grouped and head_size % GROUP == 0 else 1

    def code_bytes(self, head_size: int) -> int:
        """Return the size of a vector's codes in bytes."""
        return head_size * self.code_bits // 8

    @property
    def number_bytes(self) -> int:
        """Size of the scale of a group, and of its minimum if it has one."""
        return self.scale_bytes + (2 if self.grouped else 0)

    def bytes_per_vector(self, head_size: int) -> int:
        """Return the size of a stored vector in bytes, everything counted."""
        return self.code_bytes(head_size) + self.groups(head_size) * self.number_bytes


INT8 = VectorFormat("int8", 8, 2)
FP8 = VectorFormat("fp8", 8, 1)
INT4 = VectorFormat("int4", 4, 2, grouped=True)
VECTOR_FORMATS = {vector.name: vector for vector in (INT8, FP8, INT4)}


@dataclass(frozen=True)
class CacheFormat:
    """How a cache stores its keys and its values."""

    name: str
    code: int
    """Value of the operators' attribute `cache_format`."""
    keys: VectorFormat | None
    """None: as they are, in the type of the activations."""
    values: VectorFormat | None

    def bytes_per_token(self, head_size: int, itemsize: int) -> int:
        """Return the size of one token's key and value of one head in bytes, everything counted.

        `itemsize` is that of the activations' type, in which `auto` stores both."""
        forms = (self.keys, self.values)
        return sum(head_size * itemsize if form is None else form.bytes_per_vector(head_size) for form in forms)


AUTO = "auto"
"""The format of a cache that holds keys and values as they are."""
CACHE_FORMATS = {
    found.name: found
    for found in (
        CacheFormat(AUTO, 0, None, None),
        CacheFormat("int8", 1, INT8, INT8),
        CacheFormat("fp8", 2, FP8, FP8),
        CacheFormat("int4", 3, INT4, INT4),
        CacheFormat("k8v4", 4, INT8, INT4),
    )
}
"""Every format by the name that `--kv-cache` takes."""


def format_of_code(code: int) -> CacheFormat:
    """Return the format whose attribute `cache_format` is `code`; StopIteration for another number."""
    return next(form for form in CACHE_FORMATS.values() if form.code == code)
