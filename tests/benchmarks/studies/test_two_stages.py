"""RocketKV's two stages: cells keep and read what the policies do, and bytes and shares computed by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.studies.records import Records
from benchmarks.studies.study import Run
from benchmarks.studies.two_stages import long_prompts, measure, own_token, remainders, steps
from benchmarks.studies.two_stages.cells import PUBLISHED, Cell, First, Second, cells
from benchmarks.studies.two_stages.lengths import Step, first_length
from benchmarks.studies.two_stages.measure import Needles, Staged, counted, divergence
from benchmarks.studies.two_stages.measured import Measured, by_needle
from benchmarks.studies.two_stages.page import fewest, page
from benchmarks.studies.watched import Branch, WatchedDecoder
from kvc_trt import policies
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.small_model import SMALL

LONGEST = 64
TEXT = torch.randint(2, SMALL.vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FOLLOWING = TEXT[:9]
VOTES = First("votes", 4, 3)
STAGES = {"prompt_budget": 21, "window": 4, "pool_kernel": 3}
SHORT = Needles({200: 1.0}, cells)
OF_POLICIES = [
    ("snapkv++", Cell(VOTES, 21), STAGES),
    ("rocketkv", Cell(VOTES, 21, Second("hybrid", 4, 6, 9)), {**STAGES, "page_size": 4, "top_r": 6, "top_k": 9}),
    ("hybrid", Cell(First(), 40, Second("hybrid", 3, 5, 8)), {"page_size": 3, "top_r": 5, "top_k": 8}),
    ("quest-matched", Cell(First(), 40, Second("hybrid", 4, 16, 8)), {"page_size": 4, "top_k": 8}),
    ("hybrid", Cell(First(), 40, Second("hybrid", 3, 5, 8, 3)), {"page_size": 3, "top_r": 5, "top_k": 8, "recent": 3}),
    ("quest-matched", Cell(First(), 40, Second("hybrid", 4, 16, 8, 4)), {"page_size": 4, "top_k": 8, "recent": 4}),
    ("exact-topk-group", Cell(First(), 40, Second("exact", read=16)), {}),
    ("sparq", Cell(First(), 40, Second("sparq", channels=5, read=9, recent=1)), {"top_r": 5, "top_k": 8}),
]


@pytest.fixture(scope="module")
def weights():
    return RandomWeights(SMALL, 0)


@pytest.fixture(scope="module")
def watched(weights):
    return WatchedDecoder.of(SMALL, weights, LONGEST)


def logits_of(weights, policy, steps, **overrides):
    rule = policies.resolve(
        policy, model=SMALL, token_budget=16, max_input_len=LONGEST - 16, max_output_len=16, **overrides
    )
    decoder = ReferenceDecoder(SMALL, weights, method=policies.method(rule), parameters=rule)
    first, cache = decoder.prefill(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))
    return torch.cat([first, *(decoder.decode(torch.tensor([token]), cache) for token in FOLLOWING[:steps])])


def test_steps_have_the_logits_of_the_policies(watched, weights):
    found = watched.along(TEXT, FOLLOWING, Staged([cell for _, cell, _ in OF_POLICIES], 0))
    torch.testing.assert_close(found[0], logits_of(weights, "full", 8), atol=1e-5, rtol=1e-5)
    for (policy, _, overrides), logits in zip(OF_POLICIES, found[1:], strict=True):
        torch.testing.assert_close(logits, logits_of(weights, policy, 8, **overrides), atol=1e-5, rtol=1e-5)


def test_the_first_step_has_the_logits_of_tova(watched, weights):
    # Later steps differ: the policy drops tokens while it decodes.
    found = watched.along(TEXT, FOLLOWING, Staged([Cell(First("tova"), 16)], 0))[1]
    torch.testing.assert_close(found[:2], logits_of(weights, "tova", 1), atol=1e-5, rtol=1e-5)


def test_branches_of_one_prompt_are_those_of_each_beginning(watched):
    of = [Cell(VOTES, 21, Second("hybrid", 4, 6, 9))]
    both = watched.branches(TEXT, [Branch(40, FOLLOWING, Staged(of, 0)), Branch(33, TEXT[33:], Staged(of, 0))])
    for found, alone in zip(both, (watched.along(TEXT, FOLLOWING, Staged(of, 0)),
                                   watched.along(TEXT[:33], TEXT[33:], Staged(of, 0))), strict=True):  # fmt: skip
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_stored_and_read_pairs_match_hand_computed_values():
    # 1,000 tokens in pages of 4 have 250 pages. A step reads one bound of 32 of 64 channels: 250 / 2 keys, half a pair
    # each. The oracle reads every key.
    hybrid = Cell(VOTES, 1000, Second("hybrid", 4, 32, 500))
    assert (hybrid.stored, hybrid.read(64)) == (1250, 62.5 + 500)
    exact = Cell(First(), 1000, Second("exact", read=100))
    assert (exact.stored, exact.read(64)) == (1000, 500 + 100)
    assert (Cell(VOTES, 77).stored, Cell(VOTES, 77).read(64)) == (77, 77)


def test_cells_of_one_size_store_no_more_than_it_and_have_their_own_names():
    of = cells(SMALL, 2048)
    assert len({one.name for one in of}) == len(of)
    for one in of:
        if one.setting in ("", "half", "quarter", "divided"):
            assert one.size - 2 <= one.stored <= one.size


def test_lengths_of_needles_have_their_shares_wherever_a_run_stops(study_model):
    needles = Needles({200: 1.0, 400: 0.25, 800: 0.05}, cells)
    of = [(key["length"], key["index"]) for key in measure.keys(study_model, needles, Run(count=20))]
    assert of[:5] == [(200, 0), (200, 1), (200, 2), (200, 3), (400, 0)]
    assert of[-3:] == [(200, 19), (400, 4), (800, 0)]
    assert len(of) == 26


def test_a_known_needle_is_asked_for_under_the_cells_that_it_lacks(study_model):
    first, second = measure.keys(study_model, SHORT, Run(count=2))
    known = {**first, "cells": first["cells"][:-2]}
    again = list(measure.keys(study_model, SHORT, Run(count=2), [{"key": known}, {"key": second}]))
    assert again == [{**first, "cells": first["cells"][-2:]}]


def test_a_needle_of_several_records_has_the_cells_of_all_and_cells_are_compared_where_both_are():
    def record(index, **cells):
        of = {place: {"whole": 1, "cells": dict(cells)} for place in (measure.IN, measure.BEHIND)}
        return {"key": {"task": measure.TASK, "length": 200, "index": index}, "measured": of}

    def nats(value):
        return [0, 0, 1, value, 0, 0, 0, 0]

    one, other = Cell(First(), 1, setting="a"), Cell(First(), 1, setting="b")
    of = [record(0, **{one.name: nats(0.5)}), record(1, **{one.name: nats(0.1)}), record(0, **{other.name: nats(0.2)})]
    measured = Measured(by_needle(of), measure.IN)
    assert len(measured.records) == 2
    assert measured.values(one, "divergence") == [0.5, 0.1]
    assert measured.differences(one, other) == [0.5 - 0.2]
    assert len(measured.under([other.name]).records) == 1


def test_attention_shares_match_hand_computed_values():
    # One group of two heads, whose sums these are, one step, four tokens; tokens 1 and 3 are kept, token 3 is read.
    whole = torch.tensor([[[0.0, 0.4 + 0.2, 0.3 + 0.2, 0.3 + 0.1]]])
    kept, mask, best = torch.tensor([[1, 3]]), torch.tensor([[[False, True]]]), torch.tensor([[[1, 2]]])
    # Kept: 0.4 + 0.3 + 0.2 + 0.1 of 1.5; read: 0.3 + 0.1. Of the best, 1 and 2, one is kept and none read.
    assert counted(whole, kept, mask, best).tolist() == pytest.approx([1 / 1.5, 0.4 / 1.5, 0.5, 0.0])


def test_divergence_matches_a_hand_computed_value():
    whole, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergence(whole, whole) == pytest.approx(0, abs=1e-7)
    assert divergence(whole, other) == pytest.approx(0.1438, abs=1e-4)


def test_saved_bytes_match_hand_computed_values():
    # Stage 1 alone reads 1,250 pairs, stage 2 leaves 250 of them: 1,000 of 1,250 and the weights' 10,000, which a batch
    # of 8 shares.
    step = Step(1250, 250)
    assert step.saved(10_000, 1) == 1000 / 11_250
    assert step.saved(10_000, 8) == 1000 / 2500
    steps = {2048: Step(300, 250), 4096: step}
    assert first_length(steps, 10_000, 8) == "4,096"
    assert first_length(steps, 10_000, 1) == "none, at most 9 %"


def test_a_pair_that_rounding_leaves_over_decides_nothing():
    found = {"both": [255, 100, 1, 0.3], "alone": [256, 256, 1, 0.1], "more": [512, 90, 1, 0.0]}
    assert fewest(found, 0) == "alone"
    assert fewest(found, 1) == "more"


def test_remainders_are_those_that_the_page_speaks_of():
    of = {one.name: one for one in cells(SMALL, 2048) if one.setting == "half" and one.first == PUBLISHED}
    assert [one.kept % remainders.PAGE for one in of.values()] == [0, 1, 3]
    assert {one.kept for one in of.values()} & set(remainders.KEPT) == {819}
    [same] = [one for one in of.values() if one.kept == 819]
    assert remainders.cell(819, SMALL.head_size).second == same.second


def test_settings_of_own_tokens_are_whole_pages_and_a_few_tokens_more():
    of = own_token.cells(SMALL, remainders=True)
    assert {one.size for one in of if one.setting == own_token.HALF} == {0, 1, 2, 3}
    assert all(one.kept % one.second.page == one.size for one in of)
    assert all(one.second.recent <= one.second.read for one in of)
    assert {one.size for one in own_token.cells(SMALL, remainders=False)} == {0}


def test_own_tokens_are_read_in_any_case_or_as_their_pages_score(watched):
    staged = Staged([Cell(First(), 40, Second("hybrid", 4, 16, 8, recent)) for recent in (0, 1)], 0)
    watched.along(TEXT, FOLLOWING, staged)
    by_score, every = staged.own
    assert every == [1.0] * 8
    assert 0 <= min(by_score) < 1


def test_shares_by_place_of_a_step_match_hand_computed_values():
    of = [{"nats": [0.1, 0.4, 0.2], "slots": [3, 0, 1]}, {"nats": [0.5], "slots": [0]}]
    assert own_token.split(of, "nats", begins=True) == [0.4, 0.5]
    assert own_token.split(of, "nats", begins=False) == [0.1, 0.2]


def test_shares_of_the_whole_cache_s_step_match_hand_computed_values():
    read, time = "cache_bytes_read_per_step_modelled", "median_itl_ms"
    row = steps.row_of({
        "policy": "hybrid",
        "engine": {read: 3 << 20, time: 30.0, "min_itl_ms": 25.0},
        "dense": {read: 12 << 20, time: 40.0},
        "peak": {"peak_bytes": 50 << 20, "peak_share_of_dense": 1.25, "peak_with_weights_share_of_dense": 1.1,
                 "state_modelled_share_of_dense": 1.2},
    })  # fmt: skip
    assert row == ["`hybrid`", "50", "125", "110", "120", "3.0", "25", "30 (25)", "75"]


@pytest.fixture(scope="module")
def records(study_model, tmp_path_factory):
    """Two needles in short prompts of a shipped model, as a run writes them."""
    kept = Records(tmp_path_factory.mktemp("studies") / "two_stages.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    for key in measure.keys(study_model, SHORT, Run(count=2)):
        kept.add(key, measure.hidden(study_model, SHORT, key))
    return kept.all


def test_a_cache_that_keeps_and_reads_everything_is_the_whole_one(records):
    for one in records:
        for place in (measure.IN, measure.BEHIND):
            everything = one["measured"][place]["cells"]["votes 32/63 | all  | 256"]
            assert everything[2] == one["measured"][place]["whole"]
            assert everything[3:] == pytest.approx([0, 1, 1, 1, 1], abs=1e-3)


def test_no_more_is_read_than_kept_and_no_more_kept_than_there_is(records):
    for one in records:
        for place in (measure.IN, measure.BEHIND):
            for cell in one["measured"][place]["cells"].values():
                shares = dict(zip(measure.FIELDS, cell, strict=True))
                assert 0 <= shares["attention_read"] <= shares["attention_kept"] + 1e-4 <= 1 + 2e-4
                assert 0 <= shares["best_read"] <= shares["best_kept"] <= 1


def test_the_page_begins_with_what_the_paper_says_and_has_its_plots(records):
    written = page(records)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]
    assert len(rows) == 7
    assert len(written.images) == 3
    for path, content in written.images.items():
        assert content.startswith(b"\x89PNG")
        assert f"/studies/{path.name})" in written.text


def test_the_page_of_long_prompts_has_both_tasks_and_all_lengths(study_model, tmp_path):
    short = Needles({180: 1.0, 200: 1.0}, long_prompts.cells, long_prompts.NEEDLES.tasks, 1)
    kept = Records(tmp_path / "two_stages_long.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    for key in measure.keys(study_model, short, Run()):
        stands_for = long_prompts.LONGEST if key["length"] == 200 else 2048
        kept.add({**key, "length": stands_for}, measure.hidden(study_model, short, key))
    written = long_prompts.page(kept.all)
    rows = [line for line in written.text.splitlines() if line.startswith("| ")]
    assert len([line for line in rows if "| **" in line]) == 4
    for task in long_prompts.NEEDLES.tasks:
        assert sum(line.startswith(f"| {task} | 2,048 |") for line in rows) == 2
        assert f"## {task}, 16,384 tokens" in written.text
    assert len(written.images) == 2
