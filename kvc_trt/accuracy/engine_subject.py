"""One engine as it was built, on any backend that runs it, beside its dense twin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvc_trt.accuracy.answerer import Answerer, SessionAnswerer
from kvc_trt.accuracy.grid import FULL, Variant
from kvc_trt.accuracy.subject import Room, rows_for, threads_for
from kvc_trt.errors import InputError
from kvc_trt.graph.twin import twin_parameters
from kvc_trt.verify.target import target_for

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.tasks.tokenizer import TaskTokenizer


class EngineSubject:
    """The engine under its policy and budget, whatever the questions' length: it was resolved when it was built."""

    workers = 1

    def __init__(self, engine: Engine, backend: str) -> None:
        from kvc_trt.tasks.tokenizer import load_task_tokenizer

        self._engine, self._backend = engine, backend
        self._target = target_for(backend, engine, threads_for(engine.model))
        self.model: ModelConfig = engine.model
        path = engine.tokenizer_path
        self.tokenizer: TaskTokenizer | None = None if path is None else load_task_tokenizer(str(path))

    @property
    def variants(self) -> list[Variant]:
        """Full, and the engine's own policy where that is another."""
        parameters = self._engine.parameters
        own = [] if parameters.policy == FULL else [Variant(parameters.policy, parameters.token_budget)]
        return [Variant(FULL, None), *own]

    def describe(self) -> dict[str, Any]:
        """What was built, and what runs it."""
        build = self._engine.config["build_config"]["kvc_trt"]
        return {
            "model": build["model"],
            "checkpoint": self._engine.manifest.get("checkpoint", {}).get("fingerprint"),
            "weights": build["weights"],
            "backend": self._backend,
            "engine": self._engine.config["kv_compression"]["parameters"],
        }

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """Nothing is remembered between questions."""

    def open(self, variant: Variant, room: Room) -> Answerer:
        """The engine or its twin; both are opened once."""
        parameters = self._engine.parameters
        if room.max_input_len > parameters.max_input_len:
            raise InputError(
                f"the questions need max_input_len {room.max_input_len}, the engine has {parameters.max_input_len}",
                hint=f"build the engine with --max-input-len {room.max_input_len}, or give shorter --lengths",
            )
        return self._own if variant in self.variants[1:] or parameters.policy == FULL else self._twin

    @cached_property
    def _own(self) -> Answerer:
        return self._answerer(self._target.open(), self._engine.parameters)

    @cached_property
    def _twin(self) -> Answerer:
        return self._answerer(self._target.open_twin(), twin_parameters(self._engine.parameters))

    def _answerer(self, executor: Any, parameters: PolicyParameters) -> Answerer:
        rows = rows_for(self.model, parameters.max_sequence_len)
        return SessionAnswerer(executor, parameters, self._backend, rows, self.model.eos_token_ids)
