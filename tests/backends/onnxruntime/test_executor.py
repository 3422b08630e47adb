from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime.executor import HUGE_PAGE, OnnxRuntimeExecutor, state_buffers
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import read_graph, twin_program
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.state import StateTensor
from kvc_trt.runtime.executor import Prefilled
from tests.backends.prompts import LENGTHS, filled, padded, prompts


@pytest.fixture
def executor(rocketkv):
    executor = OnnxRuntimeExecutor(rocketkv, RunOptions(threads=1))
    executor.allocate(4)
    return executor


def test_limits_and_bytes_follow_from_the_state_list(executor, rocketkv):
    assert executor.limits.capacities == (272, rocketkv.parameters.capacity, rocketkv.parameters.capacity)
    assert executor.limits.max_sequence_len == 272
    assert executor.state_bytes() == 4 * sum(tensor.bytes_per_row() for tensor in rocketkv.state)
    bounds = next(tensor for tensor in rocketkv.state if tensor.name == "bounds.1")
    assert (executor.buffers["bounds.1"] == np.float32(bounds.fill)).all()


def test_prefill_gives_each_rows_state_and_lengths(executor, rocketkv):
    ids, lengths = padded(prompts())
    prefilled = executor.prefill(ids, lengths)
    kept = np.array([rocketkv.parameters.kept_of(n) for n in lengths.tolist()])
    assert prefilled.logits.shape == (3, 97)
    assert prefilled.cache_lengths.tolist() == [lengths.tolist(), kept.tolist(), kept.tolist()]
    assert {name: array.shape[1:] for name, array in prefilled.state.items()} == {
        tensor.name: tensor.shape for tensor in rocketkv.state
    }
    for row, length in enumerate(kept):
        stored = np.abs(prefilled.state["k_cache.1"][row]).sum(axis=-1)
        assert (stored[:, :length] > 0).all()
        assert (stored[:, length:] == 0).all()


def test_a_step_writes_one_slot_per_row_and_cache_and_nothing_else(executor):
    tokens, positions, lengths = filled(executor)
    addresses = {name: buffer.ctypes.data for name, buffer in executor.buffers.items()}
    before = {name: buffer.copy() for name, buffer in executor.buffers.items()}
    executor.decode(tokens, positions, lengths)
    assert {name: buffer.ctypes.data for name, buffer in executor.buffers.items()} == addresses
    for name, buffer in executor.buffers.items():
        changed = (buffer != before[name]).any(axis=-1 if "cache" in name else 2)
        if "cache" in name:
            layer = int(name.split(".")[1])
            expected = np.zeros(changed.shape, bool)
            expected[range(3), :, lengths[layer]] = True
            np.testing.assert_array_equal(changed, expected, err_msg=name)
        else:
            assert changed.any(axis=1)[:3].sum() == 3, name
            assert not changed[3:].any()


def test_outputs_are_the_memory_of_the_inputs(executor, rocketkv):
    """ONNX Runtime copies a whole cache where a graph's input and output are different memory."""
    tokens, positions, lengths = filled(executor)
    executor.decode(tokens, positions, lengths)
    names = [tensor.name for tensor in rocketkv.state]
    bound = dict(zip(["logits", *names], executor.binding.get_outputs(), strict=True))
    assert {name: bound[name].data_ptr() for name in names} == {
        name: buffer.ctypes.data for name, buffer in executor.buffers.items()
    }


def test_no_node_but_the_append_reads_a_cache_that_is_written(rocketkv):
    """A second reader would make the append copy its input first."""
    graph = read_graph(rocketkv.decode).graph
    state = {tensor.name for tensor in rocketkv.state}
    readers = {name: [node.op_type for node in graph.node if name in node.input] for name in state}
    assert all(len(found) == 1 for found in readers.values()), readers


def test_bindings_are_kept_until_the_number_of_rows_changes(executor):
    tokens, positions, lengths = filled(executor)
    executor.decode(tokens, positions, lengths)
    first = executor.binding
    executor.decode(tokens, positions + 1, lengths + 1)
    assert executor.binding is first
    executor.decode(tokens[:2], positions[:2] + 2, lengths[:, :2] + 2)
    assert executor.binding is not first
    assert executor.runs == 3


def test_the_answer_is_that_of_a_run_with_separate_memory(executor, rocketkv):
    tokens, positions, lengths = filled(executor)
    feeds = {"token": tokens, "positions": positions, "cache_lengths": lengths}
    feeds |= {name: buffer[:3].copy() for name, buffer in executor.buffers.items()}
    logits, *caches = executor.decode_session.run(None, feeds)
    np.testing.assert_array_equal(executor.decode(tokens, positions, lengths), logits)
    for tensor, copied in zip(rocketkv.state, caches, strict=True):
        np.testing.assert_array_equal(executor.buffers[tensor.name][:3], copied)


def test_insert_and_move_leave_nothing_of_the_former_row(executor):
    ids, lengths = padded(prompts())
    prefilled = executor.prefill(ids, lengths)
    for buffer in executor.buffers.values():
        buffer[:] = 7.0
    executor.insert(prefilled, 2, 0)
    executor.move(0, 3)
    for name, buffer in executor.buffers.items():
        np.testing.assert_array_equal(buffer[0], prefilled.state[name][2])
        np.testing.assert_array_equal(buffer[3], prefilled.state[name][2])
        assert (buffer[1:3] == 7.0).all()


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_every_precision_runs_in_place(make_program, precision):
    program = make_program("rocketkv", precision)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    executor.allocate(2)
    tokens, positions, lengths = filled(executor, 2)
    for step in range(3):
        logits = executor.decode(tokens, positions + step, lengths + step)
        assert np.isfinite(logits).all()
    assert executor.buffers["k_cache.0"].dtype == (np.float16 if precision == "fp16" else np.float32)
    assert (executor.buffers["k_cache.0"][0, :, lengths[0, 0] : lengths[0, 0] + 3] != 0).all()


