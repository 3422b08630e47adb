"""What `parameters` of config.pbtxt say about an engine: which one it is, and how much it takes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.serving.engine import ServingSettings

ENGINE = "engine"
"""Directory of the engine, beside model.py."""
DIGEST = "engine_sha256"
_NUMBERS = {"rows": int, "queue_limit": int, "memory_bytes": int, "prefix_bytes": int, "threads": int}
_SWITCHES = {"kv_proofs": {"True": True, "False": False}.__getitem__}
_READ: Mapping[str, Callable[[str], object]] = {**_NUMBERS, **_SWITCHES, "prefill_slice_ms": float, "backend": str}
_SAID = ("kvc_trt_version", "kv_policy", "kv_token_budget")
"""What is written for people."""
_OF_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Parameters that Triton's own Python backend reads."""


@dataclass(frozen=True)
class ModelSettings:
    """The parameters of one model."""

    digest: str
    """That of the engine's manifest."""
    serving: ServingSettings = field(default_factory=ServingSettings)

    def parameters(self) -> dict[str, str]:
        """Return them as Triton stores them; those that are the default are left out."""
        serving = {one.name: getattr(self.serving, one.name) for one in fields(self.serving)}
        return {DIGEST: self.digest, **{name: str(value) for name, value in serving.items() if value}}


def read_settings(config: Mapping[str, Any]) -> ModelSettings:
    """Return the settings in a model's configuration, as Triton passes it on; InputError for what is wrong with one."""
    given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
    known = (DIGEST, *_READ, *_SAID, *_OF_TRITON)
    for name in given:
        if name not in known:
            raise InputError(f"config.pbtxt: unknown parameter {name!r}{did_you_mean(name, known)}")
    if DIGEST not in given:
        raise InputError(f"config.pbtxt: parameter {DIGEST!r} is missing")
    read: dict[str, Any] = {name: _read(name, given[name]) for name in _READ if name in given}
    return ModelSettings(given[DIGEST], ServingSettings(**read))


def _read(name: str, text: str) -> object:
    try:
        return _READ[name](text)
    except (ValueError, KeyError) as error:
        expected = "an integer" if name in _NUMBERS else "True or False" if name in _SWITCHES else "a number"
        raise InputError(f"config.pbtxt: parameter {name!r} is {text!r}, expected {expected}") from error
