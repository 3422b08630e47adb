"""Calls that reach the C ABI, calls that never do, and the files that are loaded at all."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvc_trt.kernels import KernelError, KernelLibraryError
from kvc_trt.kernels.library import CompactResult, KernelLibrary
from kvc_trt.kernels.structs import ABI_VERSION, Status, struct_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from tests.kernels.double import WORKSPACE_BYTES, Calls, compile_double, compiler
from tests.plugins_cuda.cases import compact_case, step_case


@pytest.fixture
def calls(double) -> Iterator[Calls]:
    found = Calls(double.path)
    found.count.value = 0
    yield found
    found.status.value = 0


def test_a_compaction_passes_sizes_strides_and_addresses(double, calls):
    case = compact_case(lengths=[40, 9, 33], heads=6, kv_heads=2, size=24, window=4, budget=12, capacity=20)
    qkv = torch.randn(3, 40, 10, 24).transpose(1, 2)
    k, v = qkv[:, 6:8], qkv[:, 8:]
    found = double.compact(**{**case.arguments(), "k": k, "v": v})
    wanted = {
        "dtype": 0, "batch": 3, "heads": 6, "kv_heads": 2, "head_size": 24, "window": 4, "pool_kernel": 5,
        "page_size": 4, "prompt_length": 40, "prompt_budget": 12, "capacity": 20, "kv_stride_batch": 40 * 240,
        "kv_stride_head": 24, "kv_stride_token": 240, "q_window": case.q_window.data_ptr(), "k": k.data_ptr(),
        "v": v.data_ptr(), "prompt_lengths": case.prompt_lengths.data_ptr(), "k_cache": found.k_cache.data_ptr(),
        "v_cache": found.v_cache.data_ptr(), "bounds": found.bounds.data_ptr(), "indices": found.indices.data_ptr(),
        "cache_lengths": found.cache_lengths.data_ptr(),
    }  # fmt: skip
    passed = calls.params(struct_of(COMPACT))
    assert {name: passed[name] for name in wanted} == wanted
    assert (found.bounds.shape, found.indices.shape) == ((3, 2, 48, 5), (3, 2, 20))
    assert (calls.workspace_bytes.value, bool(calls.workspace.value)) == (WORKSPACE_BYTES, True)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 2)])
def test_a_step_passes_sizes_and_addresses(dtype, number, double, calls):
    case = step_case(
        lengths=[30, 7], capacity=40, page=3, top_r=5, top_k=9, token_budget=11, dense_until=13, dtype=dtype,
        recent=2,
    )  # fmt: skip
    output, selected = double.hybrid_attention(**case.arguments())
    passed = calls.params(struct_of(HYBRID_ATTENTION))
    wanted = {
        "dtype": number, "batch": 2, "heads": 4, "kv_heads": 2, "head_size": 32, "page_size": 3, "top_r": 5,
        "capacity": 40, "top_k": 9, "token_budget": 11, "dense_until": 13, "selected_width": 13,
        "recent": 2, "output": output.data_ptr(), "selected": selected.data_ptr(),
    }  # fmt: skip
    tensors = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
    wanted |= {name: getattr(case, name).data_ptr() for name in tensors}
    assert {name: passed[name] for name in wanted} == wanted
    assert double.hybrid_attention(**case.arguments(), with_selected=False)[1] is None
    assert calls.params(struct_of(HYBRID_ATTENTION))["selected"] is None
    output = double.dense_attention(**case.dense_arguments())
    passed = calls.params(struct_of(DENSE_ATTENTION))
    assert (passed["capacity"], passed["cache_format"], passed["output"]) == (40, 0, output.data_ptr())


def strided(tensor):
    """Return a tensor with the same values that takes every second element of a larger one."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


