"""Which backend a build uses. Nothing is substituted silently: what was asked for is taken or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.backends.probes import PROBES, Probe
from kvc_trt.errors import InputError, UnsupportedEnvironment, did_you_mean

BUILDERS = ("onnxruntime", "tensorrt", "tensorrt-llm", "torch")


@dataclass(frozen=True)
class Backend:
    """The backend that was taken, and why."""

    name: str
    versions: dict[str, str]
    reason: str


def select_backend(name: str = "auto") -> Backend:
    """Return the backend to build for; `auto` takes tensorrt where it can really run, else onnxruntime.

    Raises InputError for an unknown name, UnsupportedEnvironment (with what is missing) for one that cannot run here.
    """
    if name == "auto":
        return _automatic()
    if name not in BUILDERS:
        raise InputError(
            f"unknown backend '{name}'{did_you_mean(name, BUILDERS)}", hint=f"one of auto, {', '.join(BUILDERS)}"
        )
    probe = PROBES[name]()
    if not probe.usable:
        raise _unusable(probe)
    return Backend(name, probe.versions, "asked for")


def _automatic() -> Backend:
    best, fallback = PROBES["tensorrt"](), PROBES["onnxruntime"]()
    if best.usable:
        return Backend(best.name, best.versions, "TensorRT can run here")
    if not fallback.usable:
        raise _unusable(fallback)
    return Backend(fallback.name, fallback.versions, f"tensorrt cannot run here: {'; '.join(best.missing)}")


def _unusable(probe: Probe) -> UnsupportedEnvironment:
    return UnsupportedEnvironment(
        f"backend {probe.name} cannot be used: {'; '.join(probe.missing)}",
        hint="; ".join(probe.install) or "--backend onnxruntime runs on any CPU",
    )
