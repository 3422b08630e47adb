"""A policy that a user can name: two kinds, and how a token budget becomes their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvc_trt.methods.constants import Constants
from kvc_trt.methods.inputs import PolicyInputs
from kvc_trt.methods.kinds import DecodeSelection, PromptEviction
from kvc_trt.methods.parameters import PolicyParameters

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection


@dataclass(frozen=True)
class Formula:
    """What a paper says of a method: storage and traffic as fractions of dense, of the compression c."""

    storage: Callable[[float], float]
    traffic: Callable[[float], float]


@dataclass(frozen=True)
class Policy:
    """One line of `kvc-trt policies`. A method's file defines those that it introduces."""

    name: str
    summary: str
    source: str
    eviction: PromptEviction
    selection: DecodeSelection
    resolve: Callable[[PolicyInputs], PolicyParameters]
    """All constants of the policy for one engine."""
    overrides: tuple[str, ...] = ()
    """What a user may fix by hand."""
    split: str | None = None
    """The only division of the budget between two stages that it knows."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """What its name settles: a model's defaults do not change it, only a user does."""
    published: Formula | None = None
    """Its line of RocketKV's Table 1 (arXiv 2502.14051)."""

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: Constants
    ) -> Compacted:
        """What is left of a prompt's cache, [B,G,S,D]; `observed` are usually the last queries, [B,H,W,D]."""
        return self.eviction.compact(observed, keys, values, prompt_lengths, parameters)

    def select(self, query: Tensor, cache: LayerCache, parameters: Constants) -> Selection:
        """Attention of one step [B,H,D] over a cache that holds the current token; what was read, and what stays."""
        return self.selection.select(query, cache, parameters)
