"""The policies a user can name: those that the files of this package define.

A new method is one file beside this one; nothing is registered by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.methods.discovery import objects
from kvc_trt.methods.inputs import OVERRIDES, PolicyInputs, check_inputs
from kvc_trt.methods.layer_budget import SETTINGS, with_layer_budget
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.policy import Policy
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.schema import Operator


class Description(NamedTuple):
    """One policy as `kvc-trt policies` lists it."""

    name: str
    summary: str
    source: str
    prompt_eviction: str
    decode_selection: str
    overrides: tuple[str, ...]
    """What a user may fix by hand."""


def resolve(
    policy: str, *, model: ModelConfig, token_budget: int | None, max_input_len: int, max_output_len: int,
    split: str | float = "adaptive", **overrides: Any,
) -> PolicyParameters:  # fmt: skip
    """Derive every constant of a policy from a token budget and the longest request an engine will serve.

    Overrides (those that `describe` lists for the policy, and layer_budget, squeeze_share, layer_budgets) fix one
    setting by hand; None, and "auto" for pool_kernel and dense_until, leave it derived. Counts are tokens. Pure.
    InputError for an unknown policy or override (with the nearest name), one that this policy has no use for, and any
    value that cannot be right.
    """
    entry = named(policy)
    given = _given(overrides)
    for name in given:
        if name not in (*entry.overrides, *SETTINGS):
            taken = ", ".join(_setting(known) for known in entry.overrides)
            raise InputError(f"policy {policy} has no {_setting(name)}", hint=f"it takes {taken}")
    given = {**entry.fixed, **given}
    if entry.split is not None and split not in (entry.split, "adaptive"):
        raise InputError(f"policy {policy} fixes the split to {entry.split}, found {split!r}", hint="--policy rocketkv")
    inputs = PolicyInputs(policy, model, token_budget, max_input_len, max_output_len, entry.split or split, given)
    check_inputs(inputs)
    return with_layer_budget(entry.resolve(inputs), inputs)


def _setting(name: str) -> str:
    """What a user calls an override: scores of heads are given as a file."""
    return "head_pattern" if name == "head_scores" else name


def applicable(policy: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The given ones that this policy has a use for: how a model's defaults are offered to any policy."""
    names = named(policy).overrides
    return {name: value for name, value in overrides.items() if name in names}


def fixed(policy: str) -> Mapping[str, int]:
    """What a policy's name settles: a model's defaults do not change it, only a user does."""
    return named(policy).fixed


def named(policy: str) -> Policy:
    """The policy of that name. InputError for an unknown one, with the nearest."""
    known = objects(Policy)
    if policy not in known:
        raise InputError(f"unknown policy {policy!r}{did_you_mean(policy, known)}", hint="kvc-trt policies lists them")
    return known[policy]


def method(parameters: PolicyParameters) -> Policy:
    """The policy that these parameters were resolved for, with its compact and select."""
    return named(parameters.policy)


def available() -> list[tuple[str, str, str]]:
    """(name, one line, source) of every policy, in the order a user should read them."""
    return [(one.name, one.summary, one.source) for one in describe()]


def describe() -> list[Description]:
    """Every policy with its composition, in the order a user should read them."""
    return [
        Description(one.name, one.summary, one.source, one.eviction.name, one.selection.name, one.overrides)
        for one in sorted(objects(Policy).values(), key=_place)
    ]


def operators() -> Mapping[str, Operator]:
    """Every operator by its name, those that methods define in their own files included."""
    from kvc_trt.operators.registry import OPERATORS

    return {**OPERATORS, **objects(Operator)}


def _place(policy: Policy) -> tuple[int, bool, str]:
    """What does nothing, what does both, what evicts, what selects, what evicts at every step; oracles last. Among
    equals those first that RocketKV's paper sets side by side."""
    evicts, selection = policy.eviction.evicts, policy.selection
    families = (
        not evicts and not selection.reads_a_part,
        evicts and selection.reads_a_part,
        evicts and not selection.evicts_while_decoding,
        selection.reads_a_part and not selection.oracle,
        selection.evicts_while_decoding,
        True,
    )
    return families.index(True), policy.published is None, policy.name


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in OVERRIDES:
            hint = f"known: {', '.join(OVERRIDES)}"
            raise InputError(f"unknown policy override {name!r}{did_you_mean(name, OVERRIDES)}", hint=hint)
    derived = (("pool_kernel", "auto"), ("dense_until", "auto"))
    return {name: value for name, value in overrides.items() if value is not None and (name, value) not in derived}
