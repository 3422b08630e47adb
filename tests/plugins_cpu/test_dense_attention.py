"""KvcDenseAttention by the native library: the body's results, in place, for every instruction set and thread count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.rounding import assert_close

OUTPUTS = ("output", "k_cache_out", "v_cache_out")


def nodes(library: Path, heads: int, kv_heads: int, size: int, threads: int = 1) -> tuple[SingleNode, NativeNode]:
    body = DENSE_ATTENTION.body(Layout(HeadShape(heads, kv_heads, size)))
    return SingleNode(body, {"dense_until": 16}), NativeNode(body, {"dense_until": 16}, library, threads)


def inputs(lengths: list[int], heads: int, kv_heads: int, size: int, capacity: int, seed: int = 0) -> list[np.ndarray]:
    new = (normal(seed, len(lengths), heads, size), *(normal(seed + i, len(lengths), kv_heads, size) for i in (1, 2)))
    caches = (normal(seed + i, len(lengths), kv_heads, capacity, size) for i in (3, 4))
    return [*new, *caches, np.array(lengths)]


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert_close(found["output"], expected["output"], 2e-6)
    for name in OUTPUTS[1:]:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "capacity", "lengths"),
    [
        (8, 2, 16, 64, [5, 0, 63]),
        (9, 3, 64, 2500, [2400, 1200]),  # groups of three, several parts
        (4, 4, 20, 40, [39]),  # a head size that fills no whole vectors
        (14, 2, 80, 2060, [1023, 1024, 2047, 2059]),  # both sides of the border between parts
    ],
)
def test_native_results_equal_the_bodys(
    library: Path, instructions: str, threads: int, heads: int, kv_heads: int, size: int, capacity: int,
    lengths: list[int],
) -> None:  # fmt: skip
    body, native = nodes(library, heads, kv_heads, size, threads)
    arrays = inputs(lengths, heads, kv_heads, size, capacity)
    check(native(*arrays), body(*arrays))


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 47), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 40),
    st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)
def test_random_shapes_equal_the_body(
    library: Path, lengths: list[int], group: int, kv_heads: int, size: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    body, native = nodes(library, group * kv_heads, kv_heads, size)
    arrays = inputs(lengths, group * kv_heads, kv_heads, size, 48, seed)
    check(native(*arrays), body(*arrays))


def test_threads_do_not_change_a_bit(library: Path, instructions: str) -> None:
    arrays = inputs([1290, 77], 6, 2, 48, 1300)
    one, two = (nodes(library, 6, 2, 48, threads)[1](*arrays) for threads in (1, 2))
    np.testing.assert_array_equal(one["output"], two["output"])


def test_a_row_is_the_same_alone_and_in_a_batch(library: Path, instructions: str) -> None:
    arrays = inputs([1200, 30, 2047], 6, 2, 48, 2048)
    _, native = nodes(library, 6, 2, 48)
    together = native(*arrays)["output"]
    for row in range(3):
        np.testing.assert_array_equal(native(*(array[row : row + 1] for array in arrays))["output"][0], together[row])


def test_bound_caches_are_written_in_place(library: Path) -> None:
    import onnxruntime

    _, native = nodes(library, 4, 2, 16)
    query, k_new, v_new, keys, values, lengths = inputs([3, 40], 4, 2, 16, 64)
    session = native.session(tuple(str(array.dtype) for array in (query, k_new, v_new, keys, values, lengths)))
    binding = session.io_binding()
    for name, array in (("query", query), ("k_new", k_new), ("v_new", v_new), ("cache_lengths", lengths)):
        binding.bind_cpu_input(name, array)
    for name, array in (("k_cache", keys), ("v_cache", values)):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"{name}_out", value)
    binding.bind_output("output")
    before = keys.copy()
    session.run_with_iobinding(binding)
    before[[0, 1], :, [3, 40]] = k_new
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), before)


@pytest.mark.parametrize("length", [-1, 48])
def test_a_slot_outside_of_the_cache_is_refused(library: Path, length: int) -> None:
    _, native = nodes(library, 4, 2, 16)
    with pytest.raises(Exception, match=rf"KvcDenseAttention: cache_lengths: expected 0..47, found {length}"):
        native(*inputs([length], 4, 2, 16, 48))


def test_shapes_that_contradict_each_other_are_refused(library: Path) -> None:
    _, native = nodes(library, 4, 2, 16)
    arrays = inputs([3], 4, 2, 16, 48)
    arrays[4] = arrays[4][:, :, :40]
    with pytest.raises(Exception, match="v_cache: expected capacity = 48, found 40"):
        native(*arrays)
    arrays[4] = arrays[3][0]
    with pytest.raises(Exception, match="v_cache: expected 4 dimensions, found 3"):
        native(*arrays)
