"""Resolve a user's options to a plan, as a build does, and record where every number came from.

`--compare` sets every policy at one token budget side by side: what it stores, what a step reads, and what the papers'
formulas say. The formulas are those of RocketKV's Table 1 (arXiv 2502.14051), fractions of the dense cache at a
compression of c = S / token budget. Its storage column counts the auxiliary data of SparQ and RocketKV in keys, not in
pairs of key and value; ours are bytes, as allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvc_trt import policies
from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.backends.registry import backends
from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.engine.resolution.model_choice import ModelChoice, choose_model
from kvc_trt.engine.resolution.resolve import check_backend_settings
from kvc_trt.engine.resolution.resolved_build import compute_dtype, resolve_parameters, with_defaults
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import BASELINE, PolicyParameters
from kvc_trt.methods.base.token_budget import tokens_of
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.floor import ACCELERATORS, USABLE_MEMORY
from kvc_trt.profile.model_size import cache_itemsize, token_cache_bytes, weight_bytes
from kvc_trt.profile.planning.disaggregation import plan_disaggregation
from kvc_trt.profile.planning.plan import make_plan
from kvc_trt.profile.planning.tensor_parallel import plan_ranks
from kvc_trt.profile.traffic import cache_bytes, full_cache_bytes, row_traffic, stored_context_bytes


def compare_policies(config: BuildConfig, choice: ModelChoice, weights: str) -> dict[str, Any]:
    """Return one row per policy at the budget and the lengths of `config`; a policy that cannot have them says why.

    Whole caches in the other formats have rows of their own. Bytes are of one row of a batch at its longest.
    InputError if no policy is possible.
    """
    filled = with_defaults(config, choice)
    assert filled.max_input_len is not None
    assert filled.max_output_len is not None
    sequence = max(filled.max_conversation_len or 0, filled.max_input_len + filled.max_output_len)
    budget = tokens_of(filled.token_budget, filled.max_input_len)
    kv_cache = filled.kv_cache or AUTO
    full = full_cache_bytes(choice.config, sequence, cache_itemsize(weights), kv_cache)
    turns = _takes_turns(filled.backend)
    rows = [_row(name, kv_cache, filled, choice, weights, full, turns) for name, *_ in policies.available()]
    if all("not_applicable" in row for row in rows):
        raise InputError(f"no policy can be built so: {rows[0]['not_applicable']}", hint="kvc-trt plan --help")
    others = (form for form in CACHE_FORMATS if form != kv_cache)
    return {
        "model": choice.name,
        "token_budget": budget,
        "max_input_len": filled.max_input_len,
        "max_output_len": filled.max_output_len,
        "compression": sequence / budget if budget else None,
        "kv_cache": kv_cache,
        "full_bytes_per_row": full,
        "policies": rows,
        "whole_caches": [_row(BASELINE, form, filled, choice, weights, full, turns) for form in others],
    }


def _row(
    name: str, kv_cache: str, filled: BuildConfig, choice: ModelChoice, weights: str, full: int, turns: bool
) -> dict[str, Any]:
    plain = {
        "model", "token_budget", "max_input_len", "max_output_len", "max_conversation_len", "split", "head_pattern",
        "layer_budget",
    }  # fmt: skip
    given = filled.model_dump(include=plain, exclude_none=True)
    if policies.named(name).split is not None:
        given.pop("split", None)
    try:
        config = with_defaults(BuildConfig(**given, policy=name, kv_cache=kv_cache), choice)
        parameters = resolve_parameters(config, choice.config)
        if filled.backend != "auto":
            check_supported(parameters, choice.config.num_hidden_layers, filled.backend, backends())
    except InputError as error:
        return {"policy": name, "kv_cache": kv_cache, "not_applicable": error.message}
    itemsize, sequence = cache_itemsize(weights), parameters.max_sequence_len
    stored = cache_bytes(choice.config, parameters, itemsize, turns=turns and parameters.no_turn is None)
    read = row_traffic(choice.config, parameters, itemsize, parameters.max_input_len, parameters.max_output_len)
    formula = policies.named(name).published if kv_cache == (filled.kv_cache or AUTO) else None
    compression = max(1.0, sequence / (tokens_of(filled.token_budget, parameters.max_input_len) or sequence))
    return {
        "policy": name,
        "kv_cache": kv_cache,
        "stored_bytes": stored.total,
        "of_these_beside_keys_and_values": stored.page_bounds,
        "stored_share": stored.total / full,
        "stored_share_by_formula": None if formula is None else formula.storage(compression),
        "read_bytes_per_step": round(read.bytes),
        "read_share": read.bytes / full,
        "read_share_by_formula": None if formula is None else formula.traffic(compression),
    }


_OWN_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INPUTS = ("token_budget", "max_input_len", "max_output_len")


def resolve_plan(config: BuildConfig, network: float | None = None) -> dict[str, Any]:
    """Resolve the configuration as a build would, and return the plan.

    With `network`, a bandwidth in bytes per second, also that of prefill and decode on different machines.
    """
    choice = _choose(config)
    filled = with_defaults(config, choice)
    if filled.backend != "auto":
        backend_of(filled.backend)  # report an unknown backend first
    parameters = resolve_parameters(filled, choice.config)
    chosen = _weight_format(filled.weights, choice, filled.backend)
    plan = make_plan(choice.config, parameters, chosen, turns=_takes_turns(filled.backend))
    plan["model"] = {"name": choice.name, **plan["model"]}
    if network is not None:
        turns = _takes_turns(filled.backend)
        plan["disaggregation"] = plan_disaggregation(choice.config, parameters, chosen, network, turns=turns)
    plan["choices"] = _choices(config, filled, plan)
    plan["layer_budget"] = filled.layer_budget or "uniform"
    if filled.tensor_parallel is not None:
        plan["tensor_parallel"] = plan_ranks(
            choice.config, parameters, chosen, filled, filled.tensor_parallel, turns=_takes_turns(filled.backend)
        )
    if filled.backend != "auto":
        check_supported(parameters, choice.config.num_hidden_layers, filled.backend, backends())
        memory = _device_memory(choice.config, parameters, chosen, filled)
        if memory is not None:
            check_backend_settings(filled.model_copy(update={"weights": chosen}), backends())
            plan["device_memory"] = memory
        copies = _packed_copies(choice.config, chosen, filled)
        if copies is not None:
            plan["host_memory"] = host_memory(
                choice.config, parameters, chosen,
                copies=copies, rows=filled.max_batch_size, turns=_takes_turns(filled.backend),
            )  # fmt: skip
    return plan


def resolve_comparison(config: BuildConfig) -> dict[str, Any]:
    """Return the comparison of all policies at the configuration's budget."""
    choice = _choose(config)
    return compare_policies(config, choice, _weight_format(config.weights, choice, config.backend))


