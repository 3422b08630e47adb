"""The process of one rank: joins the others, reads its shard, and runs the calls of the caller's process until that
ends.

    python -m kvc_trt.backends.torch.parallel.rank COMMANDS LIFE

Both arguments are numbers of open sockets. Nothing is ever sent through LIFE: either side sees it close when the other
has died, even in the middle of a call.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import traceback
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.torch.parallel.messages import BEGIN_PREFILL, NEXT_PIECE, OPEN, Done, Failed, RankCall, Start
from kvc_trt.errors import KvcError
from kvc_trt.files.held import HeldFile
from kvc_trt.files.lost import report_lost_files
from kvc_trt.models.sharding import shards
from kvc_trt.progress import NullProgress

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from kvc_trt.backends.torch.executor import TorchExecutor
    from kvc_trt.backends.torch.model.weights import TorchWeights
    from kvc_trt.engine.program import Program
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.runtime.executor import Prefilled

STEPS = ("decode", "decode_greedy", "decode_drawn", "check_draft", "check_draft_drawn")
"""Methods whose exchanges are not counted on a GPU, where a graph is replayed."""


class Lines(logging.Handler):
    """Keeps log records, for the caller to log again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self._lines.append((record.levelno, record.name, record.getMessage()))

    def taken(self) -> tuple[tuple[int, str, str], ...]:
        """Return the lines since the last call."""
        lines, self._lines = tuple(self._lines), []
        return lines


class Rank:
    """The executors of one rank, over one copy of its weights."""

    def __init__(self, start: Start, lines: Lines) -> None:
        import torch

        from kvc_trt.backends.torch.parallel.decoder import Collectives, join

        torch.set_num_threads(start.threads)
        self._start, self._shard = start, shards(start.model, start.ranks)[start.rank]
        self._file = HeldFile.borrowed(start.weights)
        self._device = torch.device(start.device, start.rank) if start.device == "cuda" else torch.device("cpu")
        if start.device == "cuda":
            torch.cuda.set_device(self._device)
        join(start.rank, start.ranks, start.store, self._device, start.timeout)
        self._collectives, self._lines = Collectives(), lines
        self._executors: dict[int, TorchExecutor] = {}
        self._prefilled: dict[int, Prefilled] = {}
        self._reading: dict[int, Generator[None, None, Prefilled]] = {}
        """Prefills that wait between two pieces."""

    def answer(self, call: RankCall) -> Done | Failed:
        """Run one call and return the reply."""
        before = self._collectives.count
        try:
            result = self._run(call)
        except Exception as error:
            return _failed(error, intact=call.method not in STEPS and self._collectives.count == before)
        return Done(result if call.result else None, self._lines.taken() if self._start.rank == 0 else ())

    def _run(self, call: RankCall) -> Any:
        for number in call.released:
            self._executors.pop(number, None)
            self._prefilled.pop(number, None)
            self._reading.pop(number, None)
        if call.method == OPEN:
            self._open(call.executor, *call.arguments)
            return None
        executor = self._executors[call.executor]
        if call.method == "prefill":
            number, *prompts = call.arguments
            found = self._prefilled[number] = executor.prefill(*prompts)
            return replace(found, state=None)
        if call.method == BEGIN_PREFILL:
            number, ids, lengths = call.arguments
            self._reading[number] = executor.prefill_in_pieces(ids, lengths)
            return executor.pieces_of_layers(lengths)
        if call.method == NEXT_PIECE:
            return self._next_piece(*call.arguments)
        if call.method == "warm_up":
            return executor.warm_up(NullProgress(), drafts=call.arguments[0])
        if call.method == "insert":
            number, *rows = call.arguments
            executor.insert(self._prefilled[number], *rows)
            return None
        if call.method == "buffer":
            return executor.buffers[call.arguments[0]]
        return getattr(executor, call.method)(*call.arguments)

    def _next_piece(self, number: int) -> Prefilled | None:
        """Run one piece of a prefill; after the last one, return its result without the state."""
        try:
            next(self._reading[number])
        except StopIteration as end:
            del self._reading[number]
            self._prefilled[number] = end.value
            return replace(self._prefilled[number], state=None)
        return None

    def _open(self, number: int, program: Program, expose: tuple[str, ...], twin_of: PolicyParameters | None) -> None:
        from kvc_trt.backends.torch.executor import Decoding, TorchExecutor
        from kvc_trt.backends.torch.parallel.decoder import ParallelDecoder

        shard = self._shard
        decoder = partial(ParallelDecoder, shard=shard, collectives=self._collectives)
        state = tuple(replace(one, shape=(len(shard.kv_heads), *one.shape[1:])) for one in program.state)
        self._dtype = program.dtype
        self._executors[number] = TorchExecutor(
            replace(program, model=shard.local, state=state), expose=expose, weights=self._weights,
            device="auto" if self._start.device == "cuda" else "cpu", decoding=Decoding(decoder, twin_of=twin_of),
        )  # fmt: skip

    @cached_property
    def _weights(self) -> TorchWeights:
        """The rank's weights, which all programs of an engine share."""
        import torch

        from kvc_trt.backends.torch.parallel.weights import read_shard

        dtype: torch.dtype = torch.float32 if self._device.type == "cpu" else getattr(torch, self._dtype)
        with self._file.steady():
            return read_shard(self._file, self._shard, self._device, dtype)


def main() -> None:
    """Serve the process that holds the other ends of both sockets."""
    commands, life = (Connection(int(number)) for number in sys.argv[1:])
    for socket in (commands, life):
        os.set_inheritable(socket.fileno(), False)  # or they would stay open in the compilers that PyTorch starts
    start: Start = commands.recv()
    report_lost_files()
    threading.Thread(target=_end_with, args=(life, Path(start.store).parent), daemon=True).start()
    log = logging.getLogger("kvc_trt")
    log.addHandler(lines := Lines())
    log.propagate = False
    try:
        rank = Rank(start, lines)
    except Exception as error:
        commands.send(_failed(error, intact=False))
        return
    commands.send(Done(None))
    while True:
        commands.send(rank.answer(commands.recv()))


def _failed(error: Exception, *, intact: bool) -> Failed:
    if isinstance(error, KvcError):
        return Failed(error.message, error.hint, error.exit_code, intact)
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return Failed(line, None, None, intact, traceback.format_exc())


def _end_with(life: Connection, directory: Path) -> None:
    """End this process when the caller's has ended, even in the middle of a sum that never will."""
    try:
        life.recv_bytes()
    except (EOFError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
