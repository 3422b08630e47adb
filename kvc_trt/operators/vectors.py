"""Keys or values in the body of an operator: the vectors themselves, or the parts in which a cache stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc_trt.operators.cache_formats import write_codes, write_read, write_stored
from kvc_trt.operators.schema import Tensor, part_names
from kvc_trt.operators.shapes import Layout, float32, scalar, size

if TYPE_CHECKING:
    from kvc_trt.models.cache_formats import VectorFormat
    from kvc_trt.operators.emitter import Emitter, Value


@dataclass(frozen=True)
class Vectors:
    """Keys or values of many tokens, [B,G,n,.]."""

    parts: tuple[Value, ...]
    """The vectors, or the parts of the format: codes, scales, and minima where it has them."""
    format: VectorFormat | None = None

    def map(self, change: Callable[[Value], Value]) -> Vectors:
        """Return what `change` makes of every part: a choice or a move of tokens, never of channels."""
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def of_head(self, emit: Emitter, head: Value) -> Value:
        """Return the vectors of one KV head as they are read, FLOAT [B,n,D]."""
        return self.map(lambda part: emit.Gather(part, head, axis=1)).widened(emit)

    def widened(self, emit: Emitter) -> Value:
        """Return the vectors as they are read, FLOAT [...,D]."""
        if self.format is None:
            return float32(emit, self.parts[0])
        return write_read(emit, self.parts, self.format)

    def stored(self, emit: Emitter, form: VectorFormat | None) -> Vectors:
        """Return exact vectors in a format; what has one stays as it is."""
        if form is None or self.format is not None:
            return self
        return Vectors(write_stored(emit, float32(emit, self.parts[0]), form), form)

    def named(self, tensor: Tensor) -> dict[str, Value]:
        """Return the parts by the names that they have as an operator's tensor."""
        return dict(zip(part_names(tensor, self.format), self.parts, strict=True))

    def codes(self, emit: Emitter) -> Value:
        """Return the vectors if they are exact, else their codes, one for each channel."""
        return self.parts[0] if self.format is None else write_codes(emit, self.parts[0], self.format)

    def read(self, emit: Emitter) -> Value:
        """Return the vectors as they are read: in their own type if they are exact, else FLOAT."""
        return self.parts[0] if self.format is None else self.widened(emit)


@dataclass(frozen=True)
class Tables:
    """The keys and values of the same tokens."""

    keys: Vectors
    values: Vectors

    @property
    def parts(self) -> tuple[Value, ...]:
        """Those of the keys, then those of the values."""
        return self.keys.parts + self.values.parts

    def map(self, change: Callable[[Value], Value]) -> Tables:
        """Return what `change` makes of every part."""
        return Tables(self.keys.map(change), self.values.map(change))

    def of(self, parts: Sequence[Value]) -> Tables:
        """Return other tokens in the same form, by the names of their `parts`."""
        count = len(self.keys.parts)
        keys, values = (
            replace(own, parts=tuple(new))
            for own, new in zip((self.keys, self.values), (parts[:count], parts[count:]), strict=True)
        )
        return Tables(keys, values)

    def with_new(self, new: Tables, put: Callable[[Value, Value], Value]) -> Tables:
        """Return what `put` makes of every part and of the same part of `new` tokens."""
        return self.of([put(part, other) for part, other in zip(self.parts, new.parts, strict=True)])

    def stored(self, emit: Emitter, layout: Layout) -> Tables:
        """Return exact tables in the engine's format; what has a format stays as it is.

        One KV head at a time: storing computes several tables of the size of its input on the way, which take memory,
        and several times as long if they are larger than a processor's caches.
        """
        form = layout.cache_format
        if form.keys is None or self.keys.format is not None:
            return self
        made: list[Tables] = []

        def one_head(body: Emitter, head: Value) -> tuple[Value, ...]:
            own = self.map(lambda part: body.Gather(part, head, axis=1))
            made.append(Tables(own.keys.stored(body, form.keys), own.values.stored(body, form.values)))
            return made[0].parts

        by_head = emit.collect_all(scalar(emit, size(emit, self.keys.parts[0], 1)), one_head)
        return made[0].of([str(emit.Transpose(part, perm=[1, 0, 2, 3])) for part in by_head])

    def named(self, keys: Tensor, values: Tensor) -> dict[str, Value]:
        """Return all parts by the names that they have as an operator's tensors `keys` and `values`."""
        return self.keys.named(keys) | self.values.named(values)


EXACT = Tables(Vectors(("k",)), Vectors(("v",)))
"""The inputs of an operator over a prompt."""


def stored_tables(layout: Layout, keys: Tensor, values: Tensor) -> Tables:
    """Return an operator's inputs that are stored in the engine's format."""
    form = layout.cache_format
    of_keys, of_values = (
        Vectors(tuple(part_names(tensor, vector)), vector)
        for tensor, vector in ((keys, form.keys), (values, form.values))
    )
    return Tables(of_keys, of_values)
