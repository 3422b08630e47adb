"""A named policy: two kinds, and how their numbers are derived from a token budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.prompt_eviction import PromptEviction

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn


@dataclass(frozen=True)
class Formula:
    """Published formulas of a method: storage and traffic as fractions of dense, given the compression c."""

    storage: Callable[[float], float] | None
    """None where the published formula is for another division of the budget."""
    traffic: Callable[[float], float]


@dataclass(frozen=True)
class Policy:
    """A policy, one line of `kvc-trt policies`; defined in the file of its method."""

    name: str
    summary: str
    source: str
    eviction: PromptEviction
    selection: DecodeSelection
    resolve: Callable[[PolicyInputs], PolicyParameters]
    """Derives all constants of the policy for one engine."""
    overrides: tuple[str, ...] = ()
    """Names of the numbers that a user can set."""
    split: str | None = None
    """The only supported division of the budget between two stages."""
    divides: bool = False
    """True if the budget is divided between two stages, by `split`."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Numbers fixed by the policy's name: only the user can change them, not a model's defaults."""
    turn: str | None = None
    """The effect of a turn of a conversation, if `PromptEviction.turn` does not say all of it."""
    candidate: bool = False
    """True if `kvc-trt tune` tries it where no policies are named: of those that differ by a number one is enough, and
    one that takes seconds to read a prompt is for whoever names it."""
    published: Formula | None = None
    """Its formulas in RocketKV's Table 1 (arXiv 2502.14051)."""

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: Constants
    ) -> Compacted:
        """Compact a prompt's cache [B,G,S,D]; `observed` is usually the last queries [B,H,W,D]."""
        return self.eviction.compact(observed, keys, values, prompt_lengths, parameters)

    def compact_turn(self, turn: Turn, parameters: Constants) -> Compacted:
        """Compact stored and new tokens after a turn."""
        return self.eviction.compact_turn(turn, parameters)

    def select(self, query: Tensor, cache: LayerCache, parameters: Constants) -> Selection:
        """Run one step [B,H,D] over a cache that holds the current token."""
        return self.selection.select(query, cache, parameters)
