"""Run an engine's model on several ranks: an `Executor` whose every method is a call to all of them.

The caller's process holds no weights and no caches. It gives each rank the same tokens and takes logits, or best
tokens, from rank 0. State leaves and enters the ranks by head: a row that is read has all KV heads, as if one process
had held them, so stored contexts fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.torch.parallel.messages import BEGIN_PREFILL, NEXT_PIECE, OPEN
from kvc_trt.backends.torch.slices import in_slices
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.kernels.switches import DEVICE_SAMPLING
from kvc_trt.runtime.executor import Answer, CheckedDraft, DrawnDraft, ExecutorBase, Extended, Prefilled

if TYPE_CHECKING:
    from kvc_trt.backends.torch.parallel.group import RankGroup
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.progress import Progress
    from kvc_trt.runtime.sampling.draw_rules import DrawRules

Integers = NDArray[np.int64]


class OnRanks:
    """The state of one prefill, which the ranks keep under a number as long as this object lives."""

    def __init__(self, group: RankGroup) -> None:
        self.number = group.number(self)


class ParallelExecutor(ExecutorBase):
    """The executor of one program over the ranks of its weights; `expose` and `twin_of` are those of `TorchExecutor`.

    Of nodes, only values with heads along axis 1 can be exposed: those of all ranks are joined there.
    """

    def __init__(
        self,
        program: Program,
        group: RankGroup,
        *,
        expose: Collection[str] = (),
        twin_of: PolicyParameters | None = None,
    ) -> None:
        self._limits = program.limits
        # The ranks read no graphs, and were given the weight file when they started.
        turns, drafts = (None if graph is None else NO_FILE for graph in (program.extend, program.draft))
        self._program = replace(
            program, weight_file=NO_FILE, prefill=NO_FILE, decode=NO_FILE, extend=turns, draft=drafts
        )
        self._group, self._expose, self._twin_of = group, tuple(sorted(expose)), twin_of
        self._number: int | None = None

    @property
    def group(self) -> RankGroup:
        """The ranks."""
        return self._group

    def load(self) -> None:
        """Start the ranks and let each read its shard now, so that the first prompt does not wait for it."""
        self._call("load")

    def allocate(self, max_batch_size: int) -> None:
        """Allocate the state buffers on every rank."""
        self._call("allocate", max_batch_size)

    def warm_up(self, progress: Progress, *, drafts: bool) -> None:
        """Run `TorchExecutor.warm_up` on every rank; progress is shown as one task."""
        with progress.task("compiling and capturing steps on every rank", None):
            self._call("warm_up", drafts)

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers of all ranks together, copies included."""
        return sum(self._group.call_all(self._opened(), "state_bytes"))

    def prefill(self, input_ids: Integers, prompt_lengths: Integers) -> Prefilled:
        """Run the prompts; the rows' state stays on the ranks."""
        kept = OnRanks(self._group)
        found: Prefilled = self._call("prefill", kept.number, input_ids, prompt_lengths)
        return replace(found, state=kept)

    def prepare_slices(self) -> None:
        """Do nothing, as `TorchExecutor.prepare_slices`."""

    def prefill_in_slices(
        self, input_ids: Integers, prompt_lengths: Integers, limit: float
    ) -> Generator[float, None, Prefilled]:
        """Run a prompt [1,S] slice by slice, as `TorchExecutor.prefill_in_slices`; this process says where one ends."""
        if self._expose:
            return self.prefill(input_ids, prompt_lengths)
        kept = OnRanks(self._group)
        counts: list[int] = self._call(BEGIN_PREFILL, kept.number, input_ids, prompt_lengths)
        return (yield from in_slices(self._pieces(kept), counts, limit))

    def _pieces(self, kept: OnRanks) -> Generator[None, None, Prefilled]:
        """Run one piece of a prefill on all ranks per `next`."""
        while True:
            found: Prefilled | None = self._call(NEXT_PIECE, kept.number)
            if found is not None:
                return replace(found, state=kept)
            yield

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into every buffer of every rank."""
        self._call("insert", prefilled.state.number, source_row, row)

    def move(self, source_row: int, row: int) -> None:
        """Copy one row of every buffer over another."""
        self._call("move", source_row, row)

    def read_row(self, row: int) -> dict[str, NDArray[Any]]:
        """Return a copy of one row of every state tensor, with all KV heads."""
        parts = self._group.call_all(self._opened(), "read_row", row)
        return {name: self._joined([part[name] for part in parts], 0) for name in parts[0]}

    def write_row(self, row: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Write one row of every state tensor, given by name with all KV heads."""
        for name, array in tensors:
            parts = self._divided(array)
            self._group.call_each(self._opened(), "write_row", [(row, [(name, part)]) for part in parts])

    def fill_rows(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Fill every row of the named state tensors with these contents, each of one row's shape with all KV heads."""
        for name, array in rows.items():
            self._group.call_each(self._opened(), "fill_rows", [({name: part},) for part in self._divided(array)])

    def decode(self, tokens: Integers, positions: Integers, cache_lengths: Integers) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows."""
        self._runs += 1
        found: NDArray[np.float32] = self._call("decode", tokens, positions, cache_lengths)
        return found

    def decode_greedy(self, tokens: Integers, positions: Integers, cache_lengths: Integers) -> Integers:
        """Like `decode`, but return only each row's best token, as `TorchExecutor.decode_greedy` does."""
        self._runs += 1
        found: Integers = self._call("decode_greedy", tokens, positions, cache_lengths)
        return found

    @property
    def draws(self) -> bool:
        """True if the ranks' devices draw tokens."""
        return self._group.device == "cuda" and DEVICE_SAMPLING.is_on

    def decode_drawn(
        self, tokens: Integers, positions: Integers, cache_lengths: Integers, rules: Iterable[DrawRules | None]
    ) -> list[Answer]:
        """Like `decode`, but draw each row's token, as `TorchExecutor.decode_drawn` does."""
        self._runs += 1
        found: list[Answer] = self._call("decode_drawn", tokens, positions, cache_lengths, list(rules))
        return found

    def extend(
        self, first_row: int, input_ids: Integers, lengths: Integers, positions: Integers, cache_lengths: Integers
    ) -> Extended:
        """Let the rows from `first_row` on take a turn."""
        found: Extended = self._call("extend", first_row, input_ids, lengths, positions, cache_lengths)
        return found

    def check_draft(self, tokens: Integers, positions: Integers, cache_lengths: Integers) -> CheckedDraft:
        """Run a pass over `tokens` [1 + draft_tokens, rows] of the first rows."""
        found: CheckedDraft = self._call("check_draft", tokens, positions, cache_lengths)
        return found

    def check_draft_drawn(
        self, tokens: Integers, positions: Integers, cache_lengths: Integers,
        rules: Iterable[Sequence[DrawRules | None]],
    ) -> DrawnDraft:  # fmt: skip
        """Like `check_draft`, but draw the tokens after each one, as `TorchExecutor.check_draft_drawn` does."""
        found: DrawnDraft = self._call("check_draft_drawn", tokens, positions, cache_lengths, list(rules))
        return found

    def take_back(self, row: int, undo: Any, cache_lengths: Integers, kept: int) -> None:
        """Undo the steps of the latest pass of a row except the first `kept`."""
        self._call("take_back", row, undo, cache_lengths, kept)

    def exposed(self, name: str) -> NDArray[Any]:
        """Return an exposed value of the latest run, with the heads of all ranks."""
        return self._joined(self._group.call_all(self._opened(), "exposed", name), 1)

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Return the state by tensor name, [max_batch_size, ...]; each is copied from the ranks when it is read."""
        return _Buffers(self)

    def buffer(self, name: str) -> NDArray[Any]:
        """Return a copy of one state tensor, with all KV heads."""
        return self._joined(self._group.call_all(self._opened(), "buffer", name), 1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors."""
        return tuple(tensor.name for tensor in self._program.state)

    def close(self) -> None:
        """End the ranks, for every executor that shares them."""
        self._group.end()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._group.call(self._opened(), method, *arguments)

    def _opened(self) -> int:
        """Return the number under which the ranks know this executor, after they have read their weights."""
        if self._number is None:
            number = self._group.number(self)
            self._group.call(number, OPEN, self._program, self._expose, self._twin_of)
            self._number = number
        return self._number

    def _divided(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Return each rank's KV heads of one row of a state tensor."""
        return [array[shard.kv_heads.start : shard.kv_heads.stop] for shard in self._group.shards]

    def _joined(self, parts: list[NDArray[Any]], axis: int) -> NDArray[Any]:
        """Join the heads of all ranks; of ranks with the same KV heads, the first counts."""
        copies = self._group.shards[0].copies
        return np.concatenate(parts[::copies], axis=axis)


class _Buffers(Mapping[str, NDArray[Any]]):
    def __init__(self, executor: ParallelExecutor) -> None:
        self._executor = executor

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._executor.state_names:
            raise KeyError(name)
        return self._executor.buffer(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._executor.state_names)

    def __len__(self) -> int:
        return len(self._executor.state_names)
