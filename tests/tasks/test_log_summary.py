from __future__ import annotations

import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.log_summary import INTRODUCTION, PURCHASES, QUESTION, generate
from tests.tasks.readers import by_byte, by_word

STATED = re.compile(r"([\w ]+) bought the ([\w ]+) for (\d{3}) coins and left it ([\w ]+)\.")
SUMMED_UP = re.compile(r" ([\w ]+) paid (\d{3}) coins for the ([\w ]+), which is now ([\w ]+)\.")


def draw(**arguments):
    return generate(**{"seed": 0, "index": 0, "target_tokens": 1500, "encode": by_word} | arguments)


@pytest.mark.parametrize("index", range(5))
def test_the_summary_repeats_the_purchases_in_their_order_and_in_other_words(index):
    sample = draw(index=index)
    stated = [(buyer.strip(), thing, price, place) for buyer, thing, price, place in STATED.findall(sample.context)]
    (summary,) = sample.answers
    told = [(buyer, thing, price, place) for buyer, price, thing, place in SUMMED_UP.findall(summary)]
    assert told == stated
    assert len(told) == PURCHASES
    for column in zip(*told, strict=True):
        assert len(set(column)) == PURCHASES
    assert sample.question == QUESTION


@pytest.mark.parametrize(("room", "purchases"), [(128, PURCHASES), (64, 3), (20, 1)])
def test_purchases_are_spread_over_the_text(room, purchases):
    sample = draw(target_tokens=4000, max_new_tokens=room)
    text = sample.context.removeprefix(INTRODUCTION)
    places = [found.start() / len(text) for found in STATED.finditer(text)]
    assert len(places) == purchases
    assert all(i / purchases - 0.05 <= place <= (i + 1) / purchases + 0.05 for i, place in enumerate(places))
    assert sample.meta["depths"] == pytest.approx(places, abs=0.05)


@pytest.mark.parametrize(("reader", "room"), [(by_word, 128), (by_word, 40), (by_byte, 128)])
def test_the_summary_has_as_many_purchases_as_there_is_room_for_and_the_log_no_others(reader, room):
    sample = draw(encode=reader, target_tokens=6000, max_new_tokens=room)
    (summary,) = sample.answers
    assert len(reader(QUESTION + summary)) - len(reader(QUESTION)) <= room
    assert 1 <= len(SUMMED_UP.findall(summary)) <= PURCHASES
    assert len(SUMMED_UP.findall(summary)) == len(STATED.findall(sample.context))


def test_room_for_less_than_one_purchase_is_refused():
    with pytest.raises(InputError, match="the summary of one purchase needs more than 5 tokens"):
        draw(max_new_tokens=5)
