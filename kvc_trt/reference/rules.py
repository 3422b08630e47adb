"""What a decoder has to know of a policy: its numbers by cache, and what it keeps and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvc_trt.reference.cache import LayerCache, Selection
from kvc_trt.reference.compaction import Compacted


class PromptQueries(NamedTuple):
    """The queries of prompts, and how positions rotate them."""

    window: Tensor
    """[B,H,W,D]: the last W of each row after RoPE, up to the end; zeros before."""
    plain: Callable[[], Tensor]
    """[B,H,S,D]: all of them before RoPE, position i in row i; zeros past a row's end."""
    rotary_tables: tuple[Tensor, Tensor]
    """Cosine and sine of every position, [L,D/2]."""


class Rule(Protocol):
    """The numbers of a policy, or of one of its caches (`PolicyParameters`)."""

    @property
    def policy(self) -> str:
        """Its name: a cache that another policy rules is left whole and read whole."""

    @property
    def max_input_len(self) -> int:
        """The longest prompt."""

    @property
    def max_sequence_len(self) -> int:
        """The longest prompt and everything generated after it."""

    @property
    def capacity(self) -> int:
        """Slots of a cache."""

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens kept."""

    @property
    def most_kept(self) -> int:
        """Prompt tokens that a cache has room for."""

    @property
    def window(self) -> int:
        """Last queries of a prompt that decide what stays."""

    @property
    def page_size(self) -> int:
        """Consecutive slots that share bounds."""

    @property
    def has_pages(self) -> bool:
        """Whether the cache carries the bounds of its pages."""

    @property
    def sinks(self) -> int:
        """First tokens that are never evicted."""

    @property
    def future_positions(self) -> int:
        """Positions after a prompt at which queries are expected, where these decide what stays; else 0."""

    @property
    def positions(self) -> str:
        """What the rotary embedding counts: tokens of the text ("original"), or entries of the cache ("cache")."""

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether a step drops a token for each that it appends."""

    @property
    def drops_before_append(self) -> bool:
        """Whether it drops the oldest token that is no sink, before the new one is stored."""

    @property
    def skip_layers(self) -> int:
        """First layers that are not compressed."""

    @property
    def squeeze_share(self) -> float | None:
        """What unimportant layers keep of the prompt budget, where budgets are set for each prompt."""

    def groups(self, layer: int) -> Sequence[Group]:
        """One layer's caches."""

    def observe(self, queries: PromptQueries, prompt_lengths: Tensor) -> Any:
        """What compaction looks at."""

    def keeping(self, prompt_budget: int) -> Rule:
        """The same rule with another prompt budget."""


class Group(Protocol):
    """KV heads of one layer that share a cache and a rule."""

    @property
    def kv_heads(self) -> tuple[int, ...] | None:
        """Ascending; None is all of them."""

    @property
    def parameters(self) -> Rule:
        """Of this cache alone."""


class Method(Protocol):
    """What a policy keeps of a prompt, and what a step reads. `parameters` are the rule of the cache."""

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: Any
    ) -> Compacted:
        """What is left of a prompt's cache: keys and values [B,G,S,D]; `observed` are the last queries [B,H,W,D], or
        what else the rule observes."""

    def select(self, query: Tensor, cache: LayerCache, parameters: Any) -> Selection:
        """Attention of one step [B,H,D] over a cache that holds the current token; what was read, and what stays."""
