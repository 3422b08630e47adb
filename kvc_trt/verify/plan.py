"""The amount of work of each level of verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import count_parameters
from kvc_trt.policies import PolicyParameters
from kvc_trt.runtime.executor import threads_for

Level = Literal["quick", "full", "ops", "codes", "logits", "tokens", "retrieval"]
LEVELS: tuple[str, ...] = get_args(Level)

CODES = "codes"
RUNGS = ("ops", CODES, "logits", "tokens", "retrieval")
CONTROLS = ("dense twin", "activity")

LARGE_MODEL = 3_000_000_000
"""The number of parameters above which a quick check is limited: the reference would take minutes for every token."""
_LIMITED_PROMPT, _LIMITED_STEPS = 56, 8
_CONTEXT_OF_ALL_SAMPLES = 512
_FEWEST_SAMPLES = 32
_TEXT_WORK = 1.7e12
"""The work of the text questions of one placement and length at quick level, as parameters times prompt tokens: 6
questions of 2,048 tokens for a model of 135 million."""
_TEXT_WORK_OF_FULL = 8 * _TEXT_WORK
_FEWEST_TEXT_SAMPLES = 4
_MOST_REFERENCE_SAMPLES = 32
_SHARE_OF_REFERENCE = 3
"""The reference answers one in this many text questions, too."""


@dataclass(frozen=True)
class Plan:
    """The extent of one verification."""

    level: str
    rungs: tuple[str, ...]
    controls: tuple[str, ...]
    longest_prompt: int
    steps: int
    """The number of teacher-forced steps, and of greedy tokens."""
    samples: int
    """The most retrieval questions per context length and placement; see `samples_at`."""
    contexts: tuple[int, ...]
    """The lengths in tokens of questions in a vocabulary made for them."""
    text_contexts: tuple[int, ...] = ()
    """The lengths in tokens of questions that are text."""
    text_work: float = _TEXT_WORK
    model_parameters: int = 0
    limited: bool = False
    """True if this is the limited quick check of a large model."""
    threads: int | None = None
    """The number of threads of the executors and of PyTorch; None leaves both their defaults."""
    exact_samples: bool = False
    """True if the user gave the number of samples, which then applies at every length."""

    def contexts_for(self, max_input_len: int, *, text: bool) -> list[int]:
        """Return the lengths of retrieval questions that the engine takes; its own limit if it takes none of them."""
        wanted = self.text_contexts if text else self.contexts
        return [length for length in wanted if length <= max_input_len] or [max_input_len]

    def samples_at(self, context: int, *, text: bool) -> int:
        """Return the number of questions at one length: fewer at long ones, so that all lengths take about as long.

        Text questions are long, and models that read text are large, so their number is limited by the work of reading.
        """
        if self.exact_samples:
            return self.samples
        if text:
            affordable = int(self.text_work / (max(1, self.model_parameters) * context))
            return min(self.samples, max(_FEWEST_TEXT_SAMPLES, affordable))
        if context <= _CONTEXT_OF_ALL_SAMPLES:
            return self.samples
        return max(min(self.samples, _FEWEST_SAMPLES), self.samples * _CONTEXT_OF_ALL_SAMPLES // context)

    def reference_samples(self, asked: int, *, text: bool) -> int:
        """Return the number of questions that the reference answers as well, out of `asked`."""
        some = -(-asked // _SHARE_OF_REFERENCE) if text else asked
        return min(_MOST_REFERENCE_SAMPLES, some)


def _rungs_of(parameters: PolicyParameters) -> tuple[str, ...]:
    """Return the rungs of a whole ladder; the rung of codes only for caches that have a format."""
    return tuple(name for name in RUNGS if name != CODES or parameters.cache_format.keys is not None)


def make_plan(
    level: str,
    model: ModelConfig,
    parameters: PolicyParameters,
    *,
    steps: int | None = None,
    samples: int | None = None,
) -> Plan:
    """Return the plan of a level; `steps` and `samples` override its sizes. InputError for invalid values."""
    if level not in LEVELS:
        raise InputError(f"--level {level}: expected one of {', '.join(LEVELS)}")
    for name, value in (("--steps", steps), ("--samples", samples)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}: expected at least 1")
    if steps is not None and steps > parameters.max_output_len:
        raise InputError(f"--steps is {steps}: the engine has room for {parameters.max_output_len} new tokens")
    parameters_of_model = count_parameters(model)
    large = parameters_of_model > LARGE_MODEL
    if level == "quick" and large:
        few = tuple(name for name in ("ops", CODES, "logits") if name in _rungs_of(parameters))
        return Plan(level, few, (), _LIMITED_PROMPT, steps or _LIMITED_STEPS, 0, (), limited=True)
    rungs = _rungs_of(parameters) if level in ("quick", "full") else (level,)
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
        text_contexts=(512, 2048, 4096) if full else (2048,),
        text_work=_TEXT_WORK_OF_FULL if full else _TEXT_WORK,
        model_parameters=parameters_of_model,
        threads=threads_for(model),
        exact_samples=samples is not None,
    )
