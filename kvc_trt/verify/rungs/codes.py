"""The rung of codes: check bit for bit that a cache with a format holds the codes of the engine's own keys and values.

These keys and values must be close to the reference's. In this rung and those above, the reference continues with the
engine's codes, because it might round a code, or a scale that changes a whole vector, in another direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.verify.checks import Check, Rung, at_most

if TYPE_CHECKING:
    from kvc_trt.verify.codes.following import KeysOff
    from kvc_trt.verify.codes.stored_tokens import CodesFound
    from kvc_trt.verify.engine_under_test import EngineUnderTest


def check_codes(tested: EngineUnderTest, rung: Rung) -> None:
    """Compare the contents of every cache after a prompt and its steps, and the exact keys and values behind them."""
    if not tested.has_codes:
        rung.reason = "the caches hold keys and values as they are computed"
        return
    stored = tested.observed.tokens
    if stored is None:
        rung.reason = f"{tested.target.describe()['backend']} does not show the keys and values that it stores"
        return
    rung.checks += codes_checks(stored.found)
    off = tested.forced_choices.keys_off
    assert off is not None
    rung.checks.append(keys_check(off, tested.thresholds.logits_max_error))


def codes_checks(found: CodesFound, of: str = "") -> list[Check]:
    """Return the checks of stored vectors, and of page bounds if there are any; `of` is the prefix of their names."""
    codes = at_most(f"{of}codes unlike their vectors'", f"{found.vectors} vectors", found.wrong, 0, found.first)
    if not found.bounds:
        return [codes]
    detail = found.first_bound
    bounds = at_most(f"{of}bounds unlike those of codes", f"{found.bounds} bounds", found.wrong_bounds, 0, detail)
    return [codes, bounds]


def keys_check(off: KeysOff, bar: float, of: str = "") -> Check:
    """Return the check of the engine's exact keys and values against the reference's."""
    error, place = off.worst
    note = f"relative to the largest element of the same tokens, at least 1; the largest is that of {place}"
    detail = "" if error <= bar else place
    return at_most(f"{of}keys and values: error", f"{off.vectors} vectors", error, bar, detail, note)
