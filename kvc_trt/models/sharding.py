"""The part of each weight that one of several ranks holds under tensor parallelism.

Attention is divided by KV head: a rank has some KV heads with all their query heads, so that the choice of tokens for
a KV head needs nothing of another rank. Its output projection has the columns of its query heads; gate and up have
rows, down the matching columns (Megatron-LM, arXiv 1909.08053). Both products are sums over the ranks. Of experts a
rank has such a part of each, not some of them whole: whichever a token chooses, all ranks read equally much. The head
is divided along the vocabulary; embedding, norms and routers are on every rank.

With fewer KV heads than ranks, several ranks hold the same KV head, and all query heads that share it: a choice of
tokens adds up the scores of the whole group. Of the output projection each then has its part of the group's columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig

Extent = tuple[Sequence[int], ...]
"""The places that belong to a part, ascending, axis by axis of a tensor: a range wherever they are one."""


@dataclass(frozen=True)
class RowsOfEach(Sequence[int]):
    """The rows `inner` of every matrix of a stack, counted from each start; computed one by one when they are read."""

    starts: range
    inner: range

    @override
    def __len__(self) -> int:
        return len(self.starts) * len(self.inner)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    @override
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(len(self))[place])
        block, row = divmod(range(len(self))[place], len(self.inner))
        return self.starts[block] + self.inner[row]

    @override
    def __iter__(self) -> Iterator[int]:
        return (start + row for start in self.starts for row in self.inner)


_PROJECTION = re.compile(
    r"\.(self_attn|mlp|mlp\.experts|mlp\.shared_expert)\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)$"
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Shard:
    """The part of one rank. Make all of them with `shards`, which refuses a number of ranks that cannot be."""

    model: ModelConfig
    rank: int
    ranks: int

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same KV heads; 1 if each rank has its own."""
        return max(1, self.ranks // self.model.num_key_value_heads)

    @property
    def kv_heads(self) -> range:
        """KV heads whose caches the rank holds."""
        return _part(self.model.num_key_value_heads, self.rank // self.copies, self.ranks // self.copies)

    @property
    def query_heads(self) -> range:
        """Query heads that the rank computes: all of its KV heads."""
        group = self.model.group_size
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

    @property
    def output_heads(self) -> range:
        """Query heads whose attention the rank projects back; those of all ranks make up every head once."""
        return _part(self.model.num_attention_heads, self.rank, self.ranks)

    @property
    def inner(self) -> range:
        """Channels of the feed-forward block, in layers without experts."""
        return _part(self.model.intermediate_size, self.rank, self.ranks)

    def inner_of_expert(self, *, shared: bool) -> range:
        """Channels of each expert, or of the one that reads every token."""
        experts = self.model.description.experts
        assert experts is not None
        return _part(experts.shared_size if shared else experts.size, self.rank, self.ranks)

    @property
    def vocabulary(self) -> range:
        """Token ids whose logits the rank computes. The last ranks have fewer where the number does not divide."""
        size, width = self.model.vocab_size, self.vocabulary_width
        return range(min(size, self.rank * width), min(size, (self.rank + 1) * width))

    @property
    def vocabulary_width(self) -> int:
        """Number of token ids of a rank that is not one of the last."""
        return -(-self.model.vocab_size // self.ranks)

    @cached_property
    def local(self) -> ModelConfig:
        """The model that the rank computes, with all of the vocabulary; a bias of the output is on rank 0 alone."""
        description, experts = self.model.description, self.model.description.experts
        if experts is not None:
            size, shared = (len(self.inner_of_expert(shared=of_all)) for of_all in (False, True))
            description = replace(description, experts=replace(experts, size=size, shared_size=shared))
        return replace(
            self.model,
            num_attention_heads=len(self.query_heads),
            num_key_value_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            output_bias=self.model.output_bias and self.rank == 0,
            description=description,
        )

    def extent(self, name: str, shape: tuple[int, ...]) -> Extent:
        """Return the part of the tensor of that Hugging Face name and whole shape.

        A bias of attention's output is on rank 0 alone, and empty on the others. One of `down` is whole on every rank:
        who reads it sets it to zero on all but rank 0.
        """
        whole = tuple(range(size) for size in shape)
        found = _PROJECTION.search(name)
        if name == HEAD:
            return (self.vocabulary, *whole[1:])
        if found is None:
            return whole
        block, projection, kind = found.groups()
        if projection in ("o", "down") and kind == "bias":
            return whole if projection == "down" or self.rank == 0 else (range(0),)
        if projection == "o":
            return (whole[0], self._channels(self.output_heads))
        if block == "self_attn":
            return (self._channels(self.query_heads if projection == "q" else self.kv_heads), *whole[1:])
        inner = self.inner if block == "mlp" else self.inner_of_expert(shared=block != "mlp.experts")
        if projection == "down":
            return (whole[0], inner)
        return (self._of_each_expert(inner, shape[0]) if block == "mlp.experts" else inner, *whole[1:])

    def _of_each_expert(self, inner: range, rows: int) -> Sequence[int]:
        """Return these rows of each expert, whose matrices stand one under the other."""
        experts = self.model.description.experts
        assert experts is not None
        return RowsOfEach(range(0, rows, experts.size), inner)

    def _channels(self, heads: range) -> range:
        size = self.model.head_size
        return range(heads.start * size, heads.stop * size)


def shards(model: ModelConfig, ranks: int) -> tuple[Shard, ...]:
    """Return the shard of each rank; InputError, with the numbers that are possible, if the model cannot be cut so."""
    problem = _problem(model, ranks)
    if problem is not None:
        able = [str(count) for count in range(2, model.num_attention_heads + 1) if _problem(model, count) is None]
        hint = f"--tp {' or '.join(able)}" if able else "leave out --tp: this model runs in one process"
        raise InputError(f"--tp {ranks}: {problem}", hint=hint)
    return tuple(Shard(model, rank, ranks) for rank in range(ranks))


def describe_shards(model: ModelConfig, ranks: int) -> str:
    """Return one line on the part that each rank holds, and the KV heads that are held several times."""
    first = shards(model, ranks)[0]
    kv_heads, group = model.num_key_value_heads, model.group_size
    each = f"{len(first.output_heads)} of {model.num_attention_heads} query heads"
    experts = model.description.experts
    inner = f"{len(first.inner):,} of {model.intermediate_size:,} channels of the feed-forward block"
    if experts is not None:
        inner = f"{len(first.inner_of_expert(shared=False)):,} of {experts.size:,} channels of each expert"
    if first.copies == 1:
        return f"each of {ranks} ranks has {each}, {len(first.kv_heads)} of {kv_heads} KV heads and {inner}"
    return (
        f"each of {ranks} ranks has {each} and {inner}; there are fewer KV heads ({kv_heads}) than ranks, so each is "
        f"on {first.copies} of them, with its cache and the projections of its {group} query heads"
    )


def _problem(model: ModelConfig, ranks: int) -> str | None:
    """Return why the model cannot be divided among this number of ranks; None if it can."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.linear_layers:
        return "linear layers (Gated DeltaNet) are not divided among ranks"
    if any(one.gated for one in model.description.attention):
        return "gates of attention's result are not divided among ranks"
    if any(model.description.later_parts.values()):
        return "capped logits, sinks of attention and clamped gates are not computed on ranks"
    if model.qk_norm and model.description.norms.heads == "together":
        return "a norm over all heads of queries or keys is not divided among ranks"
    if model.qk_norm and model.description.norms.heads == "apart":
        return "norms of queries and keys with other weights for each head are not divided among ranks"
    for count, what in ((heads, "query heads"), *_inner_channels(model)):
        if count % ranks:
            return f"{count} {what} cannot be divided among {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads can be neither divided among {ranks} ranks nor held by equally many each"
    return None


def _inner_channels(model: ModelConfig) -> list[tuple[int, str]]:
    """Return the numbers of channels between the matrices of feed-forward blocks, each with its name."""
    experts, found = model.description.experts, []
    if experts is None or experts.dense_layers:
        found.append((model.intermediate_size, "channels of the feed-forward block"))
    if experts is not None:
        found += [(experts.size, "channels of each expert"), (experts.shared_size, "channels of the shared expert")]
    return found


def _part(count: int, number: int, parts: int) -> range:
    """Return one of equal parts of range(count)."""
    size = count // parts
    return range(number * size, (number + 1) * size)
