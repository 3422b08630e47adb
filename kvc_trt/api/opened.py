"""An engine directory and what runs it: opened, loaded at the first question, shared by a scheduler, closed."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvc_trt.progress import NullProgress, Progress

if TYPE_CHECKING:
    from kvc_trt.backends.prefill_precision import PrefillPrecision
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models import ModelConfig
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.runtime import Scheduler, Session
    from kvc_trt.runtime.scheduler.admission import MemoryPlan

StrPath: TypeAlias = "str | PathLike[str]"
Opened = TypeVar("Opened", bound="OpenedEngine")


class OpenedEngine:
    """The part of `Engine` that runs it: its session, and a scheduler over that."""

    def __init__(
        self,
        directory: EngineDirectory,
        *,
        backend: str | None = None,
        threads: int | None = None,
        prefill_precision: PrefillPrecision = "f32",
        prefix_bytes: int = 0,
        speculate: str | None = None,
        proofs: bool = False,
        progress: Progress | None = None,
    ) -> None:
        from kvc_trt.backends.registry import runner

        self.directory = directory
        """The checked engine directory: its files, config.json and manifest."""
        self._backend = None if backend is None else runner(directory.backend, backend)
        self._threads = threads
        self._prefill_precision = prefill_precision
        self._prefix_bytes = prefix_bytes
        self._speculate = speculate
        self._proofs = proofs
        self._progress = progress or NullProgress()
        self._session: Session | None = None

    @classmethod
    def open(
        cls: type[Opened],
        path: StrPath,
        *,
        backend: str | None = None,
        threads: int | None = None,
        prefill_precision: PrefillPrecision = "f32",
        prefix_bytes: int = 0,
        speculate: str | None = None,
        proofs: bool = False,
        progress: Progress | None = None,
    ) -> Opened:
        """Check the whole directory and return the engine; nothing is loaded yet.

        `backend` None runs it where it was built for, `threads` None on all cores. `prefill_precision`
        "bf16" computes prefill in bfloat16, faster on processors that multiply it; decode stays in float32.
        `prefix_bytes` are for what prompts have in common (see `share`). `speculate` "ngram", or "ngram:4" for drafts
        of four tokens, checks several tokens at once where the text repeats itself; answers stay the same. With
        `proofs`, answers can be asked for with a proof of what the caches kept and read (docs/proof.md), which makes
        the graphs write it out. Raises InputError for an engine that is not intact or cannot run there, with the
        command that rebuilds it.
        """
        from kvc_trt.backends.registry import open_engine

        directory = open_engine(path, progress=progress)
        return cls(
            directory,
            backend=backend,
            threads=threads,
            prefill_precision=prefill_precision,
            prefix_bytes=prefix_bytes,
            speculate=speculate,
            proofs=proofs,
            progress=progress,
        )

    @property
    def backend(self) -> str:
        """What runs it; InputError where nothing does that was not asked for."""
        from kvc_trt.backends.registry import runner

        return self._backend or runner(self.directory.backend)

    @property
    def kernels(self) -> str | None:
        """What computes the engine's `kvc` operators, such as "native operators (avx512)"; None for their bodies."""
        from kvc_trt.backends.registry import backend

        return backend(self.backend).kernels(self.directory)

    @property
    def path(self) -> Path:
        """Path of the engine directory."""
        return self.directory.path

    @property
    def model(self) -> ModelConfig:
        """The model's configuration."""
        return self.directory.model

    @property
    def parameters(self) -> PolicyParameters:
        """The policy with every number that was derived for this engine."""
        return self.directory.parameters

    def session(self, max_batch_size: int = 1) -> Session:
        """Load what runs the engine, and return a session with at least that many rows.

        `generate` and `stream` use the same one. With it rows can join and leave one by one. Raises
        UnsupportedEnvironment where this machine cannot run the engine.
        """
        from kvc_trt.backends.registry import session_of

        if self._session is None:
            self._session = session_of(
                self.directory,
                backend=self.backend,
                max_batch_size=max_batch_size,
                threads=self._threads,
                prefill_precision=self._prefill_precision,
                prefix_bytes=self._prefix_bytes,
                speculate=self._speculate,
                proofs=self._proofs,
                progress=self._progress,
            )
        elif self._session.max_batch_size < max_batch_size:
            self._session.grow(max_batch_size)
        return self._session

    def scheduler(
        self,
        max_batch_size: int | None = None,
        *,
        prefill_slice_ms: float | None = None,
        queue_limit: int | None = None,
        stay_seconds: float | None = None,
        conversations: bool = True,
        memory_bytes: int | None = None,
    ) -> Scheduler:
        """Return a scheduler over the engine's session, which answers many callers at once; docs/scheduler.md.

        Use it with `with`, or call `start` and `close`; until it is closed, ask nothing of the engine itself.
        `max_batch_size` None is the number of rows that the engine was built for. `memory_bytes` limits what rows and
        one prefill take together; None counts rows alone. Without `conversations` it starts sooner, and their first
        turn waits longer. None leaves the other settings at their defaults. Raises
        UnsupportedEnvironment where this machine cannot run the engine.
        """
        from kvc_trt.runtime.scheduler.scheduler import Scheduler

        rows = self.directory.build.max_batch_size if max_batch_size is None else max_batch_size
        session = self.session(rows)
        memory = None if memory_bytes is None else self._memory_plan(session, memory_bytes)
        settings = {
            "prefill_slice_ms": prefill_slice_ms, "queue_limit": queue_limit, "stay_seconds": stay_seconds,
        }  # fmt: skip
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        return Scheduler(session, max_rows=rows, memory=memory, conversations=conversations, **given)

    def _memory_plan(self, session: Session, memory_bytes: int) -> MemoryPlan:
        from kvc_trt.backends.registry import backend
        from kvc_trt.engine.program import engine_program
        from kvc_trt.machine import usable_cores
        from kvc_trt.runtime.scheduler.admission import MemoryPlan

        runs_it = backend(self.backend).with_prefill(self._prefill_precision)
        benchmark = runs_it.benchmark(self.directory, self._threads or usable_cores())
        program, block = engine_program(self.directory), session.executor.limits.prompt_block

        def prefill_bytes(tokens: int) -> float:
            return benchmark.prefill_bytes(program, 1, -(-tokens // block) * block)

        return MemoryPlan(memory_bytes, session.executor.state_bytes() // session.max_batch_size, prefill_bytes)

    def rows_for(self, prompts: Sequence[object]) -> int:
        """Rows that answer these prompts at once: as many as the engine was built for; the others wait."""
        return max(1, min(len(prompts), self.directory.build.max_batch_size))

    def close(self) -> None:
        """Give back what runs the engine; the next question loads it again."""
        from kvc_trt.runtime.executor import ClosingExecutor

        session, self._session = self._session, None
        if session is not None and isinstance(session.executor, ClosingExecutor):
            session.executor.close()

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        backend = self._backend or self.directory.backend
        return f"Engine({str(self.path)!r}, policy={self.parameters.policy!r}, backend={backend!r})"


def as_path(path: StrPath | None) -> Path | None:
    """Return the path as an object; None stays None."""
    return None if path is None else Path(path)
