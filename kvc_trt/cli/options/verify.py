"""The command line of `kvc-trt verify`: which options go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvc_trt.backends.registry import backends, program_backend
from kvc_trt.backends.run_options import PrefillPrecision

if TYPE_CHECKING:
    from kvc_trt.tasks.own.fitting import Truncate

_ENGINE_HAS = ("policies", "budgets", "weights")
"""Options of --level tasks that an engine has already."""
_WITH_REPLAY = ("engine", "replay", "file", "as_json")


@dataclass(frozen=True)
class TaskArguments:
    """The options of --level tasks, by their parameters' names. None is an option that is not given."""

    model: str | None
    policies: tuple[str, ...] | None
    budgets: tuple[int, ...] | None
    weights: str | None
    tasks: tuple[str, ...] | None
    data: Path | None
    truncate: Truncate | None
    lengths: tuple[int, ...] | None
    modes: tuple[str, ...] | None
    framing: str | None
    max_new_tokens: int | dict[str, int] | None
    minimum_accuracy: float | None
    """Percent."""
    maximum_loss: float | None
    """Percentage points."""
    output_dir: Path | None


@dataclass(frozen=True)
class VerifyArguments:
    """Every argument and option, by its parameter's name; those of --level tasks are in `asked`."""

    engine: Path | None
    level: str
    backend: str | None
    kernels: Path | None
    prefill_precision: PrefillPrecision
    sealed: bool
    steps: int | None
    samples: int | None
    checkpoint: Path | None
    seed: int
    replay: Path | None
    file: Path | None
    as_json: bool
    asked: TaskArguments

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> VerifyArguments:
        """Return the arguments among a command's `parameters`."""
        asked = {field.name: parameters[field.name] for field in fields(TaskArguments)}
        others = {name: value for name, value in parameters.items() if name not in asked}
        return cls(asked=TaskArguments(**asked), **others)

    @property
    def report_file(self) -> Path | None:
        """The file of the report, if there is one."""
        return None if self.level == "tensors" else self.file

    @property
    def directory(self) -> Path | None:
        """The directory of Polygraphy's files, if there is one."""
        return self.file if self.level == "tensors" else None

    def needed_engine(self) -> Path:
        """Return ENGINE; UsageError if it is missing."""
        if self.engine is None:
            raise click.UsageError("Missing argument 'ENGINE'.")
        return self.engine

    def check(self) -> None:
        """Raise UsageError for options that exclude each other, or an engine that is missing."""
        if self.replay is not None:
            _check_replay()
            self.needed_engine()
            return
        if self.level in ("tasks", "tensors") and self.prefill_precision != "f32":
            raise click.UsageError(f"--prefill-precision: --level {self.level} computes in f32")
        if self.level == "tasks":
            self._check_tasks()
            return
        self._refuse_tasks()
        self.needed_engine()

    def _check_tasks(self) -> None:
        if self.steps is not None:
            raise click.UsageError("--steps: --level tasks generates answers; --max-new-tokens bounds them")
        if (self.engine is None) == (self.asked.model is None):
            raise click.UsageError("--level tasks takes either ENGINE or --model")
        if self.engine is not None:
            for name in _ENGINE_HAS:
                if getattr(self.asked, name) is not None:
                    raise click.UsageError(f"--{name}: an engine has its own; --model measures others")
            if self.checkpoint is not None:
                raise click.UsageError("--checkpoint: an engine has its own weights; --model takes another's")
        elif self.backend not in (None, runs := program_backend().name) or self.kernels is not None:
            raise click.UsageError(f"--backend, --kernels: engines of --model are built in memory, for {runs}")
        able = [name for name, each in backends().items() if each.calls_kernels]
        if self.kernels is not None and self.backend not in able:
            raise click.UsageError(f"--kernels goes with --backend {' or '.join(able)}")
        if self.asked.truncate is not None and self.asked.data is None:
            raise click.UsageError("--truncate goes with --data: generated tasks are as long as --lengths says")

    def _refuse_tasks(self) -> None:
        """Refuse options of --level tasks at another level, the first of the command line."""
        for name, value in click.get_current_context().params.items():
            if name in vars(self.asked) and value is not None:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} goes with --level tasks, found --level {self.level}")


def _check_replay() -> None:
    """Refuse every option that is given beside --replay and does not go with it, even with its default value."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if name not in _WITH_REPLAY and given not in (None, ParameterSource.DEFAULT):
            raise click.UsageError(f"--replay goes with ENGINE, -o and --json, found {parameter.opts[0]}")