def test_index_lists_can_be_exposed(rocketkv):
    plain, open_ = (
        OnnxRuntimeExecutor(rocketkv, RunOptions(threads=1), expose=e) for e in ((), ("indices.1", "selected.2"))
    )
    plain.allocate(3)
    open_.allocate(3)
    expected = plain.decode(*filled(plain))
    np.testing.assert_array_equal(open_.decode(*filled(open_)), expected)
    parameters = rocketkv.parameters
    indices, selected = open_.exposed("indices.1"), open_.exposed("selected.2")
    assert indices.shape == (3, 2, parameters.capacity)
    assert (indices >= 0).sum(axis=2).tolist() == [[parameters.kept_of(n)] * 2 for n in LENGTHS]
    assert selected.shape == (3, 2, parameters.selected_width)
    assert (selected[0] >= 0).sum(axis=1).tolist() == [parameters.top_k] * 2
    assert (selected[1] >= 0).sum(axis=1).tolist() == [2, 2]


def test_the_dense_twin_stores_everything(rocketkv):
    twin = twin_program(rocketkv)
    executor = OnnxRuntimeExecutor(twin, RunOptions(threads=1))
    executor.allocate(3)
    tokens, positions, lengths = filled(executor)
    assert lengths.tolist() == [list(LENGTHS)] * 3
    assert np.isfinite(executor.decode(tokens, positions, lengths)).all()


def test_the_twin_is_bit_identical_while_every_row_fits(rocketkv):
    executors = [OnnxRuntimeExecutor(program, RunOptions(threads=1)) for program in (rocketkv, twin_program(rocketkv))]
    ids, prompt_lengths = padded(prompts((20, 3)))
    steps = []
    for executor in executors:
        executor.allocate(2)
        prefilled = executor.prefill(ids, prompt_lengths)
        for row in range(2):
            executor.insert(prefilled, row, row)
        tokens = prefilled.logits.argmax(axis=1)
        logits = [prefilled.logits]
        for step in range(5):
            logits.append(executor.decode(tokens, prompt_lengths + step, prefilled.cache_lengths + step).copy())
        steps.append(logits)
    np.testing.assert_array_equal(*steps)


def test_profiling_writes_a_file_for_each_graph(rocketkv, tmp_path):
    executor = OnnxRuntimeExecutor(rocketkv, RunOptions(threads=1), profile=tmp_path)
    executor.allocate(1)
    executor.decode(*filled(executor, 1))
    files = executor.end_profiling()
    assert set(files) == {"prefill", "decode"}
    for name, file in files.items():
        assert re.fullmatch(rf"{name}.*\.json", file.name)
        assert any(event["cat"] == "Node" for event in json.loads(file.read_text()))


def test_a_broken_graph_is_refused_by_its_file_name(rocketkv, tmp_path):
    from dataclasses import replace

    broken = tmp_path / "decode.onnx"
    broken.write_bytes(b"no graph")
    executor = OnnxRuntimeExecutor(replace(rocketkv, decode=HeldFile(broken)), RunOptions(threads=1))
    executor.allocate(1)
    with pytest.raises(InputError, match=r"decode\.onnx is not an ONNX graph"):
        executor.decode(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((3, 1), np.int64))


def test_caches_beyond_memory_are_a_clear_error(executor, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("kvc_trt.backends.onnxruntime.executor.filled", refuse)
    with pytest.raises(UnsupportedEnvironment, match=r"the caches of 1000000 rows need \d+\.\d GiB"):
        executor.allocate(1_000_000)


def test_prefilled_rows_do_not_share_memory_with_the_batch(executor):
    ids, lengths = padded(prompts())
    prefilled = executor.prefill(ids, lengths)
    assert isinstance(prefilled, Prefilled)
    executor.insert(prefilled, 0, 0)
    assert not any(np.shares_memory(prefilled.state[name], buffer) for name, buffer in executor.buffers.items())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3 << 20), st.sampled_from(["float32", "int8", "float16"]), st.booleans()),
             min_size=1, max_size=6),
    st.integers(1, 2),
)  # fmt: skip
def test_large_buffers_lie_one_after_another_in_huge_pages(sizes, rows):
    tensors = [
        StateTensor(0, 0, f"t{number}", dtype, (1, count), 0.0 if zero else -1.0, "out")
        for number, (count, dtype, zero) in enumerate(sizes)
    ]
    buffers = state_buffers(tensors, rows)
    assert list(buffers) == [tensor.name for tensor in tensors]
    places = []
    for tensor in tensors:
        buffer = buffers[tensor.name]
        assert (buffer.shape, buffer.dtype) == ((rows, *tensor.shape), tensor.dtype)
        assert buffer.flags.c_contiguous
        assert np.all(buffer[:, :, ::4099] == tensor.fill)
        if tensor.fill == 0 and tensor.bytes_per_row() >= HUGE_PAGE:
            places.append((buffer.ctypes.data, buffer.nbytes))
    if places:
        assert places[0][0] % HUGE_PAGE == 0
    for (one, size), (following, _) in pairwise(places):
        assert following % 64 == 0
        assert 0 <= following - (one + size) < 64
