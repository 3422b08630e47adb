"""What is measured: a model under many policies, or one engine beside its dense twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvc_trt.accuracy.grid import Variant
from kvc_trt.models.weights import count_parameters
from kvc_trt.verify.plan import SMALL_MODEL

if TYPE_CHECKING:
    from kvc_trt.accuracy.answerer import Answerer
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.tasks.tokenizer import TaskTokenizer

MOST_ROWS = 16
ROWS_BYTES = 1 << 30
"""Full caches of the questions that are answered together."""


@dataclass(frozen=True)
class Room:
    """The lengths that one group of questions needs."""

    max_input_len: int
    max_output_len: int
    """The answer, and the question where it arrives late."""


class Subject(Protocol):
    """Opens one answerer per variant and room."""

    @property
    def model(self) -> ModelConfig:
        """The architecture."""

    @property
    def tokenizer(self) -> TaskTokenizer | None:
        """The model's words."""

    @property
    def workers(self) -> int:
        """Variants that may be asked at a time, each by a thread of its own."""

    def describe(self) -> dict[str, Any]:
        """What the results belong to: equal where results may be put beside each other in one file."""

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """The variants that will be opened for the next questions, which nothing remembered helps with."""

    def open(self, variant: Variant, room: Room) -> Answerer:
        """The variant, resolved for the room. InputError where the policy has no engine of that budget."""


def is_oracle(decode_selection: str) -> bool:
    """Whether a policy exists to compare with only: it reads the whole cache to choose what to read."""
    return decode_selection == "exact-topk"


def threads_for(model: ModelConfig) -> int | None:
    """Threads of an executor: a small model's only wait for each other. None is all cores."""
    return 1 if count_parameters(model) < SMALL_MODEL else None


def rows_for(model: ModelConfig, sequence: int) -> int:
    """Questions of `sequence` tokens that are answered together. Rows do not depend on each other."""
    pairs = model.num_hidden_layers * model.num_key_value_heads * model.head_size
    return max(1, min(MOST_ROWS, ROWS_BYTES // (2 * 4 * pairs * sequence)))
