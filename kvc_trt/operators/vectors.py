"""Keys or values in the body of an operator: the vectors themselves, or the parts in which a cache stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc_trt.models.cache_formats import GROUP
from kvc_trt.operators.cache_formats import write_codes, write_read, write_stored, write_values
from kvc_trt.operators.schema import Tensor, part_names
from kvc_trt.operators.shapes import Layout, float32, one, scalar, size

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
        """Apply `change` to every part and return the result: a choice or a move of tokens, never of channels."""
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def widths(self, head_size: int) -> tuple[int, ...]:
        """Return the length of each part's last axis."""
        if self.format is None:
            return (head_size,)
        groups = self.format.groups(head_size)
        return (self.format.code_bytes(head_size), *[groups] * (len(self.parts) - 1))

    def of_head(self, emit: Emitter, head: Value) -> Value:
        """Return the vectors of one KV head as they are read, FLOAT [B,n,D]."""
        return self.map(lambda part: emit.Gather(part, head, axis=1)).widened(emit)

    def widened(self, emit: Emitter) -> Value:
        """Return the vectors as they are read, FLOAT [...,D]."""
        if self.format is None:
            return float32(emit, self.parts[0])
        return write_read(emit, self.parts, self.format)

    def stored(self, emit: Emitter, form: VectorFormat | None) -> Vectors:
        """Return exact vectors in a format; vectors that have one stay as they are."""
        if form is None or self.format is not None:
            return self
        return Vectors(write_stored(emit, float32(emit, self.parts[0]), form), form)

    def named(self, tensor: Tensor) -> dict[str, Value]:
        """Return the parts by the names that they have as an operator's tensor."""
        return dict(zip(part_names(tensor, self.format), self.parts, strict=True))

    def codes(self, emit: Emitter) -> Value:
        """Return the vectors if they are exact, else their codes, one for each channel."""
        return self.parts[0] if self.format is None else write_codes(emit, self.parts[0], self.format)

    def widened_channels(self, emit: Emitter, codes: Value, channels: Value, tokens: Value) -> Value:
        """Return some channels of the first `tokens` (scalar) vectors [B,G,n,D] as they are read, FLOAT [B,G,r,tokens].

        `codes` [B,G,r,tokens] are the channels themselves if the vectors are exact; `channels` INT64 [B,G,r,1]."""
        if self.format is None:
            return float32(emit, codes)
        of_group = emit.Div(channels, GROUP) if self.format.grouped else None
        numbers = []
        for part in self.parts[1:]:
            by_group = emit.Transpose(emit.Slice(part, [0], one(emit, tokens), [2]), perm=[0, 1, 3, 2])
            if of_group is not None:
                last = emit.Sub(size(emit, by_group, 2), 1)
                by_group = emit.GatherND(by_group, emit.Min(of_group, last), batch_dims=2)
            numbers.append(by_group)
        return write_values(emit, codes, numbers, self.format)

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
        """The parts of the keys, then those of the values."""
        return self.keys.parts + self.values.parts

    def map(self, change: Callable[[Value], Value]) -> Tables:
        """Apply `change` to every part and return the result."""
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
        """Apply `put` to every part and the same part of the `new` tokens, and return the results."""
        return self.of([put(part, other) for part, other in zip(self.parts, new.parts, strict=True)])

    def first(self, emit: Emitter, count: Value) -> Tables:
        """Return the first tokens; `count` is a scalar."""
        return self.map(lambda part: emit.Slice(part, [0], one(emit, count), [2]))

    def as_rows(self, emit: Emitter, head_size: int) -> Tables:
        """Return the tokens of all rows and heads one after the other, [B*G*n,.]."""
        widths = self.keys.widths(head_size) + self.values.widths(head_size)
        return self.of([emit.Reshape(part, [-1, width]) for part, width in zip(self.parts, widths, strict=True)])

    def read(self, emit: Emitter) -> tuple[Value, Value]:
        """Return keys and values as they are read: in their own type if they are exact, else FLOAT."""
        return self.keys.read(emit), self.values.read(emit)

    def stored(self, emit: Emitter, layout: Layout) -> Tables:
        """Return exact tables of many tokens in the engine's format; tables that have a format stay as they are.

        One KV head at a time: storing computes several tables of the size of its input on the way, which take memory,
        and several times as long if they are larger than a processor's caches.
        """
        if layout.cache_format.keys is None or self.keys.format is not None:
            return self
        made: list[Tables] = []

        def one_head(body: Emitter, head: Value) -> tuple[Value, ...]:
            made.append(self.map(lambda part: body.Gather(part, head, axis=1)).stored_at_once(body, layout))
            return made[0].parts

        by_head = emit.collect_all(scalar(emit, size(emit, self.keys.parts[0], 1)), one_head)
        return made[0].of([str(emit.Transpose(part, perm=[1, 0, 2, 3])) for part in by_head])

    def stored_at_once(self, emit: Emitter, layout: Layout) -> Tables:
        """Return exact tables [...,D] of few tokens in the engine's format; tables that have a format stay as they
        are."""
        form = layout.cache_format
        return Tables(self.keys.stored(emit, form.keys), self.values.stored(emit, form.values))

    def named(self, keys: Tensor, values: Tensor) -> dict[str, Value]:
        """Return all parts by the names that they have as an operator's tensors `keys` and `values`."""
        return self.keys.named(keys) | self.values.named(values)


NEW = Tables(Vectors(("k_new",)), Vectors(("v_new",)))
"""The inputs of an operator that stores new tokens."""
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
