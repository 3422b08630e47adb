"""Hit rates: SnapKV's equations with values computed by hand, and the page of a tiny measurement."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from benchmarks.studies.hit_rates import measure
from benchmarks.studies.hit_rates.measure import Settings, hit_rate, important, mean_rate, recent, vote, without_sinks
from benchmarks.studies.hit_rates.page import page
from benchmarks.studies.records import Records

OBSERVED = torch.tensor([
    [[0.50, 0.10, 0.30, 0.05, 0.05], [0.10, 0.20, 0.40, 0.20, 0.10]],
    [[0.20, 0.20, 0.20, 0.20, 0.20], [0.00, 0.10, 0.10, 0.30, 0.50]],
])  # fmt: skip
"""Attention of two heads' windows of two queries to five tokens of the prefix [N,R,L]."""
CURRENT = torch.tensor([
    [[0.60, 0.04, 0.30, 0.04, 0.02], [0.01, 0.90, 0.03, 0.03, 0.03]],
    [[0.02, 0.06, 0.02, 0.80, 0.10], [0.00, 0.00, 0.00, 0.05, 0.95]],
])  # fmt: skip
"""The same for two queries of an answer."""


def test_votes_are_summed_over_the_window_and_the_best_of_each_head_are_marked():
    # Head 0 sums to 0.6, 0.3, 0.7, 0.25, 0.15; head 1 to 0.2, 0.3, 0.3, 0.5, 0.7.
    assert vote(OBSERVED, 2).tolist() == [[True, False, True, False, False], [False, False, False, True, True]]
    # Tokens 1 and 2 of head 1 have equal votes: the lower one wins.
    assert vote(OBSERVED, 3)[1].tolist() == [False, True, False, True, True]


def test_hit_rate_is_the_share_of_important_features_that_were_voted_for():
    used = important(CURRENT, 0.05)
    assert used.shape == (2, 2, 5)
    # The first query: head 0 has {0, 2}, head 1 {1, 3, 4}; the votes hit 0, 2 and 3, 4: four of five.
    # The second: head 0 has {1}, head 1 {4} (0.05 itself is not above): one of two.
    found = hit_rate(used, vote(OBSERVED, 2))
    assert found.tolist() == pytest.approx([4 / 5, 1 / 2])
    assert mean_rate(used, vote(OBSERVED, 2)) == pytest.approx((4 / 5 + 1 / 2) / 2)


def test_a_query_without_important_features_has_no_rate_and_does_not_count():
    used = important(CURRENT, 0.85)
    # The first query has none above 0.85; the second has token 1 of head 0 and token 4 of head 1.
    found = hit_rate(used, vote(OBSERVED, 2))
    assert math.isnan(found[0])
    assert mean_rate(used, vote(OBSERVED, 2)) == pytest.approx(1 / 2)


def test_first_tokens_are_left_out_of_what_is_important(monkeypatch):
    monkeypatch.setattr(measure, "SINKS", 1)
    used = without_sinks(important(CURRENT, 0.05))
    # Without token 0 the first query has head 0's {2} and head 1's {1, 3, 4}: three of four.
    assert hit_rate(used, vote(OBSERVED, 2)).tolist() == pytest.approx([3 / 4, 1 / 2])


def test_recent_tokens_are_as_many_as_votes_choose():
    mask = recent(torch.zeros(2, 20, dtype=torch.bool), 7)
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 17, 18, 19]


def test_repetitions_are_counted_by_runs_of_four():
    assert measure.distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    assert measure.distinct_share([1, 2]) == 1.0


def test_common_beginning_is_the_length_of_the_shared_prefix():
    assert measure.common_beginning([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert measure.common_beginning([[1, 2], [1, 2, 3]]) == 2


@pytest.fixture(scope="module")
def records(study_model, tmp_path_factory):
    """Two documents of each part, tiny ones."""
    settings = Settings(window=8, windows=3, answer_windows=2, document=60, observed=8, asked_document=60,
                        asked_answer=4)  # fmt: skip
    head = {"model": study_model.name, **asdict(settings)}
    kept = Records(tmp_path_factory.mktemp("studies") / "hit_rates.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    for part in (measure.WINDOWS, measure.INSTRUCTIONS):
        for index in range(2):
            key = {**head, "part": part, "kind": "manual", "index": index}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(measure, "TOGETHER", 1)
                kept.add(key, measure.of_key(study_model, settings, key))
    return kept.all


def test_the_page_begins_with_what_the_paper_says_and_has_its_plots(records):
    written = page(records)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "**" in line]
    assert len(rows) == 4
    for row in rows:
        verdicts = ("holds", "holds in part", "does not hold here")
        assert any(f"| **{verdict}**, preliminary |" in row for verdict in verdicts)
    assert len(written.images) == 3
    assert all(content.startswith(b"\x89PNG") for content in written.images.values())
    for path in written.images:
        assert f"/studies/{path.name})" in written.text


def test_rates_are_shares_of_every_layer(records, study_model):
    layers = study_model.decoder.config.num_hidden_layers
    along, asked = records[0]["measured"]["documents"][0], records[-1]["measured"]
    assert len(along["layers"]) == layers
    assert [len(one) for one in (asked["pairs"], asked["same"])] == [layers, layers]
    rates = [one for layer in along["layers"] for pair in (*layer["prompt"], *layer["answer"]) for one in pair]
    assert all(one is None or 0 <= one <= 1 for one in rates)
    assert len(asked["answer_tokens"]) == 7
