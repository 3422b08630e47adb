"""KvcPrefillAttention by the native library: the body's results, for any shape, thread count and processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime import native
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.plugins_cuda.build import ROOT
from tests.rounding import assert_close


def prompt(batch: int, heads: int, kv_heads: int, size: int, length: int, seed: int = 0) -> list[np.ndarray]:
    return [normal(seed + part, batch, count, length, size) for part, count in enumerate((heads, kv_heads, kv_heads))]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(part.astype(np.float64), group, axis=1) for part in (k, v))
    scores = q.astype(np.float64) @ keys.transpose(0, 1, 3, 2) / np.sqrt(q.shape[3])
    scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "size", "length"),
    [(1, 4, 1, 64, 256), (2, 6, 2, 80, 128), (1, 2, 2, 20, 384), (1, 10, 2, 32, 512)],
)
def test_native_results_equal_the_bodys(
    library: Path, instructions: str, threads: int, batch: int, heads: int, kv_heads: int, size: int, length: int
) -> None:
    body = PREFILL_ATTENTION.body(Layout(HeadShape(heads, kv_heads, size)))
    arrays = prompt(batch, heads, kv_heads, size, length)
    found = NativeNode(body, {}, library, threads)(*arrays)["o"]
    assert_close(found, SingleNode(body, {})(*arrays)["o"], 2e-6)


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 40),
    st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)
def test_any_length_and_shape_is_right(
    library: Path, length: int, group: int, kv_heads: int, size: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    """Includes lengths that are not a multiple of a block, which the body does not take."""
    body = PREFILL_ATTENTION.body(Layout(HeadShape(group * kv_heads, kv_heads, size)))
    arrays = prompt(1, group * kv_heads, kv_heads, size, length, seed)
    assert_close(NativeNode(body, {}, library)(*arrays)["o"], exact(*arrays), 2e-6)


def test_later_tokens_do_not_change_earlier_ones(library: Path, instructions: str) -> None:
    """Padding on the right keeps away from every real token, bit for bit."""
    body = PREFILL_ATTENTION.body(Layout(HeadShape(4, 2, 32)))
    q, k, v = prompt(1, 4, 2, 32, 384)
    native = NativeNode(body, {}, library)
    before = native(q, k, v)["o"]
    k[:, :, 200:] *= 7
    v[:, :, 200:] += 3
    np.testing.assert_array_equal(native(q, k, v)["o"][:, :, :200], before[:, :, :200])


def test_threads_do_not_change_a_bit(library: Path, instructions: str) -> None:
    body = PREFILL_ATTENTION.body(Layout(HeadShape(6, 2, 48)))
    arrays = prompt(2, 6, 2, 48, 640)
    one, two = (NativeNode(body, {}, library, threads)(*arrays)["o"] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(1, 300), st.sampled_from([1, 3, 4]), st.integers(0, 1000), ANY_INSTRUCTIONS)
def test_the_last_queries_alone_get_the_same_bits(
    library: Path, tiles_before: int, last: int, group: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    body = PREFILL_ATTENTION.body(Layout(HeadShape(group * 2, 2, 24)))
    q, k, v = prompt(2, group * 2, 2, 24, tiles_before * 64 + last, seed)
    native = NativeNode(body, {}, library)
    some = np.ascontiguousarray(q[:, :, -last:])
    np.testing.assert_array_equal(native(some, k, v)["o"], native(q, k, v)["o"][:, :, -last:])


@pytest.mark.parametrize(("queries", "keys"), [(100, 150), (128, 64)])
def test_queries_that_begin_inside_a_tile_are_refused(library: Path, queries: int, keys: int) -> None:
    native = NativeNode(PREFILL_ATTENTION.body(Layout(HeadShape(2, 1, 16))), {}, library)
    q, k = normal(0, 1, 2, queries, 16), normal(1, 1, 1, keys, 16)
    with pytest.raises(Exception, match=f"behind a multiple of 64, found {queries}"):
        native(q, k, k)


def test_large_scores_overflow_nowhere(library: Path, instructions: str) -> None:
    body = PREFILL_ATTENTION.body(Layout(HeadShape(2, 1, 64)))
    arrays = prompt(1, 2, 1, 64, 256)
    arrays[0] *= 300
    np.testing.assert_allclose(NativeNode(body, {}, library)(*arrays)["o"], exact(*arrays), atol=1e-3)


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype("bfloat16").astype(np.float32)


UNIT = 2.0**-8
"""The largest relative error of rounding to bfloat16."""
EXPONENTIAL = 7.5e-5
"""The largest error of the coarser exponential, once in the weights and once in their sum."""


@settings(max_examples=60)
@given(
    st.integers(1, 300),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 70),
    st.sampled_from([0.1, 1.0, 20.0]),
    st.integers(0, 1000),
)
def test_bf16_changes_what_rounding_weights_changes(
    bf16_library: Path, length: int, group: int, kv_heads: int, size: int, scale: float, seed: int
) -> None:
    """Inputs that bfloat16 holds are multiplied exactly; only the rounding of softmax weights remains."""
    body = PREFILL_ATTENTION.body(Layout(HeadShape(group * kv_heads, kv_heads, size)))
    arrays = [rounded(array) for array in prompt(1, group * kv_heads, kv_heads, size, length, seed)]
    arrays[0] *= scale
    arrays[0] = rounded(arrays[0])
    found = NativeNode(body, {}, bf16_library, bf16=True)(*arrays)["o"]
    magnitude = exact(*arrays[:2], np.abs(arrays[2]))
    keys = np.repeat(np.abs(arrays[1]), group, axis=1)
    scores = np.abs(arrays[0]).astype(np.float64) @ keys.transpose(0, 1, 3, 2) / np.sqrt(size)
    of_scores = 2.0**-24 * (size + 4) * scores.max(axis=-1, keepdims=True)  # sums in float32, and softmax's steps
    bar = (UNIT + 2 * EXPONENTIAL + 2 * of_scores) * magnitude
    np.testing.assert_array_less(np.abs(found - exact(*arrays)), bar + 1e-6)


def test_bf16_rounds_its_inputs_as_the_format_does(bf16_library: Path) -> None:
    body = PREFILL_ATTENTION.body(Layout(HeadShape(4, 2, 64)))
    arrays = prompt(1, 4, 2, 64, 200)
    native_node = NativeNode(body, {}, bf16_library, bf16=True)
    np.testing.assert_array_equal(native_node(*arrays)["o"], native_node(*map(rounded, arrays))["o"])


def test_bf16_threads_and_padding_do_not_change_a_bit(bf16_library: Path) -> None:
    body = PREFILL_ATTENTION.body(Layout(HeadShape(6, 2, 48)))
    q, k, v = prompt(2, 6, 2, 48, 640)
    one = NativeNode(body, {}, bf16_library, 1, bf16=True)(q, k, v)["o"]
    k[:, :, 500:] *= 7
    two = NativeNode(body, {}, bf16_library, 2, bf16=True)(q, k, v)["o"]
    np.testing.assert_array_equal(one[:, :, :500], two[:, :, :500])


@pytest.mark.parametrize("bf16", [False, True])
def test_nan_stays_nan(bf16_library: Path, bf16: bool) -> None:
    """A NaN key reaches every query that reads it, and no other."""
    body = PREFILL_ATTENTION.body(Layout(HeadShape(2, 1, 32)))
    q, k, v = prompt(1, 2, 1, 32, 256)
    k[0, 0, 130, 7] = np.nan
    found = NativeNode(body, {}, bf16_library, bf16=bf16)(q, k, v)["o"]
    assert np.isnan(found[:, :, 130:]).all()
    assert not np.isnan(found[:, :, :128]).any()


def test_bf16_is_refused_where_the_processor_has_none(bf16_library: Path) -> None:
    loaded = native.load(bf16_library)
    body = PREFILL_ATTENTION.body(Layout(HeadShape(2, 1, 32)))
    arrays = prompt(1, 2, 1, 32, 128)
    loaded.use_instructions("avx2")
    try:
        with pytest.raises(Exception, match="the instruction set avx2 multiplies no bfloat16"):
            NativeNode(body, {}, bf16_library, bf16=True)(*arrays)
    finally:
        loaded.use_instructions(native.BF16)


LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.plugins_cpu.native_node import NativeNode

native = NativeNode(PREFILL_ATTENTION.body(Layout(HeadShape(64, 1, 4096))), {}, Path(sys.argv[1]), int(sys.argv[2]))
q, k = np.ones((2, 64, 1, 4096), np.float32), np.ones((2, 1, 1, 4096), np.float32)
native(q[:, :, :, :64].copy(), k[..., :64].copy(), k[..., :64].copy())
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    native(q, k, k)
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_too_little_memory_is_an_error_and_not_the_end_of_the_process(library: Path, threads: int) -> None:
    """One task needs more scratch memory than is left."""
    command = [sys.executable, "-c", LITTLE_MEMORY, str(library), str(threads)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "Failed to allocate memory" in found.stdout
