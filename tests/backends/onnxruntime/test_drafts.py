"""Drafts on the executor: a pass in place, and surplus tokens taken back to the bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program
from kvc_trt.errors import InputError
from kvc_trt.operators.cached_vectors import CachedVectors
from kvc_trt.runtime import Request, Session, Speculation
from tests.backends.onnxruntime.shared_sessions import SharingExecutor
from tests.rounding import assert_close
from tests.runtime.test_speculation import Always

DRAFT_TOKENS = 4
FP8 = ("rocketkv, bounds in fp8", "quest, bounds in fp8")
POLICIES = ("full", "rocketkv", "hybrid", "quest", "sparq", "snapkv-gqa", "expected-attention-hybrid", *FP8)


@pytest.fixture(scope="module")
def programs(make_program):
    """programs(name): a program with drafts."""
    return partial(make_program, draft_tokens=DRAFT_TOKENS, max_output_len=40)


class Rows:
    """Prompts on two executors: one feeds tokens step by step, the other one by passes."""

    def __init__(self, program: Program, lengths: list[int], seed: int = 0) -> None:
        self.steps, self.passes = (SharingExecutor(program, RunOptions(threads=1)) for _ in range(2))
        self.program, self.count = program, len(lengths)
        generator = np.random.default_rng(seed)
        self.positions = np.array(lengths)
        ids = np.full((len(lengths), 256), 3)
        for row, length in zip(ids, lengths, strict=True):
            row[:length] = generator.integers(2, 97, length)
        for executor in (self.steps, self.passes):
            executor.allocate(len(lengths) + 1)
            prefilled = executor.prefill(ids, self.positions)
            for row in range(len(lengths)):
                executor.insert(prefilled, row, row)
        self.lengths = prefilled.cache_lengths

    def check(self, kept: list[int], seed: int) -> None:
        """A pass whose rows keep different numbers of tokens leaves the state of a pass whose rows keep equally few.

        The rows that keep more feed the rest by steps, in both."""
        tokens = np.random.default_rng(seed).integers(2, 97, (1 + DRAFT_TOKENS, self.count))
        checked = self.passes.check_draft(tokens, self.positions, self.lengths)
        for row, count in enumerate(kept):
            if count <= DRAFT_TOKENS:
                self.passes.take_back(row, checked.undo[row], self.lengths[:, row], count)
        for step in range(min(kept)):
            logits = self.steps.decode(tokens[step], self.positions + step, self.lengths + step)
            self.compare_logits(checked.logits[step], logits)
        if len(set(kept)) == 1:
            self.positions, self.lengths = self.positions + kept[0], self.lengths + kept[0]
            self.compare()

    def compare_logits(self, ours, theirs) -> None:
        assert_close(ours, theirs)

    def compare(self) -> None:
        """Assert that entries in use are equal, and everything that follows from them."""
        for tensor in self.program.state:
            ours, theirs = (one.buffers[tensor.name][: self.count] for one in (self.passes, self.steps))
            kind = tensor.name.partition(".")[0]
            for row in range(self.count):
                stored = self.lengths[tensor.cache, row]
                used = {"k_cache": np.s_[:, :stored], "v_cache": np.s_[:, :stored], "channels": np.s_[:, :, :stored]}
                part = used.get(kind, np.s_[:])
                assert_close(ours[row][part], theirs[row][part], name=f"{tensor.name} of row {row}")


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rejection_at_each_place_leaves_what_steps_leave(programs, policy):
    rows = Rows(programs(policy), [200, 31])
    for number, kept in enumerate((1, 5, 2, 4, 3)):
        rows.check([kept] * 2, seed=number)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=3),
    kept=st.lists(st.integers(1, 1 + DRAFT_TOKENS), min_size=1, max_size=6),
    policy=st.sampled_from(["rocketkv", "quest", "sparq", *FP8]),
)
def test_drafts_equal_steps_for_random_lengths_and_acceptances(programs, lengths, kept, policy):
    rows = Rows(programs(policy), lengths)
    for number, count in enumerate(kept):
        rows.check([count] * len(lengths), seed=number)


@pytest.mark.parametrize("policy", ["rocketkv", "hybrid", "quest", *FP8])
def test_bounds_after_a_rejection_are_those_of_the_keys(programs, policy):
    program = programs(policy)
    rows = Rows(program, [200, 31, 6])
    kept = [1, 3, 5]
    rows.check(kept, seed=1)
    rule = program.parameters
    (bounds_of,) = {"bounds": rule.selection.rebuilt["bounds"]}.values()
    for tensor in (one for one in program.state if one.name.startswith("bounds")):
        layer = tensor.name.partition(".")[2]
        keys = CachedVectors((rows.passes.buffers[f"k_cache.{layer}"][: rows.count],))
        stored = rows.lengths[tensor.cache] + np.array(kept)
        found = rows.passes.buffers[tensor.name][: rows.count]
        np.testing.assert_array_equal(found, bounds_of(keys, stored, rule, found.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pass_touches_no_other_row_and_copies_no_cache(programs, policy):
    program = programs(policy)
    rows = Rows(program, [200, 31])
    buffers = rows.passes.buffers
    before = {name: (buffer.ctypes.data, buffer[2].copy()) for name, buffer in buffers.items()}
    rows.check([5, 5], seed=2)
    for name, buffer in buffers.items():
        address, untouched = before[name]
        assert buffer.ctypes.data == address
        np.testing.assert_array_equal(buffer[2], untouched)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_answers_are_those_of_steps(programs, policy, monkeypatch):
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    executor = SharingExecutor(programs(policy), RunOptions(threads=1))
    generator = np.random.default_rng(5)
    phrase = generator.integers(2, 97, 20).tolist()
    requests = [
        Request(prompt, max_new_tokens=30, ignore_eos=True)
        for prompt in (phrase * 10, phrase * 2, generator.integers(2, 97, 240).tolist())
    ]
    expected = Session(executor, None, 2).generate(requests)
    speculating = Session(executor, None, 2, speculation=Speculation())
    found = speculating.generate(requests)
    assert speculating.timings.draft_runs > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.physical_lengths for output in found] == [output.physical_lengths for output in expected]


def test_engines_without_a_draft_graph_say_how_to_build_one(make_program):
    executor = SharingExecutor(make_program("full"), RunOptions(threads=1))
    with pytest.raises(
        InputError, match="the engine has no draft graph: it was built without --draft-tokens"
    ) as raised:
        Session(executor, None, 1, speculation=Speculation())
    assert "--draft-tokens 4" in raised.value.hint
    h2o = SharingExecutor(make_program("h2o"), RunOptions(threads=1))
    with pytest.raises(InputError, match="policy h2o checks no drafts: a step drops a token"):
        Session(h2o, None, 1, speculation=Speculation())


def test_a_pass_of_another_length_is_an_error(programs):
    rows = Rows(programs("full"), [10])
    with pytest.raises(ValueError, match="expected 5 tokens per row"):
        rows.passes.check_draft(np.zeros((3, 1), np.int64), rows.positions, rows.lengths)
