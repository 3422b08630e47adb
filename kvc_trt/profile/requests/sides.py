"""The two sides of a measurement: the engine with its rows, and the dense twin with those that fit into their bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.benchmark import LARGEST_SHARE_OF_MEMORY
from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.session.session import Session
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.backends.benchmark import Benchmark
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.engine.program import Program
    from kvc_trt.profile.requests.load import Asking
    from kvc_trt.progress import Progress


@dataclass(frozen=True)
class LoadSide:
    """One side: its name in the result (`engine`, `dense`), its program and its rows."""

    name: str
    program: Program
    rows: int
    row_bytes: float
    """The bytes that one row counts as; for the dense twin those of a request of mean length."""

    @property
    def cache_bytes(self) -> float:
        """The bytes that all rows count as."""
        return self.rows * self.row_bytes

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the buffers of all rows."""
        return self.rows * _row_bytes(self.program)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the result's `sides`."""
        return {
            "side": self.name,
            "rows": self.rows,
            "row_bytes": round(self.row_bytes),
            "cache_bytes": round(self.cache_bytes),
            "allocated_bytes": self.allocated_bytes,
        }


def sides_of(engine: EngineDirectory, asked: Asking, rows: int, concurrency: int) -> tuple[LoadSide, LoadSide]:
    """Return the engine with `rows` rows, and the twin with those that fit into as many bytes, at least one.

    Caches of the twin are as long as the longest request. A row of it counts as the bytes of a request of mean length,
    which is its size in a paged cache, such as vLLM's: a twin whose short requests pay for the longest one would be a
    weak baseline. It has no more rows than there are requests at a time.
    """
    program = engine_program(engine)
    own = LoadSide("engine", program, rows, _row_bytes(program))
    longest_input, longest_output = asked.longest
    lengths = replace(
        program.parameters, max_input_len=longest_input, max_output_len=longest_output, max_conversation_len=0
    )
    twin = twin_program(replace(program, parameters=lengths))
    row_bytes = _row_bytes(twin) * asked.mean_tokens / (longest_input + longest_output)
    fit = int(own.cache_bytes / row_bytes)
    return own, LoadSide("dense", twin, max(1, min(fit, concurrency)), row_bytes)


def check_fits(sides: tuple[LoadSide, LoadSide], free_bytes: int) -> None:
    """Raise UnsupportedEnvironment for caches that this machine has no memory for."""
    needed, limit = sum(side.allocated_bytes for side in sides), LARGEST_SHARE_OF_MEMORY * free_bytes
    if needed > limit:
        own, twin = sides
        raise UnsupportedEnvironment(
            f"the caches of {own.rows:,} rows of the engine and {twin.rows:,} of its dense twin take "
            f"{readable_size(needed)}, expected at most {readable_size(limit)}",
            hint="fewer --rows, or less --concurrency",
        )


def open_scheduler(
    side: LoadSide, benchmark: Benchmark, engine: EngineDirectory, concurrency: int, progress: Progress
) -> Scheduler:
    """Return a scheduler over a session of its own, which is not started yet; all requests at a time may wait."""
    executor = benchmark.open(side.program)
    with progress.task(f"loading {side.name}", None):
        executor.load()
    session = Session(executor, engine.tokenizer, side.rows, progress=progress)
    return Scheduler(session, conversations=False, queue_limit=concurrency)


def _row_bytes(program: Program) -> int:
    return sum(tensor.bytes_per_row() for tensor in program.state)