COMPACT_MISTAKES = {
    "q_window of three dimensions": lambda c: {"q_window": c.q_window[0]},
    "q_window of another type": lambda c: {"q_window": c.q_window.double()},
    "integers": lambda c: {"q_window": c.q_window.int(), "k": c.k.int(), "v": c.v.int()},
    "q_window with gaps": lambda c: {"q_window": strided(c.q_window)},
    "q_window of another batch": lambda c: {"q_window": c.q_window[:1]},
    "q_window of another head size": lambda c: {"q_window": c.q_window[..., :16].contiguous()},
    "k of another type": lambda c: {"k": c.k.half()},
    "v of another length": lambda c: {"v": c.v[:, :, :-1]},
    "v of other strides": lambda c: {"v": c.v.transpose(1, 2).contiguous().transpose(1, 2)},
    "head elements apart": lambda c: {"k": strided(c.k), "v": strided(c.v)},
    "no tokens": lambda c: {"k": c.k[:, :, :0], "v": c.v[:, :, :0]},
    "lengths of 32 bits": lambda c: {"prompt_lengths": c.prompt_lengths.int()},
    "too few lengths": lambda c: {"prompt_lengths": c.prompt_lengths[:1]},
    "a meta tensor": lambda c: {"q_window": c.q_window.to("meta")},
    "a sparse tensor": lambda c: {"prompt_lengths": c.prompt_lengths.to_sparse()},
    "page_size 0": lambda c: {"page_size": 0},
    "a capacity beyond the ABI": lambda c: {"capacity": 2**20 + 1},
    "a budget of 2^63": lambda c: {"prompt_budget": 2**63},
    "a pool kernel of 2^31": lambda c: {"pool_kernel": 2**31},
}
STEP_MISTAKES = {
    "query of two dimensions": lambda c: {"query": c.query[0]},
    "query with gaps": lambda c: {"query": strided(c.query)},
    "query of another type": lambda c: {"query": c.query.half()},
    "k_new of another shape": lambda c: {"k_new": c.k_new[:, :1].contiguous()},
    "v_new of another type": lambda c: {"v_new": c.v_new.half()},
    "k_cache of another batch": lambda c: {"k_cache": c.k_cache[:1]},
    "k_cache with gaps": lambda c: {"k_cache": c.k_cache.transpose(1, 2).contiguous().transpose(1, 2)},
    "v_cache of fewer slots": lambda c: {"v_cache": c.v_cache[:, :, :-1].contiguous()},
    "one cache for both": lambda c: {"v_cache": c.k_cache},
    "a query inside the cache": lambda c: {"query": c.k_cache.view(-1)[: c.query.numel()].view_as(c.query)},
    "bounds by page": lambda c: {"bounds": c.bounds.transpose(2, 3).contiguous()},
    "bounds of another page size": lambda c: {"page_size": 5},
    "lengths of 32 bits": lambda c: {"cache_lengths": c.cache_lengths.int()},
    "lengths per head": lambda c: {"cache_lengths": c.cache_lengths[:, None].expand(-1, 2).contiguous()},
    "page_size -1": lambda c: {"page_size": -1},
    "top_k of 2^31": lambda c: {"top_k": 2**31},
    "a negative dense_until": lambda c: {"dense_until": -1},
}


@pytest.mark.parametrize("mistake", COMPACT_MISTAKES)
def test_a_wrong_tensor_never_reaches_a_compaction(mistake, double, calls):
    case = compact_case(lengths=[40, 9])
    with pytest.raises(ValueError, match=r"expected|takes|not an ordinary"):
        double.compact(**{**case.arguments(), **COMPACT_MISTAKES[mistake](case)})
    assert calls.count.value == 0


@pytest.mark.parametrize("mistake", STEP_MISTAKES)
def test_a_wrong_tensor_never_reaches_a_step(mistake, double, calls):
    case = step_case(lengths=[30, 7])
    with pytest.raises(ValueError, match=r"expected|takes"):
        double.hybrid_attention(**{**case.arguments(), **STEP_MISTAKES[mistake](case)})
    assert calls.count.value == 0


def test_results_go_where_the_caller_says_if_they_fit(double, calls):
    case = compact_case(lengths=[30], budget=12, capacity=30, length=30)
    fresh = double.compact(**case.arguments())
    in_place = fresh._replace(k_cache=case.k, v_cache=case.v)
    assert double.compact(**case.arguments(), out=in_place).k_cache is case.k
    assert calls.params(struct_of(COMPACT))["k_cache"] == calls.params(struct_of(COMPACT))["k"]
    calls.count.value = 0
    swapped = fresh._replace(k_cache=case.v, v_cache=case.k)
    half_in_place = fresh._replace(k_cache=case.k)
    wrong_type = fresh._replace(indices=fresh.indices.long())
    over_lengths = fresh._replace(cache_lengths=case.prompt_lengths)
    for wrong in (swapped, half_in_place, wrong_type, over_lengths):
        with pytest.raises(ValueError, match="expected"):
            double.compact(**case.arguments(), out=CompactResult(*wrong))
    assert calls.count.value == 0


def test_a_refusal_carries_its_status_and_its_message(double, calls):
    calls.status.value = 1
    with pytest.raises(KernelError, match="page_size is 0; expected at least 1") as caught:
        double.dense_attention(**step_case(lengths=[3]).dense_arguments())
    assert caught.value.status == Status.INVALID_PARAMETER
    calls.status.value = 17
    with pytest.raises(KernelError) as caught:
        double.dense_attention(**step_case(lengths=[3]).dense_arguments())
    assert caught.value.status == 17


