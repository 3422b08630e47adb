"""Resolve a user's options to a plan, as a build does, and record the source of every number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvc_trt import policies
from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.engine.resolution.model_choice import ModelChoice, choose_model
from kvc_trt.engine.resolution.resolved_build import (
    compute_dtype,
    default_taken,
    for_every_policy,
    resolve_parameters,
    with_defaults,
)
from kvc_trt.methods.base.parameters import BASELINE, PolicyParameters
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import shards
from kvc_trt.profile.accelerators import HOPPER, Accelerator
from kvc_trt.profile.model_size import cache_itemsize, token_cache_bytes, weight_bytes
from kvc_trt.profile.planning.buildable import check_buildable
from kvc_trt.profile.planning.comparison import compare_policies, of_policy
from kvc_trt.profile.planning.disaggregation import plan_disaggregation
from kvc_trt.profile.planning.limit import Limit, Sought, plan_limit
from kvc_trt.profile.planning.mix import Mix, plan_mix, read_mix
from kvc_trt.profile.planning.placement import MemoryOf, Placement, on_one_gpu
from kvc_trt.profile.planning.plan import make_plan
from kvc_trt.profile.planning.tensor_parallel import divisions, on_ranks, rank_memory
from kvc_trt.profile.traffic import cache_bytes, stored_context_bytes

_OWN_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INPUTS = ("token_budget", "max_input_len", "max_output_len")


@dataclass(frozen=True)
class PlanRequest:
    """A build to plan, and the GPUs, network and mix of requests to plan it for."""

    config: BuildConfig
    gpus: tuple[Accelerator, ...] = HOPPER
    network: float | None = None
    """Bytes per second between prefill and decode on different machines; None: they share one."""
    mix: Path | None = None
    """The file that lists requests of several lengths (`read_mix`)."""


def resolve_plan(request: PlanRequest) -> dict[str, Any]:
    """Resolve the configuration as a build would, and return the plan."""
    config, gpus = request.config, request.gpus
    choice = _choose(config)
    mix = None if request.mix is None else read_mix(request.mix)
    filled = _for_mix(with_defaults(config, choice), config, mix)
    if filled.backend != "auto":
        backend_of(filled.backend)  # report an unknown backend first
    parameters = resolve_parameters(filled, choice.config)
    weights = _weight_format(filled.weights, choice, filled.backend)
    check_buildable(filled, parameters, choice.config)
    placement = _placement(choice.config, parameters, weights, filled)
    plan = make_plan(placement, gpus, _divisions(placement, filled, gpus))
    plan["model"] = {"name": choice.name, **plan["model"]}
    plan["weights"]["assumed"] = _is_assumed(config, choice, weights)
    plan["default_taken"] = default_taken(config, choice)
    plan["choices"] = _choices(config, filled, plan, by_mix=mix is not None)
    plan["layer_budget"] = filled.layer_budget or "uniform"
    plan.update(_memory_of_backend(placement, filled, gpus))
    if mix is not None:
        plan["mix"] = plan_mix(placement, mix, gpus)
    if request.network is not None:
        plan["disaggregation"] = plan_disaggregation(placement, request.network, gpus)
    return plan


def resolve_limit(request: PlanRequest, limit: Limit) -> dict[str, Any]:
    """Return the largest token budget that fits, for the given policy and cache format or for all of them."""
    config = request.config
    choice = _choose(config)
    filled, weights = for_every_policy(config, choice), _weight_format(config.weights, choice, config.backend)
    if filled.backend != "auto":
        backend_of(filled.backend)
    sought = list(_sought(config, filled, choice, weights))
    ranks = filled.tensor_parallel
    local = choice.config if ranks is None else shards(choice.config, ranks)[0].local
    found = plan_limit(local, sought, limit, cache_itemsize(weights), request.gpus)
    assert filled.max_input_len is not None
    assert filled.max_output_len is not None
    return {
        "model": choice.name,
        "max_input_len": filled.max_input_len,
        "max_output_len": filled.max_output_len,
        "weights": weights,
        "weights_assumed": _is_assumed(config, choice, weights),
        "ranks": ranks or 1,
        **found,
    }


def _sought(config: BuildConfig, filled: BuildConfig, choice: ModelChoice, weights: str) -> Iterator[Sought]:
    """Yield the given policy and format; by default all formats, and all policies but oracles, which no engine runs."""
    alone = "policy" in config.model_fields_set
    engines = [name for name, *_ in policies.available() if not policies.named(name).selection.oracle]
    names = [config.policy] if alone else engines
    formats = [config.kv_cache] if config.kv_cache is not None else list(CACHE_FORMATS)
    for name in names:
        for kv_cache in formats:
            if alone:
                own = filled.model_copy(update={"kv_cache": kv_cache})
            else:
                own = of_policy(name, kv_cache, filled, choice)
            yield _one_sought(own, choice, weights)


def _one_sought(own: BuildConfig, choice: ModelChoice, weights: str) -> Sought:
    model = choice.config
    assert own.max_input_len is not None
    assert own.max_output_len is not None
    longest = max(own.max_conversation_len or 0, own.max_input_len + own.max_output_len)

    def parameters(budget: int) -> PolicyParameters:
        asked = own if own.policy == BASELINE else own.model_copy(update={"token_budget": budget})
        found = resolve_parameters(asked, model)
        if budget == longest:  # what can be built does not depend on the budget
            check_buildable(own, found, model)
        return found

    return Sought(
        own.policy, own.kv_cache or AUTO, longest, own.policy != BASELINE, parameters,
        lambda rule: _placement(model, rule, weights, own),
    )  # fmt: skip


def resolve_comparison(config: BuildConfig) -> dict[str, Any]:
    """Return the comparison of all policies at the configuration's budget."""
    choice = _choose(config)
    weights = _weight_format(config.weights, choice, config.backend)
    compared = compare_policies(config, choice, weights, turns=_takes_turns(config.backend))
    return {**compared, "weights": weights, "weights_assumed": _is_assumed(config, choice, weights)}


