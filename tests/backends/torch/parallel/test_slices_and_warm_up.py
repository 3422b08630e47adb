"""Prefills in slices and warming up, which all ranks do together."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.messages import RankCall
from kvc_trt.backends.torch.parallel.rank import Rank
from kvc_trt.progress import NullProgress
from kvc_trt.runtime.executor import SlicingExecutor, WarmingExecutor
from kvc_trt.runtime.session.batch import batch_of
from tests.backends.torch.parallel.sliding_models import GEMMA_3
from tests.slices import result_of
from tests.small_model import SMALL


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL, GEMMA_3], ids=["Llama", "Gemma 3"])
def test_slices_of_ranks_give_the_bits_of_their_whole_prefill(model, make_program, on_shared_ranks):
    """Also with a step between two slices, and after a prefill that was given up."""
    executor = on_shared_ranks(make_program("rocketkv, a skipped layer", model=model), 2)
    assert isinstance(executor, SlicingExecutor)
    executor.allocate(2)
    batch = batch_of([np.random.default_rng(0).integers(2, 97, 90).tolist()])
    ids, lengths = batch.input_ids, batch.prompt_lengths
    whole = executor.prefill(ids, lengths)
    executor.insert(whole, 0, 0)
    given_up = executor.prefill_in_slices(ids, lengths, 0.0)
    next(given_up)
    executor.decode(np.array([3]), lengths, whole.cache_lengths)
    given_up.close()
    found, shares = result_of(executor.prefill_in_slices(ids, lengths, 0.0))
    assert len(shares) >= 2 * 4
    np.testing.assert_array_equal(found.logits, whole.logits)
    np.testing.assert_array_equal(found.cache_lengths, whole.cache_lengths)
    rows = []
    for prefilled in (whole, found):
        executor.insert(prefilled, 0, 1)
        rows.append(executor.read_row(1))
    for name, part in rows[0].items():
        np.testing.assert_array_equal(rows[1][name], part, err_msg=name)


class Recorder:
    """Stands for the ranks of an executor, or for the executor of a rank."""

    def __init__(self):
        self.calls = []

    def number(self, owner):
        return 0

    def call(self, executor, method, *arguments):
        self.calls.append((method, arguments))

    def warm_up(self, progress, *, drafts):
        self.calls.append(drafts)


def test_warming_up_is_asked_of_every_rank(make_program):
    group = Recorder()
    executor = ParallelExecutor(make_program("rocketkv"), group)
    assert isinstance(executor, WarmingExecutor)
    executor.warm_up(NullProgress(), drafts=True)
    assert group.calls[-1] == ("warm_up", (True,))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_rank_warms_its_own_executor_up(drafts):
    rank, executor = Rank.__new__(Rank), Recorder()
    rank._executors, rank._prefilled, rank._reading = {4: executor}, {}, {}
    rank._run(RankCall(4, "warm_up", (drafts,), result=True))
    assert executor.calls == [drafts]
