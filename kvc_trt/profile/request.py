"""The settings of a profile, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig

DEFAULT_POINTS = 5
LEAST_DEFAULT_CONTEXT = 128
DEFAULT_STEPS = 100
DEFAULT_BATCHES = (1, 8)


@dataclass(frozen=True)
class ProfileRequest:
    """The settings of one profile."""

    contexts: tuple[int, ...]
    """Prompt lengths in tokens, ascending."""
    batches: tuple[int, ...]
    steps: int
    """Decode steps per row of the result and side."""
    decode_seconds: float
    """Time limit of the steps of one row of the result, both sides together."""
    prefills: int
    """Timed prefills per row of the result and side."""
    prefill_seconds: float
    """Time limit of one prefill; time to first token is left out if one is expected to take longer."""
    options: RunOptions = DEFAULTS


def default_contexts(parameters: PolicyParameters) -> tuple[int, ...]:
    """Return the engine's longest prompt, halved down to 128 tokens."""
    longest = parameters.max_input_len
    halves = [longest >> shift for shift in range(DEFAULT_POINTS)]
    return tuple(sorted({length for length in halves if length >= min(LEAST_DEFAULT_CONTEXT, longest)}))


def check_contexts(contexts: tuple[int, ...], parameters: PolicyParameters, model: ModelConfig) -> tuple[int, ...]:
    """Return the contexts in ascending order; InputError for one that the engine does not support."""
    longest = model.max_position_embeddings
    for context in contexts:
        if not 1 <= context <= parameters.max_input_len:
            raise InputError(
                f"--contexts {context}: this engine takes prompts of 1 to {parameters.max_input_len} tokens",
                hint=f"build it with --max-input-len {context}" if 0 < context <= longest else None,
            )
    return tuple(sorted(set(contexts)))
