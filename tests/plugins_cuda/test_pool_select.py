"""kernels/pool_select.cuh on given votes: pooling as torch's max_pool1d, then the best, the window, and -1.

By one block, and by clusters (kernels/cluster_select_prompt.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvc_trt.reference.selection import best_ascending
from tests.plugins_cuda.toys import SCHEDULES, aligned, toys


@dataclass(frozen=True)
class Way:
    """Threads of the blocks of clusters that select, and the most keys of each; 0 threads: as the launcher chooses."""

    threads: int
    keys: int

    def __str__(self) -> str:
        return f"clusters of {self.threads} threads with {self.keys} keys" if self.threads else "one block"


ONE_BLOCK = Way(0, 0)
CLUSTERS = (Way(256, 16), Way(256, 32), Way(512, 32))
_chosen = [ONE_BLOCK]


@pytest.fixture(params=[ONE_BLOCK, CLUSTERS[0]], ids=str, autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """The way in which `run` selects."""
    toys().set_schedule("forward")
    toys().set_device("sm_90a")
    _chosen[0] = request.param
    yield request.param
    toys().set_device("sm_80")


def run(
    votes: Tensor, *, window: int, pool: int, n: int, budget: int, capacity: int
) -> tuple[NDArray[np.int32], int, NDArray[np.uint32]]:
    """votes [heads, length] of one row of n tokens -> indices [heads, capacity], tokens stored, order keys."""
    (heads, length), way = votes.shape, _chosen[0]
    given_votes = aligned((heads, length), np.float32)
    given_votes[...] = votes.numpy()
    stride = (length + 3) // 4 * 4
    keys, stored = aligned((heads, stride), np.uint32, 7), aligned((1,), np.int64, -7)
    indices = aligned((heads, capacity + 1), np.int32, -7)  # one more than may be written
    numbers = (heads, window, pool, *map(ctypes.c_int64, (length, n, budget, capacity, stride)))
    places = (way.threads, way.keys, given_votes)
    message = toys().run("pool_select", *places, *numbers, keys, stored, indices)
    assert not message, message
    flat = indices.reshape(-1)
    assert (flat[heads * capacity :] == -7).all(), "written past the end of indices"
    return flat[: heads * capacity].reshape(heads, capacity), int(stored[0]), keys


def expected(votes: Tensor, *, window: int, pool: int, n: int, budget: int, capacity: int) -> Tensor:
    result = torch.full((len(votes), capacity), -1, dtype=torch.int64)
    kept = min(n, budget)
    result[:, :kept] = torch.arange(kept)
    if n > budget:
        pooled = max_pool1d(votes[:, None, : n - window], pool, stride=1, padding=pool // 2)[:, 0]
        result[:, : budget - window] = best_ascending(pooled, budget - window)
        result[:, budget - window : budget] = torch.arange(n - window, n)
    return result


def check(votes: Tensor, **numbers: int) -> None:
    indices, stored, _ = run(votes, **numbers)
    np.testing.assert_array_equal(indices, expected(votes, **numbers).numpy())
    assert stored == min(numbers["n"], numbers["budget"])


def random_votes(heads: int, length: int, seed: int, distinct: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    if distinct:
        return torch.randint(0, distinct, (heads, length), generator=make).float() / 8
    return torch.rand((heads, length), generator=make) ** 8


@pytest.mark.parametrize("pool", [1, 3, 5, 63, 511, 1023, 1025, 4095])
@pytest.mark.parametrize("n", [700, 2100, 9000])
def test_pools_narrower_and_wider_than_a_tile_follow_the_rule(pool: int, n: int) -> None:
    check(random_votes(2, n + 3, pool + n), window=8, pool=pool, n=n, budget=n // 7, capacity=n // 7 + 2)


@pytest.mark.parametrize("pool", [2047, 2049, 31])
def test_a_peak_at_every_edge_of_a_tile_keeps_its_plateau(pool: int) -> None:
    """One peak at a time, at the positions where tiles begin and end: the plateau around it is kept, and no more."""
    window, n = 4, 9000
    tile = 2048 if pool < 1024 else 8192
    edges = (0, pool // 2, tile - pool, tile - pool + 1, tile - pool + 2, tile, tile + pool // 2)
    for peak in (*(edge for edge in edges if edge < n - window), 1, n - window - 1):
        votes = torch.zeros(1, n)
        votes[0, peak] = 1
        plateau = min(peak + pool // 2, n - window - 1) - max(peak - pool // 2, 0) + 1
        indices, _, _ = run(votes, window=window, pool=pool, n=n, budget=plateau + window, capacity=plateau + window)
        first = max(peak - pool // 2, 0)
        np.testing.assert_array_equal(indices[0, :plateau], np.arange(first, first + plateau), f"peak at {peak}")


def test_keys_are_the_pooled_votes() -> None:
    votes = random_votes(2, 300, 4)
    _, _, keys = run(votes, window=8, pool=9, n=290, budget=20, capacity=20)
    pooled = max_pool1d(votes[:, None, :282], 9, stride=1, padding=4)[:, 0].numpy()
    np.testing.assert_array_equal(keys[:, :282], pooled.view(np.uint32) | 0x80000000)
    assert (keys[:, 282:] == 7).all(), "keys written for the window or past the prompt"


def test_nan_spreads_to_its_neighbourhood_and_ranks_last() -> None:
    votes = random_votes(3, 400, 5)
    votes[0, 100], votes[1, ::50], votes[2] = torch.nan, torch.nan, torch.nan
    for budget in (30, 200, 399):
        check(votes, window=6, pool=21, n=400, budget=budget, capacity=budget)


def test_infinite_and_zero_votes_follow_the_rule() -> None:
    votes = random_votes(2, 200, 6)
    votes[0, 50:120], votes[1] = torch.inf, 0.0
    votes[1, 10::20] = -0.0
    check(votes, window=5, pool=7, n=200, budget=60, capacity=64)


@pytest.mark.parametrize("n", [0, 1, 7, 20])
def test_short_prompts_keep_everything(n: int) -> None:
    check(random_votes(2, 30, 7), window=8, pool=5, n=n, budget=20, capacity=25)


def test_a_budget_of_the_window_keeps_the_window() -> None:
    check(random_votes(2, 100, 8), window=8, pool=5, n=100, budget=8, capacity=8)
    check(random_votes(2, 100, 8), window=8, pool=5, n=9, budget=8, capacity=8)


def test_lengths_beyond_the_prompt_are_clamped() -> None:
    votes = random_votes(1, 50, 9)
    found, stored, _ = run(votes, window=4, pool=3, n=99, budget=20, capacity=20)
    np.testing.assert_array_equal(found, expected(votes, window=4, pool=3, n=50, budget=20, capacity=20).numpy())
    assert stored == 20
    assert run(votes, window=4, pool=3, n=-1, budget=20, capacity=20)[1] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), pool=st.integers(0, 300), n=st.integers(2, 900), distinct=st.sampled_from([0, 2, 6]))
def test_random_votes_are_selected_by_the_rule(data: st.DataObject, pool: int, n: int, distinct: int) -> None:
    window = data.draw(st.integers(1, n - 1))
    budget = data.draw(st.integers(window, n - 1))
    votes = random_votes(2, n + data.draw(st.integers(0, 9)), data.draw(st.integers(0, 2**31)), distinct)
    check(votes, window=window, pool=2 * pool + 1, n=n, budget=budget, capacity=budget + data.draw(st.integers(0, 5)))


@pytest.mark.parametrize("way", CLUSTERS, ids=str, indirect=True)
@pytest.mark.parametrize("n", [65, 1500, 4096 + 32, 4100 + 32, 8190, 12345])
@pytest.mark.parametrize("distinct", [0, 2, 300])
def test_any_cluster_follows_the_rule(n: int, distinct: int) -> None:
    """Votes of one value, of a few, and of as many as there are tokens, whose threshold takes one digit to three."""
    for budget in (n // 11 + 33, n // 2, n - 1):
        check(random_votes(2, n + 1, n + budget, distinct), window=32, pool=5, n=n, budget=budget, capacity=budget + 3)


@pytest.mark.parametrize("way", CLUSTERS, ids=str, indirect=True)
def test_close_votes_are_told_apart_by_the_last_bits() -> None:
    """All digits but the last are equal, or all but the second."""
    n = 3000
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3)).int()
    for bits in (order, order << 10):
        votes = (bits + torch.tensor(1.0).view(torch.int32)).view(torch.float32)[None]
        check(votes, window=1, pool=1, n=n, budget=n // 3, capacity=n)


def test_schedules_give_the_same_bits() -> None:
    votes = random_votes(2, 5000, 10, distinct=40)
    results = []
    for schedule in SCHEDULES:
        toys().set_schedule(schedule, seed=12)
        indices, _, keys = run(votes, window=32, pool=63, n=5000, budget=700, capacity=800)
        results.append((indices.tobytes(), keys.tobytes()))
    assert results[0] == results[1] == results[2]
