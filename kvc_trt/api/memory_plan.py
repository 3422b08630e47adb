"""The memory that a scheduler may give to rows and one prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.backends.registry import backend, runner
from kvc_trt.engine.program import engine_program
from kvc_trt.runtime.scheduler.admission import MemoryPlan

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.runtime import Session


def memory_plan(engine: EngineDirectory, options: RunOptions, session: Session, memory_bytes: int) -> MemoryPlan:
    """Return a plan of `memory_bytes`, with the bytes of a row and of a prefill by the backend that runs the engine."""
    benchmark = backend(options.backend or runner(engine.backend)).benchmark(engine, options)
    program, block = engine_program(engine), session.executor.limits.prompt_block

    def prefill_bytes(tokens: int) -> float:
        return benchmark.prefill_bytes(program, 1, -(-tokens // block) * block)

    return MemoryPlan(memory_bytes, session.executor.state_bytes() // session.max_batch_size, prefill_bytes)
