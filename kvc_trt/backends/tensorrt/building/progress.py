"""Show TensorRT's build phases as progress. It reports from several threads, and exceptions must not reach it.

C++ calls the callbacks, so an exception that leaves one ends the process. Every exception, also an interrupt, is kept,
the build is asked to stop, and the exception is raised again by the caller of the build.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvc_trt.progress import Advance, Progress

if TYPE_CHECKING:
    import tensorrt

    from kvc_trt.backends.tensorrt.module import TensorRT

STEPS_WORTH_SHOWING = 10
"""Fewest steps of a phase that is shown; the builder opens hundreds of shorter ones."""


class CallbackErrors:
    """Exceptions of callbacks, kept until the builder has returned."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        """Keep the first exception."""
        self.error = self.error or error

    def raise_again(self) -> None:
        """Raise the kept exception, if any."""
        if self.error is not None:
            raise self.error


@dataclass
class _Open:
    task: AbstractContextManager[Advance]
    advance: Advance
    done: int = 0


class Phases:
    """Shows long phases as tasks of a `Progress`, in any order; `monitor` connects it to TensorRT."""

    def __init__(self, progress: Progress, kept: CallbackErrors) -> None:
        self._progress, self._kept = progress, kept
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def start(self, name: str, steps: int) -> None:
        """Begin a phase of `steps` steps."""
        with self._lock:
            if steps < STEPS_WORTH_SHOWING or name in self._open:
                return
            task = self._progress.task(f"TensorRT: {name}", steps)
            self._open[name] = _Open(task, task.__enter__())

    def step(self, name: str, step: int) -> bool:
        """Record that step `step` (from 0) of a phase is done; False asks the builder to stop."""
        with self._lock:
            found = self._open.get(name)
            if found is not None and step >= found.done:
                found.advance(step + 1 - found.done)
                found.done = step + 1
        return self._kept.error is None

    def finish(self, name: str) -> None:
        """End a phase, maybe before its last step."""
        with self._lock:
            found = self._open.pop(name, None)
        if found is not None:
            found.task.__exit__(None, None, None)

    def close(self) -> None:
        """End the phases that a failed build left open."""
        for name in list(self._open):
            self.finish(name)


def monitor(trt: TensorRT, phases: Phases, kept: CallbackErrors) -> tensorrt.IProgressMonitor:
    """Return an IProgressMonitor that reports to `phases`; it must live as long as the builder uses it."""
    base: Any = trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            try:
                phases.start(phase_name, num_steps)
            except BaseException as error:
                kept.keep(error)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                return phases.step(phase_name, step)
            except BaseException as error:
                kept.keep(error)
                return False

        def phase_finish(self, phase_name: str) -> None:
            try:
                phases.finish(phase_name)
            except BaseException as error:
                kept.keep(error)

    return Monitor()  # type: ignore[no-any-return]
