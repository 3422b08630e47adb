"""How much each level of verification does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import count_parameters
from kvc_trt.policies import PolicyParameters
from kvc_trt.runtime.executor import threads_for

Level = Literal["quick", "full", "ops", "logits", "tokens", "retrieval"]
LEVELS: tuple[str, ...] = get_args(Level)

RUNGS = ("ops", "logits", "tokens", "retrieval")
CONTROLS = ("dense twin", "activity")

LARGE_MODEL = 3_000_000_000
"""Parameters above which a quick check is limited: the reference would take minutes for every token."""
_LIMITED_PROMPT, _LIMITED_STEPS = 56, 8
_CONTEXT_OF_ALL_SAMPLES = 512
_FEWEST_SAMPLES = 32


@dataclass(frozen=True)
class Plan:
    """What one verification does."""

    level: str
    rungs: tuple[str, ...]
    controls: tuple[str, ...]
    longest_prompt: int
    steps: int
    """How many teacher-forced steps, and how many greedy tokens."""
    samples: int
    """Retrieval questions per context length and placement; see `samples_at`."""
    contexts: tuple[int, ...]
    limited: bool = False
    """Whether this is the limited quick check of a large model."""
    threads: int | None = None
    """Threads of the executors and of PyTorch; None leaves both their defaults."""
    exact_samples: bool = False
    """The number of samples was asked for, and holds at every length."""

    def samples_at(self, context: int) -> int:
        """Questions at one length: fewer at long ones, so that every length takes about the same time."""
        if self.exact_samples or context <= _CONTEXT_OF_ALL_SAMPLES:
            return self.samples
        return max(min(self.samples, _FEWEST_SAMPLES), self.samples * _CONTEXT_OF_ALL_SAMPLES // context)


def make_plan(
    level: str,
    model: ModelConfig,
    parameters: PolicyParameters,
    *,
    steps: int | None = None,
    samples: int | None = None,
) -> Plan:
    """The plan of a level; `steps` and `samples` override its sizes. InputError for values that cannot be right."""
    if level not in LEVELS:
        raise InputError(f"--level {level}: expected one of {', '.join(LEVELS)}")
    for name, value in (("--steps", steps), ("--samples", samples)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}: expected at least 1")
    if steps is not None and steps > parameters.max_output_len:
        raise InputError(f"--steps is {steps}: the engine has room for {parameters.max_output_len} new tokens")
    large = count_parameters(model) > LARGE_MODEL
    if level == "quick" and large:
        return Plan(level, ("ops", "logits"), (), _LIMITED_PROMPT, steps or _LIMITED_STEPS, 0, (), limited=True)
    rungs = RUNGS if level in ("quick", "full") else (level,)
    full = level == "full"
    room = parameters.max_output_len
    return Plan(
        level,
        rungs,
        CONTROLS if level != "retrieval" else (),
        longest_prompt=parameters.max_input_len if full and not large else min(parameters.max_input_len, 1024),
        steps=steps or min(room, 64 if full else 32),
        samples=samples or (200 if full else 32),
        contexts=(256, 512, 1024, 2048) if full else (512,),
        threads=threads_for(model),
        exact_samples=samples is not None,
    )
