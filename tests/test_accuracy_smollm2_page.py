"""The page of the real model's accuracy follows from the two results alone, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accuracy_smollm2_page as page
from benchmarks.accuracy_smollm2_cells import OURS, Comparison, Group, read

PLACE = {"task": "niah-single-1", "mode": "query-aware", "length": 2048, "framing": "chat"}
SUMMARY = {**PLACE, "task": "log-summary"}
GROUP = Group(**PLACE)
MIB = 1 << 20
MACHINE = {
    "commit": "abc", "device": "a processor",
    "versions": {"kvc_trt": "1", "onnxruntime": "2", "kvpress": "3", "transformers": "4", "torch": "5"},
}  # fmt: skip


def ours(policy, budget, scores, stored, place=PLACE):
    by = "likelihood" if place is SUMMARY else "answer"
    cell = {**place, "policy": policy, "row_bytes": stored * MIB, "scores": scores, "scored_by": by}
    return cell if budget is None else {**cell, "token_budget": budget}


def theirs(press, label, scores, kept, place=PLACE):
    return {**place, "press": press, "label": label, "kept": [kept], "output_tokens": 10, "scores": scores}


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    """Ten questions, of which the full cache answers eight."""
    right = [1] * 8 + [0] * 2
    mine = [
        ours("full", None, right, 90),
        ours("rocketkv", 256, right, 60),
        ours("hybrid", 256, [0] * 10, 120),
        {**PLACE, "policy": "snapkv", "token_budget": 128, "reason": "too small"},
        ours("full", None, [1.5, 2.5], 90, SUMMARY),
        ours("rocketkv", 256, [2.0, 2.5], 60, SUMMARY),
    ]
    other = [
        theirs("full", "full", right, 90),
        theirs("snapkv", "budget 256", [0] * 10, 246),
        theirs("snapkv", "bytes of rocketkv 256", right, 590),
        theirs("snapkv", "ratio 0.5", [0] * 10, 500),
        theirs("full", "full", [1.5, 2.5], 90, SUMMARY),
        theirs("snapkv", "budget 256", [4.0, 4.5], 246, SUMMARY),
    ]
    settings = {"weights": "fp32", "seed": 0, "max_new_tokens": {"niah-single-1": 12}}
    first = {"machine": MACHINE, "settings": settings, "spent": {"processor_seconds": 5}, "cells": mine}
    second = {"machine": MACHINE, "seconds": 7, "bytes_per_token": 46080, "cells": other}
    paths = [tmp_path / name for name in ("ours.json", "theirs.json")]
    for path, content in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(content))
    return read(*paths)


def test_a_policy_is_judged_on_what_the_full_cache_answers(found: Comparison):
    cell = found.cell(OURS, GROUP, "rocketkv", "budget 256")
    assert cell is not None
    assert (cell.mean.value, found.on_answered(cell).value, found.on_answered(cell).samples) == (0.8, 1.0, 8)
    text = page.measured(found)
    assert "| `rocketkv` | budget 256 | 60.0 | 10 | 80.0 % (49-94) | +0.0 ± 0.0 | 100.0 ± 0.0 (8) |" in text
    assert "| `rocketkv` | budget 256 | 60.0 | 2 | 2.250 ± 0.177 | +0.250 ± 0.177 |" in text


def test_policies_stand_beside_presses_at_equal_tokens_and_equal_bytes(found: Comparison):
    text = page.measured(found)
    assert "| `rocketkv` 256 | equal token budget | **+80.0 ± 12.6 (10)** |" in text
    assert "| `rocketkv` 256 | equal bytes | +0.0 ± 0.0 (10) |" in text
    assert "| `hybrid` 256 | equal token budget | +0.0 ± 0.0 (10) |" in text
    assert "| `rocketkv` 256 | equal token budget | -2.000 ± 0.000 (2) |" in text  # two questions show nothing
    assert f"- {GROUP}, budget 256, equal tokens (n 10): `rocketkv` is better than `snapkv`." in text
    assert f"- {GROUP}, budget 256, equal bytes (n 10): `rocketkv` is not told from `snapkv`." in text
    assert f"- {GROUP}, budget 256 (n 10): `rocketkv` is better than `hybrid`." in text


def test_the_smallest_cache_that_still_answers_is_found_on_both_sides(found: Comparison):
    line = next(line for line in page.measured(found).splitlines() if line.startswith(f"- {GROUP}: "))
    assert line.endswith(": `snapkv` of kvpress 26.4, `rocketkv` 60.0; at no point: `hybrid`.")


def test_what_is_missing_is_said(found: Comparison):
    text = page.measured(found)
    assert "`needles` (0 of 1 groups have all 64 questions)" in text
    assert "| 10 of 10 |" in text
    assert "`snapkv` 128, niah-single-1" in text
    assert "too small" in text


def test_figures_are_drawn_for_answers_and_likelihoods(found: Comparison):
    images = dict(page._images(found))
    assert sorted(images) == [
        f"accuracy-smollm2-{kind}-{axis}.png" for kind in ("answers", "likelihood") for axis in ("budget", "bytes")
    ]
    assert all(image.startswith(b"\x89PNG") for image in images.values())


def test_without_kvpress_the_page_is_ours_alone(found: Comparison, tmp_path: Path):
    alone = page.measured(read(tmp_path / "ours.json", tmp_path / "absent.json"))
    assert "Beside kvpress" not in alone
    assert "not asked" in alone
