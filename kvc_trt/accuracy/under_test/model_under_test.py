"""The subject of a measurement: a model under many policies (`policy_engines`), or one engine and its dense twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.answerer import Answerer, SessionAnswerer, full_row_bytes, rows_for
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError
from kvc_trt.policies import BASELINE
from kvc_trt.runtime.executor import threads_for
from kvc_trt.tasks.tokenizer import task_tokenizer_of

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.tasks.framing import Template
    from kvc_trt.tasks.tokenizer import TaskTokenizer


@dataclass(frozen=True)
class Room:
    """The lengths that one group of questions needs."""

    max_input_len: int
    max_output_len: int
    """Room for the answer, and for the question where it arrives late."""
    turn_tokens: int = 0
    """Positions behind both, for a second question and its answer; 0 where none is asked."""


class ModelUnderTest(Protocol):
    """A model that opens one answerer per variant and room."""

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""

    @property
    def tokenizer(self) -> TaskTokenizer | None:
        """The model's tokenizer; None for a model of token ids."""

    @property
    def template(self) -> Template | None:
        """The model's chat template, if it has one."""

    @property
    def workers(self) -> int:
        """The number of variants that can be asked at a time, each in a separate thread."""

    @property
    def reads_once(self) -> bool:
        """True if a prompt is read once for all variants, not by each."""

    def describe(self) -> dict[str, Any]:
        """Settings that results must share to stand in one file."""

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """The variants that will be opened for the next questions, which nothing remembered helps with."""

    def open(self, variant: Variant, room: Room) -> Answerer:
        """The variant, resolved for the room. InputError where the policy has no engine of that budget."""


class BuiltEngine:
    """The engine under its policy and budget, whatever the questions' length: it was resolved when it was built."""

    workers = 1
    reads_once = False

    def __init__(self, engine: EngineDirectory, backend: str) -> None:
        self._engine, self._backend = engine, backend
        self._target = harness_for(engine, RunOptions(backend, threads_for(engine.model)))
        self.config: ModelConfig = engine.model
        file = engine.tokenizer_file
        self.tokenizer: TaskTokenizer | None = None if file is None else task_tokenizer_of(file)
        self.template: Template | None = None if file is None else engine.chat_template

    @property
    def variants(self) -> list[Variant]:
        """The full cache, and the engine's own policy where that is another."""
        parameters = self._engine.parameters
        own = [] if parameters.policy == BASELINE else [Variant(parameters.policy, parameters.token_budget)]
        return [Variant(BASELINE, None), *own]

    def describe(self) -> dict[str, Any]:
        """A description of the build and of its backend."""
        build = self._engine.build
        return {
            "model": build.model,
            "checkpoint": self._engine.manifest.checkpoint.fingerprint,
            "weights": build.weights,
            "backend": self._backend,
            "engine": self._engine.config.to_json()["kv_compression"]["parameters"],
        }

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """Do nothing: nothing is remembered between questions."""

    def open(self, variant: Variant, room: Room) -> Answerer:
        """The engine or its twin; both are opened once."""
        parameters = self._engine.parameters
        if room.max_input_len > parameters.max_input_len:
            raise InputError(
                f"the questions need max_input_len {room.max_input_len}, the engine has {parameters.max_input_len}",
                hint=f"build the engine with --max-input-len {room.max_input_len}, or give shorter --lengths",
            )
        return self._own if variant in self.variants[1:] or parameters.policy == BASELINE else self._twin

    @cached_property
    def _own(self) -> Answerer:
        return self._answerer(self._target.open(), self._engine.parameters)

    @cached_property
    def _twin(self) -> Answerer:
        return self._answerer(self._target.open_twin(), self._engine.parameters.keeping_everything())

    def _answerer(self, executor: Any, parameters: PolicyParameters) -> Answerer:
        rows = rows_for(full_row_bytes(self.config, parameters.max_sequence_len))
        return SessionAnswerer(executor, parameters, self._backend, rows, self.config.eos_token_ids)
