"""A model under every policy: its weights written once, an engine in memory per policy, budget and length."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.answerer import Answerer, SessionAnswerer, full_row_bytes, rows_for
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.reference import Prefills, ReferenceAnswerer
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.config import BuildConfig
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.program import Program, policy_program
from kvc_trt.engine.resolution.calibration import Cosines, calibrated
from kvc_trt.engine.resolution.model_choice import ModelChoice, ModelSource, choose_model, open_source
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, compute_dtype, host_weights, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.files.cache import scratch_directory
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.weights import EngineWeights, GraphWeights, write_weights
from kvc_trt.machine import usable_cores
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.rope import longest_alike
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import threads_for
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from kvc_trt.validation import validated

if TYPE_CHECKING:
    from kvc_trt.backends.base import ProgramRunner
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.tasks.framing import Template
    from kvc_trt.tasks.tokenizer import TaskTokenizer

COPIED_WEIGHTS = 64 << 20
"""The size of quantised weights up to which engines stay open: each copies them for its decode."""
MOST_LOADED = 32
"""Engines whose graphs stay loaded. All are asked in turn, again and again, so it is the last one before that goes: the
first ones, which are asked next, are still there."""


@dataclasses.dataclass(frozen=True)
class ChosenModel:
    """A model whose checkpoint was found and whose weights nobody has read yet."""

    choice: ModelChoice
    source: ModelSource
    weights: str
    """The format of the weights in engines, fp32 to int4."""
    given: Mapping[str, str]
    """The model and, if it was named, the checkpoint, as a build takes them."""

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture, with the type in which engines compute."""
        return dataclasses.replace(self.choice.config, dtype=compute_dtype(self.weights))

    @cached_property
    def _tokenizer_file(self) -> Path | None:
        return next((path for path in self.source.tokenizer_files if path.name == "tokenizer.json"), None)

    @cached_property
    def tokenizer(self) -> TaskTokenizer | None:
        """The model's tokenizer; None for a model of token ids."""
        return None if self._tokenizer_file is None else load_task_tokenizer(str(self._tokenizer_file))

    @cached_property
    def template(self) -> Template | None:
        """The model's chat template, if it has one."""
        return None if self._tokenizer_file is None else ChatTemplate.load(self._tokenizer_file.parent)

    def describe(self) -> dict[str, Any]:
        """The model, its checkpoint and the kind of weights."""
        return {
            "model": self.choice.name,
            "checkpoint": self.source.weights.fingerprint(),
            "weights": self.weights,
            "backend": program_backend().name,
        }

    def write(self, path: Path, length: int, progress: Progress | None = None) -> None:
        """Write the weights of engines whose sequences have at most `length` tokens."""
        source, config = self.source.weights, self.choice.config
        write_weights(config, source, path, weights=self.weights, length=length, progress=progress)

    def build(self, variant: Variant, room: Room) -> BuildConfig:
        """The settings of a build of the variant's engine. InputError for settings that no policy has."""
        budget = {} if variant.token_budget is None else {"token_budget": variant.token_budget}
        given = {
            **self.given,
            "policy": variant.name,
            "max_input_len": room.max_input_len,
            "max_output_len": room.max_output_len,
            **budget,
            **variant.settings,
        }
        if room.turn_tokens:
            given["max_conversation_len"] = room.max_input_len + room.max_output_len + room.turn_tokens
        return validated(BuildConfig, given, str(variant))

    def resolved(self, variant: Variant, room: Room) -> ResolvedBuild:
        """The numbers of that engine, without layer budgets that are measured. InputError if there is no such
        engine."""
        return ResolvedBuild(with_defaults(self.build(variant, room), self.choice), self.config)


class _Stored(NamedTuple):
    """A weight file and the runner of the engines that use it, which share their prompts' prefills."""

    weights: HeldFile
    runner: ProgramRunner


