"""The page of caches in formats follows from the results alone: losses by question, the rule, what others are shown."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from benchmarks.accuracy.formats import answers, divergence, page
from benchmarks.accuracy.formats.losses import against, alone, enough_questions, farther, open_with, pooled
from benchmarks.accuracy.formats.losses import divergence as divergence_of
from benchmarks.accuracy.formats.methods import METHODS, in_format
from benchmarks.accuracy.formats.recorded import caches, recorded
from benchmarks.accuracy.smollm2.cells import Group
from kvc_trt.models.cache_formats import CACHE_FORMATS

PLACE = {"task": "niah-single-1", "mode": "query-aware", "length": 2048, "framing": "chat"}
SUMMARY = {**PLACE, "task": "log-summary"}
NEEDLES, SUMMARIES = Group(**PLACE), Group(**SUMMARY)
RIGHT = [1] * 48 + [0] * 16
NATS = [1.0 + 0.01 * place for place in range(64)]
MACHINE = {
    "commit": "abc", "device": "a processor",
    "versions": {"kvc_trt": "1", "onnxruntime": "2", "kvpress": "3", "transformers": "4", "torch": "5"},
}  # fmt: skip
BYTES = dict(zip(CACHE_FORMATS, (90, 24, 23, 14, 19), strict=True))


def write(folder, changed=None, diverged=0.001):
    """Results in which every cache answers alike; `changed` are scores by place, method, form and budget."""
    changed, cells = changed or {}, []
    for place, scores in ((PLACE, RIGHT), (SUMMARY, NATS)):
        by = "likelihood" if place is SUMMARY else "answer"
        for method, budget in caches():
            for form in CACHE_FORMATS:
                own = changed.get((place["task"], method, form, budget), scores)
                cell = {
                    **place, "dataset": "d", "policy": in_format(method, form), "row_bytes": BYTES[form] << 20,
                    "scores": own, "scored_by": by,
                }  # fmt: skip
                cells.append(cell if budget is None else {**cell, "token_budget": budget})
    settings = {"checkpoint": "c", "weights": "fp32"}
    result = {"machine": MACHINE, "settings": settings, "spent": {"seconds": 5}, "cells": cells}
    (folder / f"{answers.NAME}.json").write_text(json.dumps(result))
    if diverged is not None:
        one = {"row_bytes": 9, "divergence": 0.5, "equal": 0.9, "divergence_from_own": diverged}
        prompts = [
            {"method": method, "length": length, "caches": [one] * len(CACHE_FORMATS)}
            for method in METHODS for length in (2048, 4096) for _ in "ab"
        ]  # fmt: skip
        found = {"machine": MACHINE, "prompts": prompts}
        (folder / f"{divergence.NAME}.json").write_text(json.dumps(found))
    return recorded(folder)


def test_a_loss_is_the_mean_over_questions_and_methods(tmp_path):
    lost = [0] * 8 + RIGHT[8:]
    found = write(tmp_path, {(PLACE["task"], "tova", "int8", 128): lost})
    loss = pooled(found, NEEDLES, "int8")
    assert loss.value == pytest.approx(-8 / 64 / len(caches()))
    assert loss.low < loss.value < loss.high
    assert loss.asked == 64


def test_equal_answers_leave_an_interval_that_has_a_width(tmp_path):
    found = write(tmp_path)
    loss = pooled(found, NEEDLES, "int8")
    assert loss.value == 0
    assert -0.03 < loss.low < 0 < loss.high < 0.03
    assert open_with(64) == pytest.approx(0.0566, abs=1e-4)
    assert open_with(enough_questions()) <= 0.03 < open_with(enough_questions() - 1)


def test_a_methods_loss_beyond_chance_is_named_although_the_mean_is_small(tmp_path):
    lost = [0] * 9 + RIGHT[9:]
    found = write(tmp_path, {(PLACE["task"], "tova", "int8", 512): lost})
    [one] = [each for each in alone(found, NEEDLES, "int8") if each.worse]
    assert (one.own.method, one.gained, one.lost) == ("tova", 0, 9)
    assert list(against(found, "int8")) == ["one needle: `tova`, budget 512, is worse in it beyond chance"]
    assert list(against(found, "fp8")) == []


def test_less_likely_summaries_and_divergence_speak_against_a_format(tmp_path):
    less = [one + 0.05 for one in NATS]
    changed = {(SUMMARY["task"], method, "int4", budget): less for method, budget in caches()}
    found = write(tmp_path, changed)
    assert list(against(found, "int4")) == ["a summary: a loss of up to 0.050 nats is not excluded"]
    said = list(against(write(tmp_path, diverged=0.02), "int8"))
    assert said[0] == "the whole cache diverges by 0.020 nats a token at 4,096 tokens"
    assert len(said) == len(METHODS)


def test_a_cache_that_diverges_from_itself_may_be_no_farther_from_the_whole_one(tmp_path):
    found = write(tmp_path, diverged=0.02)
    assert divergence_of(found, 2048, "hybrid", "int8").value == pytest.approx(0.02)
    assert farther(found, 2048, "hybrid", "int8") == (0, 0, 0, 2)
    text = " ".join(page.measured(found).split())
    assert "is at most 0.0000 [0.0000, 0.0000] farther from the whole fp32 cache than it is in fp32" in text


def test_too_few_questions_speak_against_a_format_by_their_number(tmp_path):
    few = {(PLACE["task"], method, "int8", budget): RIGHT[:8] for method, budget in caches()}
    found = write(tmp_path, few)
    assert pooled(found, NEEDLES, "int8").asked == 8
    assert list(against(found, "int8")) == ["8 of 64 questions were asked of: one needle"]


def test_without_divergences_no_format_can_be_the_default(tmp_path):
    [said] = against(write(tmp_path, diverged=None), "int8")
    assert said.startswith("divergence was not measured of the whole cache, `rocketkv`, ")


def test_the_page_has_every_cache_once_and_the_peers_where_they_were_asked(tmp_path):
    eviction = [
        {**PLACE, "dataset": "d", "point": "full", "stored_tokens": None, "scores": RIGHT},
        {**PLACE, "dataset": "d", "point": "budget 128", "stored_tokens": 128, "scores": RIGHT},
        {**PLACE, "dataset": "other", "point": "budget 256", "stored_tokens": 256, "scores": RIGHT},
    ]
    (tmp_path / "peers-eviction.json").write_text(
        json.dumps({"machine": MACHINE, "openvino_genai": "1", "cells": eviction})
    )
    found = write(tmp_path)
    text = page.measured(found)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows)) == len(caches()) * len(CACHE_FORMATS)
    assert "| `full` | 90.0 | 75 % | 1.31 nats | 0.5000 | 0.5000 |" in text
    assert "| OpenVINO `u8`, full | 25.3 | +0 | - | - | - |" in text
    assert "OpenVINO `u8`, 128 tokens" in text
    assert "256 tokens" not in text.replace("2,048, 4,096 tokens", "")
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 120
    lines = list(csv.DictReader(io.StringIO(page.sidecar(found))))
    whole = next(one for one in lines if one["engine"] == "OpenVINO" and one["point"] == "full")
    assert int(whole["stored_bytes"]) == 2048 * 2 * 30 * 3 * (64 + 8)
    assert {one["format"] for one in lines if one["engine"] == "kvc-trt"} == set(CACHE_FORMATS)


def test_the_figure_is_a_png(tmp_path):
    assert page.over_bytes(write(tmp_path)).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def committed():
    return recorded()


def test_the_page_is_that_of_the_results(committed):
    command = "python -m benchmarks.accuracy.formats.page"
    assert page.MARKS.inside(page.PAGE) == page.measured(committed), command
    assert page.CELLS.read_text() == page.sidecar(committed), command
    assert page.IMAGE.is_file(), command


def lost_and_gained(formats, group, form):
    """Answers that the caches of a group lose and gain in a format, and the pairs of answers."""
    pairs = alone(formats, group, form)
    asked = sum(min(len(one.own.scores), len(one.other.scores)) for one in pairs)
    return sum(one.lost for one in pairs), sum(one.gained for one in pairs), asked


def test_hand_written_claims_of_page_and_decision_follow_from_the_results(committed):
    lengths = (2048, 4096, 8192)
    followed = [(length, method) for length in lengths for method in METHODS]
    assert committed.followed == followed

    def diverged(form, digits, method="full"):
        return [round(divergence_of(committed, length, method, form).value, digits) for length in lengths]

    assert max(diverged("int8", 4)) < 0.001
    assert (diverged("k8v4", 3), diverged("fp8", 2)) == ([0.005] * 3, [0.02] * 3)
    evicting = [method for method in METHODS if method.startswith(("snapkv", "tova"))]
    assert max(max(diverged("int8", 4, method)) for method in evicting) == 0.0011
    assert diverged("int8", 4, "rocketkv")[2] == 0.0056
    assert [f"{one:.2g}" for one in diverged("int8", 6, "hybrid")] == ["0.0016", "0.012", "0.031"]
    assert np.mean([divergence_of(committed, *place, "int8").value for place in followed]).round(3) == 0.004
    more = {place: [round(one, 4) for one in farther(committed, *place, "int8")[:3]] for place in followed}
    assert [more[length, "hybrid"][0] for length in lengths] == [0.0011, 0.0007, -0.0002]
    assert [more[length, "rocketkv"][0] for length in lengths] == [0.0014, 0.0015, 0.0041]
    assert more[8192, "hybrid"][2] == 0.0098
    assert max(more.values()) == more[8192, "rocketkv"] == [0.0041, 0.0009, 0.0072]

    answered = [group for group in committed.groups if group.task != "log-summary"]
    forms = [form for form in CACHE_FORMATS if form != "auto"]
    counts = {(group, form): lost_and_gained(committed, group, form) for group in answered for form in forms}
    assert {one[2] for one in counts.values()} == {576}
    whole = [one for (_, form), one in counts.items() if form == "int8"]
    assert [sum(numbers) for numbers in zip(*whole, strict=True)] == [24, 28, 2304]
    assert min(pooled(committed, group, "int8").low for group in answered) > -0.02
    [summary] = [group for group in committed.groups if group.task == "log-summary"]
    assert pooled(committed, summary, "int8").high < 0
    assert [round(one, 3) for one in pooled(committed, summary, "fp8")[:3]] == [0.018, 0.012, 0.024]
    assert round(pooled(committed, summary, "int4").value, 2) == 0.05
    among_others = NEEDLES._replace(task="niah-multikey-1-prose")
    found = [counts[place][:2] for place in ((NEEDLES, "fp8"), (among_others, "k8v4"), (among_others, "int4"))]
    assert found == [(17, 3), (17, 4), (33, 15)]
    assert round(-100 * pooled(committed, NEEDLES, "fp8").low, 1) == 4.2
    assert list(against(committed, "int8")) == ["`hybrid` diverges by 0.031 nats a token at 8,192 tokens"]
    assert all(list(against(committed, form)) for form in forms)
