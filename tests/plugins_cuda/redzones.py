"""Calls of kvc_compact in which every buffer, the workspace too, is between two zones that nothing may write."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.kernels.library import KernelLibrary, dtype_of
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators.compaction.compact import COMPACT
from tests.plugins_cuda.cases import DTYPES, CompactCase

ZONE = 4096
_FILL = 0x7F
"""Reads as NaN in float16 and as an enormous number in the other types: a use of unwritten memory shows."""


class Guarded:
    """Tensors carved out of one byte buffer each, `ZONE` bytes before and after them filled with a pattern."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffers: dict[str, tuple[Tensor, int, int]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        buffer = torch.full((size + 2 * ZONE + 256,), _FILL, dtype=torch.uint8, device=self._device)
        start = ZONE + -(buffer.data_ptr() + ZONE) % 256
        self._buffers[name] = (buffer, start, start + size)
        return buffer[start : start + size].view(dtype).reshape(shape)

    def copy(self, name: str, value: Tensor) -> Tensor:
        return self.empty(name, tuple(value.shape), value.dtype).copy_(value)

    def check(self) -> None:
        for name, (buffer, start, end) in self._buffers.items():
            assert bool((buffer[:start] == _FILL).all()), f"bytes before {name} were written"
            assert bool((buffer[end:] == _FILL).all()), f"bytes after {name} were written"


def compact_between_redzones(
    library: KernelLibrary, case: CompactCase, *, with_bounds: bool, in_place: bool
) -> dict[str, Tensor]:
    """One call; the results by name, on the CPU, after every zone and every input was found unchanged."""
    memory = Guarded(library.device_type)
    (batch, heads, window, size), (_, kv_heads, length, _) = case.q_window.shape, case.k.shape
    given = {name: getattr(case, name) for name in ("q_window", "k", "v", "prompt_lengths")}
    inputs = {name: memory.copy(name, value) for name, value in given.items()}
    numbers = {"capacity": case.capacity, "page_size": case.page_size, "fp8_bounds": case.fp8_bounds}
    shapes = COMPACT.output_shapes(
        {name: value.shape for name, value in given.items()},
        numbers,
        case.k.element_size(),
    )
    outputs = {
        tensor.name: memory.empty(
            tensor.name, tuple(shapes[tensor.name]), dtype_of(COMPACT, tensor, numbers, case.k.dtype)
        )
        for tensor in COMPACT.outputs
        if with_bounds or tensor.name != "bounds"
    }
    if in_place:
        outputs["k_cache"], outputs["v_cache"] = inputs["k"], inputs["v"]
    stride = inputs["k"].stride()
    params = struct_of(COMPACT)(
        dtype=DTYPES.index(case.k.dtype), batch=batch, heads=heads, kv_heads=kv_heads, head_size=size, window=window,
        pool_kernel=case.pool_kernel, prompt_length=length, prompt_budget=case.prompt_budget, **numbers,
        kv_stride_batch=stride[0], kv_stride_head=stride[1], kv_stride_token=stride[2],
        **{name: value.data_ptr() for name, value in (inputs | outputs).items()},
    )  # fmt: skip
    bytes_wanted = library.workspace_bytes("kvc_compact", params)
    workspace = memory.empty("workspace", (bytes_wanted,), torch.uint8)
    library.call("kvc_compact", params, workspace.data_ptr(), bytes_wanted)
    if library.device_type == "cuda":
        torch.cuda.synchronize()
    memory.check()
    for name, value in given.items():
        if not (in_place and name in ("k", "v")):
            assert torch.equal(inputs[name].cpu().view(torch.uint8), value.view(torch.uint8)), f"{name} was written"
    return {name: value.cpu() for name, value in outputs.items()}
