"""The candidates: policies with their settings and cache formats, at the token budgets that fit a row's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvc_trt import policies
from kvc_trt.accuracy.grid import Variant
from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.policies import BASELINE
from kvc_trt.sizes import readable_size

RowBytes = Callable[[Variant], int]
"""Bytes of cache that an engine allocates for one sequence. InputError where there is no engine of that budget."""
STEP = 32
"""Token budgets are multiples of this."""
SPARED = 0.75
"""The largest share of the whole cache's bytes, in the same format, at which a method is tried that saves nothing else:
with more of them there is little to choose it for."""
SMALLER = (1.0, 0.5)
"""Shares of the largest budget that fits at which a method is tried: a smaller one may do as well."""
FORMATS = (AUTO, "int8", "int4")
"""Cache formats that are tried where none are named."""
ALTERNATIVES = {"pool_kernel": ("pool_kernel=17",), "layer_budget": ("layer_budget=squeeze",)}
"""By a setting that a policy may have: the alternatives tried beside its own choice. The pool carries a vote over a
number of seven digits, where SnapKV's own carries it over three."""


@dataclass(frozen=True)
class Candidate:
    """A method at one budget, and the bytes of a row of it."""

    variant: Variant
    row_bytes: int

    def __str__(self) -> str:
        return str(self.variant)


@dataclass(frozen=True)
class Candidates:
    """The candidates that fit, the smallest rows first, and why other methods are not tried."""

    fitting: tuple[Candidate, ...]
    refused: Mapping[str, str]
    """By method: the bytes of its smallest engine, or the reason that there is none."""
    too_large: Candidate | None = None
    """The smallest row of all that do not fit; None where no engine was too large."""


def method_names(named: Sequence[str] | None, formats: Sequence[str] | None, *, measures_layers: bool) -> list[str]:
    """Return the methods to try: policies with settings after colons.

    `named` None takes every policy that is a candidate by default, with its ALTERNATIVES, those of layers where they
    can be measured and for caches as they are. A policy that a user names is tried as it is, in every format unless it
    has its own. InputError for an unknown policy or format.
    """
    known = [one.name for one in policies.describe()]
    for name in (one.partition(":")[0] for one in named or ()):
        if name not in known:
            raise InputError(f"unknown policy {name!r}{did_you_mean(name, known)}", hint="kvc-trt policies lists them")
        if policies.named(name).selection.oracle:
            raise InputError(f"policy {name} has no engine: there is nothing to choose it for", hint="kvc-trt policies")
    for form in formats or ():
        if form not in CACHE_FORMATS:
            near = did_you_mean(form, CACHE_FORMATS)
            raise InputError(f"unknown cache format {form!r}{near}", hint=f"formats: {', '.join(CACHE_FORMATS)}")
    if named:
        return list(methods(named, formats or FORMATS))
    own = [name for name in known if policies.named(name).candidate]
    settings = {name: tuple(_alternatives(name, measures_layers)) for name in own}
    found = methods(own, formats or FORMATS, settings)
    return [name for name in found if not {"layer_budget", "kv_cache"} <= Variant(name, None).settings.keys()]


def _alternatives(policy: str, measures_layers: bool) -> Iterator[str]:
    """The policy as it is, and with each setting that it may have."""
    yield ""
    rule = policies.named(policy)
    for setting, values in ALTERNATIVES.items():
        if setting == "layer_budget":  # any policy may have it; it was published for those that evict as they decode
            fits = measures_layers and rule.selection.evicts_while_decoding
        else:
            fits = setting in rule.overrides
        if fits:
            yield from values


def methods(
    names: Iterable[str], formats: Sequence[str], settings: Mapping[str, Sequence[str]] | None = None
) -> Iterator[str]:
    """Return every name in every cache format, with every combination of its own settings.

    `formats` are values of `kv_cache`; `settings` are, by name, alternatives such as `pool_kernel=7:window=32`; an
    empty one is the policy as it is. A name that says its format has no other.
    """
    for name in dict.fromkeys(names):
        own_format = "kv_cache" in Variant(name, None).settings
        for form in (AUTO,) if own_format else dict.fromkeys(formats):
            for own in (settings or {}).get(name, ("",)):
                parts = (name, own, "" if form == AUTO else f"kv_cache={form}")
                yield ":".join(part for part in parts if part)


def candidates(names: Iterable[str], row_bytes: RowBytes, limit: int, longest: int) -> Candidates:
    """The methods at the largest token budget of at most `longest` whose row has at most `limit` bytes, and at parts.

    A row's bytes never shrink when the budget grows, so the largest that fits is found by halving. Methods whose steps
    read all that is stored are tried up to SPARED of the whole cache.
    """
    found: dict[Variant, Candidate] = {}
    refused: dict[str, str] = {}
    too_large: list[Candidate] = []
    for name in names:
        for variant in _at_budgets(name, row_bytes, limit, longest):
            try:
                size = row_bytes(variant)
            except InputError as error:
                refused.setdefault(name, error.message)
                continue
            if size <= limit:
                found[variant] = Candidate(variant, size)
            else:
                too_large.append(Candidate(variant, size))
                reason = f"a row takes {readable_size(size)}, and {readable_size(limit)} are given"
                refused.setdefault(name, reason)
        if any(variant.policy == name for variant in found):
            refused.pop(name, None)
    ordered = sorted(found.values(), key=lambda one: (one.row_bytes, str(one)))
    return Candidates(tuple(ordered), refused, min(too_large, key=lambda one: one.row_bytes, default=None))


def _at_budgets(name: str, row_bytes: RowBytes, limit: int, longest: int) -> list[Variant]:
    if Variant.of(name, STEP).token_budget is None:
        return [Variant(name, None)]
    largest = _largest(name, row_bytes, min(limit, _useful(name, row_bytes)), longest)
    return [Variant(name, budget) for budget in dict.fromkeys(_multiple(largest * share) for share in SMALLER)]


def _useful(name: str, row_bytes: RowBytes) -> float:
    """The most bytes of a row at which the method can be worth it."""
    method = Variant(name, None)
    if policies.named(method.name).selection.reads_a_part:
        return float("inf")
    return SPARED * row_bytes(whole_in(method.settings.get("kv_cache", AUTO)))


def whole_in(form: str) -> Variant:
    """The whole cache in a format."""
    return Variant(BASELINE if form == AUTO else f"{BASELINE}:kv_cache={form}", None)


def _largest(name: str, row_bytes: RowBytes, limit: float, longest: int) -> int:
    """The largest budget that fits, in steps; the smallest one that has an engine where none fits."""

    def fits(steps: int) -> bool:
        try:
            return row_bytes(Variant(name, steps * STEP)) <= limit
        except InputError:
            return True  # too small for the method: larger ones are tried

    low, high = 1, max(1, longest // STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * STEP


def _multiple(budget: float) -> int:
    return max(STEP, int(budget) // STEP * STEP)
