"""Refuse to plan what a build would refuse before it does any work."""

from __future__ import annotations

from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.backends.registry import backends
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.resolve import check_backend_settings, check_exact_bounds, check_graphs
from kvc_trt.engine.resolution.resolved_build import compute_dtype
from kvc_trt.engine.supported import check_supported
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig


def check_buildable(filled: BuildConfig, parameters: PolicyParameters, model: ModelConfig) -> None:
    """Raise InputError, as a build does, for graphs, settings, a policy or a model that cannot be had.

    Without a backend, what backends alone refuse is not asked. Weights in the model's own format are not either: a
    build for such a backend makes others of them.
    """
    check_graphs(filled, parameters)
    if filled.weights != "auto":
        check_exact_bounds(parameters, compute_dtype(filled.weights))
    if filled.backend == "auto":
        return
    if filled.weights == "auto":
        filled = filled.model_copy(update={"weights": backend_of(filled.backend).weight_kinds[0]})
    check_backend_settings(filled, backends())
    check_supported(parameters, model, filled.backend, backends())
