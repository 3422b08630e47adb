"""The options of a decoder, beside its model, its policy and its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvc_trt.backends.torch.memory import PREFILL_BLOCK
from kvc_trt.backends.torch.model.elementwise import AS_WRITTEN, Elementwise

if TYPE_CHECKING:
    from kvc_trt.methods.base.parameters import PolicyParameters

DenseAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""query [B,H,D], k_new, v_new [B,G,D], k_cache, v_cache (written), cache_lengths [B] -> [B,H,D]; no format."""


@dataclass(frozen=True)
class DecoderOptions:
    """The options of a `TorchDecoder`."""

    cache_dtype: torch.dtype
    expose: Collection[str] = ()
    """Names of values that each run stores in `TorchDecoder.exposed`: keys.L and values.L of a prompt or a turn,
    q_window.L and indices.L of compaction, query.L, key.L, value.L, attended.L and selected.L of a step."""
    elementwise: Elementwise = AS_WRITTEN
    """The functions between the products."""
    dense_attention: DenseAttention | None = None
    """Attends in layers that read their whole cache; None: our kernel."""
    block: int = PREFILL_BLOCK
    """The number of tokens per block of a prefill's projections and feed-forward."""
    turns: bool = False
    """True if a prefill also returns the state that a turn needs."""
    twin_of: PolicyParameters | None = None
    """The parameters of the engine whose dense twin this is. The twin runs by nodes the same parts as that engine, so
    that both agree bit for bit."""
