"""Token budgets in percent, as SnapKV (arXiv 2404.14469, eq. 3) and SqueezeAttention (arXiv 2404.04793) state them.

A budget in percent is that share of an engine's longest prompt, once. SnapKV's share is of each prompt: of the tokens
before the observation window, that many stay beside it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokenBudget: TypeAlias = "int | str | None"
"""Tokens; a share such as "20%"; None for policies that need none."""
PERCENT = r"^[0-9]{1,3}(\.[0-9]{1,6})?%$"
UP_TO_ROUNDING = 1 + 2.0**-40
"""Lets a number that is an integer up to rounding be that integer: 29% of 100 tokens are 29, although the product of
the two floats is less, and the last bit of a `pow` may differ between machines."""


def share_of(budget: TokenBudget) -> float | None:
    """Return the share that a budget in percent names, over 0 to 1; None for tokens. InputError for another text."""
    if not isinstance(budget, str):
        return None
    share = float(budget[:-1]) / 100 if re.fullmatch(PERCENT, budget) else 0.0
    if not 0 < share <= 1:
        raise InputError(
            f"token_budget is {budget!r}; expected tokens, or a percentage over 0% to 100%", hint="--token-budget 20%"
        )
    return share


def tokens_of(budget: TokenBudget, max_input_len: int) -> int | None:
    """Return a budget in tokens: in percent, that share of the longest prompt, rounded down."""
    share = share_of(budget)
    return budget if share is None else int(max_input_len * share * UP_TO_ROUNDING)  # type: ignore[return-value]


@lru_cache(maxsize=64)
def budgets_by_share(longest: int, share: float, window: int) -> NDArray[np.int64]:
    """Return the tokens kept of a prompt of n tokens, INT64 [longest + 1], read-only.

    The window and floor(share (n - window)) of the tokens before it; a prompt within the window stays whole.
    """
    import numpy as np

    before = np.maximum(np.arange(longest + 1, dtype=np.int64) - window, 0)
    chosen = np.floor(before * share * UP_TO_ROUNDING).astype(np.int64)
    kept: NDArray[np.int64] = np.minimum(np.arange(longest + 1), window) + np.minimum(chosen, before)
    kept.flags.writeable = False
    return kept
