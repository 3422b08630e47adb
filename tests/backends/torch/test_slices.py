"""A prefill in slices: the whole prefill's bits, and with cut attention the whole attention's lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model.decoder import TorchDecoder
from kvc_trt.backends.torch.model.prompt_attention import QUERY_BLOCKS, queries_at_once
from kvc_trt.backends.torch.slices import in_slices
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import cache_sites
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.executor import SlicingExecutor
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.session.batch import batch_of
from tests.backends.torch.small_blocks import in_blocks
from tests.every_policy import EVERY
from tests.slices import result_of

BLOCK = 16
TOGETHER = QUERY_BLOCKS * BLOCK
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, TOGETHER, TOGETHER + 1, 3 * TOGETHER - 1, 200)
"""Around the blocks of products, and those of queries."""


def cut(program) -> TorchExecutor:
    """Return an executor whose prefill has small pieces."""
    return TorchExecutor(program, device="cpu", decoding=in_blocks(BLOCK))


def prompt(length: int):
    """Return a prompt as sessions give it, padded to whole blocks."""
    batch = batch_of([np.random.default_rng(length).integers(2, 97, length).tolist()])
    return batch.input_ids, batch.prompt_lengths


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("kv_cache", ["auto", *(name for name in CACHE_FORMATS if name != "auto")])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVERY)
def test_slices_give_the_bits_of_the_whole_prefill(policy, length, kv_cache, make_program):
    executor = cut(make_program(policy, turns=True, kv_cache=kv_cache))
    whole = executor.prefill(*prompt(length))
    found, shares = result_of(executor.prefill_in_slices(*prompt(length), limit=0.0))
    assert len(shares) == sum(executor.pieces_of_layers(prompt(length)[1]))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    np.testing.assert_array_equal(found.logits, whole.logits)
    np.testing.assert_array_equal(found.cache_lengths, whole.cache_lengths)
    assert found.state.keys() == whole.state.keys()
    for name, tensor in whole.state.items():
        assert found.state[name].numpy().tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("length", [BLOCK + 1, TOGETHER, TOGETHER + 1, 200])
@pytest.mark.parametrize("policy", EVERY)
def test_small_pieces_keep_what_one_piece_keeps(policy, length, make_program):
    """Attention by blocks of queries sums in another order: values agree to rounding, and entries are the same."""
    program = make_program(policy, turns=True)
    whole = TorchExecutor(program, device="cpu").prefill(*prompt(length))
    found = cut(program).prefill(*prompt(length))
    np.testing.assert_allclose(found.logits, whole.logits, atol=1e-4)
    assert found.logits.argmax() == whole.logits.argmax()
    np.testing.assert_array_equal(found.cache_lengths, whole.cache_lengths)
    for site in cache_sites(program.model, program.parameters):
        if (positions := f"slot_positions.{site.name}") in whole.state:
            np.testing.assert_array_equal(found.state[positions], whole.state[positions])
        np.testing.assert_allclose(found.state[f"k_cache.{site.name}"], whole.state[f"k_cache.{site.name}"], atol=1e-4)


def test_rows_of_different_lengths_keep_the_same_in_small_pieces(make_program):
    program = make_program("rocketkv", turns=True)
    ids, lengths = np.random.default_rng(3).integers(2, 97, (3, 150)), np.array([150, 70, 9])
    whole, found = (one.prefill(ids, lengths) for one in (TorchExecutor(program, device="cpu"), cut(program)))
    np.testing.assert_allclose(found.logits, whole.logits, atol=1e-4)
    np.testing.assert_array_equal(found.state["slot_positions.1"], whole.state["slot_positions.1"])


def test_rows_that_step_between_slices_change_nothing(make_program):
    """A row decodes after every slice; both give what each gives alone."""
    alone, executor = (cut(make_program("rocketkv", max_output_len=40)) for _ in range(2))
    ids, lengths = prompt(100)
    steps = []
    for one in (alone, executor):
        one.allocate(2)
        prefilled = one.prefill(ids, lengths)
        one.insert(prefilled, 0, 0)
    stored = prefilled.cache_lengths

    def step(one, count):
        given = np.array([5 + count]), lengths + count, stored + count
        return one.decode(*given).copy()

    def step_between():
        if len(steps) < 30:
            steps.append(step(executor, len(steps)))

    expected = alone.prefill(*prompt(130))
    found, _ = result_of(executor.prefill_in_slices(*prompt(130), limit=0.0), step_between)
    assert len(steps) == 30
    for count, logits in enumerate(steps):
        np.testing.assert_array_equal(logits, step(alone, count))
    for name, tensor in expected.state.items():
        np.testing.assert_array_equal(found.state[name], tensor, err_msg=name)


def test_a_limit_that_is_never_reached_gives_one_slice(make_program):
    executor = cut(make_program("snapkv++"))
    assert isinstance(executor, SlicingExecutor)
    executor.prepare_slices()
    found, shares = result_of(executor.prefill_in_slices(*prompt(100), limit=1e9))
    assert shares == []
    np.testing.assert_array_equal(found.logits, executor.prefill(*prompt(100)).logits)


def test_a_prompt_that_does_not_fit_is_refused_before_its_first_slice(make_program, monkeypatch):
    executor = cut(make_program("rocketkv"))
    executor.load()
    slices = executor.prefill_in_slices(*prompt(100), limit=0.0)
    monkeypatch.setattr("kvc_trt.backends.torch.memory.free_bytes", lambda device: 1000)
    with pytest.raises(UnsupportedEnvironment, match=r"prefill of 1 x 100 tokens needs .*; this machine has 1000 B"):
        next(slices)


def test_exposed_values_are_those_of_one_slice(make_program):
    """Prefills with exposed values run in one slice, since work between slices would replace the values."""
    executor = TorchExecutor(make_program("rocketkv"), device="cpu", expose=["indices.1"])
    found, shares = result_of(executor.prefill_in_slices(*prompt(100), limit=0.0))
    assert shares == []
    assert found.logits.shape == (1, executor.limits.vocab_size)
    assert executor.exposed("indices.1").shape[0] == 1


def test_a_prefill_that_is_closed_runs_no_further(make_program, monkeypatch):
    executor = cut(make_program("rocketkv"))
    slices, ran = executor.prefill_in_slices(*prompt(100), limit=0.0), []
    monkeypatch.setattr(executor.decoder, "_compact", lambda *given: ran.append(given))
    next(slices)
    slices.close()
    assert ran == []
    with pytest.raises(StopIteration):
        next(slices)


def test_a_scheduler_answers_rows_between_the_slices_of_a_prompt(make_program):
    """A row takes a step after each slice; both answers are those of a session that reads prompts whole."""
    program = make_program("rocketkv")
    requests = [Request([7] * 20, max_new_tokens=12), Request(list(range(2, 92)), max_new_tokens=3)]
    expected = [Session(cut(program), None, 1).generate([request])[0].token_ids for request in requests]
    one = Scheduler(Session(cut(program), None, 2), prefill_slice_ms=1e-6)
    first = one.submit(requests[0])
    while one.metrics()["running"] == 0:
        one.advance()
    before, second = one.metrics(), one.submit(requests[1])
    while not first.done:
        one.advance()
    after = one.metrics()
    assert after["slices"] - before["slices"] >= 10
    assert after["steps"] - before["steps"] >= 10
    assert not second.done
    while one.advance():
        pass
    assert [ticket.result(0).token_ids for ticket in (first, second)] == expected


class Clock:
    """Stands for the clock: a piece lets its time pass."""

    def __init__(self, monkeypatch, took):
        self.now = 0.0
        self.took = took
        monkeypatch.setattr("kvc_trt.backends.torch.slices.time.perf_counter", lambda: self.now)

    def pieces(self):
        for seconds in self.took:
            self.now += seconds
            yield
        return "result"


def test_a_slice_ends_before_the_piece_that_would_go_past_its_limit(monkeypatch):
    """Two layers of three pieces: the second layer's are expected to take what the first layer's took."""
    clock = Clock(monkeypatch, [1, 4, 1, 1, 4, 1])
    found, shares = result_of(in_slices(clock.pieces(), [3, 3], limit=6.0))
    assert found == "result"
    assert shares == [2 / 6, 5 / 6]


def test_a_piece_longer_than_the_limit_is_a_slice_of_its_own_once_a_layer_has_run(monkeypatch):
    clock = Clock(monkeypatch, [1, 9, 1, 1, 9, 1])
    _, shares = result_of(in_slices(clock.pieces(), [3, 3], limit=5.0))
    assert shares == [2 / 6, 4 / 6, 5 / 6]


def test_rows_of_a_prefill_share_the_masks_of_later_queries(make_program, monkeypatch):
    """The memory that a prefill is said to need has one mask, however many rows there are."""
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def seen(*tables, **options):
        if (mask := options.get("attn_mask")) is not None:
            masks.append(len(mask))
        return attend(*tables, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    ids, lengths = np.random.default_rng(4).integers(2, 97, (3, 150)), np.array([150, 70, 9])
    cut(make_program("rocketkv")).prefill(ids, lengths)
    assert masks
    assert set(masks) == {1}


@pytest.mark.parametrize(
    ("capability", "dtype", "whole"),
    [
        ((8, 0), torch.bfloat16, False),
        ((8, 9), torch.float16, False),
        ((8, 0), torch.float32, True),
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.float16, True),
        ((12, 0), torch.bfloat16, False),
    ],
)
def test_all_queries_attend_together_where_no_kernel_takes_later_ones_as_well(capability, dtype, whole, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tables = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert (queries_at_once(tables, 8192) > 1 << 40) == whole
    assert whole or queries_at_once(tables, 8192) == 32768


def test_pieces_cover_a_prompt_once():
    """Blocks of queries divide every length."""

    class Stub(TorchDecoder):
        def __init__(self):
            self._block, self._weights = BLOCK, type("W", (), {"embedding": torch.zeros(1)})

    for length in LENGTHS:
        blocks = Stub()._query_blocks(length)
        assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(length))
