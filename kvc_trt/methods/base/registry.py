"""The policies that the files of this package define.

A new method is one new file in this package; nothing is registered by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.discovery import objects
from kvc_trt.methods.base.inputs import OVERRIDES, PolicyInputs, check_inputs, check_integer
from kvc_trt.methods.base.layer_budget import SETTINGS, with_layer_budget, with_layer_kinds
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.token_budget import TokenBudget, share_of, tokens_of
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.schema import Operator

if TYPE_CHECKING:
    from kvc_trt.methods.base.isolated_runs import PromptRun, StepRun, TurnRun


class Description(NamedTuple):
    """One policy as `kvc-trt policies` lists it."""

    name: str
    summary: str
    source: str
    prompt_eviction: str
    decode_selection: str
    overrides: tuple[str, ...]
    """Names of the numbers that a user can set."""
    turn: str | None
    """The tokens that a turn of a conversation evicts, in one sentence; None if there are no turns."""


def resolve(
    policy: str, *, model: ModelConfig, token_budget: TokenBudget, max_input_len: int, max_output_len: int,
    split: str | float = "adaptive", **overrides: Any,
) -> PolicyParameters:  # fmt: skip
    """Derive every constant of a policy from a token budget and the longest request an engine will serve.

    Overrides (those that `describe` lists for the policy, and layer_budget, squeeze_share, layer_budgets) set a number
    by hand; None, and "auto" for pool_kernel and dense_until, leave it derived. Counts are tokens; a token budget may
    be a share of the longest prompt, "20%", which SnapKV takes of each prompt (eq. 3). InputError for an unknown policy
    or override (suggesting the nearest name), for one or a split that the policy does not use, and for invalid values.
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
    if split != "adaptive" and not entry.divides:
        known = ", ".join(sorted(one.name for one in objects(Policy).values() if one.divides and one.split is None))
        raise InputError(f"policy {policy} has no split: it does not divide its budget", hint=f"it is for {known}")
    check_integer("max_input_len", max_input_len, 1)
    tokens, share = tokens_of(token_budget, max_input_len), share_of(token_budget)
    inputs = PolicyInputs(policy, model, tokens, max_input_len, max_output_len, entry.split or split, given, share)
    check_inputs(inputs)
    parameters = with_layer_kinds(with_layer_budget(entry.resolve(inputs), inputs), inputs)
    parameters.check_softmax(model)
    return parameters


def _setting(name: str) -> str:
    """Return the user's name of an override: scores of heads are given as a file."""
    return "head_pattern" if name == "head_scores" else name


def applicable(policy: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return those overrides that the policy uses, so that a model's defaults can be passed to any policy."""
    names = named(policy).overrides
    return {name: value for name, value in overrides.items() if name in names}


def fixed(policy: str) -> Mapping[str, int]:
    """Return the numbers fixed by a policy's name: only the user can change them, not a model's defaults."""
    return named(policy).fixed


def named(policy: str) -> Policy:
    """Return the policy of that name; InputError for an unknown one, suggesting the nearest."""
    known = objects(Policy)
    if policy not in known:
        raise InputError(f"unknown policy {policy!r}{did_you_mean(policy, known)}", hint="kvc-trt policies lists them")
    return known[policy]


def method(parameters: PolicyParameters) -> Policy:
    """Return the policy that these parameters were resolved for."""
    return named(parameters.policy)


def available() -> list[tuple[str, str, str]]:
    """Return (name, summary, source) of every policy, in reading order."""
    return [(one.name, one.summary, one.source) for one in describe()]


def describe() -> list[Description]:
    """Return every policy with its kinds, in reading order."""
    return [_description(one) for one in sorted(objects(Policy).values(), key=_place)]


def _description(policy: Policy) -> Description:
    kinds = policy.eviction.name, policy.selection.name
    turn = policy.turn or policy.eviction.turn
    return Description(policy.name, policy.summary, policy.source, *kinds, policy.overrides, turn)


def operators() -> Mapping[str, Operator]:
    """Return every operator by name, including those defined in the files of methods."""
    from kvc_trt.operators.registry import OPERATORS

    return {**OPERATORS, **objects(Operator)}


def prompt_runs() -> Mapping[str, PromptRun]:
    """Return the isolated run of every operator of an eviction, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}


def turn_runs() -> Mapping[str, TurnRun]:
    """Return the isolated run of every operator that an eviction has for turns alone, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.turn_runs().items()}


def step_runs() -> Mapping[str, StepRun]:
    """Return the isolated run of every operator of a selection, by name."""
    kinds = objects(DecodeSelection).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}


def _place(policy: Policy) -> tuple[int, bool, str]:
    """Sort key: policies that do nothing, do both, evict, select, evict at every step; oracles last.

    Within a class, policies compared in RocketKV's paper come first."""
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
