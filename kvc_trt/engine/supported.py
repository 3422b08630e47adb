"""Which policies each backend's engines can have: asked before a build does any work, and before an engine is loaded.

ONNX Runtime executes the body of every operator. The other backends need a kernel or a plugin in its place; so they run
what is done by operators that have one alone, all KV heads of a layer alike.
"""

from __future__ import annotations

from kvc_trt.engine.targets import STAGES
from kvc_trt.errors import InputError
from kvc_trt.methods.parameters import PolicyParameters

EVERY_OPERATOR = ("onnxruntime",)
"""Backends that run whatever a graph can be written for."""
WITH_KERNELS = frozenset(("KvcPrefillAttention", "KvcCompact", "KvcHybridAttention", "KvcDenseAttention"))


def check_supported(parameters: PolicyParameters, layers: int, backend: str) -> None:
    """Raise InputError, naming the backends that run the policy, where an engine of `backend` cannot have it."""
    lack = unsupported(parameters, layers, backend)
    if lack is None:
        return
    able = [name for name in STAGES if unsupported(parameters, layers, name) is None]
    runs = f"it runs on {', '.join(able)}" if able else "the reference alone runs it"
    hint = f"--backend {able[0]}" if able else "kvc-trt policies lists the policies; kvc-trt verify --level tasks"
    raise InputError(f"policy {parameters.policy}: backend {backend} has no {lack}; {runs}", hint=hint)


def unsupported(parameters: PolicyParameters, layers: int, backend: str) -> str | None:
    """What a backend has not that this policy needs in some of `layers` layers; None where it has everything."""
    every = [group for layer in range(layers) for group in parameters.groups(layer)]
    if any(group.parameters.selection.oracle for group in every):
        return "graph of an oracle that reads everything to find what matters"
    if backend in EVERY_OPERATOR:
        return None
    if any(group.kv_heads is not None for group in every):
        return "kernel for layers whose KV heads are cached apart"
    return next((lack for group in every if (lack := _missing_kernel(group.parameters)) is not None), None)


def _missing_kernel(rule: PolicyParameters) -> str | None:
    eviction, selection = rule.eviction, rule.selection
    if eviction.operators is None or not WITH_KERNELS.issuperset(eviction.operators):
        return f"kernel for prompt eviction {eviction.name}"
    if not WITH_KERNELS.issuperset(selection.operators):
        return f"kernel for decode selection {selection.name}"
    if rule.squeeze_share is not None and rule.compresses:
        return "kernel that divides a budget for each prompt"
    if rule.per_query_head or rule.reallocate or rule.sinks or rule.positions != "original":
        return "kernel for this form of the policy"
    return None