def _for_mix(filled: BuildConfig, config: BuildConfig, mix: Mix | None) -> BuildConfig:
    """Return the build with missing lengths set to the mix's longest; InputError if given lengths are too short."""
    if mix is None:
        return filled
    own = {"max_input_len": mix.longest_input, "max_output_len": mix.longest_output}
    filled = filled.model_copy(update={name: value for name, value in own.items() if getattr(config, name) is None})
    assert filled.max_input_len is not None
    assert filled.max_output_len is not None
    mix.check(filled.max_input_len, filled.max_output_len)
    return filled


def _placement(model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig) -> Placement:
    turns = _takes_turns(filled.backend)
    if filled.tensor_parallel is not None:
        return on_ranks(model, parameters, weights, filled, filled.tensor_parallel, turns=turns)
    return on_one_gpu(model, parameters, weights, turns=turns, memory=_own_memory(model, weights, filled, parameters))


def _own_memory(model: ModelConfig, weights: str, filled: BuildConfig, parameters: PolicyParameters) -> MemoryOf | None:
    """Return the configured backend's own model of GPU memory; None if it has none."""
    if filled.backend == "auto":
        return None
    computing, size = replace(model, dtype=compute_dtype(weights)), weight_bytes(model, weights).resident
    backend = backend_of(filled.backend)
    if backend.device_memory(computing, parameters, size, 1, {}) is None:
        return None

    def memory(rule: PolicyParameters, rows: int) -> float:
        found = backend.device_memory(computing, rule, size, rows, {})
        assert found is not None
        return float(found["total_bytes"])

    return memory


def _divisions(placement: Placement, filled: BuildConfig, gpus: Sequence[Accelerator]) -> list[str | None]:
    """Return for each GPU the options that divide the engine among several such; all None if every GPU holds it."""
    if all(map(placement.holds, gpus)):
        return [None for _ in gpus]
    return list(divisions(placement.model, placement.parameters, placement.weights, filled, gpus))


