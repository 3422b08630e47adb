"""Divide the budget among layers, evenly or as SqueezeAttention does, for any eviction.

`squeeze` divides once, by cosines that a build measures on calibration prompts. `squeeze-online` divides for each
prompt in the prefill graph: every layer has room for twice the budget (`squeeze_cap` times) and is trimmed once all
cosines are known.

Layers that the model lets slide have no budget: each of them keeps its window in a ring, and so computes the same as
the model. A layer whose window covers the engine's longest sequence attends to everything, and the policy acts on it as
on any other if it rotates as those do (`ModelConfig.windows`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import DEFAULT_CAP, LARGEST_CAP
from kvc_trt.methods.base.inputs import PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.token_budget import UP_TO_ROUNDING

DEFAULT_SHARE = 0.35
"""Default of `squeeze_share`, within the paper's 0.3 to 0.4 (arXiv 2404.04793)."""
LAYER_BUDGETS = ("uniform", "squeeze", "squeeze-online")
SETTINGS = ("layer_budget", "squeeze_share", "squeeze_cap", "layer_budgets")
"""Overrides that every policy that evicts accepts."""


def with_layer_budget(parameters: PolicyParameters, inputs: PolicyInputs) -> PolicyParameters:
    """Return `parameters` with layer budgets; unchanged for `squeeze` without measured budgets.

    InputError if the policy evicts nothing or already has layer budgets, and for invalid numbers.
    """
    kind = inputs.choice("layer_budget", "uniform")
    share = inputs.choice("squeeze_share", DEFAULT_SHARE)
    budgets = inputs.choice("layer_budgets", None)
    if kind not in LAYER_BUDGETS:
        raise InputError(f"layer_budget is {kind!r}; expected one of {', '.join(LAYER_BUDGETS)}")
    if kind != "squeeze-online":
        _unused("squeeze_cap", "squeeze_cap" in inputs.overrides, "squeeze-online")
    if kind == "uniform":
        _unused("squeeze_share", "squeeze_share" in inputs.overrides)
        _unused("layer_budgets", budgets is not None)
        return parameters
    _check_evicts(parameters, kind)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise InputError(f"squeeze_share is {share!r}; expected a number over 0, up to 1")
    if kind == "squeeze-online":
        _unused("layer_budgets", budgets is not None)
        return _online(parameters, float(share), _cap(inputs.choice("squeeze_cap", DEFAULT_CAP)))
    if budgets is None:
        return parameters
    return replace(parameters, layer_budgets=_checked(budgets, parameters, inputs))


def with_layer_kinds(parameters: PolicyParameters, inputs: PolicyInputs) -> PolicyParameters:
    """Return `parameters` with the windows of the model's sliding layers, and with its linear layers.

    InputError if the policy divides a budget: a division among layers would count those to which none is given. So too
    if it compresses, and every layer slides: each ring holds what the model attends to, and nothing is left to choose.
    """
    linear, layers = inputs.model.linear_layers, inputs.model.num_hidden_layers
    if linear:
        _check_undivided(parameters, inputs, f"{len(linear)} of {layers} are linear", "")
    windows = inputs.model.windows(parameters.max_sequence_len)
    if windows is not None:
        longest = min(filter(None, windows))
        shorter = f", or sequences of at most {longest} tokens" if inputs.model.windows(longest) is None else ""
        sliding = f"{sum(map(bool, windows))} of {layers} slide in sequences of {parameters.max_sequence_len} tokens"
        if all(windows) and parameters.compresses:
            raise InputError(
                f"policy {parameters.policy} compresses layers of full attention, and in {inputs.model.architecture} "
                f"{sliding}",
                hint=f"--policy full, with which each keeps its window{shorter}",
            )
        _check_undivided(parameters, inputs, sliding, shorter)
    return replace(parameters, layer_windows=windows, linear_layers=linear or None)


def _check_undivided(parameters: PolicyParameters, inputs: PolicyInputs, others: str, way_out: str) -> None:
    """Raise InputError if the policy divides a budget; `others` says which layers get none of it."""
    kind = inputs.choice("layer_budget", "uniform")
    divides = {
        f"--layer-budget {kind}": kind != "uniform",
        f"policy {parameters.policy}": parameters.layer_budgets is not None or parameters.retrieval_heads is not None,
    }
    for what, divided in divides.items():
        if divided:
            raise InputError(f"{what} divides a budget among all layers, and {others}", hint=f"another policy{way_out}")


