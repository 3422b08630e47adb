from __future__ import annotations

import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.multi_instruction import generate
from tests.tasks.readers import by_word


def draw(**arguments):
    return generate(**{"seed": 0, "index": 0, "target_tokens": 1500, "encode": by_word} | arguments)


@pytest.mark.parametrize(("facts", "instructions"), [(8, 3), (1, 1), (20, 20)])
def test_each_instruction_asks_for_one_of_the_facts(facts, instructions):
    for index in range(5):
        sample = draw(index=index, facts=facts, instructions=instructions)
        known = dict(re.findall(r"Locker (\S+) has number (\d{7})\.", sample.context))
        asked = re.findall(r"\n(\d+)\. Give (\S+)\.", sample.question)
        assert len(known) == facts
        assert [int(number) for number, _ in asked] == list(range(1, instructions + 1))
        assert len({key for _, key in asked}) == instructions
        assert tuple(known[key] for _, key in asked) == sample.answers
        assert sample.meta["asked"] == [key for _, key in asked]


def test_facts_are_anywhere_and_are_asked_in_any_order():
    samples = [draw(index=index) for index in range(60)]
    depths = [depth for sample in samples for depth in sample.meta["depths"]]
    assert min(depths) < 0.05
    assert max(depths) > 0.95
    assert any(sample.meta["depths"] != sorted(sample.meta["depths"]) for sample in samples)


@pytest.mark.parametrize("numbers", [{"instructions": 0}, {"instructions": 9}, {"facts": 0}, {"facts": 10**6}])
def test_there_is_at_least_one_instruction_and_a_fact_for_each(numbers):
    with pytest.raises(InputError, match="expected 1 <= instructions <= facts <= 17100"):
        draw(**numbers)
