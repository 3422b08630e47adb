"""The pieces that run together: every token once, in order, within the limit where possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime.prefill.slice_plan import Rates, blocks, fitted, fitted_to_blocks, grouped

GRAIN = 128


@given(
    st.integers(1, 40),
    st.sampled_from([GRAIN, 2 * GRAIN, 3 * GRAIN]),
    st.builds(Rates, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.floats(1e-6, 1e4),
)
def test_blocks_cover_the_prompt_and_keep_the_limit(lengths, grain, rates, limit):
    tokens = lengths * GRAIN
    found = blocks(rates, tokens, grain, limit)
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == tokens
    for first, last in found[:-1]:
        assert (last - first) % grain == 0
    for first, last in found:
        assert last - first >= min(grain, tokens)
        # The remainder after the last multiple of the grain belongs to the last block.
        assert last - first < 2 * grain or rates.seconds(first, last - last % grain) <= limit


def test_blocks_are_even():
    rates = Rates(19e-6, 6e-9, 1e-3)
    cuts = blocks(rates, 4096, 256, 0.12)
    assert len(cuts) == 2
    times = [rates.seconds(*cut) for cut in cuts]
    assert max(times) < 1.2 * min(times)


@given(st.lists(st.floats(0, 2)), st.floats(0.01, 5))
def test_groups_are_neighbours_and_as_large_as_the_limit_allows(seconds, limit):
    groups = [list(group) for group in grouped(seconds, limit)]
    assert [number for group in groups for number in group] == list(range(len(seconds)))
    for group in groups:
        assert len(group) == 1 or sum(seconds[number] for number in group) <= limit
    for one, following in itertools.pairwise(groups):
        assert sum(seconds[number] for number in one) + seconds[following[0]] > limit


def test_rates_are_recovered_from_two_measurements():
    rates = Rates(3e-6, 2e-9)
    near, far = (0, 256), (2048, 2304)
    found = fitted((*near, rates.seconds(*near)), (*far, rates.seconds(*far)))
    assert found.token_seconds == pytest.approx(rates.token_seconds)
    assert found.pair_seconds == pytest.approx(rates.pair_seconds)


def test_a_disturbed_measurement_gives_no_negative_rate():
    assert fitted((0, 256, 1.0), (2048, 2304, 0.5)).pair_seconds == 0.0
    assert fitted((0, 256, 0.0), (2048, 2304, 0.5)).token_seconds == 0.0


@given(st.floats(1e-6, 1e-3), st.floats(0, 1e-7), st.floats(0, 1))
def test_rates_are_recovered_from_three_measurements(token_seconds, pair_seconds, block_seconds):
    rates = Rates(token_seconds, pair_seconds, block_seconds)
    places = (0, 256), (0, 1024), (2048, 3072)
    found = fitted_to_blocks(*((*place, rates.seconds(*place)) for place in places))
    for first, last in (*places, (0, 4096), (3840, 4096)):
        assert found.seconds(first, last) == pytest.approx(rates.seconds(first, last), rel=1e-6)


@given(*[st.floats(0, 10)] * 3)
def test_disturbed_measurements_of_blocks_give_no_negative_rate(short, near, far):
    found = fitted_to_blocks((0, 256, short), (0, 1024, near), (2048, 3072, far))
    assert min(found.token_seconds, found.pair_seconds, found.block_seconds) >= 0
