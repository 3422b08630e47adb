from __future__ import annotations

import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.needles import TIMES, Arrangement, answer, generate_needles, question
from kvc_trt.tasks.task import string_match_all
from tests.tasks.readers import by_word

NEEDLE = re.compile(r"Entry (\S+) (?:(first|then|later|finally) )?reads (\S+)\.")


def draw(arrangement, *, index=0, target_tokens=600, depth=None):
    return generate_needles(
        task="niah",
        arrangement=arrangement,
        seed=0,
        index=index,
        target_tokens=target_tokens,
        encode=by_word,
        depth=depth,
    )


@pytest.mark.parametrize("haystack", ["noise", "prose"])
def test_the_values_of_one_key_come_in_the_order_of_their_times(haystack):
    sample = draw(Arrangement(haystack, values_per_key=4))
    found = NEEDLE.findall(sample.context)
    assert {key for key, _, _ in found} == set(sample.meta["asked"])
    assert [time for _, time, _ in found] == list(TIMES)
    assert tuple(value for _, _, value in found) == sample.answers


def test_the_values_of_four_keys_are_asked_for_in_the_order_of_the_question():
    sample = draw(Arrangement("prose", keys=4, asked=4))
    read = {key: value for key, _, value in NEEDLE.findall(sample.context)}
    assert sample.answers == tuple(read[key] for key in sample.meta["asked"])
    places = [sample.question.index(key) for key in sample.meta["asked"]]
    assert places == sorted(places)
    assert places[0] > 0


def test_a_haystack_of_needles_holds_nothing_else_and_no_key_twice():
    sample = draw(Arrangement("needles"), target_tokens=1500)
    found = NEEDLE.findall(sample.context)
    keys = [key for key, _, _ in found]
    assert len(set(keys)) == len(keys) == sample.meta["units"] + 1 > 60
    assert NEEDLE.sub("", sample.context).split() == ["Remember", "what", "every", "entry", "reads."]


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 0.5), (1.0, 1)])
@pytest.mark.parametrize("haystack", ["noise", "prose", "needles"])
def test_depth_places_the_needle(haystack, depth, place):
    sample = draw(Arrangement(haystack), target_tokens=2000, depth=depth)
    before = sample.context.index(sample.answers[0]) / len(sample.context)
    assert before == pytest.approx(place, abs=0.06)


def test_the_expected_answer_scores_in_full():
    for keys, values in ((["a"], ["1"]), (["a"], ["1", "2", "3", "4"]), (["a", "b", "c"], ["1", "2", "3"])):
        assert string_match_all(answer(keys, values), values) == 1
    assert answer(["a"], ["1", "2"]) == " 1, entry a then reads 2."
    assert question(["a"], 2).endswith("in order? Answer: entry a first reads")
    assert answer(["a", "b"], ["1", "2"]) == " 1, entry b reads 2."
    assert question(["a", "b"]).endswith("entries a and b read? Answer: entry a reads")


@pytest.mark.parametrize(
    "wrong",
    [
        {"haystack": "essays"},
        {"haystack": "prose", "keys": 2, "asked": 3},
        {"haystack": "prose", "values_per_key": 5},
        {"haystack": "prose", "keys": 2, "asked": 2, "values_per_key": 2},
        {"haystack": "prose", "asked": 0},
    ],
)
def test_impossible_needle_questions_are_refused(wrong):
    with pytest.raises(InputError, match="expected"):
        Arrangement(**wrong)


def test_bad_depths_and_targets_are_refused():
    with pytest.raises(InputError, match=r"depth is 1\.5"):
        draw(Arrangement("prose"), depth=1.5)
    with pytest.raises(InputError, match="shortest prompt"):
        draw(Arrangement("prose"), target_tokens=60)
