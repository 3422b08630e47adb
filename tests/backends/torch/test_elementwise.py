"""The operations between the products: the reference's arithmetic, and a compiler that may fail."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kvc_trt.backends.torch.model import elementwise
from kvc_trt.backends.torch.model.elementwise import AS_WRITTEN, Compiled
from kvc_trt.backends.torch.model.projections import float_product
from kvc_trt.backends.torch.model.prompt_attention import prefill_attention
from kvc_trt.reference.layers import Rotary, rms_norm
from tests.small_model import SMALL as MODEL

EPSILON = 1e-5


def rotation_inputs(dtype):
    heads, kv_heads, size = 4, 2, MODEL.head_size
    positions = torch.tensor([0, 5, 200])
    rotary = Rotary(MODEL, 256, torch.float32, longest=256)
    joined = torch.randn(3, (heads + 2 * kv_heads) * size).to(dtype)
    return joined, rotary, positions, (heads, kv_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_the_references_rounded_once(dtype):
    hidden, update, weight = torch.randn(3, 64).to(dtype), torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype)
    added, found = AS_WRITTEN.added_and_normed(hidden, update, weight, EPSILON)
    assert torch.equal(added, hidden + update)
    expected = rms_norm(added.float(), weight.float(), EPSILON).to(dtype)
    torch.testing.assert_close(found, expected)
    large = torch.full((1, 64), 3e4).to(dtype)
    assert AS_WRITTEN.normed(large, torch.ones(64, dtype=dtype), EPSILON).isfinite().all(), "a square overflowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_references(dtype):
    joined, rotary, positions, heads = rotation_inputs(dtype)
    angles = rotary.cos[positions], rotary.sin[positions]
    found = AS_WRITTEN.rotated_heads(joined, *angles, None, None, heads, EPSILON)
    parts = joined.view(3, -1, MODEL.head_size).split([4, 2, 2], dim=1)
    for part, value in zip(parts[:2], found[:2], strict=True):
        assert torch.equal(value, rotary(part.float(), positions).to(dtype))
    assert torch.equal(found[2], parts[2])
    assert all(value.is_contiguous() for value in found), "the kernels take contiguous tensors only"


def test_heads_are_normed_before_they_are_rotated():
    joined, rotary, positions, heads = rotation_inputs(torch.float32)
    norms = torch.randn(MODEL.head_size), torch.randn(MODEL.head_size)
    angles = rotary.cos[positions], rotary.sin[positions]
    query, keys, _ = AS_WRITTEN.rotated_heads(joined, *angles, *norms, heads, EPSILON)
    parts = joined.view(3, -1, MODEL.head_size).split([4, 2, 2], dim=1)
    for part, norm, value in zip(parts, norms, (query, keys), strict=False):
        torch.testing.assert_close(value, rotary(rms_norm(part, norm, EPSILON), positions))


def test_gating_takes_the_first_half_as_the_gate():
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    found = AS_WRITTEN.gated(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", ["normed", "added_and_normed", "rotated_heads", "gated"])
def test_every_function_is_one_graph_for_the_compiler(name):
    """The functions are traced whole, at several numbers of rows; Inductor's code for a GPU was not run."""
    function = getattr(elementwise, name)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for rows in (1, 2, 3, 7):
        x, weight = torch.randn(rows, 128), torch.randn(128)
        angles = torch.randn(rows, 8), torch.randn(rows, 8)
        arguments = {
            "normed": (x, weight, EPSILON),
            "added_and_normed": (x, x, weight, EPSILON),
            "rotated_heads": (x, *angles, None, None, (4, 2), EPSILON),
            "gated": (x,),
        }[name]
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_a_compiler_that_fails_is_said_once_and_changes_nothing(caplog):
    def broken(function):
        def run(*arguments):
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

        return run

    gated = Compiled(elementwise.gated, broken)
    x = torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(gated(x), elementwise.gated(x))
    assert caplog.text.count("Failed to find C compiler.") == 1
    assert "gated" in caplog.text
    with pytest.raises(TypeError):
        gated(x, "silu", x)


def test_out_of_memory_is_not_taken_for_a_compiler_failure():
    def full(function):
        def run(*arguments):
            raise torch.OutOfMemoryError("full")

        return run

    with pytest.raises(torch.OutOfMemoryError):
        Compiled(elementwise.gated, full)(torch.randn(2, 8))


def test_logits_of_16_bit_weights_are_not_rounded_to_16_bits():
    x, matrix = torch.randn(2, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    found = float_product(x, matrix)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.float() @ matrix.float().T)
    assert not torch.equal(found, found.bfloat16().float())


def test_on_a_gpu_attention_never_falls_back_to_a_kernel_that_holds_all_scores(monkeypatch):
    """Checks which kernels are allowed; only a GPU can show that they run."""
    from torch.nn import attention

    allowed = []

    monkeypatch.setattr(attention, "sdpa_kernel", lambda backends: allowed.append(backends) or contextlib.nullcontext())
    for dtype in (torch.bfloat16, torch.float32):
        query, keys = (torch.empty(1, heads, 32, 64, dtype=dtype, device="meta") for heads in (8, 2))
        assert prefill_attention(query, keys, keys).shape == query.shape
    backends = attention.SDPBackend
    assert allowed == [[backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION], backends.EFFICIENT_ATTENTION]
