"""One small valid call of every operation, with the valid values of each field, to be made wrong field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.rotated import ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from kvc_trt.kernels.structs import Parameters, Status, struct_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT

INT32, INT64 = 2**31 - 1, 2**63 - 1
FILL, ZONE = 0x5A, 8192
# One small call that every library accepts: B 2, H 4, G 2, D 16, W 4, S = C 24, p 4.
SHAPE = {"dtype": 0, "batch": 2, "heads": 4, "kv_heads": 2, "head_size": 16}
NUMBERS = {
    "kvc_compact": {
        **SHAPE, "window": 4, "pool_kernel": 3, "page_size": 4, "fp8_bounds": 0, "by_length": 1, "cache_format": 0,
        "reserved": 0, "prompt_length": 24,
        "prompt_budget": 8, "capacity": 24, "kv_stride_batch": 768, "kv_stride_head": 384, "kv_stride_token": 16,
    },
    "kvc_hybrid_attention": {
        **SHAPE, "page_size": 4, "top_r": 8, "fp8_bounds": 0, "cache_format": 0, "recent": 2, "capacity": 24,
        "top_k": 8, "token_budget": 12, "dense_until": 10, "selected_width": 12,
    },
    "kvc_dense_attention": {**SHAPE, "cache_format": 0, "capacity": 24},
}  # fmt: skip
PAGED, ROTATED = ("kvc_hybrid_attention", "kvc_rotated_hybrid_attention"), "kvc_rotated_dense_attention"
NUMBERS |= {PAGED[1]: NUMBERS[PAGED[0]], ROTATED: NUMBERS["kvc_dense_attention"]}
STRUCTS: dict[str, type[Parameters]] = {
    "kvc_compact": struct_of(COMPACT),
    "kvc_hybrid_attention": struct_of(HYBRID_ATTENTION),
    "kvc_dense_attention": struct_of(DENSE_ATTENTION),
    "kvc_rotated_hybrid_attention": struct_of(ROTATED_HYBRID_ATTENTION),
    "kvc_rotated_dense_attention": struct_of(ROTATED_DENSE_ATTENTION),
}


@dataclass(frozen=True)
class Pointer:
    """A buffer of the call: the bytes that it needs, and the library's use of it."""

    bytes: int
    alignment: int = 16
    written: bool = False
    optional: bool = False


CACHE, BOUNDS = Pointer(2 * 2 * 24 * 16 * 4, written=True), 2 * 2 * 32 * 6 * 4
STEP = {
    "query": Pointer(2 * 4 * 16 * 4),
    "k_new": Pointer(2 * 2 * 16 * 4),
    "v_new": Pointer(2 * 2 * 16 * 4),
    "k_cache": CACHE,
    "v_cache": CACHE,
    "cache_lengths": Pointer(2 * 8, alignment=8),
    "output": Pointer(2 * 4 * 16 * 4, written=True),
}
POINTERS = {
    "kvc_compact": {
        "q_window": Pointer(2 * 4 * 4 * 16 * 4),
        "k": Pointer(2 * 2 * 24 * 16 * 4),
        "v": Pointer(2 * 2 * 24 * 16 * 4),
        "prompt_lengths": Pointer(2 * 8, alignment=8),
        "prompt_budgets": Pointer(2 * 8, alignment=8),
        "pool_kernels": Pointer(2 * 8, alignment=8),
        "k_cache": CACHE,
        "v_cache": CACHE,
        "bounds": Pointer(BOUNDS, written=True, optional=True),
        "cache_lengths": Pointer(2 * 8, alignment=8, written=True),
        "indices": Pointer(2 * 2 * 24 * 4, alignment=4, written=True),
    },
    "kvc_hybrid_attention": {
        **STEP,
        "bounds": Pointer(BOUNDS, written=True),
        "selected": Pointer(2 * 2 * 12 * 4, alignment=4, written=True, optional=True),
    },
    "kvc_dense_attention": STEP,
}
TOKEN = {
    "joined": Pointer(2 * 8 * 16 * 4),
    "cosines": Pointer(2 * 8 * 4, alignment=4),
    "sines": Pointer(2 * 8 * 4, alignment=4),
    "query": Pointer(2 * 4 * 16 * 4, written=True),
}
for operation in PAGED[0], "kvc_dense_attention":
    kept = {name: pointer for name, pointer in POINTERS[operation].items() if name not in ("query", "k_new", "v_new")}
    POINTERS[operation.replace("kvc_", "kvc_rotated_")] = TOKEN | kept


class Call:
    """A valid call on poisoned memory; a test makes one of its fields wrong."""

    def __init__(self, library: KernelLibrary, operation: str) -> None:
        self.library, self.operation = library, operation
        self.memory: dict[str, Tensor] = {}
        addresses = {name: self._allocate(name, pointer.bytes) for name, pointer in POINTERS[operation].items()}
        self.params = STRUCTS[operation](**NUMBERS[operation], **addresses)
        self.needed = library.workspace_bytes(operation, self.params)
        self.workspace: int | None = self._allocate("workspace", self.needed)
        self.bytes = self.needed

    def _allocate(self, name: str, size: int) -> int:
        """Allocates in the middle of a buffer so large that no other one of the call is near."""
        self.memory[name] = torch.full((size + 2 * ZONE,), FILL, dtype=torch.uint8, device=self.library.device_type)
        middle = self.memory[name].data_ptr() + ZONE
        return middle - middle % 256

    def run(self) -> None:
        self.library.call(self.operation, self.params, self.workspace, self.bytes)

    def refused(self, call: Callable[[], object], status: Status = Status.INVALID_PARAMETER) -> str:
        """Return the message of a refusal, after a check that every byte is as it was."""
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.status == status, caught.value
        for name, buffer in self.memory.items():
            assert bool((buffer == FILL).all()), f"{name} was written"
        return str(caught.value).removeprefix(f"{self.operation}: ").removesuffix(f" ({status.name})")

    def workspace_refusal(self) -> str:
        """Return the message of a workspace query that is refused without its result being written."""
        text = self.refused(lambda: self.library.workspace_bytes(self.operation, self.params))
        return text.removeprefix(f"{self.operation}_workspace: ")
