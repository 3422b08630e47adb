from __future__ import annotations

import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.variable_tracking import INSTRUCTION, generate
from tests.tasks.readers import by_byte, by_word


def draw(index=0, target_tokens=1500, encode=by_word):
    return generate(seed=0, index=index, target_tokens=target_tokens, encode=encode)


def parts(sample) -> tuple[str, str]:
    """Return the solved example, and the text that is asked about."""
    _, example, asked = sample.context.split(INSTRUCTION)
    return example, asked


@pytest.mark.parametrize("index", range(12))
def test_the_chain_leads_from_the_number_to_every_name_in_order(index):
    sample = draw(index)
    for text, question in zip(parts(sample), (sample.context, sample.question), strict=True):
        statements = re.findall(r"SET ([A-Z]{5}) = (\w+)\.", text)
        number = re.search(r"have the value (\d{5})\?", question).group(1)
        names = [name for name, _ in statements]
        assert [value for _, value in statements] == [number, *names[:-1]]
        assert len(set(names)) == 5
    assert tuple(names) == sample.answers
    assert sample.question.endswith("They are")


def test_the_example_is_solved_shares_nothing_and_is_short():
    for index in range(12):
        sample = draw(index)
        example, asked = parts(sample)
        solved = re.search(r"They are (.*)\.", example).group(1).split(", ")
        assert len(solved) == 5
        assert not set(solved) & set(sample.answers)
        assert str(sample.meta["number"]) not in example
        assert len(by_word(INSTRUCTION + example)) <= 500
        assert asked.count(".") > example.count(".")


def test_statements_are_spread_at_random_depths_in_order():
    depths = [sample.meta["depths"] for sample in (draw(index) for index in range(40))]
    assert all(some == sorted(some) for some in depths)
    assert min(some[0] for some in depths) < 0.02
    assert max(some[-1] for some in depths) > 0.98


def test_with_bytes_for_tokens_the_example_shrinks():
    sample = draw(target_tokens=2000, encode=by_byte)
    example, _ = parts(sample)
    assert len(by_byte(INSTRUCTION + example)) <= 500


def test_an_example_that_cannot_shrink_enough_is_refused_and_not_retried_for_ever():
    with pytest.raises(InputError, match=r"variable-tracking \(its solved example\): the shortest prompt has"):
        draw(encode=lambda text: by_byte(text) * 3, target_tokens=10_000)
