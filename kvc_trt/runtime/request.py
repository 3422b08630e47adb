"""What a row is asked to do, what it says while it runs, and what it leaves behind."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import Limits

FinishReason = Literal["stop", "length", "capacity"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 is greedy (lowest id among equal logits)."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k best tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keep the smallest set of best tokens whose probability reaches top_p."""
    seed: int | None = None
    """Equal seeds draw equal tokens, alone and in any batch; None takes the system's entropy."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be a finite number >= 0, found {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top-k must be >= 0 (0 keeps all tokens), found {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top-p must be in (0, 1], found {self.top_p}")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"seed must be >= 0, found {self.seed}")


@dataclass(frozen=True)
class Request:
    """One row: a prompt and the rules for its continuation."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int | None = None
    """None is the engine's max_output_len. More than the cache holds is allowed: the row then ends with `capacity`."""
    continuation_token_ids: Sequence[int] = ()
    """Fed through decode after the prompt's cache is compacted, before anything is sampled (a late query)."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: Sequence[int] = ()
    """Besides the model's own end tokens."""
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""


@dataclass(frozen=True)
class Output:
    """What a finished row produced."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every sampled token, the stop token included."""
    text: str | None
    """Decoded tokens without the stop token or stop string; None where the engine has no tokenizer."""
    finish_reason: FinishReason
    logical_length: int
    """Tokens the model has seen; the last sampled token is not fed and not counted."""
    physical_lengths: tuple[int, ...]
    """Tokens stored, per cache."""


@dataclass(frozen=True)
class Event:
    """One sampled token of one row."""

    row: int
    token_id: int
    text: str
    """New text that can no longer change or become part of a stop string; may be empty."""
    output: Output | None = None
    """Set when the row is done; it has then left the batch."""


def check_token_ids(ids: Iterable[object], limits: Limits, what: str) -> list[int]:
    """The ids as plain integers; InputError names the first that is no integer or no token of the model."""
    checked: list[int] = []
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InputError(f"{what}: token {position} is {value!r}, expected an integer token id")
        token = int(value)
        if not 0 <= token < limits.vocab_size:
            raise InputError(f"{what}: token {position} is {token}, expected an id from 0 to {limits.vocab_size - 1}")
        checked.append(token)
    return checked


def check_request(request: Request, limits: Limits, what: str = "prompt") -> tuple[list[int], list[int], int]:
    """(prompt ids, continuation ids, max_new_tokens), all checked against the engine's limits."""
    prompt = check_token_ids(request.prompt_token_ids, limits, what)
    if not prompt:
        raise InputError(f"{what} is empty, expected 1 to {limits.max_input_len} tokens")
    if len(prompt) > limits.max_input_len:
        raise InputError(
            f"{what} has {len(prompt)} tokens, expected at most {limits.max_input_len} (the engine's max_input_len)",
            hint=f"shorten it, or build the engine with --max-input-len {len(prompt)}",
        )
    max_new_tokens = limits.max_output_len if request.max_new_tokens is None else request.max_new_tokens
    if max_new_tokens < 1:
        raise InputError(f"{what}: max_new_tokens must be at least 1, found {max_new_tokens}")
    if any(not stop for stop in request.stop_strings):
        raise InputError(f"{what}: a stop string is empty")
    return prompt, check_token_ids(request.continuation_token_ids, limits, f"{what}: continuation"), max_new_tokens
