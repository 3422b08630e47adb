from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.passkey import BACKGROUND, INSTRUCTION, QUESTION, generate
from tests.tasks.readers import by_word


def draw(**arguments):
    return generate(**{"seed": 0, "index": 0, "target_tokens": 1000, "encode": by_word} | arguments)


@settings(max_examples=30)
@given(depth=st.floats(0, 1), index=st.integers(0, 10**6))
def test_one_pass_key_of_seven_digits_is_at_the_depth(depth, index):
    sample = draw(depth=depth, index=index)
    (digits,) = sample.answers
    assert re.findall(r"\d+", sample.prompt) == [digits]
    assert len(digits) == 7
    before, after = (text.count(".") for text in sample.context.removeprefix(INSTRUCTION).split(f"{digits}."))
    assert before + after == sample.meta["sentences"]
    assert abs(before - depth * sample.meta["sentences"]) <= 0.5


def test_the_background_is_repeated_in_order():
    sample = draw(depth=1.0)
    text = sample.context.removeprefix(INSTRUCTION)
    expected = [BACKGROUND[i % len(BACKGROUND)] for i in range(sample.meta["sentences"])]
    assert text.startswith(" ".join(expected))
    assert sample.meta["sentences"] > 2 * len(BACKGROUND)
    assert sample.question == QUESTION


def test_depths_take_turns_and_digits_are_independent():
    samples = [draw(index=index) for index in range(200)]
    assert [sample.meta["depth"] for sample in samples[:10]] == pytest.approx([i / 9 for i in range(10)])
    assert samples[10].meta["depth"] == 0
    for place in range(7):
        assert {sample.answers[0][place] for sample in samples} == set("0123456789")


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_outside_0_to_1_is_refused(depth):
    with pytest.raises(InputError, match="expected 0 "):
        draw(depth=depth)
