from __future__ import annotations

import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.lines import answer, generate_lines
from kvc_trt.tasks.task import last_integer, sample_rng
from kvc_trt.tasks.words import KINDS, draw_distinct
from tests.tasks.readers import by_word

LINE = re.compile(r"^Line (\S+) holds (\d{5})$", re.MULTILINE)


@pytest.mark.parametrize("key_kind", KINDS)
def test_a_line_is_asked_for_by_its_key(key_kind):
    sample = generate_lines(seed=0, index=3, target_tokens=900, encode=by_word, key_kind=key_kind)
    lines = LINE.findall(sample.context)
    assert len(lines) == len(dict(lines)) == sample.meta["lines"]
    assert sample.answers == (dict(lines)[sample.meta["asked"]],)
    assert all(10_000 <= int(value) <= 50_000 for _, value in lines)
    assert last_integer(answer(int(sample.answers[0])), sample.answers) == 1


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (1.0, -1)])
def test_depth_determines_the_line_asked_for(depth, place):
    sample = generate_lines(seed=0, index=0, target_tokens=500, encode=by_word, depth=depth)
    assert sample.meta["asked"] == LINE.findall(sample.context)[place][0]


def test_bad_depths_are_refused():
    with pytest.raises(InputError, match="depth is -1"):
        generate_lines(seed=0, index=0, target_tokens=500, encode=by_word, depth=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_distinct_and_at_most_as_many_as_there_are(kind):
    numbers = (1, 300)
    some = draw_distinct(sample_rng("keys", 0, 0), kind, 400, numbers)
    assert len(set(some)) == len(some) == (300 if kind == "numbers" else 400)
    assert some == draw_distinct(sample_rng("keys", 0, 0), kind, 400, numbers)


def test_an_unknown_kind_of_key_is_refused():
    with pytest.raises(InputError, match="'colours', expected one of words, numbers, codes, uuids"):
        draw_distinct(sample_rng("keys", 0, 0), "colours", 3)
