"""Importance of layers: values computed by hand, and the page of a tiny measurement."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.studies.layer_importance import measure
from benchmarks.studies.layer_importance.measure import Settings, binned, division, surprise
from benchmarks.studies.layer_importance.page import elsewhere, page, unimportant
from benchmarks.studies.records import Records
from benchmarks.studies.watched import WatchedDecoder
from kvc_trt.models.random_weights import RandomWeights
from tests.small_model import SMALL

IMPORTANT, OTHER = 0.5, 0.99


def test_budgets_equal_the_papers_example():
    # Appendix A.2: 18 layers are important and 14 are not, 1,000 tokens each, p = 0.3.
    layers = [0.1] * 2 + [IMPORTANT] * 16 + [OTHER] * 14
    budgets = division(layers, 1000, 0.3, 10_000)
    assert set(budgets[18:]) == {300}
    assert set(budgets[:18]) == {1544, 1545}
    assert sum(budgets) == 32_000


def test_unimportant_layers_are_the_highest_cluster():
    assert unimportant([0.2, 0.99, 0.6, 0.98, 0.61]) == {1, 3}


def test_moved_share_is_half_of_all_budget_differences(monkeypatch):
    # Of four layers with 1,000 tokens, one is unimportant: 350 for it and 1,216 or 1,217 for the others.
    own, other = [0.1, 0.5, 0.5, 0.99], [0.99, 0.5, 0.5, 0.1]
    assert elsewhere(own, own) == 0
    assert elsewhere(own, other) == pytest.approx((1216 - 350) / 4000, abs=0.001)


def test_neighbours_are_averaged_and_what_is_past_the_end_is_not_there():
    found = binned(torch.tensor([[1.0, 3.0, 5.0, 7.0, 9.0]]), positions=8, size=2)
    assert found[0, :3].tolist() == [2.0, 6.0, 9.0]
    assert torch.isnan(found[0, 3])


def test_surprise_of_uniform_logits_is_the_log_of_the_vocabulary():
    assert surprise(torch.zeros(3, 8), [1, 2, 3]) == pytest.approx(torch.tensor(8.0).log().item())


@pytest.fixture(scope="module")
def deeper(study_model):
    """A model of eight layers, which have a first, a last and others between, with random weights."""
    config = replace(SMALL, num_hidden_layers=8, vocab_size=study_model.decoder.config.vocab_size)
    decoder = WatchedDecoder.of(config, RandomWeights(config, 0), 256)
    return replace(study_model, name="random", decoder=decoder)


@pytest.fixture(scope="module")
def records(deeper, tmp_path_factory):
    settings = Settings(document=40, positions=48, swept_prompt=160, summary=24)
    head = {"model": deeper.name, **asdict(settings)}
    kept = Records(tmp_path_factory.mktemp("studies") / "layer_importance.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "TOGETHER", 2)
        for kind in ("manual", "code"):
            key = {**head, "part": measure.COSINES, "kind": kind, "index": 0, "prompts": 2}
            kept.add(key, measure.of_key(deeper, settings, key))
        for index in range(2):
            key = {**head, "part": measure.SWEEP, "index": index}
            kept.add(key, measure.of_key(deeper, settings, key))
    return kept.all


def test_the_page_begins_with_what_the_paper_says_and_has_its_plots(records):
    written = page(records)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]
    assert len(rows) == 5
    assert len(written.images) == 3
    for path, content in written.images.items():
        assert content.startswith(b"\x89PNG")
        assert f"/studies/{path.name})" in written.text


def test_a_share_of_one_divides_nothing(records):
    layers = records[0]["measured"]["means"][0]
    assert division(layers, 30, 1.0, 150) == (30,) * 8
