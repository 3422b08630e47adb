"""How long may the haystack be? The largest number of its units with which a prompt stays within the target."""

from __future__ import annotations

from collections.abc import Callable

from kvc_trt.errors import InputError
from kvc_trt.verify.tasks.sample import Encode


def fit_units(
    render: Callable[[int], str],
    *,
    task: str,
    encode: Encode,
    target_tokens: int,
    max_new_tokens: int,
    minimum: int = 1,
    maximum: int | None = None,
) -> int:
    """The largest n in [minimum, maximum] with tokens(render(n)) + max_new_tokens <= target_tokens.

    `render` gives the whole prompt with n units and must be pure. What is returned was measured, so it fits even where
    the length is not monotone in n; it is the largest where it is. Units of at least one token are never more than
    `target_tokens`, which bounds the search for any tokenizer. InputError if `minimum` units do not fit.
    """
    room = target_tokens - max_new_tokens
    tokens = len(encode(render(minimum)))
    if tokens > room:
        raise InputError(
            f"{task}: the shortest prompt has {tokens} tokens and {max_new_tokens} more are generated, "
            f"the target is {target_tokens}",
            hint=f"use a target of at least {tokens + max_new_tokens} tokens",
        )
    last = max(minimum, min(target_tokens, target_tokens if maximum is None else maximum))
    fits, excess = minimum, min(last, 2 * minimum + 1)
    while fits < excess and len(encode(render(excess))) <= room:  # doubling: no prompt is encoded far beyond the target
        fits, excess = excess, min(last, 2 * excess)
    while excess - fits > 1:
        middle = (fits + excess) // 2
        if len(encode(render(middle))) <= room:
            fits = middle
        else:
            excess = middle
    return fits


def require_positions(task: str, target_tokens: int, positions: int) -> None:
    """InputError unless a model of `positions` positions can hold prompt and answer of the target."""
    if target_tokens > positions:
        raise InputError(
            f"{task}: the target is {target_tokens} tokens, the model has {positions} positions",
            hint=f"use a target of at most {positions} tokens",
        )
