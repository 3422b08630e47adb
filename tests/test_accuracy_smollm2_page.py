"""The page of the real model's accuracy follows from the two results alone, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accuracy_smollm2_page as page
from benchmarks.accuracy_smollm2_cells import KVPRESS, OURS, Answered, Comparison, Group, read
from benchmarks.accuracy_smollm2_claims import signed, verdict
from kvc_trt.accuracy.cell import mean
from kvc_trt.errors import InputError

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
    cell = {**place, "dataset": "d", "policy": policy, "row_bytes": stored * MIB, "scores": scores, "scored_by": by}
    return cell if budget is None else {**cell, "token_budget": budget}


def theirs(press, label, scores, kept, place=PLACE):
    return {
        **place, "dataset": "d", "press": press, "label": label, "kept": [kept], "output_tokens": 10, "scores": scores,
    }  # fmt: skip


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
        theirs("full", "full", right, 2038),
        theirs("snapkv", "budget 256", [0] * 10, 246),
        theirs("snapkv", "bytes of rocketkv 256", right, 590),
        theirs("snapkv", "ratio 0.5", [0] * 10, 500),
        theirs("tova", "budget 256", right, 246),
        theirs("tova", "ratio 0.5", [0] * 10, 1000),
        theirs("tova", "ratio 0.25", right, 1500),
        theirs("adakv-snapkv", "budget 256", right, 246),
        theirs("full", "full", [1.5, 2.5], 1980, SUMMARY),
        theirs("snapkv", "budget 256", [4.0, 4.5], 246, SUMMARY),
    ]
    settings = {"checkpoint": "c", "weights": "fp32", "seed": 0, "max_new_tokens": {"niah-single-1": 12}}
    first = {"machine": MACHINE, "settings": settings, "spent": {"processor_seconds": 5}, "cells": mine}
    second = {
        "machine": MACHINE,
        "settings": {"checkpoint": "c"},
        "seconds": 7,
        "bytes_per_token": 46080,
        "cells": other,
    }
    paths = [tmp_path / name for name in ("ours.json", "theirs.json")]
    for path, content in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(content))
    return read(*paths)


def test_a_policy_is_judged_on_what_the_full_cache_answers(found: Comparison):
    cell = found.cell(OURS, GROUP, "rocketkv", "budget 256")
    assert cell is not None
    assert (cell.mean.value, found.on_answered(cell).value, found.on_answered(cell).samples) == (0.8, 1.0, 8)
    text = page.measured(found)
    assert "| `rocketkv` | budget 256 | 60.0 | 10 | 80.0 % (49-94) | +0.0 on each | 100.0 % (68-100; 8) |" in text
    assert "| `rocketkv` | budget 256 | 60.0 | 2 | 2.250 ± 0.177 | +0.250 ± 0.177 |" in text


def test_policies_stand_beside_presses_at_equal_tokens_and_equal_bytes(found: Comparison):
    text = page.measured(found)
    assert "| `rocketkv` 256 | equal token budget | **+80.0 ± 12.6 (10)** |" in text
    assert "| `rocketkv` 256 | equal bytes | +0.0 on each (10) |" in text
    assert "| `hybrid` 256 | equal token budget | +0.0 on each (10) |" in text
    assert "| `rocketkv` 256 | equal token budget | -2.000 on each (2) |" in text  # two questions show nothing
    few = "(a direction, n = 10): `rocketkv` is"
    assert f"- {GROUP}, budget 256, equal tokens {few} better than `snapkv`; not told from `tova`, `adakv-" in text
    assert f"- {GROUP}, budget 256, equal bytes {few} not told from `snapkv`." in text
    assert f"- {GROUP}, budget 256 {few} better than `hybrid`." in text


def test_enough_questions_are_no_direction(tmp_path: Path, found: Comparison):
    path = tmp_path / "ours.json"
    cells = [ours("full", None, [1] * 64, 90), ours("rocketkv", 256, [1] * 64, 60), ours("tova", 256, [0] * 64, 11)]
    path.write_text(json.dumps({**found.ours, "cells": cells}))
    text = page.measured(read(path, None))
    assert f"- {GROUP}, budget 256 (n = 64): `rocketkv` is better than `tova`." in text
    assert f"- {GROUP}, kvc-trt (n = 64, of which" in text


def test_a_verdict_points_where_its_test_points():
    """Worse on 27 questions by little, better on 5 by much: the mean says better, and the test counts questions."""
    cells = [
        Answered(OURS, GROUP, "rocketkv", "budget 256", 1, scores, likelihood=likelihood)
        for likelihood in (True, False)
        for scores in ((2.01,) * 27 + (0.0,) * 5, (2.0,) * 32)
    ]
    assert verdict(cells[0], cells[1]) == "worse"
    assert verdict(cells[1], cells[0]) == "better"
    assert verdict(cells[2], cells[3]) == "better"
    assert verdict(cells[3], cells[3]) == "equal"


def test_an_error_that_says_nothing_is_not_written():
    assert signed(mean([-1, -1]), 100, 1) == "-100.0 on each"
    assert signed(mean([1, 0]), 100, 1) == "+50.0 ± 35.4"


def test_the_smallest_cache_is_one_from_which_on_every_larger_one_answers_too(found: Comparison):
    """tova answers at 11 MiB, fails at 44 and answers at 66; AdaKV frees nothing."""
    lines = [line for line in page.measured(found).splitlines() if line.startswith(f"- {GROUP}, k")]
    asked = "a direction, n = 10, of which the whole cache answers 8 with 90.0 MiB; at most"
    assert lines == [
        f"- {GROUP}, kvc-trt ({asked} 1 points a method): `rocketkv` 60.0; at no point: `hybrid`.",
        f"- {GROUP}, kvpress ({asked} 3 points a method): `snapkv` 26.4, `tova` 66.4; "
        "no smaller than the whole cache: `adakv-snapkv` 90.0.",
    ]


def test_adakv_is_charged_what_it_stores(found: Comparison):
    cell, full = found.cell(KVPRESS, GROUP, "adakv-snapkv", "budget 256"), found.full(GROUP, KVPRESS)
    assert cell is not None
    assert full is not None
    assert cell.stored == full.stored == 2048 * 46080
    assert "| `adakv-snapkv` | budget 256 | 90.0 |" in page.measured(found)


@pytest.mark.parametrize(("field", "value"), [("settings", {"checkpoint": "other"}), ("dataset", "other")])
def test_answers_to_other_questions_are_not_paired(found: Comparison, tmp_path: Path, field: str, value: object):
    changed = {**found.theirs, field: value}
    if field == "dataset":
        changed = {**found.theirs, "cells": [{**one, field: value} for one in found.theirs["cells"]]}
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"expected answers .* found other; run make"):
        read(tmp_path / "ours.json", path)


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
