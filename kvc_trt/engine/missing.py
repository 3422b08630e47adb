"""The graphs and kernels that a policy needs and that do not exist.

The backends of ONNX Runtime and OpenVINO execute the body of every operator; PyTorch executes the bodies of operators
without a kernel. Other backends need a kernel or a plugin for each operator, and treat all KV heads of a layer alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvc_trt.methods.base.parameters import Group, PolicyParameters


def missing_graph(parameters: PolicyParameters, layers: int) -> str | None:
    """Return the graph that cannot be made for a policy; None if all can."""
    if any(group.parameters.selection.oracle for group in _groups(parameters, layers)):
        return "graph of an oracle, which reads everything to find the best tokens"
    return None


def missing_kernel(parameters: PolicyParameters, layers: int) -> str | None:
    """Return a kernel that a policy needs and that does not exist; None if all exist."""
    return missing_linear(parameters) or missing_kernel_of_caches(parameters, layers)


def missing_kernel_of_caches(parameters: PolicyParameters, layers: int) -> str | None:
    """Return a kernel that the layers with caches need and that does not exist; None if all exist."""
    return _missing_kernel_of(_groups(parameters, layers)) or missing_division(parameters, layers)


def missing_kernel_of_choices(parameters: PolicyParameters, layers: int) -> str | None:
    """Return a kernel that the caches which the policy acts on need and that does not exist; None if all exist.

    The window of a sliding layer is the model's, and its ring has no kernel.
    """
    acted_on = [group for group in _groups(parameters, layers) if not group.parameters.slides]
    return _missing_kernel_of(acted_on) or missing_division(parameters, layers)


def missing_linear(parameters: PolicyParameters) -> str | None:
    """Return the kernel for linear layers, which a backend without code of its own needs; None without such layers."""
    return None if parameters.linear_layers is None else "kernel for the linear layers of the model"


def missing_division(parameters: PolicyParameters, layers: int) -> str | None:
    """Return the kernel that divides a budget among layers for each prompt, if the policy needs it; otherwise None."""
    rules = [group.parameters for group in _groups(parameters, layers)]
    divides = any(rule.squeeze_share is not None and rule.compresses for rule in rules)
    return "kernel that divides a budget for each prompt" if divides else None


def _groups(parameters: PolicyParameters, layers: int) -> list[Group]:
    return [group for layer in range(layers) for group in parameters.groups(layer)]


def _missing_kernel_of(groups: Sequence[Group]) -> str | None:
    if any(group.kv_heads is not None for group in groups):
        return "kernel for layers whose KV heads are cached separately"
    return next((missing for group in groups if (missing := _missing_kernel(group.parameters)) is not None), None)


def _missing_kernel(rule: PolicyParameters) -> str | None:
    eviction, selection = rule.eviction, rule.selection
    if eviction.operators is None or any(operator.kernel is None for operator in eviction.operators):
        return f"kernel for prompt eviction {eviction.name}"
    if any(operator.kernel is None for operator in eviction.operators_of(rule) or ()):
        return f"kernel for pool_kind {rule.pool_kind}, only for {PolicyParameters.pool_kind}"
    if any(operator.kernel is None for operator in selection.operators):
        return f"kernel for decode selection {selection.name}"
    if rule.per_query_head or rule.reallocate or rule.sinks or rule.positions != "original":
        return "kernel for this form of the policy"
    return None