def _memory_of_backend(placement: Placement, filled: BuildConfig, gpus: Sequence[Accelerator]) -> dict[str, Any]:
    """Return the memory that the configured backend takes: on each of several GPUs, on one, or on the host."""
    model, parameters, weights = placement.model, placement.parameters, placement.weights
    turns = _takes_turns(filled.backend)
    if filled.tensor_parallel is not None:
        ranks = filled.tensor_parallel
        return {"tensor_parallel": rank_memory(model, parameters, weights, filled, ranks, turns=turns)}
    if filled.backend == "auto":
        return {}
    found: dict[str, Any] = {}
    memory = _device_memory(model, parameters, weights, filled, gpus)
    if memory is not None:
        found["device_memory"] = memory
    copies = _packed_copies(model, weights, filled)
    if copies is not None:
        found["host_memory"] = host_memory(
            model, parameters, weights, copies=copies, rows=filled.max_batch_size, turns=turns
        )
    return found


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
    return "fp8" if choice.quantised == "fp8" and "fp8" in kinds else _OWN_FORMATS[choice.config.dtype]


def _is_assumed(config: BuildConfig, choice: ModelChoice, weights: str) -> bool:
    """Return whether neither the user nor the checkpoint says the format of the weights."""
    return config.weights == "auto" and not choice.dtype_known and weights == _OWN_FORMATS[choice.config.dtype]


def _takes_turns(backend: str) -> bool:
    """Return whether a backend's engines take turns; with `auto`, they do."""
    return backend == "auto" or "extend" in backend_of(backend).files


def _device_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, gpus: Sequence[Accelerator]
) -> dict[str, Any] | None:
    computing = replace(model, dtype=compute_dtype(weights))
    usable = {gpu.name: gpu.usable for gpu in gpus}
    size = weight_bytes(model, weights).resident
    return backend_of(filled.backend).device_memory(computing, parameters, size, filled.max_batch_size, usable)


def _packed_copies(model: ModelConfig, weights: str, filled: BuildConfig) -> tuple[str, ...] | None:
    drafts, size = filled.draft_tokens is not None, weight_bytes(model, weights).resident
    return backend_of(filled.backend).packed_copies(weights, size, drafts=drafts)


def _choices(
    config: BuildConfig, filled: BuildConfig, plan: Mapping[str, Any], *, by_mix: bool
) -> list[dict[str, Any]]:
    """Return every number of the policy with its source: given, the model's default, or derived."""
    known = policies.applicable(filled.policy, dict.fromkeys((*DERIVED_NUMBERS, "dense_until")))
    names = [name for name in (*_INPUTS, *known) if name in plan["policy"]]
    found = [
        {"name": name, "value": plan["policy"][name], "source": _source(name, config, filled, by_mix)} for name in names
    ]
    if plan["policy"]["prompt_share"]:
        own = "the longest prompt's; each keeps its own share"
        return [{**one, "source": own} if one["name"] == "prompt_budget" else one for one in found]
    return found


def _source(name: str, config: BuildConfig, filled: BuildConfig, by_mix: bool) -> str:
    if getattr(filled, name) == "auto":
        return "auto: measured when the engine is built; the token budget stands in for it here"
    if name == "token_budget" and isinstance(filled.token_budget, str):
        return f"{filled.token_budget} of the longest prompt"
    if getattr(config, name) is not None:
        return "given"
    if by_mix and name in ("max_input_len", "max_output_len"):
        return "the longest of the mix"
    return "default of the model" if getattr(filled, name) is not None else "derived"


def host_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, *, copies: Sequence[str], rows: int, turns: bool
) -> dict[str, Any]:
    """Return the memory of an engine that runs on the host, as plain data, sizes in bytes.

    `copies` names the uses (such as steps) for which a packed copy of the matrices that a step reads is kept.
    A conversation keeps its row between its turns, so `rows` counts it also while it waits.
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
