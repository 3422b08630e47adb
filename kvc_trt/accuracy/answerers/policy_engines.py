"""A model under every policy: its weights written once, an engine in memory per policy, budget and length."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.accuracy.answerers.answerer import Answerer, SessionAnswerer, full_row_bytes, rows_for
from kvc_trt.accuracy.answerers.model_under_test import Room
from kvc_trt.accuracy.answerers.reference import Prefills, ReferenceAnswerer
from kvc_trt.accuracy.grid import Variant
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.config import BuildConfig
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.program import Program, policy_program
from kvc_trt.engine.resolution.calibration import calibrated
from kvc_trt.engine.resolution.model_choice import ModelChoice, ModelSource, choose_model, open_source
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, compute_dtype, host_weights, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.files.cache import scratch_directory
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.weights import EngineWeights, GraphWeights, write_weights
from kvc_trt.machine import usable_cores
from kvc_trt.models.config import longest_sequence
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import threads_for
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from kvc_trt.validation import validated

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.tasks.framing import Template
    from kvc_trt.tasks.tokenizer import TaskTokenizer

COPIED_WEIGHTS = 64 << 20
"""Size of quantised weights up to which engines stay open: each copies them for its decode."""


class PolicyEngines:
    """A model whose weights are on the disk once; `open_model` makes one."""

    def __init__(self, choice: ModelChoice, source: ModelSource, weights: str, directory: Path) -> None:
        self._choice, self._source, self._weights = choice, source, weights
        threads = threads_for(choice.config)
        self._file = HeldFile(directory / WEIGHTS_FILE)
        self.config = dataclasses.replace(choice.config, dtype=compute_dtype(weights))
        files = [path for path in source.tokenizer_files if path.name == "tokenizer.json"]
        self.tokenizer: TaskTokenizer | None = load_task_tokenizer(str(files[0])) if files else None
        self.template: Template | None = ChatTemplate.load(files[0].parent) if files else None
        self._backend = program_backend()
        self._runner = self._backend.program_runner(
            directory, RunOptions(threads=threads or usable_cores()), share_prefill=True
        )
        self.workers = 1 if threads is None else usable_cores()
        copied = GraphWeights(self._file).quantised
        self._stays_open = not copied or self._file.size <= COPIED_WEIGHTS
        self._prefills = Prefills()
        self._open: dict[tuple[Variant, Room], Answerer] = {}

    def describe(self) -> dict[str, Any]:
        """The model, its checkpoint and the kind of weights."""
        return {
            "model": self._choice.name,
            "checkpoint": self._source.weights.fingerprint(),
            "weights": self._weights,
            "backend": self._backend.name,
        }

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """All other engines are closed; these say what they will read of prefill."""
        self._prefills.forget()
        self._open = {key: answerer for key, answerer in self._open.items() if key[1] == room and key[0] in variants}
        self._runner.forget()
        for variant in variants:
            with contextlib.suppress(InputError):
                self.open(variant, room)

    def open(self, variant: Variant, room: Room) -> Answerer:
        """An engine in memory; the reference where the policy has none."""
        if (variant, room) in self._open:
            return self._open[variant, room]
        if not self._stays_open:
            self._open.clear()
        parameters = self._resolve(variant, room)
        turns = room.turn_tokens > 0
        answerer = self._reference(parameters) if parameters.selection.oracle else self._engine(parameters, turns)
        self._open[variant, room] = answerer
        return answerer

    def row_bytes(self, variant: Variant, room: Room) -> int:
        """Bytes of cache that an engine allocates for one sequence. InputError where there is none of that budget."""
        return _row_bytes(self._program(self._resolve(variant, room), room.turn_tokens > 0))

    def _resolve(self, variant: Variant, room: Room) -> PolicyParameters:
        """As a build resolves it, with layer budgets measured where the variant asks for them."""
        budget = {} if variant.token_budget is None else {"token_budget": variant.token_budget}
        given = {
            "model": self._choice.name,
            "policy": variant.name,
            "max_input_len": room.max_input_len,
            "max_output_len": room.max_output_len,
            **budget,
            **variant.settings,
        }
        if room.turn_tokens:
            given["max_conversation_len"] = room.max_input_len + room.max_output_len + room.turn_tokens
        config = with_defaults(validated(BuildConfig, given, str(variant)), self._choice)
        return calibrated(ResolvedBuild(config, self.config), self._source, NullProgress()).parameters

    def _engine(self, parameters: PolicyParameters, turns: bool) -> Answerer:
        program = self._program(parameters, turns)
        executor, rows = self._runner.open(program), rows_for(_row_bytes(program))
        return SessionAnswerer(executor, parameters, self._backend.name, rows, self.config.eos_token_ids)

    def _reference(self, parameters: PolicyParameters) -> Answerer:
        weights = EngineWeights(self._file)
        rows = rows_for(full_row_bytes(self.config, parameters.max_sequence_len))
        return ReferenceAnswerer(self.config, weights, parameters, rows, self.config.eos_token_ids, self._prefills)

    def _program(self, parameters: PolicyParameters, turns: bool) -> Program:
        return policy_program(self.config, parameters, self._file, turns=turns)


def _row_bytes(program: Program) -> int:
    return sum(tensor.bytes_per_row() for tensor in program.state)


@contextlib.contextmanager
def open_model(
    model: str,
    *,
    checkpoint: str | None = None,
    weights: str = "auto",
    progress: Progress | None = None,
) -> Iterator[PolicyEngines]:
    """Write the weights of a preset or a Hugging Face directory once, for as long as it is used.

    Raises InputError for an unknown model or a checkpoint that is not the model's.
    """
    config = BuildConfig(model=model, checkpoint=checkpoint)
    choice, source = open_source(choose_model(model, checkpoint), config)
    kind = host_weights(choice) if weights == "auto" else weights
    length = longest_sequence(choice.config)
    with scratch_directory("accuracy") as directory:
        path = directory / WEIGHTS_FILE
        write_weights(choice.config, source.weights, path, weights=kind, length=length, progress=progress)
        yield PolicyEngines(choice, source, kind, directory)
