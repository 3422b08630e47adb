"""Run an engine's model in PyTorch: its weights, its state tensors, and the kernels through `torch.ops.kvc`.

The engine can be of any backend that keeps its weights in the weight file. On a GPU the weights are in memory in the
cache's type, and a decode step is one CUDA graph per number of rows. On a CPU this is slow: its purpose is to run the
kernels (emulated, or their reference) inside a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.decoder_options import DecoderOptions, DenseAttention
from kvc_trt.backends.torch.device import choose_device, from_numpy, kernel_device, say_if_slow, to_numpy, warn_once
from kvc_trt.backends.torch.model import elementwise
from kvc_trt.backends.torch.model.bounds import rebuild_bounds, stays_in_page
from kvc_trt.backends.torch.model.capturer import Capturer
from kvc_trt.backends.torch.model.decoder import OBSERVABLE, PromptResult, TorchDecoder
from kvc_trt.backends.torch.model.step import StaticStep, rows_captured
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.backends.torch.slices import each_done, in_slices
from kvc_trt.engine.program import Program, engine_program
from kvc_trt.graph.state import CacheSite, cache_sites, parts_in_step
from kvc_trt.graph.weights import HEAD, EngineWeights
from kvc_trt.kernels.stored_parts import read_parts
from kvc_trt.kernels.switches import DEVICE_SAMPLING
from kvc_trt.operators.schema import part_names
from kvc_trt.operators.tensors import K_CACHE
from kvc_trt.runtime.executor import Answer, CheckedDraft, DrawnDraft, ExecutorBase, Extended, Prefilled

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.progress import Progress
    from kvc_trt.runtime.sampling.draw_rules import DrawRules

__all__ = ["TorchExecutor", "kernel_device"]

PREFILL_TOKENS = 131072
"""The largest number of tokens, including padding, that run through prefill together; more run in groups."""
SHORTER = "take shorter prompts, or fewer rows"
SMALLER = "take a smaller batch, or build the engine with a smaller token budget or length"


@dataclass(frozen=True)
class Decoding:
    """The decoder of an executor, and two of its options."""

    decoder: Callable[..., TorchDecoder] = TorchDecoder
    """Makes the decoder of a model, parameters, weights and `DecoderOptions`."""
    dense_attention: DenseAttention | None = None
    """Replaces our kernel in layers that read their whole cache."""
    twin_of: PolicyParameters | None = None
    """The parameters of the engine whose dense twin the program is, if both must agree bit for bit."""


class TorchExecutor(ExecutorBase):
    """The `Executor` of one engine, or of a `Program` derived from one.

    `device` is auto (that of the kernel library in use, or the CPU), cpu or cuda. A number of threads is set for the
    whole process; None keeps PyTorch's. `expose` names values for `exposed`: q_window.L, keys.L, values.L, indices.L of
    prefill, query.L, attended.L, selected.L of decode; steps are then not captured. `weights` shares those of another
    executor. If a policy has no kernels for some part, `expose` may name any value of the graphs' nodes.
    """

    def __init__(
        self, engine: EngineDirectory | Program, options: RunOptions = DEFAULTS, *, expose: Collection[str] = (),
        weights: TorchWeights | None = None, device: str = "auto", prefill_tokens: int = PREFILL_TOKENS,
        decoding: Decoding = Decoding(),
    ) -> None:  # fmt: skip
        program = engine if isinstance(engine, Program) else engine_program(engine)
        path = policy_path(program.model, program.parameters)
        for name in expose:
            if path is None and name.partition(".")[0] not in OBSERVABLE:
                raise ValueError(f"{name} cannot be exposed; expected one of {', '.join(OBSERVABLE)}, and .LAYER")
        self.program = program
        self.device = choose_device(device)
        say_if_slow(self.device)
        if path is not None:
            warn_once(str(path))
        self._limits = program.limits
        self._expose, self._weights = frozenset(expose), weights
        self._prefill_tokens, self._decoding = prefill_tokens, decoding
        self._buffers: dict[str, Tensor] = {}
        self._steps: dict[tuple[int, int], StaticStep] = {}
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    @cached_property
    def weights(self) -> TorchWeights:
        """The weights on the device: float32 on a CPU, the cache's type on a GPU."""
        if self._weights is not None:
            return self._weights
        model, dtype, file = self.program.model, self._dtype, self.program.weight_file
        with file.steady():
            source = EngineWeights(file)
            needed = memory.weight_bytes(model, dtype.itemsize, own_head=HEAD in source.names())
            memory.require(needed, "the weights need", self.device, "build the engine with --weights bf16 or fp16")
            return TorchWeights.read(model, source, self.device, dtype)

    @cached_property
    def decoder(self) -> TorchDecoder:
        """The model under its policy."""
        on_gpu = self.device.type == "cuda"
        options = DecoderOptions(
            self._cache_dtype,
            expose=self._expose,
            elementwise=elementwise.compiled() if on_gpu else elementwise.AS_WRITTEN,
            dense_attention=self._decoding.dense_attention,
            turns=any(not tensor.in_step for tensor in self.program.state),
            twin_of=self._decoding.twin_of,
        )
        return self._decoding.decoder(self.program.model, self.program.parameters, self.weights, options)

    @cached_property
    def capturer(self) -> Capturer:
        """The capturer of steps in CUDA graphs; its `refused` is the reason if captures are refused, otherwise None."""
        if self.decoder.steps_by_nodes:
            return Capturer(self.device, "the host waits for lengths in steps that run as PyTorch operations")
        return Capturer(self.device, "inner values of every step are to be kept" if self._expose else None)

    @cached_property
    def _without_capture(self) -> Capturer:
        """The capturer that captures nothing, for steps with more than STEP_TOKENS tokens in a model with experts."""
        reason = f"steps of more than {memory.STEP_TOKENS} tokens group them by expert, for which the host waits"
        return Capturer(self.device, reason)

    def capturer_of(self, tokens: int) -> Capturer:
        """Return the capturer for a step of `tokens` tokens; with experts, only steps of few tokens are captured."""
        grouped = self.program.model.description.experts is not None and tokens > memory.STEP_TOKENS
        return self._without_capture if grouped else self.capturer

    @property
    def draws(self) -> bool:
        """True on a GPU, unless the environment leaves draws to the host; on a CPU the host's sampler is faster."""
        return self.device.type == "cuda" and DEVICE_SAMPLING.is_on

    def load(self) -> None:
        """Read the weights now, so that the first prompt does not wait for them."""
        assert self.decoder is not None

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """Return the state by tensor name, [max_batch_size, ...]; a copy on a GPU, shared memory on a CPU."""
        return {name: to_numpy(buffer) for name, buffer in self._buffers.items()}

    @property
    def state(self) -> dict[str, Tensor]:
        """The state tensors themselves, which `decode` updates in place."""
        return self._buffers

    def fill_rows(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Fill every row of the named state tensors with these contents, each of one row's shape."""
        for name, row in rows.items():
            self._buffers[name][:] = from_numpy(row).to(self.device)

    def allocate(self, max_batch_size: int) -> None:
        """Allocate the state buffers, one tensor each. UnsupportedEnvironment if they do not fit."""
        self._buffers, self._steps = {}, {}
        state, model = self.program.state, self.program.model
        fed = max_batch_size * (1 + self._limits.draft_tokens)
        needed = memory.cache_bytes(state, max_batch_size) + memory.step_bytes(model, fed, self._dtype.itemsize)
        if self.draws:
            needed += memory.drawing_bytes(model, fed)
        memory.require(needed, f"the caches of {max_batch_size} rows need", self.device, SMALLER)
        self._buffers = {
            tensor.name: torch.full(
                (max_batch_size, *tensor.shape), tensor.fill, dtype=getattr(torch, tensor.dtype), device=self.device
            )
            for tensor in state
        }

    def warm_up(self, progress: Progress, *, drafts: bool) -> None:
        """Compile and capture the steps for every number of rows, and their most common draws; nothing on a CPU.

        Captures share scratch memory: the largest comes first, so the others need no more.
        """
        if not self.capturer.captures:
            return
        most = len(next(iter(self._buffers.values())))
        numbers = sorted({rows_captured(rows, most) for rows in range(1, most + 1)}, reverse=True)
        widths = (1 + self._limits.draft_tokens, 1) if drafts else (1,)
        with progress.task("compiling and capturing steps", len(numbers) * len(widths)) as advance:
            for count in widths:
                for rows in numbers:
                    with memory.said(f"a step of {rows} rows", self.device, SMALLER):
                        step = self._static_step(rows, count)
                        if self.draws:
                            step.prepare_draws()
                    advance(1)

    def forget_steps(self) -> None:
        """Drop all captured steps: later calls capture them again, with the switches set then."""
        self._steps = {}

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts; the rows' state is a new tensor [B, ...] per state tensor."""
        rows, longest = len(prompt_lengths), int(prompt_lengths.max())
        together = rows if self._expose else max(1, self._prefill_tokens // longest)
        found = []
        for first in range(0, rows, together):
            group = slice(first, first + together)
            length = int(prompt_lengths[group].max())
            self._require_prefill(len(prompt_lengths[group]), length)
            ids, lengths = self._moved(input_ids[group, :length]), self._moved(prompt_lengths[group])
            with memory.said(f"prefill of {len(lengths)} x {length} tokens", self.device, SHORTER):
                found.append(self.decoder.prefill(ids, lengths))
        return _prefilled(found[0] if len(found) == 1 else joined(found))

    def prepare_slices(self) -> None:
        """Do nothing: slices need nothing that a whole prefill does not load."""

    def prefill_in_slices(
        self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
    ) -> Generator[float, None, Prefilled]:
        """Run a prompt [1,S] slice by slice; the result equals that of `prefill` bit for bit, in the same memory.

        If inner values are exposed, there is one slice, so that no other run can replace them meanwhile.
        """
        if self._expose:
            return self.prefill(input_ids, prompt_lengths)
        pieces = self.prefill_in_pieces(input_ids, prompt_lengths)
        return (yield from in_slices(pieces, self.pieces_of_layers(prompt_lengths), limit))

    def pieces_of_layers(self, prompt_lengths: NDArray[np.int64]) -> list[int]:
        """Return the pieces of each layer in a prefill of prompts of lengths [B]."""
        return self.decoder.pieces_of_layers(len(prompt_lengths), int(prompt_lengths.max()))

    def prefill_in_pieces(
        self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]
    ) -> Generator[None, None, Prefilled]:
        """Run prompts one piece per `next`, waiting for each; UnsupportedEnvironment if there is too little memory.

        Padding common to all rows is removed, as in `prefill`, because products of another shape may round differently.
        """
        input_ids = input_ids[:, : prompt_lengths.max()]
        self._require_prefill(*input_ids.shape)
        with memory.said("prefill of {} x {} tokens".format(*input_ids.shape), self.device, SHORTER):
            pieces = self.decoder.prefill_in_pieces(self._moved(input_ids), self._moved(prompt_lengths))
            return _prefilled((yield from each_done(pieces, self.device)))

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into every buffer."""
        for name, buffer in self._buffers.items():
            buffer[row] = prefilled.state[name][source_row]

    def move(self, source_row: int, row: int) -> None:
        """Copy one row of every buffer over another."""
        for buffer in self._buffers.values():
            buffer[row] = buffer[source_row]

    def read_row(self, row: int) -> dict[str, NDArray[Any]]:
        """Return one row of every state tensor, by name; a copy on a GPU, shared memory on a CPU."""
        return {name: to_numpy(buffer[row]) for name, buffer in self._buffers.items()}

    def write_row(self, row: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Write one row of every state tensor, given by name."""
        for name, array in tensors:
            self._buffers[name][row] = from_numpy(array).to(self.device)

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows in place."""
        return self._step(tokens, positions, cache_lengths).logits(len(tokens))

    def decode_greedy(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Like `decode`, but return only each row's best token [rows]; the logits stay on the device.

        The lowest id among equal logits, as `numpy.argmax`; NOT_FINITE for a row whose logits are not finite.
        """
        return self._step(tokens, positions, cache_lengths).best(len(tokens))

    def decode_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[DrawRules | None],
    ) -> list[Answer]:  # fmt: skip
        """Like `decode`, but draw each row's token by its rules on the device; a row with None gets its logits.

        The rules are iterated while the device runs the step.
        """
        step = self._step(tokens, positions, cache_lengths)
        return [answer for (answer,) in step.drawn([rule] for rule in rules)]

    def extend(
        self, first_row: int, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Extended:  # fmt: skip
        """Let the rows from `first_row` on take a turn, all together; no graph is captured."""
        if self._limits.no_turns is not None:
            raise ValueError(str(self._limits.no_turns))
        rows = slice(first_row, first_row + len(lengths))
        state = {name: buffer[rows] for name, buffer in self._buffers.items()}
        given = self._moved(input_ids), self._moved(positions), lengths.tolist(), cache_lengths.tolist()
        count, stored = input_ids.shape[1], int(cache_lengths.max())
        needed = memory.turn_bound(self.program, len(lengths), count, stored, itemsize=self._dtype.itemsize)
        memory.require(needed, f"a turn of {len(lengths)} x {count} tokens needs", self.device, "take shorter turns")
        with memory.said(f"a turn of {len(lengths)} x {input_ids.shape[1]} tokens", self.device, "take shorter turns"):
            logits, after = self.decoder.extend(*given, state, all_logits=self._limits.all_logits)
        found = logits.cpu().numpy()
        if not self._limits.all_logits:
            return Extended(found, after.numpy())
        return Extended(found[np.arange(len(lengths)), lengths - 1], after.numpy(), found)

    def check_draft(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> CheckedDraft:
        """Run a pass over `tokens` [1 + draft_tokens, rows] of the first rows in place."""
        undo = self._undo(len(positions))
        return CheckedDraft(self._step(tokens, positions, cache_lengths).logits(len(positions)), undo)

    def check_draft_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[Sequence[DrawRules | None]],
    ) -> DrawnDraft:  # fmt: skip
        """Like `check_draft`, but draw the tokens after each one on the device, by rules [rows][tokens]."""
        undo = self._undo(len(positions))
        return DrawnDraft(self._step(tokens, positions, cache_lengths).drawn(rules), undo)

    def _undo(self, rows: int) -> list[Any]:
        """Return for each row the data that `take_back` needs: sums over a cache's entries, if the policy has any."""
        sums = [f"{name}.{site.name}" for site in self._sites for name in site.parameters.selection.sums]
        return [{name: to_numpy(self._buffers[name][row]).copy() for name in sums} for row in range(rows)]

    def take_back(self, row: int, undo: Any, cache_lengths: NDArray[np.int64], kept: int) -> None:
        """Undo the steps of the latest pass of a row except the first `kept`."""
        for site, before in zip(self._sites, cache_lengths.tolist(), strict=True):
            if site.parameters.selection.sums:
                self._take_back_sums(site, row, undo, before, kept)
            if site.parameters.has_pages:
                dropped = range(before + kept, before + 1 + self._limits.draft_tokens)
                self._take_back_bounds(site, row, dropped)

    def _take_back_bounds(self, site: CacheSite, row: int, dropped: range) -> None:
        """Rebuild the page bounds of one row's cache after its last slots, `dropped`, were taken back."""
        form, page_size = site.parameters.cache_format.keys, site.parameters.page_size
        slots = stays_in_page(dropped, page_size)
        parts = [self._buffers[f"{name}.{site.name}"][row, :, slots] for name in part_names(K_CACHE, form)]
        rebuild_bounds(read_parts(parts, form), self._buffers[f"bounds.{site.name}"][row], dropped, page_size)

    def _take_back_sums(self, site: CacheSite, row: int, undo: Any, before: int, kept: int) -> None:
        """Undo the steps of one row in a cache that carries sums over its entries."""
        selection, end = site.parameters.selection, f".{site.name}"
        names = [part.name for part in parts_in_step(site.parameters)]
        state = {name: to_numpy(self._buffers[name + end][row]) for name in names}
        saved = {name: undo[name + end] for name in selection.sums}
        steps = range(before + kept, before + 1 + self._limits.draft_tokens)
        selection.take_back(state, saved, before, steps, site.parameters)
        self.write_row(row, ((name + end, state[name]) for name in selection.sums))

    @cached_property
    def _sites(self) -> tuple[CacheSite, ...]:
        return cache_sites(self.program.model, self.program.parameters)

    def exposed(self, name: str) -> NDArray[Any]:
        """Return an exposed value of the latest run; index lists are INT32 [B,G,width]."""
        return to_numpy(self.decoder.exposed[name])

    def _step(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> StaticStep:
        """Queue one step of tokens [rows] or [count,rows]. On a GPU a graph may have more rows than it feeds."""
        rows, count = len(positions), 1 if tokens.ndim == 1 else len(tokens)
        if self.capturer.captures:
            rows = rows_captured(rows, len(next(iter(self._buffers.values()))))
        with memory.said(f"a step of {rows} rows", self.device, SMALLER):
            step = self._static_step(rows, count)
            step.run(tokens, positions, cache_lengths)
        self._runs += count == 1
        return step

    def _static_step(self, rows: int, count: int) -> StaticStep:
        """Return the step of `rows` rows with `count` tokens each, which is captured on its first use."""
        if (rows, count) not in self._steps:
            capturer = self.capturer_of(rows * count)
            made = StaticStep(self.decoder, self._buffers, rows, self.device, capturer, count=count)
            self._steps[rows, count] = made
        return self._steps[rows, count]

    def _require_prefill(self, rows: int, length: int) -> None:
        needed = memory.prefill_bound(self.program, rows, length, itemsize=self._dtype.itemsize)
        what = f"prefill of {rows} x {length} tokens needs"
        memory.require(needed, what, self.device, SHORTER)

    @property
    def _cache_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.program.dtype)
        return dtype

    @property
    def _dtype(self) -> torch.dtype:
        """The type of the weights and of all computation between them."""
        return torch.float32 if self.device.type == "cpu" else self._cache_dtype

    def _moved(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)


def _prefilled(found: PromptResult) -> Prefilled:
    return Prefilled(found.logits.cpu().numpy(), found.cache_lengths.cpu().numpy(), found.state)


def joined(parts: list[PromptResult]) -> PromptResult:
    """Join groups of rows in order, freeing each group's tensor as soon as it is copied."""
    state = {name: torch.cat([part.state.pop(name) for part in parts]) for name in list(parts[0].state)}
    logits = torch.cat([part.logits for part in parts])
    return PromptResult(logits, state, torch.cat([part.cache_lengths for part in parts], dim=1))
