"""Every policy at one token budget, side by side: what it stores, what a step reads, and what the papers' formulas say.

The formulas are those of RocketKV's Table 1 (arXiv 2502.14051), fractions of the dense cache at a compression of
c = S / token budget. Its storage column counts the auxiliary data of SparQ and RocketKV in keys, not in pairs of key
and value; ours are bytes, as allocated.
"""

from __future__ import annotations

from typing import Any

from kvc_trt import policies
from kvc_trt.config import BuildConfig
from kvc_trt.engine.model_choice import ModelChoice
from kvc_trt.engine.resolved_build import resolve_parameters, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.profile.model_size import cache_itemsize
from kvc_trt.profile.traffic import cache_bytes, full_cache_bytes, row_traffic


def compare_policies(config: BuildConfig, choice: ModelChoice, weights: str) -> dict[str, Any]:
    """One row per policy at the budget and the lengths of `config`; a policy that they rule out says why.

    Bytes are of one row of a batch, at its longest. InputError where they rule out every policy.
    """
    filled = with_defaults(config, choice)
    rows = [_row(name, filled, choice, weights) for name, *_ in policies.available()]
    if all("not_applicable" in row for row in rows):
        raise InputError(f"no policy can be built so: {rows[0]['not_applicable']}", hint="kvc-trt plan --help")
    assert filled.max_input_len is not None
    assert filled.max_output_len is not None
    sequence = filled.max_input_len + filled.max_output_len
    return {
        "model": choice.name,
        "token_budget": filled.token_budget,
        "max_input_len": filled.max_input_len,
        "max_output_len": filled.max_output_len,
        "compression": sequence / filled.token_budget if filled.token_budget else None,
        "full_bytes_per_row": full_cache_bytes(choice.config, sequence, cache_itemsize(weights)),
        "policies": rows,
    }


def _row(name: str, filled: BuildConfig, choice: ModelChoice, weights: str) -> dict[str, Any]:
    plain = {"model", "token_budget", "max_input_len", "max_output_len", "split", "head_pattern", "layer_budget"}
    given = filled.model_dump(include=plain, exclude_none=True)
    if policies.named(name).split is not None:
        given.pop("split", None)
    try:
        config = with_defaults(BuildConfig(**given, policy=name), choice)
        parameters = resolve_parameters(config, choice.config)
    except InputError as error:
        return {"policy": name, "not_applicable": error.message}
    itemsize, sequence = cache_itemsize(weights), parameters.max_sequence_len
    full = full_cache_bytes(choice.config, sequence, itemsize)
    stored = cache_bytes(choice.config, parameters, itemsize)
    read = row_traffic(choice.config, parameters, itemsize, parameters.max_input_len, parameters.max_output_len)
    formula, compression = policies.named(name).published, max(1.0, sequence / (filled.token_budget or sequence))
    return {
        "policy": name,
        "stored_bytes": stored.total,
        "of_these_beside_keys_and_values": stored.page_bounds,
        "stored_share": stored.total / full,
        "stored_share_by_formula": None if formula is None else formula.storage(compression),
        "read_bytes_per_step": round(read.bytes),
        "read_share": read.bytes / full,
        "read_share_by_formula": None if formula is None else formula.traffic(compression),
    }
