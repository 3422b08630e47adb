"""Check whether a backend supports a policy, before a build does any work and before an engine is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.engine.backend import BuildBackend
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters


def check_supported(
    parameters: PolicyParameters, layers: int, backend: str, backends: Mapping[str, BuildBackend]
) -> None:
    """Raise InputError, naming the backends that support the policy, if `backend` does not."""
    missing = _missing(parameters, layers, backends[backend])
    if missing is None:
        return
    able = supporting(parameters, layers, backends)
    runs = f"it runs on {', '.join(able)}" if able else "only the reference runs it"
    hint = f"--backend {able[0]}" if able else "kvc-trt policies lists the policies; kvc-trt verify --level tasks"
    raise InputError(f"policy {parameters.policy}: backend {backend} has no {missing}; {runs}", hint=hint)


def supporting(parameters: PolicyParameters, layers: int, backends: Mapping[str, BuildBackend]) -> list[str]:
    """Return the backends that support the policy; none for an oracle."""
    return [name for name, backend in backends.items() if _missing(parameters, layers, backend) is None]


def _missing(parameters: PolicyParameters, layers: int, backend: BuildBackend) -> str | None:
    if parameters.kv_cache not in backend.cache_formats:
        return f"caches in {parameters.kv_cache}, only in {', '.join(backend.cache_formats)}"
    return backend.missing(parameters, layers)