class PolicyEngines:
    """A model whose weights are on the disk once; `open_model` makes one.

    They are there twice if sequences of different lengths rotate by different tables (LongRoPE).

    `threads` is how many an engine takes; None leaves that to `threads_for`. With fewer than there are processors, as
    many engines as these allow are asked at a time. Prompts are computed with all of them.
    """

    reads_once = True

    def __init__(self, chosen: ChosenModel, directory: Path, *, threads: int | None = None) -> None:
        self._chosen = chosen
        self.config, self.tokenizer, self.template = chosen.config, chosen.tokenizer, chosen.template
        threads = threads or threads_for(chosen.config)
        self._directory, self._file = directory, HeldFile(directory / WEIGHTS_FILE)
        self._backend = program_backend()
        self._threads = threads or usable_cores()
        self._stored = {chosen.config.max_position_embeddings: self._opened(self._file)}
        """Weight files by the number of positions of their rotary tables."""
        self.workers = 1 if threads is None else max(1, usable_cores() // threads)
        copied = GraphWeights(self._file).quantised
        self._stays_open = not copied or self._file.size <= COPIED_WEIGHTS
        self._prefills = Prefills()
        self._open: dict[tuple[Variant, Room], Answerer] = {}
        self._asked: dict[tuple[Variant, Room], None] = {}
        """The variants and rooms opened to be asked, the latest last."""
        self._resolved: dict[tuple[Variant, Room], PolicyParameters] = {}
        self._cosines: Cosines = {}
        self._opening = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """The model, its checkpoint and the kind of weights."""
        return self._chosen.describe()

    def announce(self, variants: Sequence[Variant], room: Room) -> None:
        """Close all other engines, and record which prefill values these variants will read."""
        self._prefills.forget()
        wanted = {(variant, room) for variant in variants}
        self._open = {key: answerer for key, answerer in self._open.items() if key in wanted}
        self._asked = {key: None for key in self._asked if key in wanted}
        for stored in self._stored.values():
            stored.runner.forget()
        for variant in variants:
            with contextlib.suppress(InputError):
                self._answerer(variant, room)

    def open(self, variant: Variant, room: Room) -> Answerer:
        """An engine in memory; the reference where the policy has none. MOST_LOADED of them stay open."""
        with self._opening:
            found = self._answerer(variant, room)
            self._asked.pop((variant, room), None)
            self._asked[variant, room] = None
            while len(self._asked) > MOST_LOADED:
                before = list(self._asked)[-2]
                del self._asked[before]
                self._open.pop(before, None)
            return found

    def _answerer(self, variant: Variant, room: Room) -> Answerer:
        """The answerer of a variant; its graphs are loaded when it is first asked."""
        if (variant, room) not in self._open:
            if not self._stays_open:
                self._open.clear()
            parameters = self.parameters(variant, room)
            turns = room.turn_tokens > 0
            made = self._reference(parameters) if parameters.selection.oracle else self._engine(parameters, turns)
            self._open[variant, room] = made
        return self._open[variant, room]

    def parameters(self, variant: Variant, room: Room) -> PolicyParameters:
        """The variant's numbers as a build resolves them, with layer budgets measured where it asks for them."""
        if (variant, room) not in self._resolved:
            resolved = self._chosen.resolved(variant, room)
            measured = calibrated(resolved, self._chosen.source, NullProgress(), known=self._cosines)
            self._resolved[variant, room] = measured.parameters
        return self._resolved[variant, room]

    def program(self, variant: Variant, room: Room) -> Program:
        """The graphs of the variant's engine."""
        return self._program(self.parameters(variant, room), room.turn_tokens > 0)

    def row_bytes(self, variant: Variant, room: Room) -> int:
        """Bytes of cache that an engine allocates for one sequence. InputError if no engine has that budget."""
        return _row_bytes(self.program(variant, room))

    def _engine(self, parameters: PolicyParameters, turns: bool) -> Answerer:
        program = self._program(parameters, turns)
        executor, rows = self._stored_for(parameters).runner.open(program), rows_for(_row_bytes(program))
        return SessionAnswerer(executor, parameters, self._backend.name, rows, self.config.eos_token_ids)

    def _reference(self, parameters: PolicyParameters) -> Answerer:
        weights = EngineWeights(self._stored_for(parameters).weights)
        rows = rows_for(full_row_bytes(self.config, parameters.max_sequence_len))
        return ReferenceAnswerer(self.config, weights, parameters, rows, self.config.eos_token_ids, self._prefills)

    def _program(self, parameters: PolicyParameters, turns: bool) -> Program:
        return policy_program(self.config, parameters, self._stored_for(parameters).weights, turns=turns)

    def _stored_for(self, parameters: PolicyParameters) -> _Stored:
        """The weights with the rotary tables of an engine of that length; they are written when first asked for."""
        length = longest_alike(self.config, parameters.max_sequence_len)
        if length not in self._stored:
            path = self._directory / str(length) / WEIGHTS_FILE
            path.parent.mkdir()
            self._chosen.write(path, length)
            self._stored[length] = self._opened(HeldFile(path))
        return self._stored[length]

    def _opened(self, weights: HeldFile) -> _Stored:
        options = RunOptions(threads=self._threads)
        return _Stored(weights, self._backend.program_runner(weights.path.parent, options, share_prefill=True))


def _row_bytes(program: Program) -> int:
    return sum(tensor.bytes_per_row() for tensor in program.state)


@contextlib.contextmanager
def open_model(
    model: str,
    *,
    checkpoint: str | None = None,
    weights: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[PolicyEngines]:
    """Write the weights of a preset or a Hugging Face directory once, for as long as it is used.

    `threads` as for `PolicyEngines`. Raises InputError for an unknown model or a checkpoint that is not the model's.
    """
    chosen = choose(model, checkpoint=checkpoint, weights=weights)
    with loaded_model(chosen, threads=threads, progress=progress) as loaded:
        yield loaded


def choose(model: str, *, checkpoint: str | None = None, weights: str = "auto") -> ChosenModel:
    """Find a model and its checkpoint. Raises InputError as `open_model` does."""
    config = BuildConfig(model=model, checkpoint=checkpoint)
    choice, source = open_source(choose_model(model, checkpoint), config)
    given = {"model": model} if checkpoint is None else {"model": model, "checkpoint": checkpoint}
    return ChosenModel(choice, source, host_weights(choice) if weights == "auto" else weights, given)


@contextlib.contextmanager
def loaded_model(
    chosen: ChosenModel, *, threads: int | None = None, progress: Progress | None = None
) -> Iterator[PolicyEngines]:
    """Write the weights of a model once, for as long as it is used; `threads` as for `PolicyEngines`."""
    with scratch_directory("accuracy") as directory:
        chosen.write(directory / WEIGHTS_FILE, chosen.config.max_position_embeddings, progress)
        yield PolicyEngines(chosen, directory, threads=threads)
