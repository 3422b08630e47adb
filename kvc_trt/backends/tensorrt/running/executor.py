"""Run a TensorRT engine: caches stay on the GPU and are updated in place; a decode step is one CUDA graph.

Device memory is planned once per number of rows (`memory.py`) and allocated as one block; nothing is allocated while
rows run. A step copies its tokens and lengths in, runs, and copies each row's best token out into pinned memory, all
recorded in one CUDA graph per batch size. The host waits once per step: for the best tokens if every row is greedy,
otherwise for the logits that it samples from, which are copied after the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.tensorrt.building.profiles import choose_profile, longest_turn
from kvc_trt.backends.tensorrt.device import Graph, Stream, free_memory
from kvc_trt.backends.tensorrt.lowering.outputs import BEST, LOGITS
from kvc_trt.backends.tensorrt.running.buffers import Buffers, StagedRows
from kvc_trt.backends.tensorrt.running.context import ExecutionContext, ExtraOutputs
from kvc_trt.backends.tensorrt.running.loading import LoadedEngine, load, profiles_of
from kvc_trt.backends.tensorrt.running.memory import STAGED, EngineBytes, check_fits, plan_memory, sizes_for
from kvc_trt.backends.tensorrt.running.turns import Turns
from kvc_trt.engine.program import Program, engine_program
from kvc_trt.runtime.executor import ExecutorBase, Extended, Prefilled

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

Array = NDArray[Any]


@dataclass
class PreparedStep:
    """A decode step prepared for a number of rows."""

    context: ExecutionContext
    extra_outputs: ExtraOutputs
    graph: Graph | None = None
    """None until the step has run once, and if graphs are off."""


class TensorRtExecutor(ExecutorBase):
    """The `GreedyExecutor` of one engine directory, or of a `Program` whose engines are `loaded` already.

    A prefill works in the last rows of the state buffers: by the session's contract the active rows come first, and
    there are at least as many free rows as prompts. So the next prefill overwrites its rows, and so may inserting
    another row; inserting an overwritten row is an error. `cuda_graphs=False` queues every kernel separately, for
    debugging.
    """

    def __init__(
        self, engine: EngineDirectory | Program, *, loaded: LoadedEngine | None = None, cuda_graphs: bool = True
    ) -> None:
        self.program = engine if isinstance(engine, Program) else engine_program(engine)
        self._engine, self._loaded = engine, loaded
        self._limits = self.program.limits
        self._cuda_graphs = cuda_graphs
        self._state_by_name = {tensor.name: tensor for tensor in self.program.state}
        self._stream: Stream | None = None
        self._buffers: Buffers | None = None
        self._steps: dict[int, PreparedStep] = {}
        self._prefills: dict[int, ExecutionContext] = {}
        self._staged: StagedRows | None = None
        self._turns: Turns | None = None
        self._exposed: dict[str, Array] = {}

    def load(self) -> LoadedEngine:
        """Load the plans onto the GPU, once."""
        if self._loaded is None:
            assert not isinstance(self._engine, Program), "a program is run with engines that are loaded already"
            self._loaded = load(self._engine)
        return self._loaded

    def allocate(self, max_batch_size: int) -> None:
        """Plan the memory for this many rows, check that it fits, and allocate all buffers, freeing earlier ones.

        InputError for more rows than the engine's profiles allow, UnsupportedEnvironment if they do not fit.
        """
        loaded = self.load()
        decode, prefill = profiles_of(loaded.decode, "token"), profiles_of(loaded.prefill, "input_ids")
        choose_profile(decode, max_batch_size)
        self.release()
        turns = () if loaded.extend is None else profiles_of(loaded.extend, "input_ids")
        sizes = sizes_for(prefill, max_batch_size, longest_turn(turns))
        engine = EngineBytes(0, 0, loaded.activation_bytes(max_batch_size), "engine")
        plan = plan_memory(self.program.model.vocab_size, self.program.state, engine, sizes)
        check_fits(plan, free_memory()[0], "what the engine needs beside its weights")
        self._stream = Stream()
        self._buffers = Buffers(self.program, sizes, engine.activations, self._stream)

    def release(self) -> None:
        """Free everything except the plans."""
        if self._stream is not None:
            self._stream.synchronise()
        for step in self._steps.values():
            step.extra_outputs.free()
            if step.graph is not None:
                step.graph.free()
        self._steps, self._prefills, self._staged, self._turns = {}, {}, None, None
        if self._buffers is not None:
            self._buffers.free()
        if self._stream is not None:
            self._stream.free()
        self._buffers = self._stream = None

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers in bytes."""
        return self.rows * sum(tensor.bytes_per_row() for tensor in self.program.state)

    @property
    def rows(self) -> int:
        """The number of allocated rows."""
        return self._allocated.sizes.rows

    def prefill_bytes(self) -> int:
        """Bytes that a prefill needs in addition to the rows' state, allocated before the first one."""
        staged = self._allocated.sizes.prefill_rows * sum(tensor.bytes_per_row() for tensor in self.program.state)
        return staged + self._allocated.activations[1]

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts, in as many runs as the engine's profiles require; their rows wait in the last rows."""
        buffers, rows = self._allocated, len(prompt_lengths)
        buffers.check_rows(rows)
        staged, self._staged = StagedRows(buffers.sizes.rows - rows, rows), None
        logits = np.empty((rows, self._limits.vocab_size), np.float32)
        lengths = np.empty((len(self._limits.capacities), rows), np.int64)
        seen: dict[str, list[Array]] = {}
        profiles = profiles_of(self.load().prefill, "input_ids")
        profile = choose_profile(profiles, 1, input_ids.shape[1])
        most = min(profiles[profile].batch.largest, buffers.sizes.prefill_rows)
        for first in range(0, rows, most):
            end = min(first + most, rows)
            count = end - first
            self._run_prefill(profile, input_ids[first:end], prompt_lengths[first:end], seen)
            buffers.queue_unstage(count, staged.first + first)
            logits[first:end] = buffers.prompt_logits.array[:count]
            lengths[:, first:end] = buffers.lengths(count)
        self._exposed |= {name: np.concatenate(parts) for name, parts in seen.items()}
        self._staged = staged
        return Prefilled(logits, lengths, staged)

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into row `row`; ValueError for a row of an earlier prefill, or one overwritten."""
        staged: StagedRows = prefilled.state
        if staged is not self._staged:
            raise ValueError(f"prefilled row {source_row} is gone: insert rows before the next prefill")
        if (source := staged.take(source_row, row)) is not None:
            self._allocated.copy_row(source, row)

    def move(self, source_row: int, row: int) -> None:
        """Copy one row of every buffer over another."""
        self._allocated.copy_row(source_row, row)

    def read_row(self, row: int) -> dict[str, Array]:
        """Return a copy of one row of every state tensor, by name."""
        return {tensor.name: self._allocated.read_row(tensor, row) for tensor in self.program.state}

    def write_row(self, row: int, tensors: Iterable[tuple[str, Array]]) -> None:
        """Write one row of every state tensor, given by name."""
        for name, array in tensors:
            self._allocated.write_row(self._state_by_name[name], row, array)

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows in place; the logits are valid until the next call."""
        step, buffers, rows = self._start(tokens, positions, cache_lengths), self._allocated, len(tokens)
        buffers.queue_logits_out(buffers.logits, rows)
        self._finish(step, rows)
        found: NDArray[np.float32] = buffers.logits.array[:rows]
        return found

    def decode_greedy(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Like `decode`, but return only each row's best token [rows], the lowest among equals, or NOT_FINITE.

        The plan computes it (`lowering/outputs.py`); the logits stay on the device.
        """
        step, rows = self._start(tokens, positions, cache_lengths), len(tokens)
        self._finish(step, rows)
        found: NDArray[np.int64] = self._allocated.best.array[:rows].astype(np.int64)
        return found

    @override
    def load_turns(self) -> LoadedEngine:
        """Load all plans, the plan of turns among them."""
        return self.load()

    def extend(
        self, first_row: int, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Extended:  # fmt: skip
        """Let the rows from `first_row` on take a turn, one after the other; no graph is captured."""
        buffers = self._allocated
        if self._turns is None:
            self._turns = Turns(self.load(), self.program, buffers)
        return self._turns.run(first_row, input_ids, lengths, positions, cache_lengths)

    @property
    def buffers(self) -> Mapping[str, Array]:
        """Return a copy of the state by tensor name, [max_batch_size, ...]."""
        return {tensor.name: self._allocated.read(tensor) for tensor in self.program.state}

    def fill_rows(self, rows: Mapping[str, Array]) -> None:
        """Fill every row of the named state tensors with these contents, each of one row's shape."""
        for tensor in self.program.state:
            if tensor.name in rows:
                self._allocated.fill(tensor, rows[tensor.name])
        self._allocated.stream.synchronise()

    def exposed(self, name: str) -> Array:
        """Return an extra output of the engine, from the latest run."""
        return self._exposed[name]

    @property
    def _allocated(self) -> Buffers:
        if self._buffers is None:
            raise ValueError("no rows are allocated; call allocate(max_batch_size) first")
        return self._buffers

    def _start(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> PreparedStep:
        """Queue a step, its best tokens included."""
        buffers, rows = self._allocated, len(tokens)
        buffers.check_rows(rows)
        buffers.write_step(tokens, positions, cache_lengths)
        step = self._steps.get(rows) or self._make_step(rows)
        if step.graph is not None:
            step.graph.launch(buffers.stream)
        else:
            self._queue_step(step.context, rows)
        return step

    def _finish(self, step: PreparedStep, rows: int) -> None:
        """Wait for the step and everything queued after it; the first step of its rows is recorded afterwards."""
        stream = self._allocated.stream
        stream.synchronise()
        self._exposed |= step.extra_outputs.read(stream)
        if step.graph is None and self._cuda_graphs and not step.extra_outputs:
            # After one run TensorRT has nothing left to set up; recording runs nothing.
            step.graph = stream.capture(lambda: self._queue_step(step.context, rows))
        self._runs += 1

    def _make_step(self, rows: int) -> PreparedStep:
        """Make a context for this number of rows; it must never change once a graph has recorded it."""
        loaded, buffers = self.load(), self._allocated
        profile = choose_profile(profiles_of(loaded.decode, "token"), rows)
        context = ExecutionContext(loaded.decode, loaded.tensorrt, profile, buffers.activations, buffers.stream)
        state = [tensor for tensor in self.program.state if tensor.in_step]
        caches = len(self._limits.capacities)
        context.shape({"token": (rows,), "positions": (rows,), "cache_lengths": (caches, rows)})
        context.shape({tensor.name: (rows, *tensor.shape) for tensor in state})
        context.bind({**buffers.step_addresses(), LOGITS: buffers.address("logits"), BEST: buffers.address("best")})
        context.bind({tensor.name: buffers.address(tensor.name) for tensor in state})
        context.bind({tensor.aliased_output: buffers.address(tensor.name) for tensor in state})
        context.check_in_place({tensor.aliased_output: tensor.name for tensor in state})
        usual = {LOGITS, BEST, *(tensor.aliased_output for tensor in state)}
        step = PreparedStep(context, ExtraOutputs(loaded.decode, context, usual))
        self._steps[rows] = step
        return step

    def _queue_step(self, context: ExecutionContext, rows: int) -> None:
        buffers = self._allocated
        buffers.queue_step_in()
        context.enqueue()
        buffers.queue_best_out(rows)

    def _run_prefill(self, profile: int, input_ids: Array, prompt_lengths: Array, seen: dict[str, list[Array]]) -> None:
        """Run and wait; the state is staged, logits and lengths are on the host."""
        loaded, buffers, state = self.load(), self._allocated, self.program.state
        if profile not in self._prefills:
            context = ExecutionContext(loaded.prefill, loaded.tensorrt, profile, buffers.activations, buffers.stream)
            context.bind({"logits": buffers.address("logits"), "cache_lengths": buffers.address("lengths")})
            context.bind({tensor.name: buffers.address(STAGED + tensor.name) for tensor in state})
            self._prefills[profile] = context
        context, rows = self._prefills[profile], len(prompt_lengths)
        context.shape({"input_ids": input_ids.shape, "prompt_lengths": prompt_lengths.shape})
        context.bind(buffers.queue_prompts_in(input_ids, prompt_lengths))
        extra_outputs = ExtraOutputs(
            loaded.prefill, context, {"logits", "cache_lengths", *(tensor.name for tensor in state)}
        )
        context.enqueue()
        buffers.queue_logits_out(buffers.prompt_logits, rows)
        buffers.queue_lengths_out(rows)
        buffers.stream.synchronise()
        for name, value in extra_outputs.read(buffers.stream).items():
            seen.setdefault(name, []).append(value)
        extra_outputs.free()
