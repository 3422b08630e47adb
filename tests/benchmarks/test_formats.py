"""What the benchmarks of cache formats compare."""

from __future__ import annotations

from benchmarks.accuracy.formats import answers, divergence
from kvc_trt.accuracy.answerers.policy_engines import open_model
from kvc_trt.accuracy.grid import Variant
from kvc_trt.models.cache_formats import CACHE_FORMATS


def test_every_method_is_compared_in_every_format_with_the_whole_cache_first():
    every = divergence.variants()
    assert every[0] == Variant("full", None)
    wholes = [one for one in every if one.name == "full"]
    assert [one.settings.get("kv_cache", "auto") for one in wholes] == list(CACHE_FORMATS)
    others = (len(divergence.METHODS) - 1) * len(CACHE_FORMATS)
    assert len(every) == len(set(every)) == len(CACHE_FORMATS) + others * len(divergence.BUDGETS)


def test_questions_are_those_of_the_policies_grid():
    for name in answers.GROUPS:
        for form in CACHE_FORMATS:
            stage = answers.stage(name, form)
            assert stage.groups == answers.CORE[name].groups
            assert stage.variants[0] == Variant("full", None)
            assert {one.settings.get("kv_cache", "auto") for one in stage.variants[1:]} == {form}


def test_pieces_of_plain_text_continue_with_their_own_tokens():
    with open_model("retrieval-text") as model:
        asked = divergence.questions(model, 512, 5)
        ids = model.tokenizer.encode(divergence.plain_text())
    assert {len(one.prompt_ids) for one in asked} == {512 - divergence.CONTINUED}
    assert (*asked[0].prompt_ids, *asked[0].target_ids) == tuple(ids[:512])
    assert len({one.prompt_ids for one in asked}) == 5
    assert (*asked[-1].prompt_ids, *asked[-1].target_ids) == tuple(ids[(len(ids) - 512) // 4 * 4 :][:512])
