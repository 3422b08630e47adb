"""Drafts over caches that have a format: what a rejection leaves is what plain steps leave, read from equal codes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvc_trt.backends.run_options import RunOptions
from kvc_trt.graph.state import cache_sites
from kvc_trt.operators.cached_vectors import cached_vectors
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.runtime import Request, Session, Speculation
from tests.backends.onnxruntime.shared_sessions import SharingExecutor
from tests.backends.onnxruntime.test_drafts import DRAFT_TOKENS, Rows
from tests.every_format import DIFFERENT, in_formats
from tests.every_policy import CHECKING_DRAFTS
from tests.rounding import assert_close
from tests.runtime.test_speculation import Always

ONE_CODE = 0.15
"""Share of a vector's largest number: more than one step of any format."""
FLIPPED = 0.01
"""The share of codes that may differ: passes and steps round keys and values differently, and a few are beside an
edge of two codes."""


@pytest.fixture(scope="module")
def programs(make_program):
    """programs(name, ...): a program with drafts."""
    return partial(make_program, draft_tokens=DRAFT_TOKENS, max_output_len=40)


class StoredRows(Rows):
    """Rows whose caches have a format."""

    def compare_logits(self, ours, theirs):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())

    def compare(self):
        """Entries in use hold the codes of steps, and what follows from entries follows from these."""
        for site in cache_sites(self.program.model, self.program.parameters):
            for row, stored in enumerate(self.lengths[site.cache]):
                ours, theirs = (self._held(one, site, row) for one in (self.passes, self.steps))
                for tensor in (K_CACHE, V_CACHE):
                    first = [self._first(state, tensor, site, stored) for state in (ours, theirs)]
                    values, expected = (vectors.values() for vectors in first)
                    largest = np.abs(expected).max(axis=-1, keepdims=True)
                    assert (np.abs(values - expected) <= ONE_CODE * largest).all()
                    codes = [vectors.codes() for vectors in first]
                    assert np.mean(codes[0] != codes[1]) <= FLIPPED
                self._compare_rest(ours, site, stored)

    def _held(self, executor, site, row):
        end = f".{site.name}"
        return {name.removesuffix(end): one[row] for name, one in executor.buffers.items() if name.endswith(end)}

    def _first(self, state, tensor, site, stored):
        return cached_vectors(state, tensor, site.parameters.cache_format).map(lambda part: part[:, :stored])

    def _compare_rest(self, state, site, stored):
        rule = site.parameters
        keys = cached_vectors(state, K_CACHE, rule.cache_format).map(lambda part: part[None])
        for name, rebuild in rule.selection.rebuilt.items():
            expected, found = rebuild(keys, np.array([stored]), rule, state[name].dtype)[0], state[name]
            used = np.s_[..., :stored] if name == "channels" else np.s_[...]
            np.testing.assert_array_equal(found[used], expected[used], err_msg=f"{name}.{site.name}")
        if "value_sum" in state:
            values = self._first(state, V_CACHE, site, stored).values()
            assert_close(state["value_sum"], values.sum(axis=1, dtype=np.float64), 2e-6)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(CHECKING_DRAFTS, 0, DIFFERENT))
def test_rejections_leave_what_steps_leave(programs, policy, form):
    rows = StoredRows(programs(policy, kv_cache=form), [200, 31])
    for number, kept in enumerate((1, 5, 2, 4, 3)):
        rows.check([kept] * 2, seed=number)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(CHECKING_DRAFTS, 1, DIFFERENT))
def test_greedy_answers_are_those_of_steps(programs, policy, form, monkeypatch):
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    executor = SharingExecutor(programs(policy, kv_cache=form), RunOptions(threads=1))
    generator = np.random.default_rng(5)
    phrase = generator.integers(2, 97, 20).tolist()
    requests = [
        Request(prompt, max_new_tokens=20, ignore_eos=True)
        for prompt in (phrase * 10, phrase * 2, generator.integers(2, 97, 240).tolist())
    ]
    expected = Session(executor, None, 2).generate(requests)
    speculating = Session(executor, None, 2, speculation=Speculation())
    found = speculating.generate(requests)
    assert speculating.timings.draft_runs > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.physical_lengths for output in found] == [output.physical_lengths for output in expected]
