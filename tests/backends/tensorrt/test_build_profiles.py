"""Profiles: every size that an engine promises is in one, and none needs more memory than one longest prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.tensorrt.building.profiles import (
    TOKENS_PER_PREFILL,
    TOKENS_PER_TURN,
    Profile,
    SizeRange,
    choose_profile,
    decode_profiles,
    extend_profiles,
    input_shapes,
    longest_turn,
    prefill_profiles,
)
from kvc_trt.errors import InputError
from kvc_trt.operators import PROMPT_BLOCK
from tests.backends.tensorrt.weightless import preset_graphs, weightless_extend
from tests.graph.small_models import LLAMA, resolve


def test_profiles_of_a_usual_engine_are_the_golden_ones():
    assert prefill_profiles(32768, 8) == (
        Profile(SizeRange(1, 1, 8), SizeRange(128, 2048, 2048)),
        Profile(SizeRange(1, 1, 4), SizeRange(2176, 8192, 8192)),
        Profile(SizeRange(1, 1, 1), SizeRange(8320, 32768, 32768)),
    )
    assert decode_profiles(8) == (Profile(SizeRange(1, 8, 8)),)
    assert decode_profiles(100) == (
        Profile(SizeRange(1, 8, 8)), Profile(SizeRange(9, 64, 64)), Profile(SizeRange(65, 100, 100))
    )  # fmt: skip
    assert decode_profiles(1) == (Profile(SizeRange(1, 1, 1)),)


@given(length=st.integers(1, 300_000), batch=st.integers(1, 600), data=st.data())
def test_every_prompt_and_every_batch_finds_its_profile(length, batch, data):
    prefill, decode = prefill_profiles(length, batch), decode_profiles(batch)
    tokens = data.draw(st.integers(1, length))
    padded = -(-tokens // PROMPT_BLOCK) * PROMPT_BLOCK
    assert prefill[choose_profile(prefill, 1, padded)].allows(1, padded)
    rows = data.draw(st.integers(1, batch))
    assert decode[choose_profile(decode, rows)].allows(rows)
    assert sum(profile.allows(rows) for profile in decode) == 1


def test_a_turn_is_that_of_one_row():
    assert extend_profiles(32768) == (
        Profile(SizeRange(1, 1, 1), SizeRange(1, 2048, 2048)),
        Profile(SizeRange(1, 1, 1), SizeRange(2049, 8192, 8192)),
        Profile(SizeRange(1, 1, 1), SizeRange(8193, TOKENS_PER_TURN, TOKENS_PER_TURN)),
    )


@given(length=st.integers(1, 300_000), data=st.data())
def test_every_turn_finds_its_profile(length, data):
    profiles, tokens = extend_profiles(length), data.draw(st.integers(1, min(length, TOKENS_PER_TURN)))
    assert longest_turn(profiles) == min(length, TOKENS_PER_TURN)
    assert sum(profile.allows(1, tokens) for profile in profiles) == 1
    assert profiles[choose_profile(profiles, 1, tokens)].allows(1, tokens)


@given(length=st.integers(1, 300_000), batch=st.integers(1, 600))
def test_memory_does_not_grow_with_the_batch(length, batch):
    longest = -(-length // PROMPT_BLOCK) * PROMPT_BLOCK
    most = max(longest, TOKENS_PER_PREFILL)
    assert all(profile.largest_tokens <= most for profile in prefill_profiles(length, batch))


def test_sizes_beyond_the_profiles_are_refused_with_the_limit():
    with pytest.raises(InputError, match="9 rows: expected at most 8 rows") as caught:
        choose_profile(decode_profiles(8), 9)
    assert "--max-batch-size" in caught.value.hint
    with pytest.raises(InputError, match="1 prompts of 384 padded tokens: expected at most 256 padded tokens"):
        choose_profile(prefill_profiles(250, 1), 1, 384)


def test_shapes_are_those_of_the_graphs_inputs():
    prefill, decode = preset_graphs("llama3.1-8b", "rocketkv", "bf16")
    shapes = input_shapes(prefill, Profile(SizeRange(1, 2, 4), SizeRange(128, 256, 512)))
    assert shapes == {"input_ids": ((1, 128), (2, 256), (4, 512)), "prompt_lengths": ((1,), (2,), (4,))}
    shapes = input_shapes(decode, Profile(SizeRange(1, 2, 4)))
    assert shapes["cache_lengths"] == ((32, 1), (32, 2), (32, 4))
    assert shapes["k_cache.0"][2][0] == 4
    assert shapes.keys() == {value.name for value in decode.graph.input}


def test_shapes_of_a_turn_cover_every_input():
    extend = weightless_extend(LLAMA, resolve("rocketkv"), "bf16")
    shapes = input_shapes(extend, Profile(SizeRange(1, 1, 1), SizeRange(1, 64, 200)))
    assert shapes["input_ids"] == ((1, 1), (1, 64), (1, 200))
    assert shapes["cache_lengths"] == ((3, 1), (3, 1), (3, 1))
    assert shapes.keys() == {value.name for value in extend.graph.input}
