"""How long may the haystack be? The largest number of its units with which a prompt stays within the target."""

from __future__ import annotations

from collections.abc import Callable

from kvc_trt.errors import InputError
from kvc_trt.tasks.sample import Encode


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

    def tokens(units: int) -> int:
        return len(encode(render(units)))

    fits, below = minimum, tokens(minimum)
    if below > room:
        raise InputError(
            f"{task}: the shortest prompt has {below} tokens and {max_new_tokens} more are generated, "
            f"the target is {target_tokens}",
            hint=f"use a target of at least {below + max_new_tokens} tokens",
        )
    last = max(minimum, target_tokens if maximum is None else min(target_tokens, maximum))
    excess, above = fits, below
    while above <= room:  # doubling: no prompt is encoded far beyond the target
        fits, below = excess, above
        if fits == last:
            return fits
        excess = min(last, 2 * fits + 1)
        above = tokens(excess)
    halve = False
    while excess - fits > 1:  # a prompt is about as long as its units are many; halving in turn bounds the steps
        share = 0.5 if halve else (room - below) / (above - below)
        probe = min(max(fits + int(share * (excess - fits)), fits + 1), excess - 1)
        if (found := tokens(probe)) <= room:
            fits, below = probe, found
        else:
            excess, above = probe, found
        halve = not halve
    return fits


def require_positions(task: str, target_tokens: int, positions: int) -> None:
    """InputError unless a model of `positions` positions can hold prompt and answer of the target."""
    if target_tokens > positions:
        raise InputError(
            f"{task}: the target is {target_tokens} tokens, the model has {positions} positions",
            hint=f"use a target of at most {positions} tokens",
        )
