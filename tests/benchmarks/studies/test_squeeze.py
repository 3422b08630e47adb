"""SqueezeAttention's policies with and without budgets by layer: caches keep what the policies do."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from benchmarks.studies.records import Records
from benchmarks.studies.squeeze import engines, measure
from benchmarks.studies.squeeze.caches import HeavyHitters, Together
from benchmarks.studies.squeeze.equal import budget_as_good, budget_at, crossing
from benchmarks.studies.squeeze.measure import (
    DIVISIONS,
    POLICIES,
    WITH,
    WITHOUT,
    Lengths,
    caches,
    division,
    place,
)
from benchmarks.studies.squeeze.page import page
from benchmarks.studies.study import Run
from benchmarks.studies.watched import Recent, WatchedDecoder
from kvc_trt import policies
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.small_model import SMALL

LONGEST = 64
TEXT = torch.randint(2, SMALL.vocab_size, (40,), generator=torch.Generator().manual_seed(5)).tolist()
FOLLOWING = torch.randint(2, SMALL.vocab_size, (10,), generator=torch.Generator().manual_seed(6)).tolist()
LENGTHS = Lengths(len(TEXT), len(FOLLOWING))
SHARES = (0.4, 0.6, 1.0)


@pytest.fixture(scope="module")
def weights():
    return RandomWeights(SMALL, 0)


@pytest.fixture(scope="module")
def watched(weights):
    return WatchedDecoder.of(SMALL, weights, LONGEST)


@pytest.fixture(scope="module")
def layers(watched):
    return watched.layer_cosines(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))[:, 0].tolist()


@pytest.fixture(scope="module")
def logits(watched, layers):
    return watched.along(TEXT, FOLLOWING, caches(SMALL, LENGTHS, layers, SHARES))


def of_policy(weights, policy, share, kind):
    rule = policies.resolve(
        policy, model=SMALL, token_budget=f"{100 * share:g}%", max_input_len=len(TEXT),
        max_output_len=len(FOLLOWING), layer_budget=kind,
    )  # fmt: skip
    decoder = ReferenceDecoder(SMALL, weights, method=policies.method(rule), parameters=rule)
    first, cache = decoder.prefill(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))
    return torch.cat([first, *(decoder.decode(torch.tensor([token]), cache) for token in FOLLOWING[:-1])])


@pytest.mark.parametrize("kind", DIVISIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_text_behind_a_prompt_has_the_logits_of_the_policy(logits, weights, policy, kind):
    for number, share in enumerate(SHARES):
        at = 1 + (POLICIES.index(policy) * len(SHARES) + number) * len(DIVISIONS) + DIVISIONS.index(kind)
        expected = of_policy(weights, policy, share, kind)
        torch.testing.assert_close(logits[at], expected, atol=1e-5, rtol=1e-5)


def test_the_first_cache_is_the_whole_one(logits, watched):
    text = torch.tensor([TEXT + FOLLOWING[:-1]])
    full = watched.prefill(text, torch.tensor([text.shape[1]]))[0]
    torch.testing.assert_close(logits[0][-1:], full, atol=1e-5, rtol=1e-5)


def test_a_division_moves_tokens_and_keeps_their_sum(layers):
    uniform, divided = (division(SMALL, "h2o", 0.5, kind, LENGTHS, layers) for kind in (WITHOUT, WITH))
    assert uniform == (20,) * len(layers)
    assert sum(divided) == sum(uniform)
    assert divided[layers.index(max(layers))] == 7  # 0.35 of 20


def test_places_are_in_the_order_of_the_caches():
    shares = [0.1, 0.2]
    assert [place("sliding-window", share, kind) for share in shares for kind in DIVISIONS] == [0, 1, 2, 3]
    assert place("h2o", 1.0, WITH) == 3 * 10 * 2 - 1


def test_caches_together_are_those_of_each_alone(watched):
    some = [(6, 25, 17), (16, 16, 16)]
    both = watched.along(TEXT, FOLLOWING, Together(Recent(some, 0), HeavyHitters(some)))
    for part, found in ((Recent(some, 0), both[:2]), (HeavyHitters(some), both[2:])):
        for one, other in zip(watched.along(TEXT, FOLLOWING, part), found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_crossing_lies_between_two_budgets():
    assert crossing((0.1, 0.2, 0.3), (0.9, 0.5, 0.1), 0.2) == pytest.approx(0.275)
    assert crossing((0.1, 0.2, 0.3), (0.9, 0.5, 0.1), 0.95) == 0.1
    assert crossing((0.1, 0.2, 0.3), (0.9, 0.5, 0.1), 0.05) is None


def test_budgets_for_equal_answers_have_intervals():
    budgets = (0.1, 0.2, 0.3)
    without = np.array([[0.9, 0.5, 0.1], [0.7, 0.3, 0.1]])
    divided = np.array([[0.5, 0.1, 0.0], [0.3, 0.1, 0.0]])
    found = budget_at(budgets, without, 0.2)
    assert found.value == pytest.approx(0.2 + 0.1 * 0.2 / 0.3)
    assert found.low == pytest.approx(0.25)  # both draws are the second prompt
    assert found.high == pytest.approx(0.275)  # or the first
    as_good = budget_as_good(budgets, without, divided, 0.2)
    assert as_good.value == pytest.approx(0.1)
    assert budget_at(budgets, without, 0.05).percent() == "none"


@pytest.fixture(scope="module")
def records(study_model, tmp_path_factory):
    kept = Records(tmp_path_factory.mktemp("studies") / "squeeze.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        small = {
            "PROMPT": 96, "ANSWER": 32, "HALFWAY": 112, "NEW": 32, "BATCHES": (1, 32), "COST_TOKENS": (512, 1024),
            "PAIRS": 2,
        }  # fmt: skip
        for name, value in small.items():
            patch.setattr(engines, name, value)
        patch.setattr(measure, "LENGTHS", {False: 224})
        patch.setattr(measure, "FOLLOWING", 24)
        text = study_model.tokenizer.encode(measure.plain_text())
        opened = engines.Engines(Run("retrieval-text"), stack)
        sides = {}
        for key in engines.keys(study_model):
            if key["part"] == engines.STEPS:
                kept.add(key, engines.timed(opened, sides, text[:112], min(2, key["batch"])))
            elif key["part"] == engines.MEMORY:
                kept.add(key, engines.counted(opened))
            else:
                layers = study_model.decoder.layer_cosines(torch.tensor([text[:96]]), torch.tensor([96]))[:, 0]
                kept.add(key, engines.costs(opened, text[:96], layers.tolist()))
        for key in measure.keys(study_model, Run("retrieval-text", count=2)):
            kept.add(key, measure.answered(study_model, key["kind"], key["index"], key["length"]))
    return kept.all


@pytest.mark.slow
def test_rows_are_counted_as_the_state_of_engines(records):
    (counted,) = (one["measured"] for one in records if one["key"]["part"] == engines.MEMORY)
    row, used = counted["row"], counted["used"]
    assert used["squeeze-online 20 %"] == row["uniform 20 %"] == used["uniform 20 %"]
    assert 1.9 < row["squeeze-online 20 %"] / row["uniform 20 %"] < 2.1
    assert row["whole cache"] / row["uniform 20 %"] == pytest.approx(128 / 19)


def test_the_page_begins_with_what_the_paper_says_and_has_its_plots(records):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.studies.squeeze.page.BATCHES", (1, 32))
        written = page(records)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]
    assert len(rows) == 5
    assert len(written.images) == 2
    for path, content in written.images.items():
        assert content.startswith(b"\x89PNG")
        assert f"/studies/{path.name})" in written.text


def test_a_page_without_figures_of_engines_says_what_is_missing(records):
    kinds = (measure.ANSWERS, engines.MEMORY)
    written = page([one for one in records if one["key"]["part"] in kinds])
    assert len([line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]) == 3
    assert "Not measured yet: steps over batches (tables 3 and 9), the cost in a prefill" in written.text
    assert "Rows that fit beside the weights" in written.text
    with pytest.raises(SystemExit, match="no answers were measured yet"):
        page([one for one in records if one["key"]["part"] != measure.ANSWERS])
