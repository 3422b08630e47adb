"""The part of each weight that one of several ranks holds under tensor parallelism.

Attention is divided by KV head: a rank has some KV heads with all their query heads, so that the choice of tokens for
a KV head needs nothing of another rank. Its output projection has the columns of its query heads; gate and up have
rows, down the matching columns (Megatron-LM, arXiv 1909.08053). Both products are sums over the ranks. The head is
divided along the vocabulary; embedding and norms are on every rank.

With fewer KV heads than ranks, several ranks hold the same KV head, and all query heads that share it: a choice of
tokens adds up the scores of the whole group. Of the output projection each then has its part of the group's columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig

Extent = tuple[range, ...]
"""One range per axis of a tensor."""

_PROJECTION = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)$")
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
        """Channels of the feed-forward block."""
        return _part(self.model.intermediate_size, self.rank, self.ranks)

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
        return replace(
            self.model,
            num_attention_heads=len(self.query_heads),
            num_key_value_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            output_bias=self.model.output_bias and self.rank == 0,
        )

    def extent(self, name: str, shape: tuple[int, ...]) -> Extent:
        """Return the part of the tensor of that Hugging Face name and whole shape; empty for a bias of another rank."""
        whole = tuple(range(size) for size in shape)
        found = _PROJECTION.search(name)
        if name == HEAD:
            return (self.vocabulary, *whole[1:])
        if found is None:
            return whole
        projection, kind = found.groups()
        if projection in ("o", "down"):
            if kind == "bias":
                return whole if self.rank == 0 else (range(0),)
            return (whole[0], self._channels(self.output_heads) if projection == "o" else self.inner)
        rows = self.inner
        if projection in ("q", "k", "v"):
            rows = self._channels(self.query_heads if projection == "q" else self.kv_heads)
        return (rows, *whole[1:])

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
    """Return one line on what each rank holds, and which KV heads are held several times."""
    first = shards(model, ranks)[0]
    kv_heads, group = model.num_key_value_heads, model.group_size
    each = f"{len(first.output_heads)} of {model.num_attention_heads} query heads"
    inner = f"{len(first.inner):,} of {model.intermediate_size:,} channels of the feed-forward block"
    if first.copies == 1:
        return f"each of {ranks} ranks has {each}, {len(first.kv_heads)} of {kv_heads} KV heads and {inner}"
    return (
        f"each of {ranks} ranks has {each} and {inner}; there are fewer KV heads ({kv_heads}) than ranks, so each is "
        f"on {first.copies} of them, with its cache and the projections of its {group} query heads"
    )


def _problem(model: ModelConfig, ranks: int) -> str | None:
    """Return why the model cannot be divided among this number of ranks; None if it can."""
    heads, kv_heads, inner = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
    if model.description.experts is not None:
        return "feed-forward blocks of experts are not divided among ranks"
    if model.linear_layers:
        return "linear layers (Gated DeltaNet) are not divided among ranks"
    if any(one.gated for one in model.description.attention):
        return "gates of attention's result are not divided among ranks"
    if any(model.description.later_parts.values()):
        return "capped logits, sinks of attention and clamped gates are not computed on ranks"
    if model.rotary_bases:
        return "sliding layers with a rotary base of their own are not divided among ranks"
    if model.description.feed_forward.bias:
        return "biases of the feed-forward block are not divided among ranks"
    if model.qk_norm and model.description.norms.heads == "together":
        return "a norm over all heads of queries or keys is not divided among ranks"
    for count, what in ((heads, "query heads"), (inner, "channels of the feed-forward block")):
        if count % ranks:
            return f"{count} {what} cannot be divided among {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads can be neither divided among {ranks} ranks nor held by equally many each"
    return None


def _part(count: int, number: int, parts: int) -> range:
    """Return one of equal parts of range(count)."""
    size = count // parts
    return range(number * size, (number + 1) * size)
