"""RocketKV's division of one token budget into cache, pages, channels and tokens (arXiv 2502.14051).

The budget t is traffic: K+V pairs that one attention module reads per step and KV head. Half is spent on scores, half
on exact attention. Everything is computed once on the host in double precision and stored as integers. The default
width of stage 1's max-pooling is from the table of the paper's first version (arXiv 2502.14051v1).

Pages, channels and tokens read are an engine's. What stage 1 keeps is an engine's too, or each prompt's own: then S is
the prompt's length and the new tokens.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from kvc_trt.methods.base.token_budget import UP_TO_ROUNDING
from kvc_trt.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SHORT, LONG = 63, 511
LLAMA_3_1_THRESHOLD = 48_000
LONGCHAT_THRESHOLD = 12_000


def cache_capacity(sequence: int, budget: int, new_tokens: int, split: str | float) -> int:
    """Return the slots of the compressed cache: stage 1 compresses by S/t to the power that `split` gives it.

    At least twice the new tokens (the prompt keeps as many as will be generated), never more than the sequence.
    """
    compression = max(1.0, sequence / budget)
    if split == "adaptive":
        share = min(0.2 + 0.06 * math.log2(compression), 0.8)
    else:
        share = 0.5 if split == "even" else float(split)
    compressed = math.floor(sequence / math.pow(compression, share) * UP_TO_ROUNDING)
    return max(compressed, min(2 * new_tokens, sequence))


@lru_cache(maxsize=64)
def budgets_by_length(longest: int, budget: int, new_tokens: int, split: str | float, window: int) -> NDArray[np.int64]:
    """Return the tokens kept of a prompt of n tokens, INT64 [longest + 1], read-only.

    A prompt within the token budget stays whole, and the window of a longer one always stays. The numbers neither rise
    nor fall with n throughout: the adaptive split compresses the longest prompts to less than shorter ones.
    """
    import numpy as np

    kept = np.arange(longest + 1, dtype=np.int64)
    tokens = kept[budget + 1 :]
    sequence = (tokens + new_tokens).astype(np.float64)
    compression = np.maximum(1.0, sequence / budget)
    if split == "adaptive":
        share = np.minimum(0.2 + 0.06 * np.log2(compression), 0.8)
    else:
        share = np.full_like(compression, 0.5 if split == "even" else float(split))
    compressed = np.floor(sequence / np.power(compression, share) * UP_TO_ROUNDING).astype(np.int64)
    own = np.maximum(compressed, np.minimum(2 * new_tokens, tokens + new_tokens)) - new_tokens
    kept[budget + 1 :] = np.minimum(np.maximum(own, window), tokens)
    kept.flags.writeable = False
    return kept


def default_page_size(capacity: int, budget: int) -> int:
    """Return the tokens per page: the square root of stage 2's compression, at least 1."""
    compression = max(1.0, capacity / budget)
    pages = math.ceil(math.sqrt(compression))
    return 1 if pages > compression else pages


def default_channels(capacity: int, budget: int, page_size: int, head_size: int) -> int:
    """Return the channels read per page, in 1..head_size, so that scoring costs half of the budget."""
    compression = max(1.0, capacity / budget)
    return min(max(math.floor(head_size * page_size / compression), 1), head_size)


def traffic(capacity: int, page_size: int, top_r: int, top_k: int, head_size: int) -> float:
    """Return the K+V pairs read per step and KV head of a full cache; a page's channel is 1/(2 head_size) pair."""
    return capacity / page_size * top_r / head_size / 2 + min(top_k, capacity)


def auto_pool_kernel(model: ModelConfig, prompt_tokens: int) -> int:
    """Return 511 for long prompts of the two model families named in the paper, 63 for all others."""
    threshold = long_prompt(model)
    return SHORT if threshold is None or prompt_tokens < threshold else LONG


def long_prompt(model: ModelConfig) -> int | None:
    """Return the length from which a model's prompts are pooled by 511; None if none are.

    The rotary scaling identifies the two families: `llama3` is Llama 3.1 and later, `linear` without grouped queries is
    LongChat.
    """
    scaling = model.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        return LLAMA_3_1_THRESHOLD
    if scaling is not None and scaling.kind == "linear" and model.group_size == 1:
        return LONGCHAT_THRESHOLD
    return None
