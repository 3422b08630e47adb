"""Rankings of softmax weights that underflow: right lists pass whether an executor keeps subnormal numbers or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kvc_trt.backends.harness import EngineOperator
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.methods.base.isolated_runs import ExactList
from kvc_trt.methods.base.registry import operators
from kvc_trt.methods.expected_attention import ExpectedEntries, expected_scores
from kvc_trt.methods.heavy_hitters import HeavyHitters
from kvc_trt.methods.rankings.attended_entries import AttendedEntries
from kvc_trt.verify.rankings.index_lists import compare_exactly
from kvc_trt.verify.rungs.operators import run_case
from tests.near_ties import compare_compaction, compare_selection
from tests.plugins_cuda.conftest import one_thread
from tests.verify.underflowing import POLICIES, flush, nothing_received, place_of_lowest_normal, underflowing

__all__ = ["one_thread"]

pytestmark = pytest.mark.usefixtures("no_scores")
SMALLEST_NORMAL = np.float32(2.0**-126)
SIZE = 16


@pytest.fixture
def no_scores(monkeypatch):
    """H2O's cached entries have received nothing, so that a step ranks by its own weights."""
    monkeypatch.setattr(HeavyHitters, "state_of", nothing_received)


def cases(policy, make_engine, parameters_for, edit=None):
    parameters = parameters_for(policy.partition(",")[0], **POLICIES[policy])
    engine = make_engine(parameters, edit=edit, turns=parameters.no_turn is None)
    return underflowing(harness_for(engine, RunOptions("onnxruntime", 1)).operators(), engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_bodies_choose_by_the_rule_where_weights_underflow(policy, make_engine, parameters_for):
    for operator, case, rule in cases(policy, make_engine, parameters_for):
        outcome = run_case(operator, case, rule)
        assert outcome.indices.compared
        assert not outcome.indices.wrong, f"{operator.name}: {outcome.indices.wrong}"


@pytest.mark.parametrize("policy", POLICIES)
def test_bodies_that_flush_choose_by_the_rule(policy, make_engine, parameters_for):
    """Such bodies choose otherwise than the reference. Values and the weights of kept tokens are compared too."""
    differ = 0
    for operator, case, rule in cases(policy, make_engine, parameters_for, flush):
        outcome = run_case(operator, case, rule)
        assert not outcome.indices.wrong, f"{operator.name}: {outcome.indices.wrong}"
        assert outcome.copy_error == 0
        assert outcome.value_error < 1e-5
        differ += outcome.indices.near_ties
        if policy in ("rocketkv", "tova", "h2o", "expected-attention"):
            assert outcome.indices.near_ties, f"{operator.name} chose as the reference did"
    assert differ


@pytest.mark.parametrize("policy", POLICIES)
def test_bodies_that_do_not_flush_are_right_beside_a_reference_that_does(policy, make_engine, parameters_for):
    """PyTorch's own switch for the reference; the operator runs without it."""
    for operator, case, rule in cases(policy, make_engine, parameters_for):
        outcome = with_flushed_reference(operator, case, rule)
        assert not outcome.indices.wrong, f"{operator.name}: {outcome.indices.wrong}"


def with_flushed_reference(operator, case, rule):
    if not torch.set_flush_denormal(True):
        pytest.skip("PyTorch cannot flush subnormal numbers here")
    try:
        return run_case(Unflushed(operator), case, rule)
    finally:
        torch.set_flush_denormal(False)


@dataclass
class Unflushed:
    """An operator that runs with subnormal numbers, whatever the thread's setting."""

    operator: EngineOperator

    def __post_init__(self):
        self.name = self.operator.name

    def run(self, **inputs):
        torch.set_flush_denormal(False)
        try:
            return self.operator.run(**inputs)
        finally:
            torch.set_flush_denormal(True)


@dataclass
class Exchanging:
    """An operator that leaves a token whose weight is normal, and takes one whose weight is not."""

    operator: EngineOperator
    leaves: int
    page_size: int
    done: bool = False
    """True once the token was there, and another one was not."""

    def __post_init__(self):
        self.name = self.operator.name

    def run(self, **inputs):
        results = [np.array(table) for table in self.operator.run(**inputs)]
        found = {one.name: table for one, table in zip(operators()[self.name].outputs, results, strict=True)}
        for head in range(2):
            if "ranks" in found:
                self._exchange_ranks(found["kept"][0, head], found["ranks"][0, head])
            elif "slot_positions_out" in found:
                self._exchange_slots(found["slot_positions_out"][0, head])
            else:
                self._exchange((found["selected"] if "selected" in found else found["indices"])[0, head])
        return results

    def _exchange(self, listed):
        """Take the first page that is not listed in place of the token's; outside of steps, pages are tokens."""
        size = self.page_size
        first, kept = self.leaves // size * size, listed[listed >= 0]
        free = [page for page in range(0, kept[-1], size) if not np.isin(np.arange(page, page + size), kept).any()]
        if self.leaves not in kept or not free:
            return
        rest = np.setdiff1d(kept, np.arange(first, first + size))
        listed[: kept.size], self.done = np.sort([*rest, *range(free[0], free[0] + size)]), True

    def _exchange_slots(self, positions):
        """Drop the token in place of the one that was dropped."""
        (dropped,) = np.setdiff1d(np.arange(positions.size), positions)
        positions[positions < 0], positions[positions == self.leaves], self.done = dropped, -1, True

    def _exchange_ranks(self, kept, ranks):
        here, last = np.flatnonzero(kept == self.leaves)[0], ranks.argmax()
        ranks[here], ranks[last], self.done = ranks[last], ranks[here], True


STAGE_1 = {"KvcCompact", "KvcCompactTurn"}
EXCHANGED = {
    "rocketkv": {*STAGE_1, "KvcHybridAttention"}, "pyramidkv": {"KvcCompact"}, "snapkv": STAGE_1,
    "rocketkv, budgets by prompt": {"KvcCompactRanked", "KvcHybridAttention"},
    "tova": {"KvcCompactTova", "KvcTovaAttention"},
    "h2o": {"KvcCompactHeavyHitters", "KvcHeavyHitterAttention", "KvcCompactHeavyHittersOfTurn"},
    "expected-attention": {"KvcCompactExpectedAttention"},
    "snapkv-gqa, averages": {"KvcCompactAverage", "KvcCompactAverageTurn"},
}  # fmt: skip


@pytest.mark.parametrize("edit", [None, flush], ids=["kept", "flushed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_out_a_token_of_normal_weight_is_wrong(policy, edit, make_engine, parameters_for):
    """The token's weight is 1e-31: the least of all normal ones, and a million times what underflow may lose."""
    exchanged = set()
    for operator, case, rule in cases(policy, make_engine, parameters_for, edit):
        wrong = Exchanging(operator, *place_of_lowest_normal(case, rule))
        outcome = run_case(wrong, case, rule)
        if wrong.done:
            exchanged.add(operator.name)
            assert outcome.indices.wrong, operator.name
            assert "scores differ by" in outcome.indices.wrong[0]
    assert exchanged == EXCHANGED[policy]


def entries(logits: list[float], heads: int = 2, weak: float = 1.0) -> AttendedEntries:
    """One KV head per query head; in the last one, `weak` times the logits. Equal logits are equal keys."""
    keys = np.zeros((heads, len(logits), SIZE), np.float32)
    keys[:, :, 0] = np.array(logits) / np.sqrt(SIZE)
    keys[-1, :, 0] *= weak
    queries = np.zeros((heads, 1, SIZE), np.float32)
    queries[:, :, 0] = SIZE
    return AttendedEntries(queries, keys, recent=1, of_layer=True)


def expected_entries(logits: list[float]) -> ExpectedEntries:
    attended = entries([0.0, *logits], 1)
    covariance = np.zeros((1, SIZE, SIZE), np.float32)
    return ExpectedEntries(attended.queries[:, 0], covariance, attended.keys, np.ones_like(attended.keys), 1)


def judged(ranked, expected: list[int], found: list[int]):
    right, given = (np.array([one] * len(ranked.keys), np.int32) for one in (expected, found))
    return compare_exactly(ExactList(0, given, (right,), ranked))


@pytest.mark.parametrize("make", [entries, expected_entries])
def test_lists_of_weights_that_underflow_are_judged_in_float64(make):
    """One ranking keeps the last entry beside those listed, the other a first one before them."""

    def compare(logits, *lists):
        if make is entries:
            return judged(make(logits), *([*one, len(logits) - 1] for one in lists))
        return judged(make(logits), *([0, *(1 + j for j in one)] for one in lists))

    lost = [0.0, -95.0, -99.0, -90.0, -60.0, -91.0]
    assert compare(lost, [0, 3, 4], [0, 1, 4]).near_ties
    assert not compare(lost, [0, 3, 4], [0, 1, 4]).wrong
    assert "underflow explains" in compare(lost, [0, 3, 4], [0, 1, 3]).wrong[0], "-60 is normal"
    tied = [0.0, -20.0, -95.0, -20.0, -95.0, -91.0]
    assert compare(tied, [0, 1], [0, 3]).wrong
    assert "the lower index wins" in compare(tied, [0, 1, 2, 3], [0, 1, 3, 4]).wrong[0], "copies tie anywhere"
    nearly = [0.0, -20.0, -95.0, -20.00001, -95.0, -91.0]
    assert "loses nothing" in compare(nearly, [0, 3], [0, 1]).wrong[0]
    assert compare(nearly, [0, 1], [0, 3]).wrong


def test_a_weight_that_one_head_loses_does_not_excuse_a_wrong_order_of_normal_scores():
    """In the second KV head all but the first weigh less than 2^-126; in the first one, 1 and 3 weigh 5e-9 and 2e-9."""
    ranked = entries([0.0, -19.0, -50.0, -20.0, -40.0], weak=5.0)
    assert judged(ranked, [0, 1, 4], [0, 3, 4]).wrong
    tied = entries([0.0, -20.0, -50.0, -20.0, -40.0], weak=5.0)
    assert judged(tied, [0, 1, 4], [0, 3, 4]).wrong


def test_a_weight_that_vanishes_in_the_score_does_not_excuse_it_either():
    """Both scores are 1e-30 and differ by less than the 1e-38 of the second KV head, which no float32 shows."""
    ranked = entries([0.0, -69.0, -80.0, -69.0, -75.0], weak=87.5 / 69)
    ranked.queries[:, :, 1], ranked.keys[0, 3, 1] = 1, -2e-8
    assert judged(ranked, [0, 1, 4], [0, 3, 4]).wrong


def test_kv_heads_that_share_a_list_keep_the_same_tokens():
    ranked = entries([0.0, -95.0, -99.0, -90.0, -91.0])
    found = np.array([[0, 1, 4], [0, 3, 4]], np.int32)
    right = np.array([[0, 3, 4]] * 2, np.int32)
    assert "KV heads keep different tokens" in compare_exactly(ExactList(0, found, (right,), ranked)).wrong[0]
    apart = replace(ranked, of_layer=False)
    assert compare_exactly(ExactList(0, found, (right,), apart)).near_ties == 1


def test_nan_scores_explain_no_difference():
    ranked = entries([0.0, -95.0, -99.0, -90.0, -91.0])
    ranked.keys[:, 2] = np.nan
    assert judged(ranked, [0, 3, 4], [0, 1, 4]).wrong


def test_tokens_that_always_stay_must_be_listed():
    ranked = entries([0.0, -95.0, -99.0, -90.0, -91.0])
    assert "entry 4 always stays" in judged(ranked, [0, 3, 4], [0, 1, 3]).wrong[0]
    assert "kept position 5 of 5" in judged(ranked, [0, 3, 4], [0, 3, 5]).wrong[0]


def plateau(logits: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return a window of one query and keys with these logits, the last of them the window's own."""
    ranked = entries(logits, 1)
    return ranked.queries[None], ranked.keys[None]


def compare_pooled(logits: list[float], expected: list[int], found: list[int]):
    lists = (np.array([[one]], np.int32) for one in (expected, found))
    return compare_compaction(*plateau(logits), np.array([len(logits)]), *lists, pool_kernel=3)


def test_tokens_that_share_a_maximum_tie_where_it_is_normal():
    """3 spreads to 2 and 4. Of two that underflow, either may be found the larger."""
    normal = [0.0, -95.0, -99.0, -60.0, -99.0, -95.0, -99.0, -1.0]
    assert "the lower index wins" in compare_pooled(normal, [0, 1, 2, 7], [0, 1, 4, 7]).wrong[0]
    lost = [0.0, -99.0, -97.0, -90.0, -97.0, -95.0, -92.0, -1.0]
    assert compare_pooled(lost, [0, 1, 2, 7], [0, 1, 5, 7]).near_ties == 1
    assert not compare_pooled(lost, [0, 1, 2, 7], [0, 1, 5, 7]).wrong


def test_a_lost_maximum_leaves_its_place_to_another():
    """2 and 4 share the maximum at 3, whose two weights are 0.9 x 2^-126. The one at 5 is 1.1 x 2^-126, so it stays."""
    smallest = np.log(2.0**-126)
    logits = np.full((2, 8), -99.0)
    logits[:, 0], logits[:, 3], logits[0, 5] = 0, smallest + np.log(0.9), smallest + np.log(1.1)
    keys, queries = np.zeros((1, 1, 8, SIZE), np.float32), np.zeros((1, 2, 1, SIZE), np.float32)
    keys[0, 0, :, :2], queries[0, [0, 1], 0, [0, 1]] = logits.T / np.sqrt(SIZE), SIZE
    lists = (np.array([[one]], np.int32) for one in ([0, 1, 2, 7], [0, 1, 4, 7]))
    found = compare_compaction(queries, keys, np.array([8]), *lists, pool_kernel=3)
    assert (found.near_ties, found.wrong) == (1, ())


def test_tokens_whose_scores_are_above_what_underflow_loses_are_not_exchanged():
    logits = [0.0, -99.0, -99.0, -99.0, -80.0, -99.0, -99.0, -84.0, -99.0, -1.0]
    assert "differ by" in compare_pooled(logits, [0, 1, 3, 9], [0, 1, 6, 9]).wrong[0]


def test_copied_pages_tie_also_where_they_underflow():
    query, keys = np.zeros((1, 1, SIZE), np.float32), np.zeros((1, 1, 4, SIZE), np.float32)
    query[..., 0], keys[0, 0, :, 0] = SIZE, np.array([0, -95, -95, -91]) / np.sqrt(SIZE)

    def compare(expected, found):
        lists = (np.array([[one]], np.int32) for one in (expected, found))
        return compare_selection(query, keys, np.array([4]), *lists, page_size=1, top_r=SIZE)

    assert "exact copies" in compare([0, 1, 3], [0, 2, 3]).wrong[0]
    assert compare([0, 3], [0, 1]).near_ties == 1
    assert "differ by" in compare([0, 3], [1, 3]).wrong[0]


@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("scaled_first", [False, True])
def test_expected_attention_that_flushes_stays_in_its_range(length, scaled_first):
    """The weights are multiplied by the values' lengths before they are divided by the heads, or after."""
    rng = np.random.default_rng(0)
    logits = np.append(0.0, rng.uniform(-104, -60, 200))
    keys, mean = np.zeros((201, SIZE)), np.zeros((4, SIZE))
    keys[:, 0], mean[:, 0] = logits / np.sqrt(SIZE), SIZE * np.array([1.0, 1.01, 0.99, 0.9])
    values = np.full((201, SIZE), length / np.sqrt(SIZE))
    weights = np.exp(mean[:, :1] * keys[:, 0] / np.sqrt(SIZE))
    weights = flushed(weights / weights.sum(-1, keepdims=True))
    found = np.zeros(201, np.float32)
    for head in weights:
        first = flushed(flushed(head * np.float32(length)) / 4) if scaled_first else flushed(head / 4)
        found = flushed(found + first)
    found = found if scaled_first else flushed(found * np.float32(length))
    scores = expected_scores(mean, np.zeros((4, SIZE, SIZE)), keys, values, 1.0)
    assert (found < scores.value * 0.9).sum() > 20
    assert (found >= scores.low).all()
    assert (scores.low[logits > -65] > 0).all() or length < 1


def flushed(numbers) -> np.ndarray:
    single = np.asarray(numbers, np.float32)
    return np.where(np.abs(single) < SMALLEST_NORMAL, np.float32(0), single)
