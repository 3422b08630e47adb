"""enqueue of the C++ plugins on host memory, over the emulated kernels: the same bits as the C ABI called directly.

Other tests judge the kernels; these have to show a swapped address, a forgotten field or a wrong stride.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvc_trt.operators.registry import OPERATORS
from tests.backends.tensorrt.plugin_cases import FORMATS, STORING, stored
from tests.plugins_cuda import cases
from tests.plugins_cuda.tensorrt import toolchain

DATA_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.bfloat16: 7, torch.int64: 8}
REFUSED = -1


class Argument(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Driver:
    """enqueue_driver.cpp over one plugin library."""

    library: ctypes.CDLL
    plugins: str

    def __call__(self, operator: str, case, outputs: Sequence[Tensor]) -> int:
        """One step; the status of enqueue, or the earlier action that failed (kNotCreated = 101 and so on)."""
        schema = OPERATORS[operator].for_numbers(vars(case))
        names = [attribute.name for attribute in schema.attributes]
        values = [getattr(case, name) for name in names]
        inputs = [getattr(case, row.name) for row in schema.inputs]
        return self.library.kvc_test_enqueue(
            self.plugins.encode(), operator.encode(), (ctypes.c_char_p * len(names))(*(n.encode() for n in names)),
            (ctypes.c_int32 * len(values))(*values), len(values), *_arguments(inputs), *_arguments(outputs),
        )  # fmt: skip


def _arguments(tensors: Sequence[Tensor]) -> tuple[ctypes.Array[Argument], int]:
    rows = [
        Argument(DATA_TYPES[t.dtype], t.ndim, (ctypes.c_int64 * 8)(*t.shape), t.data_ptr()) for t in tensors
    ]  # fmt: skip
    assert all(t.is_contiguous() for t in tensors)
    return (Argument * len(rows))(*rows), len(rows)


@pytest.fixture
def enqueue(plugins) -> Driver:
    source = toolchain.HERE / "enqueue_driver.cpp"
    path = toolchain.compile_cpp("libenqueue_driver.so", "-shared", source, "-ldl")
    return Driver(ctypes.CDLL(str(path)), str(plugins))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that no kernel has written yet."""
    return torch.full(tuple(shape), -77, dtype=dtype)


def check_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to the last bit, NaN included."""
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.pairwise
@cases.FP8
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(61, 9, 40), (24,), (5, 0)], ids=str)
def test_enqueued_compaction_equals_the_library_call(enqueue, emulation, dtype, lengths, fp8):
    case = cases.compact_case(lengths=lengths, heads=6, kv_heads=2, page=3, dtype=dtype, fp8=fp8)
    expected = emulation.compact(**case.arguments())
    outputs = [poisoned(tensor.shape, tensor.dtype) for tensor in expected]
    assert enqueue("KvcCompact", case, outputs) == 0
    check_same(outputs, expected)


@pytest.mark.pairwise
@cases.FP8
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(61, 17, 40), (15, 3), (70, -1)], ids=str)
def test_enqueued_hybrid_attention_equals_the_library_call(enqueue, emulation, dtype, lengths, fp8):
    case = cases.step_case(
        lengths=lengths, heads=6, kv_heads=2, page=3, top_r=5, top_k=12, dense_until=18, dtype=dtype, fp8=fp8
    )
    direct = case.to("cpu")
    output, selected = emulation.hybrid_attention(**direct.arguments())
    case = case.to("cpu")
    outputs = [poisoned(output.shape, dtype), case.k_cache, case.v_cache, case.bounds]
    outputs.append(poisoned(selected.shape, torch.int32))
    assert enqueue("KvcHybridAttention", case, outputs) == 0
    check_same(outputs, [output, direct.k_cache, direct.v_cache, direct.bounds, selected])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(61, 9, 40), (70, -1)], ids=str)
def test_enqueued_dense_attention_equals_the_library_call(enqueue, emulation, dtype, lengths):
    case = cases.step_case(lengths=lengths, heads=6, kv_heads=2, dtype=dtype)
    direct = case.to("cpu")
    output = emulation.dense_attention(**direct.dense_arguments())
    case = case.to("cpu")
    outputs = [poisoned(output.shape, dtype), case.k_cache, case.v_cache]
    assert enqueue("KvcDenseAttention", case, outputs) == 0
    check_same(outputs, [output, direct.k_cache, direct.v_cache])


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("make", STORING, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_enqueued_operators_over_stored_caches_equal_the_library_calls(enqueue, emulation, make, form, dtype):
    step = stored(make, form)(emulation, dtype, (61, 9, 40))
    tensors = dict(zip((tensor.name for tensor in step.operator.inputs), step.inputs, strict=True))
    assert enqueue(step.operator.name, SimpleNamespace(**tensors, **step.fields), step.outputs) == 0
    check_same(step.outputs, step.expected)


def test_bounds_in_fp8_are_overwritten_whatever_the_cache_is(enqueue):
    case = cases.step_case(lengths=(61, 9), fp8=True)
    call = SimpleNamespace(bounds=torch.zeros_like(case.bounds), bounds_kept=case.bounds, fp8_bounds=1)
    assert enqueue("KvcReplaceBounds", call, [call.bounds]) == 0
    check_same([call.bounds], [case.bounds])


def test_a_cache_in_another_buffer_is_refused_and_left_alone(enqueue):
    case = cases.step_case(lengths=(9,))
    before = case.to("cpu")
    copies = [case.k_cache.clone(), case.v_cache.clone()]
    output = poisoned(case.query.shape, torch.float32)
    assert enqueue("KvcDenseAttention", case, [output, *copies]) == REFUSED
    check_same([case.k_cache, case.v_cache, *copies], [before.k_cache, before.v_cache] * 2)
    assert bool((output == -77).all())
