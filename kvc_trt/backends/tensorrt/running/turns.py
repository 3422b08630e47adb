"""Run turns with the extend plan: one row at a time, in the row's own buffers.

The plan updates state in place, at the start of the buffer that it is bound to. A row inside a buffer can be that start
if it is aligned, as rows of usual models are; another row is copied to the place where prefills put theirs, and back.

A run takes `TOKENS_PER_TURN` tokens at most. A longer turn runs in parts where every cache keeps all tokens, which is
the same; where stored and new tokens compete it would not be, and is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.building.profiles import choose_profile, longest_turn
from kvc_trt.backends.tensorrt.running.buffers import Buffers
from kvc_trt.backends.tensorrt.running.context import ExecutionContext
from kvc_trt.backends.tensorrt.running.loading import LoadedEngine, profiles_of
from kvc_trt.engine.program import Program
from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import Extended

Array = NDArray[Any]


class Turns:
    """Runs turns over allocated buffers. A context per profile is made when it is first needed."""

    def __init__(self, loaded: LoadedEngine, program: Program, buffers: Buffers) -> None:
        if loaded.extend is None:
            raise ValueError("the engine has no extend plan, and takes no turns")
        self._loaded, self._program, self._buffers = loaded, program, buffers
        self._plan = loaded.extend
        self._most = longest_turn(profiles_of(self._plan, "input_ids"))
        self._contexts: dict[int, ExecutionContext] = {}

    def run(self, first_row: int, input_ids: Array, lengths: Array, positions: Array, cache_lengths: Array) -> Extended:
        """Let each row from `first_row` on take a turn (see `TurnExecutor.extend`)."""
        rows = len(lengths)
        self._buffers.check_rows(first_row + rows)
        self._check(int(lengths.max()))
        logits = np.empty((rows, self._program.model.vocab_size), np.float32)
        after = np.empty((len(self._program.capacities), rows), np.int64)
        for index, count in enumerate(lengths.tolist()):
            stored = cache_lengths[:, index]
            for start in range(0, count, self._most):
                tokens = input_ids[index, start : min(start + self._most, count)]
                self._run_row(first_row + index, tokens, int(positions[index]) + start, stored)
                stored = self._buffers.lengths(1)[:, 0].copy()
            logits[index], after[:, index] = self._buffers.prompt_logits.array[0], stored
        return Extended(logits, after)

    def _check(self, longest: int) -> None:
        if longest > self._most and not all(tensor.in_step for tensor in self._program.state):
            raise InputError(
                f"a turn of {longest} tokens: expected at most {self._most} where stored and new tokens compete",
                hint="take it in parts",
            )

    def _run_row(self, row: int, tokens: Array, position: int, stored: Array) -> None:
        """Run and wait; logits and lengths are on the host."""
        buffers, state = self._buffers, self._program.state
        context = self._context(len(tokens))
        context.shape({"input_ids": (1, len(tokens)), "lengths": (1,), "positions": (1,)})
        context.shape({"cache_lengths": (len(stored), 1)})
        context.shape({tensor.name: (1, *tensor.shape) for tensor in state})
        places = buffers.take_row(row)
        context.bind({**buffers.queue_turn_in(tokens, position, stored), **places})
        context.bind({tensor.aliased_output: places[tensor.name] for tensor in state})
        context.bind({"logits": buffers.address("logits"), "cache_lengths_out": buffers.address("lengths")})
        context.check_in_place({tensor.aliased_output: tensor.name for tensor in state})
        context.enqueue()
        buffers.give_back(row)
        buffers.queue_logits_out(buffers.prompt_logits, 1)
        buffers.queue_lengths_out(1)
        buffers.stream.synchronise()

    def _context(self, tokens: int) -> ExecutionContext:
        profile = choose_profile(profiles_of(self._plan, "input_ids"), 1, tokens)
        if profile not in self._contexts:
            buffers = self._buffers
            made = ExecutionContext(self._plan, self._loaded.tensorrt, profile, buffers.activations, buffers.stream)
            self._contexts[profile] = made
        return self._contexts[profile]