def uniform_budget(parameters: PolicyParameters) -> int:
    """Return the tokens per layer before division: of the prompt, or of everything if a step evicts."""
    if parameters.evicts_while_decoding:
        return parameters.capacity - parameters.spare_slots
    return parameters.prompt_budget


def smallest_budget(parameters: PolicyParameters) -> int:
    """Return the smallest budget of a layer: the least that its eviction needs, or the sinks and one token."""
    return parameters.sinks + 1 if parameters.evicts_while_decoding else parameters.eviction.least(parameters)


def largest_budget(parameters: PolicyParameters) -> int:
    """Return the largest useful budget of a layer: the longest prompt, or the whole sequence if a step evicts."""
    return parameters.max_sequence_len if parameters.evicts_while_decoding else parameters.max_input_len


def _check_evicts(parameters: PolicyParameters, kind: str) -> None:
    if not parameters.eviction.evicts:
        raise InputError(f"--layer-budget {kind}: policy {parameters.policy} evicts nothing", hint="kvc-trt policies")
    if parameters.layer_budgets is not None or parameters.retrieval_heads is not None:
        raise InputError(
            f"--layer-budget {kind}: policy {parameters.policy} divides its budget itself", hint="kvc-trt policies"
        )


def _cap(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 1 <= given <= LARGEST_CAP:
        raise InputError(f"squeeze_cap is {given!r}; expected 1 to {LARGEST_CAP:g} times the prompt budget")
    return float(given)


def _online(parameters: PolicyParameters, share: float, cap: float) -> PolicyParameters:
    reason = _not_trimmed(parameters)
    if reason is not None:
        raise InputError(
            f"--layer-budget squeeze-online: policy {parameters.policy} cannot be divided for each prompt: {reason}",
            hint="--layer-budget squeeze",
        )
    online = replace(parameters, squeeze_share=share, squeeze_cap=cap)
    if parameters.evicts_while_decoding:
        return _by_row(online, uniform_budget(parameters))
    return replace(online, capacity=online.most_kept + parameters.max_output_len)


def _by_row(online: PolicyParameters, budget: int) -> PolicyParameters:
    """Return the parameters of caches whose rows have budgets of their own, with `budget` as the mean."""
    eviction, selection = online.eviction.by_row, online.selection.by_row
    assert eviction is not None, "it is trimmed"
    assert selection is not None, "it is trimmed"
    most = min(int(online.squeeze_cap * budget * UP_TO_ROUNDING), online.max_sequence_len)
    return replace(
        online, prompt_eviction=eviction.name, decode_selection=selection.name, token_budget=budget,
        capacity=most + selection.spare_slots, top_k=most + selection.spare_slots,
    )  # fmt: skip


def _not_trimmed(parameters: PolicyParameters) -> str | None:
    """Return why the kept part of a prompt cannot be trimmed once its budgets are known; None if it can."""
    if parameters.evicts_while_decoding:
        if parameters.eviction.by_row is None or parameters.selection.by_row is None:
            return "its steps evict, and its caches cannot differ by row"
        return None
    if parameters.eviction.cache_per_query_head:
        return "it evicts per query head"
    if not parameters.eviction.trims:
        return f"its eviction ({parameters.eviction.name}) does not rank what it keeps"
    return None


def _checked(budgets: Any, parameters: PolicyParameters, inputs: PolicyInputs) -> tuple[int, ...]:
    layers = inputs.model.num_hidden_layers
    if len(budgets) != layers or any(isinstance(b, bool) or not isinstance(b, int) for b in budgets):
        raise InputError(f"layer_budgets is {list(budgets)}; expected {layers} integers, one per layer")
    low, high = smallest_budget(parameters), largest_budget(parameters)
    if min(budgets) < min(low, uniform_budget(parameters)) or max(budgets) > high:
        raise InputError(f"layer_budgets reaches from {min(budgets)} to {max(budgets)}; expected {low} to {high}")
    return tuple(budgets)


def _unused(name: str, given: bool, kind: str = "squeeze") -> None:
    if given:
        without = "--layer-budget" if kind == "squeeze" else f"--layer-budget {kind}"
        raise InputError(f"{name} has no use without {without}", hint=f"--layer-budget {kind}")
