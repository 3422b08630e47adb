"""Compare all policies at one token budget: the bytes that each stores, those that a step reads, and papers' formulas.

The formulas are those of RocketKV's Table 1 (arXiv 2502.14051), fractions of the dense cache at a compression of
c = S / token budget. Its storage column counts the auxiliary data of SparQ and RocketKV in keys, not in pairs of key
and value, and assumes the even split; our figures are bytes, as allocated.
"""

from __future__ import annotations

from typing import Any

from kvc_trt import policies
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import ModelChoice
from kvc_trt.engine.resolution.resolved_build import for_every_policy, recommended, resolve_parameters, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import BASELINE
from kvc_trt.methods.base.token_budget import tokens_of
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.profile.model_size import cache_itemsize
from kvc_trt.profile.planning.buildable import check_buildable
from kvc_trt.profile.traffic import cache_bytes, full_state_bytes, full_step_bytes, row_traffic

OF_ALL_POLICIES = ("layer_budget", "kv_cache", "window")
"""Settings given by the user that apply to every policy which has them."""
_SETTINGS = {
    "model", "token_budget", "max_input_len", "max_output_len", "max_conversation_len", "split", "head_pattern",
    *OF_ALL_POLICIES,
}  # fmt: skip
_OF_ENGINE = ("backend", "weights", "draft_tokens", "all_logits", "tensor_parallel")


def compare_policies(config: BuildConfig, choice: ModelChoice, weights: str, *, turns: bool) -> dict[str, Any]:
    """Return one entry per policy at the budget and the lengths of `config`, as JSON-compatible data.

    The entry of a policy that cannot be built so has the reason, `not_applicable`. If `config` names neither policy nor
    budget, the budget is that of the policy which the model's preset recommends. Whole caches in the other formats have
    entries of their own. Bytes are those of one row of a batch at its longest. InputError if no policy is possible.
    """
    filled, taken = for_every_policy(config, choice), recommended(config, choice)
    if taken is not None and filled.max_output_len is not None:
        filled = filled.model_copy(update={"token_budget": taken.token_budget(filled.max_output_len)})
    assert filled.max_input_len is not None
    assert filled.max_output_len is not None
    sequence = max(filled.max_conversation_len or 0, filled.max_input_len + filled.max_output_len)
    budget = tokens_of(filled.token_budget, filled.max_input_len)
    kv_cache = filled.kv_cache or AUTO
    full = full_state_bytes(choice.config, sequence, cache_itemsize(weights), kv_cache)
    rows = [_row(name, kv_cache, filled, choice, weights, full, turns) for name, *_ in policies.available()]
    if all("not_applicable" in row for row in rows):
        raise InputError(
            f"no policy can be built with these settings: {rows[0]['not_applicable']}", hint="kvc-trt plan --help"
        )
    others = (form for form in CACHE_FORMATS if form != kv_cache)
    return {
        "model": choice.name,
        "token_budget": budget,
        "recommended": None if taken is None else taken.policy,
        "max_input_len": filled.max_input_len,
        "max_output_len": filled.max_output_len,
        "compression": sequence / budget if budget else None,
        "kv_cache": kv_cache,
        "full_bytes_per_row": full,
        "policies": rows,
        "whole_caches": [_row(BASELINE, form, filled, choice, weights, full, turns) for form in others],
    }


def of_policy(name: str, kv_cache: str, filled: BuildConfig, choice: ModelChoice) -> BuildConfig:
    """Return the build of one policy in a cache format, with budget, lengths and engine of `filled`."""
    given = filled.model_dump(include=_SETTINGS, exclude_none=True)
    rule = policies.named(name)
    if "window" not in rule.overrides:
        given.pop("window", None)
    if rule.split is not None or not rule.divides:
        given.pop("split", None)
    own = with_defaults(BuildConfig(**{**given, "policy": name, "kv_cache": kv_cache}), choice)
    return own.model_copy(update={one: getattr(filled, one) for one in _OF_ENGINE})


def _row(
    name: str, kv_cache: str, filled: BuildConfig, choice: ModelChoice, weights: str, full: int, turns: bool
) -> dict[str, Any]:
    try:
        own = of_policy(name, kv_cache, filled, choice)
        parameters = resolve_parameters(own, choice.config)
        check_buildable(own, parameters, choice.config)
    except InputError as error:
        return {"policy": name, "kv_cache": kv_cache, "not_applicable": error.message}
    itemsize, sequence = cache_itemsize(weights), parameters.max_sequence_len
    stored = cache_bytes(choice.config, parameters, itemsize, turns=turns and parameters.no_turn is None)
    read = row_traffic(
        choice.config, parameters.in_the_mean, itemsize, parameters.max_input_len, parameters.max_output_len
    )
    formula = policies.named(name).published if kv_cache == (filled.kv_cache or AUTO) else None
    compression = max(1.0, sequence / (tokens_of(filled.token_budget, parameters.max_input_len) or sequence))
    return {
        "policy": name,
        "kv_cache": kv_cache,
        "stored_bytes": stored.total,
        "of_these_beside_keys_and_values": stored.page_bounds,
        "stored_share": stored.total / full,
        "stored_share_by_formula": formula and formula.storage and formula.storage(compression),
        "read_bytes_per_step": round(read.bytes),
        "read_share": read.bytes / full_step_bytes(choice.config, sequence, itemsize, filled.kv_cache or AUTO),
        "read_share_by_formula": formula and formula.traffic(compression),
    }
