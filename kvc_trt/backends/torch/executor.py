"""Runs an engine directory's model in PyTorch: its weights, its state tensors, and the kernels through `torch.ops.kvc`.

The engine may have been built for any backend that keeps its weights in the weight file. On a CPU this is slow: it is
there to run the kernels (emulated, or their reference) inside a whole model.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.backends.onnxruntime.program import Program, engine_program
from kvc_trt.backends.torch.decoder import OBSERVABLE, TorchDecoder, TorchWeights
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph import PROMPT_BLOCK
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.kernels.loading import current_library
from kvc_trt.runtime.executor import Limits, Prefilled

if TYPE_CHECKING:
    from kvc_trt.engine import Engine


class TorchExecutor:
    """The `Executor` of one engine, or of a `Program` derived from one.

    The device is that of the kernel library in use, the CPU where there is none. `threads` is PyTorch's number for the
    whole process; None leaves it. `expose` names values that `exposed` then gives: q_window.L, keys.L, values.L,
    indices.L of prefill, query.L, attended.L, selected.L of decode. `weights` shares another executor's.
    """

    def __init__(
        self, engine: Engine | Program, *, threads: int | None = None, expose: Collection[str] = (),
        weights: TorchWeights | None = None,
    ) -> None:  # fmt: skip
        program = engine if isinstance(engine, Program) else engine_program(engine)
        parameters = program.parameters
        for name in expose:
            if name.partition(".")[0] not in OBSERVABLE:
                raise ValueError(f"{name} cannot be exposed; expected one of {', '.join(OBSERVABLE)}, and .LAYER")
        self.program = program
        self.device = kernel_device()
        self._limits = Limits(
            vocab_size=program.model.vocab_size,
            max_input_len=parameters.max_input_len,
            max_output_len=parameters.max_output_len,
            max_sequence_len=parameters.max_sequence_len,
            capacities=program.capacities,
            prompt_block=PROMPT_BLOCK,
        )
        self._expose, self._weights = frozenset(expose), weights
        self._buffers: dict[str, Tensor] = {}
        self._runs = 0
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def limits(self) -> Limits:
        """The engine's bounds."""
        return self._limits

    @property
    def runs(self) -> int:
        """Decode runs so far."""
        return self._runs

    @cached_property
    def weights(self) -> TorchWeights:
        """On the device: float32 on a CPU, the cache's type on a GPU."""
        if self._weights is not None:
            return self._weights
        dtype = torch.float32 if self.device.type == "cpu" else self._cache_dtype
        return TorchWeights(self.program.model, EngineWeights(self.program.weights_path), self.device, dtype)

    @cached_property
    def decoder(self) -> TorchDecoder:
        """The model under its policy."""
        program = self.program
        return TorchDecoder(
            program.model, program.parameters, self.weights, cache_dtype=self._cache_dtype, expose=self._expose
        )

    def load(self) -> None:
        """Read the weights now, so that the first prompt does not wait for it."""
        assert self.decoder is not None

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """The state by tensor name, [max_batch_size, ...]; on a CPU the memory that `decode` writes, else a copy."""
        return {name: buffer.cpu().numpy() for name, buffer in self._buffers.items()}

    def allocate(self, max_batch_size: int) -> None:
        """Make the state buffers: one tensor each, in place for good."""
        state = self.program.state
        try:
            self._buffers = {
                tensor.name: torch.full(
                    (max_batch_size, *tensor.shape), tensor.fill, dtype=getattr(torch, tensor.dtype), device=self.device
                )
                for tensor in state
            }
        except (MemoryError, RuntimeError) as error:
            needed = max_batch_size * sum(tensor.bytes_per_row() for tensor in state)
            raise UnsupportedEnvironment(
                f"the caches of {max_batch_size} rows need {needed / 2**30:.1f} GiB, more than {self.device} gives",
                hint="take a smaller batch, or build the engine with a smaller token budget or length",
            ) from error

    def state_bytes(self) -> int:
        """Bytes of the allocated state buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts; the rows' state is [B, ...] per state tensor, in memory of its own."""
        longest = int(prompt_lengths.max())
        found = self.decoder.prefill(self._moved(input_ids[:, :longest]), self._moved(prompt_lengths))
        return Prefilled(found.logits.cpu().numpy(), found.cache_lengths.cpu().numpy(), found.state)

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into every buffer."""
        for name, buffer in self._buffers.items():
            buffer[row] = prefilled.state[name][source_row]

    def move(self, source_row: int, row: int) -> None:
        """Copy one row of every buffer over another."""
        for buffer in self._buffers.values():
            buffer[row] = buffer[source_row]

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step of the first len(tokens) rows, in place."""
        active = {name: buffer[: len(tokens)] for name, buffer in self._buffers.items()}
        step = self._moved(tokens), self._moved(positions), self._moved(cache_lengths)
        logits = self.decoder.decode(*step, active)
        self._runs += 1
        found: NDArray[np.float32] = logits.cpu().numpy()
        return found

    def exposed(self, name: str) -> NDArray[Any]:
        """An exposed value of the latest run; index lists are INT32 [B,G,width]."""
        found: NDArray[Any] = self.decoder.exposed[name].cpu().numpy()
        return found

    @property
    def _cache_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.program.state[0].dtype)
        return dtype

    def _moved(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)


def kernel_device() -> torch.device:
    """Where the kernel library in use runs; the CPU, on the reference, where there is none."""
    library = current_library()
    if library is None or library.device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedEnvironment(f"{library.path} runs on a GPU, and PyTorch finds none on this machine")
    return torch.device("cuda", torch.cuda.current_device())