def refuse_overrides(settings: Iterable[str]) -> None:
    """Raise InputError for a setting of single policies: a comparison derives them all from the budget."""
    for name in settings:
        if name in (*DERIVED_NUMBERS, "dense_until") and name not in ("layer_budget", "kv_cache"):
            raise InputError(
                f"--set {name}: --compare shows every policy as it is derived from the budget",
                hint="leave out --compare to set it for one --policy",
            )


def _choose(config: BuildConfig) -> ModelChoice:
    path = Path(config.model)
    is_config = path.name == "config.json" and path.is_file()
    return choose_model(str(path.absolute().parent) if is_config else config.model, config.checkpoint, config.revision)


def _weight_format(asked: str, choice: ModelChoice, backend: str) -> str:
    if asked != "auto":
        return asked
    kinds = () if backend == "auto" else backend_of(backend).weight_kinds
    if choice.blocks and "keep" in kinds:
        return "keep"
    return "fp8" if choice.quantised and "fp8" in kinds else _OWN_FORMATS[choice.config.dtype]


def _takes_turns(backend: str) -> bool:
    """Return whether engines of a backend take turns; those of the default one, `auto`, do."""
    return backend == "auto" or "extend" in backend_of(backend).files


def _device_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig
) -> dict[str, Any] | None:
    computing = replace(model, dtype=compute_dtype(weights))
    usable = {gpu.name: round(USABLE_MEMORY * gpu.memory) for gpu in ACCELERATORS}
    size = weight_bytes(model, weights).resident
    return backend_of(filled.backend).device_memory(computing, parameters, size, filled.max_batch_size, usable)


def _packed_copies(model: ModelConfig, weights: str, filled: BuildConfig) -> tuple[str, ...] | None:
    drafts, size = filled.draft_tokens is not None, weight_bytes(model, weights).resident
    return backend_of(filled.backend).packed_copies(weights, size, drafts=drafts)


def _choices(config: BuildConfig, filled: BuildConfig, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every number of the policy with its source: given, the model's default, or derived."""
    known = policies.applicable(filled.policy, dict.fromkeys((*DERIVED_NUMBERS, "dense_until")))
    names = [name for name in (*_INPUTS, *known) if name in plan["policy"]]
    found = [{"name": name, "value": plan["policy"][name], "source": _source(name, config, filled)} for name in names]
    if plan["policy"]["prompt_share"]:
        own = "the longest prompt's; each keeps its own share"
        return [{**one, "source": own} if one["name"] == "prompt_budget" else one for one in found]
    return found


def _source(name: str, config: BuildConfig, filled: BuildConfig) -> str:
    if getattr(filled, name) == "auto":
        return "auto: measured when the engine is built; the token budget stands in for it here"
    if name == "token_budget" and isinstance(filled.token_budget, str):
        return f"{filled.token_budget} of the longest prompt"
    if getattr(config, name) is not None:
        return "given"
    return "default of the model" if getattr(filled, name) is not None else "derived"


def host_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, *, copies: Sequence[str], rows: int, turns: bool
) -> dict[str, Any]:
    """Return the memory of an engine that runs from the host's, sizes in bytes. `copies` names who packs weights anew.

    A copy is of the matrices that a step reads. A conversation keeps its row between its turns, so rows count both.
    """
    turns = turns and parameters.no_turn is None
    itemsize, size = cache_itemsize(weights), weight_bytes(model, weights)
    row = cache_bytes(model, parameters, itemsize, turns=turns).total
    lines = [
        ("weights, mapped from their file", size.resident),
        *((f"weights packed for {who}", size.per_step) for who in copies),
        (f"caches of {rows} rows", rows * row),
        ("one layer of the longest prompt or turn", parameters.max_input_len * token_cache_bytes(model, itemsize)),
    ]
    return {
        "rows": rows,
        "lines": [{"kind": kind, "bytes": round(bytes_)} for kind, bytes_ in lines],
        "total_bytes": round(sum(bytes_ for _, bytes_ in lines)),
        "bytes_per_further_row": row,
        "bytes_per_prefix": stored_context_bytes(model, parameters, itemsize, parameters.max_input_len, turns=turns),
    }
