"""torch.ops.kvc: correct operators in PyTorch's own sense, on the reference and on a library, traced and captured."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.kernels import KernelLibraryError, loading, reference_ops, use_library
from kvc_trt.kernels.ops import argument_names, kvc, operator_name
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS, ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from tests.kernels.double import Calls, compile_double
from tests.plugins_cuda.cases import DTYPES, compact_case, step_case
from tests.plugins_cuda.test_rotated_attention import unrotated


def finite(case):
    """Return the step with zeros instead of NaN past a row's end: opcheck compares results, and NaN equals nothing."""
    case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()
    return case


def arguments(name, **options):
    """Positional arguments of an operator."""
    if name == "compact":
        return tuple(compact_case(lengths=[60, 24, 3], **options).arguments().values())
    case = finite(step_case(lengths=[60, -1, 10], **options))
    if name in ROTATED:
        given = unrotated(case).arguments(ROTATED[name], "cpu")
        return tuple(given[argument] for argument in argument_names(ROTATED[name]))
    return tuple((case.arguments() if name == "hybrid_attention" else case.dense_arguments()).values())


ROTATED = {operator_name(one): one for one in (ROTATED_HYBRID_ATTENTION, ROTATED_DENSE_ATTENTION)}
OPERATORS = {operator_name(one): one for one in LIBRARY_OPERATORS}
NAMES = ("compact", "hybrid_attention", "dense_attention", *ROTATED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_keeps_pytorchs_rules(name, dtype):
    """The schema lists the written tensors, the fake results have the real shape and type, and tracing works."""
    done = torch.library.opcheck(getattr(kvc, name), arguments(name, dtype=dtype))
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_on_a_library_keeps_pytorchs_rules(name, library):
    with use_library(library.path):
        inputs = (x.to(library.device_type) if isinstance(x, torch.Tensor) else x for x in arguments(name))
        done = torch.library.opcheck(getattr(kvc, name), tuple(inputs))
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_cpu_tensors_go_to_the_reference(name):
    mine, theirs = arguments(name), arguments(name)
    by_name = dict(zip(argument_names(OPERATORS[name]), theirs, strict=True))
    found, expected = getattr(kvc, name)(*mine), reference_ops.compute(name, by_name)
    found, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for a, b in zip(mine, theirs, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num()), "another update in place"


@pytest.mark.parametrize("on", ["reference", "emulation"])
def test_a_step_can_leave_out_what_it_selected(on, emulation):
    """The output and the update in place stay the same; the kernels get a null address."""
    whole, alone = arguments("hybrid_attention"), arguments("hybrid_attention")
    with use_library(emulation.path) if on == "emulation" else nullcontext():
        output, _ = kvc.hybrid_attention(*whole)
        assert torch.equal(kvc.hybrid_attention_without_selected(*alone), output)
        done = torch.library.opcheck(kvc.hybrid_attention_without_selected, arguments("hybrid_attention"))
    assert set(done.values()) == {"SUCCESS"}
    assert all(torch.equal(a, b) for a, b in zip(whole[3:6], alone[3:6], strict=True))


def test_a_chosen_library_is_called_instead(double):
    calls = Calls(double.path)
    before = calls.count.value
    kvc.dense_attention(*arguments("dense_attention"))
    assert calls.count.value == before
    with use_library(double.path):
        for name in NAMES:
            getattr(kvc, name)(*arguments(name))
    assert calls.count.value == before + len(NAMES)
    kvc.dense_attention(*arguments("dense_attention"))
    assert calls.count.value == before + len(NAMES)


def test_a_cuda_library_leaves_cpu_tensors_to_the_reference(tmp_path, monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, str(compile_double(tmp_path, executor="cuda")))
    expected = reference_ops.dense_attention(*arguments("dense_attention"))
    assert torch.equal(kvc.dense_attention(*arguments("dense_attention")), expected)


def test_queries_may_have_gaps_but_caches_may_not(double):
    query, k_new, v_new, k_cache, v_cache, lengths = arguments("dense_attention")
    gaps = torch.stack([query, query], dim=-1)[..., 0]
    assert torch.equal(
        kvc.dense_attention(gaps, k_new, v_new, k_cache.clone(), v_cache.clone(), lengths),
        kvc.dense_attention(query, k_new, v_new, k_cache.clone(), v_cache.clone(), lengths),
    )
    with use_library(double.path), pytest.raises(ValueError, match="expected it contiguous"):
        kvc.dense_attention(query, k_new, v_new, k_cache.mT.contiguous().mT, v_cache, lengths)


class Step(torch.nn.Module):
    """Compaction and two steps with arithmetic around them, as a model would have."""

    def forward(self, q_window, k, v, prompt_lengths, query, k_new, v_new):
        k_cache, v_cache, bounds, lengths, _ = kvc.compact(q_window * 2, k, v, prompt_lengths, 24, 40, 5, 4, 0)
        output, selected = kvc.hybrid_attention(
            query, k_new, v_new, k_cache, v_cache, bounds, lengths, 4, 8, 16, 16, 16, 0, 3
        )
        output = kvc.dense_attention(output + query, k_new, v_new, k_cache, v_cache, lengths + 1)
        return output.relu(), selected, k_cache * 1, bounds * 1


def model_inputs(batch=3):
    case = compact_case(lengths=[60, 24, 30][:batch])
    new = (torch.randn(batch, heads, 32, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    return case.q_window, case.k.nan_to_num(), case.v.nan_to_num(), case.prompt_lengths, *new


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_around_the_operators_compiles_whole(backend):
    """fullgraph: no operator breaks the graph; caches written in place are seen by what follows."""
    torch.compiler.reset()
    compiled = torch.compile(Step(), backend=backend, fullgraph=True)
    for batch in (3, 2):  # the second one is traced with a symbolic batch
        for found, expected in zip(compiled(*model_inputs(batch)), Step()(*model_inputs(batch)), strict=True):
            assert torch.equal(found, expected)


def test_a_compiled_model_calls_the_library(emulation):
    torch.compiler.reset()
    compiled = torch.compile(Step(), backend="aot_eager", fullgraph=True)
    inputs = model_inputs()
    with use_library(emulation.path):
        found, selected, keys, bounds = compiled(*inputs)
    expected = Step()(*inputs)
    assert torch.equal(selected, expected[1])
    assert torch.equal(keys, expected[2])
    assert torch.equal(bounds, expected[3])
    assert torch.allclose(found, expected[0], atol=1e-5, rtol=0)


sizes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3), "group": st.integers(1, 4), "size": st.sampled_from([8, 16, 24]),
        "page": st.integers(1, 7), "dtype": st.sampled_from(DTYPES),
    }
)  # fmt: skip


