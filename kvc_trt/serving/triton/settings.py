"""The settings of a model in `parameters` of config.pbtxt: its kind, its files and its limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.serving.engine import ServingSettings

Role = Literal["model", "engine", "preprocessing", "postprocessing"]
"""model: text or tokens in, text out. The others are steps of an ensemble (`family/`)."""
ROLES: tuple[Role, ...] = get_args(Role)
ENGINE, TOKENIZER = "engine", "tokenizer.json"
"""The directory of the engine, and the file of a text step's tokenizer, beside model.py."""
DIGEST, TOKENIZER_DIGEST = "engine_sha256", "tokenizer_sha256"
_NUMBERS = {"rows": int, "queue_limit": int, "memory_bytes": int, "prefix_bytes": int, "threads": int}
_SWITCHES = dict.fromkeys(("kv_proofs", "sealed"), {"True": True, "False": False}.__getitem__)
_READ: Mapping[str, Callable[[str], object]] = {**_NUMBERS, **_SWITCHES, "prefill_slice_ms": float, "backend": str}
_LENGTHS = {"max_input_len": int, "max_output_len": int}
_LARGEST = 2**63 - 1
_SAID = ("role", "kvc_trt_version", "kv_policy", "kv_token_budget")
"""The parameter of the role, and parameters that only people read."""
_OF_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Parameters that Triton's own Python backend reads."""


@dataclass(frozen=True)
class ModelSettings:
    """The parameters of a model that runs an engine."""

    digest: str
    """The digest of the engine's manifest."""
    serving: ServingSettings = field(default_factory=ServingSettings)
    role: Role = "model"

    def parameters(self) -> dict[str, str]:
        """Return the parameters as Triton stores them, without those that have their defaults."""
        serving = ((one, getattr(self.serving, one.name)) for one in fields(self.serving))
        given = {one.name: str(value) for one, value in serving if value != one.default}
        return {DIGEST: self.digest, **({} if self.role == "model" else {"role": self.role}), **given}


@dataclass(frozen=True)
class TextSettings:
    """The parameters of a text step, which has a tokenizer and no engine."""

    role: Role
    digest: str
    """SHA-256 of the tokenizer's file."""
    max_input_len: int
    """The longest prompt that the engine takes, in tokens."""
    max_output_len: int
    """The engine's `max_output_len`: the longest answer to a request that sets no length, in tokens."""

    def parameters(self) -> dict[str, str]:
        """Return the parameters as Triton stores them."""
        lengths = {name: str(getattr(self, name)) for name in _LENGTHS}
        return {"role": self.role, TOKENIZER_DIGEST: self.digest, **lengths}


def read_settings(config: Mapping[str, Any]) -> ModelSettings | TextSettings:
    """Return the settings in a model's configuration, which Triton passes on; InputError names a wrong one."""
    given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
    role = _role(given.get("role", "model"))
    if role in ("preprocessing", "postprocessing"):
        _check_names(given, (TOKENIZER_DIGEST, *_LENGTHS), (TOKENIZER_DIGEST, *_LENGTHS))
        lengths: dict[str, Any] = {name: _read(name, given[name], _LENGTHS[name]) for name in _LENGTHS}
        return TextSettings(role, given[TOKENIZER_DIGEST], **lengths)
    _check_names(given, (DIGEST, *_READ), (DIGEST,))
    read: dict[str, Any] = {name: _read(name, given[name], _READ[name]) for name in _READ if name in given}
    return ModelSettings(given[DIGEST], ServingSettings(**read), role)


def _role(given: str) -> Role:
    for role in ROLES:
        if given == role:
            return role
    raise InputError(f"config.pbtxt: parameter 'role' is {describe(given)}, expected {', '.join(ROLES)}")


def _check_names(given: Mapping[str, str], own: Iterable[str], needed: Iterable[str]) -> None:
    known = (*own, *_SAID, *_OF_TRITON)
    for name in given:
        if name not in known:
            raise InputError(f"config.pbtxt: unknown parameter {describe(name)}{did_you_mean(name, known)}")
    for name in needed:
        if name not in given:
            raise InputError(f"config.pbtxt: parameter {name!r} is missing")


def _read(name: str, text: str, read: Callable[[str], object]) -> object:
    try:
        value = read(text)
        if isinstance(value, (int, float)) and not 0 <= value <= _LARGEST:  # false for NaN too
            raise ValueError
    except (ValueError, KeyError) as error:
        kind = "an integer" if read is int else "a number"
        expected = "True or False" if name in _SWITCHES else f"{kind} in 0..2^63-1"
        raise InputError(f"config.pbtxt: parameter {name!r} is {describe(text)}, expected {expected}") from error
    return value
