"""Check whether a backend supports a model and a policy: before a build does any work, before an engine is loaded, and
before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.engine.backend import BuildBackend
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig


def check_supported(
    parameters: PolicyParameters, model: ModelConfig, backend: str, backends: Mapping[str, BuildBackend]
) -> None:
    """Raise InputError, naming the backends that support model and policy, if `backend` does not."""
    missing = _missing(parameters, model, backends[backend])
    if missing is None:
        return
    who, what = missing
    able = supporting(parameters, model, backends)
    runs = f"it runs on {', '.join(able)}" if able else "only the reference runs it"
    hint = f"--backend {able[0]}" if able else "kvc-trt policies lists the policies; kvc-trt verify --level tasks"
    raise InputError(f"{who}: backend {backend} has no {what}; {runs}", hint=hint)


def supporting(parameters: PolicyParameters, model: ModelConfig, backends: Mapping[str, BuildBackend]) -> list[str]:
    """Return the backends that support model and policy; none for an oracle."""
    return [name for name, backend in backends.items() if _missing(parameters, model, backend) is None]


def _missing(parameters: PolicyParameters, model: ModelConfig, backend: BuildBackend) -> tuple[str, str] | None:
    """Return who needs what the backend does not have; None if it has everything."""
    part = backend.missing_part(model)
    if part is not None:
        return model.architecture, part
    policy = f"policy {parameters.policy}"
    if parameters.kv_cache not in backend.cache_formats:
        return policy, f"caches in {parameters.kv_cache}, only in {', '.join(backend.cache_formats)}"
    missing = backend.missing(parameters, model.num_hidden_layers)
    return None if missing is None else (policy, missing)