def same_shapes(name, inputs):
    """Real results against those for meta tensors."""
    moved = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs)
    fake, real = getattr(kvc, name)(*moved), getattr(kvc, name)(*inputs)
    fake, real = ((x,) if isinstance(x, torch.Tensor) else x for x in (fake, real))
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]
    assert all(x.is_meta for x in fake)


@settings(max_examples=40)
@given(sizes, st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(4, 30), st.integers(0, 5))
def test_fake_compactions_have_real_shapes(size, lengths, budget, room):
    heads, dtype, page = size["kv_heads"] * size["group"], size["dtype"], size["page"]
    case = compact_case(
        lengths=lengths, heads=heads, kv_heads=size["kv_heads"], size=size["size"], window=4, budget=budget,
        capacity=min(budget, max(*lengths, 1)) + room, page=page, dtype=dtype,
    )  # fmt: skip
    same_shapes("compact", tuple(case.arguments().values()))


@settings(max_examples=40)
@given(sizes, st.lists(st.integers(-1, 40), min_size=1, max_size=3), st.integers(1, 20), st.integers(0, 30))
def test_fake_steps_have_real_shapes(size, lengths, top_k, until):
    heads, dtype, page = size["kv_heads"] * size["group"], size["dtype"], size["page"]
    case = step_case(
        lengths=lengths, heads=heads, kv_heads=size["kv_heads"], size=size["size"], page=page, top_r=3, top_k=top_k,
        token_budget=7, dense_until=until, dtype=dtype,
    )  # fmt: skip
    same_shapes("hybrid_attention", tuple(case.arguments().values()))
    same_shapes("dense_attention", tuple(case.dense_arguments().values()))


@pytest.mark.gpu
def test_a_captured_step_replays_on_new_inputs(gpu):
    case = step_case(lengths=[60, 10, 33], capacity=80).to(gpu.device)
    inputs = tuple(case.arguments().values())
    with use_library(gpu.library.path):
        replay, (output, selected) = gpu.captured(lambda: kvc.hybrid_attention(*inputs))
        for step in range(3):
            other = step_case(lengths=[40 + step, 70, -1], capacity=80, seed=step).to(gpu.device)
            for captured, new in zip(inputs[:7], tuple(other.arguments().values())[:7], strict=True):
                captured.copy_(new)
            replay()
            expected = kvc.hybrid_attention(*other.arguments().values())
            assert torch.equal(output, expected[0])
            assert torch.equal(selected, expected[1])


def test_on_a_gpu_nothing_stands_in_for_a_missing_library():
    from kvc_trt.kernels import ops

    with pytest.raises(KernelLibraryError, match="need the CUDA kernel library; there is none"):
        ops._library_for(torch.empty(1, device="meta"))