def test_a_library_says_what_it_is(double):
    assert (double.executor, double.device_type) == ("emulation", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "KVC_ABI_VERSION + 1"}, f"ABI version {ABI_VERSION + 1}; expected {ABI_VERSION}"),
        ({"executor": "fpga"}, "executor is 'fpga'"),
    ],
)
def test_another_abi_or_executor_is_refused(options, message, tmp_path):
    with pytest.raises(KernelLibraryError, match=message):
        KernelLibrary(compile_double(tmp_path, **options))


def test_a_cuda_library_takes_no_cpu_tensors(tmp_path):
    library = KernelLibrary(compile_double(tmp_path, executor="cuda"))
    with pytest.raises(ValueError, match="takes cuda"):
        library.dense_attention(**step_case(lengths=[3]).dense_arguments())
    with pytest.raises(ValueError, match="only the emulation has schedules"):
        library.set_schedule("reverse")


def test_symbols_are_bound_when_they_are_called(tmp_path):
    library = KernelLibrary(compile_double(tmp_path, incomplete=True))
    case = step_case(lengths=[3])
    library.dense_attention(**case.dense_arguments())
    with pytest.raises(KernelLibraryError, match="has no kvc_hybrid_attention"):
        library.hybrid_attention(**case.arguments())


def test_files_that_are_not_libraries_are_refused_with_their_path(tmp_path):
    with pytest.raises(KernelLibraryError, match="no kernel library there"):
        KernelLibrary(tmp_path / "absent.so")
    (tmp_path / "text.so").write_text("not an ELF file")
    with pytest.raises(KernelLibraryError, match=r"text\.so cannot be loaded"):
        KernelLibrary(tmp_path / "text.so")
    (tmp_path / "foreign.c").write_text("int nothing;")
    compiled = [compiler(), "-shared", "-fPIC", str(tmp_path / "foreign.c"), "-o", str(tmp_path / "foreign.so")]
    subprocess.run(compiled, check=True)
    with pytest.raises(KernelLibraryError, match="has no kvc_abi_version"):
        KernelLibrary(tmp_path / "foreign.so")


def test_the_emulation_refuses_a_field_by_its_name(emulation):
    case = replace(step_case(lengths=[30]), top_r=33)
    with pytest.raises(KernelError, match="top_r") as caught:
        emulation.hybrid_attention(**case.arguments())
    assert caught.value.status == Status.INVALID_PARAMETER
    assert math.isnan(case.k_cache[0, 0, 30, 0].item()), "a refused step has written"


def test_a_repeated_call_passes_its_own_addresses(double, calls):
    """Shapes and numbers were checked by the first one: the others differ in addresses alone."""
    cases = [step_case(lengths=[30, 7], capacity=40, page=3, top_r=5, top_k=9, token_budget=11) for _ in range(2)]
    passed, outputs = [], []
    double.hybrid_attention(**cases[0].arguments())
    prepared = len(double._prepared)
    for case in cases:
        output, selected = double.hybrid_attention(**case.arguments())
        passed.append(calls.params(struct_of(HYBRID_ATTENTION)))
        outputs.append(output)
        addresses = {name: getattr(case, name).data_ptr() for name in ("query", "k_new", "k_cache", "bounds")}
        addresses |= {"output": output.data_ptr(), "selected": selected.data_ptr()}
        assert {name: passed[-1][name] for name in addresses} == addresses
        assert (calls.workspace_bytes.value, bool(calls.workspace.value)) == (WORKSPACE_BYTES, True)
    numbers = ("struct_bytes", "dtype", "batch", "heads", "capacity", "top_k", "selected_width", "page_size")
    assert len({tuple(one[name] for name in numbers) for one in passed}) == 1
    assert len(double._prepared) == prepared
    assert {(one.shape, one.dtype) for one in outputs} == {(outputs[0].shape, outputs[0].dtype)}


@pytest.mark.parametrize("wrong", ["shared", "shape", "type", "number", "strides"])
def test_a_repeated_call_is_still_checked(wrong, double, calls):
    case = step_case(lengths=[30, 7], capacity=40, page=3, top_r=5, top_k=9, token_budget=11)
    double.hybrid_attention(**case.arguments())
    before, given = calls.count.value, case.arguments()
    if wrong == "shared":
        given["v_cache"] = given["k_cache"]
    elif wrong == "shape":
        given["query"] = given["query"][:, :, :-1].contiguous()
    elif wrong == "type":
        given["k_new"] = given["k_new"].double()
    elif wrong == "number":
        given["page_size"] = 2**40
    else:
        given["v_new"] = strided(given["v_new"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"overlap|expected"):
            double.hybrid_attention(**given)
    assert calls.count.value == before
