"""The builder's estimate: from shapes alone, and the message of one that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvc_trt.backends.tensorrt.memory_estimate import Machine, activation_bytes, check_fits, estimate
from kvc_trt.backends.tensorrt.profiles import Profile, Range, decode_profiles, prefill_profiles
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.presets import load_preset
from tests.backends.tensorrt.weightless import preset_parameters

GIB = 1 << 30
MODEL = load_preset("llama3.1-8b").config
WEIGHTS = 16 * GIB


def estimated(profiles, model=MODEL):
    state = state_tensors(model, preset_parameters("llama3.1-8b", "rocketkv"), model.dtype)
    return estimate(model, state, profiles, WEIGHTS)


def test_an_8b_build_does_not_hold_three_models():
    for profiles in (prefill_profiles(32768, 8), decode_profiles(8)):
        assert 2 * WEIGHTS <= estimated(profiles).host < 2.5 * WEIGHTS
        assert estimated(profiles).mapped == WEIGHTS


def test_activations_of_a_long_prompt():
    tokens, profile = 32768, Profile(Range(1, 1, 1), Range(128, 32768, 32768))
    expected = tokens * (2 * 4096 + 3 * 14336) * 2 + 4 * MODEL.vocab_size
    assert activation_bytes(MODEL, profile) == expected
    scores = 2 * 4 * MODEL.num_attention_heads * tokens**2
    assert activation_bytes(replace(MODEL, dtype="float32"), profile) > scores
    assert activation_bytes(MODEL, Profile(Range(1, 8, 8))) < 10 << 20


def test_longer_prompts_and_more_rows_take_more_of_the_gpu():
    assert estimated(prefill_profiles(131072, 8)).device > estimated(prefill_profiles(32768, 8)).device
    assert estimated(decode_profiles(64)).device > estimated(decode_profiles(8)).device


def test_what_does_not_fit_says_by_how_much():
    needed = estimated(decode_profiles(8))
    check_fits(needed, Machine(64 * GIB, 80 * GIB), "the decode engine")
    check_fits(needed, Machine(None, None), "the decode engine")
    with pytest.raises(UnsupportedEnvironment, match=r"needs 34\.0 GiB of memory, 20\.0 GiB are free.*by 14\.0 GiB"):
        check_fits(needed, Machine(20 * GIB, 80 * GIB), "the decode engine")
    with pytest.raises(UnsupportedEnvironment, match=r"of memory on H100, 10\.0 GiB are free: it does not fit by"):
        check_fits(needed, Machine(64 * GIB, 10 * GIB, "H100"), "the decode engine")


def test_the_estimate_in_words():
    assert "34.0 GiB of memory (and 16.0 GiB of weights mapped" in estimated(decode_profiles(8)).as_text()
