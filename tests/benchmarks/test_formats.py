"""The methods, formats and texts that the benchmarks of cache formats compare."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.accuracy.formats import answers, divergence
from benchmarks.accuracy.formats.methods import METHODS, split
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.models.cache_formats import CACHE_FORMATS


def forms(some):
    return [one.settings.get("kv_cache", "auto") for one in some]


def test_every_method_is_asked_in_every_format_with_the_whole_cache_first():
    every = answers.compared()
    assert every[0] == Variant("full", None)
    assert forms(one for one in every if one.name == "full") == list(CACHE_FORMATS)
    others = (len(METHODS) - 1) * len(CACHE_FORMATS)
    assert len(every) == len(set(every)) == len(CACHE_FORMATS) + others * len(answers.BUDGETS)
    assert {split(one.policy) for one in every} == set(product(METHODS, CACHE_FORMATS))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_followed_in_every_format(method):
    every = divergence.variants(method)
    assert forms(every) == list(CACHE_FORMATS)
    assert {split(one.policy)[0] for one in every} == {method}


def test_pieces_of_plain_text_continue_with_their_own_tokens():
    with open_model("retrieval-text") as model:
        asked = divergence.questions(model, 512, 5)
        ids = model.tokenizer.encode(divergence.plain_text())
    assert {len(one.prompt_ids) for one in asked} == {512 - divergence.CONTINUED}
    assert (*asked[0].prompt_ids, *asked[0].target_ids) == tuple(ids[:512])
    assert len({one.prompt_ids for one in asked}) == 5
    assert (*asked[-1].prompt_ids, *asked[-1].target_ids) == tuple(ids[(len(ids) - 512) // 4 * 4 :][:512])
