"""The page of the real model's accuracy follows from the two results alone, and names missing parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accuracy_smollm2_page as page
from benchmarks.accuracy_smollm2_cells import KVPRESS, OURS, Answered, Comparison, Group, read
from benchmarks.accuracy_smollm2_claims import signed, verdicts
from benchmarks.accuracy_smollm2_stages import POOLS
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


RIGHT = [1] * 56 + [0] * 14
"""Seventy questions; the full cache answers eight in ten."""
WRONG = [0] * 70


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    mine = [
        ours("full", None, RIGHT, 90),
        ours("rocketkv", 256, RIGHT, 60),
        ours("hybrid", 256, WRONG, 120),
        ours("tova", 256, RIGHT, 11),
        ours("tova", 512, [1] * 70, 22),
        {**PLACE, "policy": "snapkv", "token_budget": 128, "reason": "too small"},
        ours("full", None, [1.5, 2.5], 90, SUMMARY),
        ours("rocketkv", 256, [2.0, 2.5], 60, SUMMARY),
    ]
    other = [
        theirs("full", "full", RIGHT, 2038),
        theirs("snapkv", "budget 256", WRONG, 246),
        theirs("snapkv", "bytes of rocketkv 256", RIGHT, 590),
        theirs("snapkv", "ratio 0.5", WRONG, 500),
        theirs("tova", "budget 256", RIGHT, 246),
        theirs("tova", "ratio 0.5", WRONG, 1000),
        theirs("tova", "ratio 0.25", RIGHT, 1500),
        theirs("adakv-snapkv", "budget 256", RIGHT, 246),
        theirs("full", "full", [1.5, 2.5], 1980, SUMMARY),
        theirs("snapkv", "budget 256", [4.0, 4.5], 246, SUMMARY),
        theirs("full", "bytes of rocketkv 256", [1.5, 2.5], 1980, SUMMARY),
        theirs("tova", "bytes of rocketkv 256", [2.0], 1970, SUMMARY),
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
    assert (cell.mean.value, found.on_answered(cell).value, found.on_answered(cell).samples) == (0.8, 1.0, 56)
    text = page.measured(found)
    assert "| `rocketkv` | budget 256 | 60.0 | 70 | 80.0 % (69-88) | +0.0 on each | 100.0 % (94-100; 56) |" in text
    assert "| `rocketkv` | budget 256 | 60.0 | 2 | 2.250 ± 0.250 | +0.250 ± 0.250 |" in text


def test_policies_stand_beside_presses_at_equal_tokens_and_equal_bytes(found: Comparison):
    text = page.measured(found)
    assert "| `rocketkv` 256 | equal token budget | **+80.0 ± 4.8 (70)** |" in text
    assert "| `rocketkv` 256 | equal bytes | +0.0 on each (70) | n/a | frees no bytes |" in text
    assert "| `hybrid` 256 | equal token budget | +0.0 on each (70) | *-80.0 ± 4.8 (70)* |" in text
    assert f"- {GROUP}, budget 256, equal token budget (n = 70): `rocketkv` is better than `snapkv`; not" in text
    assert f"- {GROUP}, budget 256, equal bytes (n = 70): `rocketkv` is not distinguishable from `snapkv`." in text


def test_policies_stand_beside_each_other_at_equal_tokens_and_with_no_more_bytes(found: Comparison):
    text = page.measured(found)
    said = "`rocketkv` is better than `hybrid`; not distinguishable from `tova`."
    assert f"- {GROUP}, budget 256 (n = 70): {said}" in text
    assert f"- {GROUP}, budget 256 and others with no more bytes (n = 70): `rocketkv` is worse than `tova` 512." in text


def test_of_few_questions_nothing_is_said(found: Comparison):
    """Two questions give neither a sentence nor a mark in the table; the page says where the whole prompt fits."""
    text, summary = page.measured(found), Group(**SUMMARY)
    assert "| `rocketkv` 256 | equal token budget | -2.000 on each (2) |" in text
    assert "| `rocketkv` 256 | equal bytes | the whole prompt fits |" in text
    assert f"- {summary}, budget" not in text
    assert "Of fewer than 64 questions nothing is said." in text


def cells_of(*scores: tuple[float, ...], likelihood: bool = False) -> list[Answered]:
    return [
        Answered(OURS, GROUP, f"method {place}", "budget 256", 1, one, likelihood=likelihood)
        for place, one in enumerate(scores)
    ]


@pytest.mark.parametrize("likelihood", [True, False])
def test_a_verdict_points_where_its_test_points(likelihood: bool):
    """Higher on 54 questions by little, lower on 10 by much: the mean says lower, and the test counts questions."""
    higher, lower = cells_of((2.01,) * 54 + (0.0,) * 10, (2.0,) * 64, likelihood=likelihood)
    found = verdicts([(higher, lower), (lower, higher), (lower, lower)])
    expected = ["worse", "better", "equal"] if likelihood else ["better", "worse", "equal"]
    assert list(found.values()) == expected


def test_among_many_comparisons_one_needs_more():
    """Better on six questions of 64, and worse on none: chance of 3 %, unless that is one of several comparisons."""
    better, equal, few = cells_of((1.0,) * 6 + (0.0,) * 58, (0.0,) * 64, (0.0,) * 63)
    assert list(verdicts([(better, equal)]).values()) == ["better"]
    assert list(verdicts([(better, equal), (better, better)]).values()) == ["equal", "equal"]
    assert list(verdicts([(better, equal), (better, few)]).values()) == ["better", "too few"]


def test_an_error_that_says_nothing_is_not_written():
    assert signed(mean([-1, -1]), 100, 1) == "-100.0 on each"
    assert signed(mean([1, 0]), 100, 1) == "+50.0 ± 50.0"


def test_the_smallest_cache_is_one_from_which_on_every_larger_one_answers_too(found: Comparison):
    """tova answers at 11 MiB, fails at 44 and answers at 66; AdaKV frees nothing."""
    lines = [line for line in page.measured(found).splitlines() if line.startswith(f"- {GROUP}, k")]
    asked = "n = 70, of which the whole cache answers 56 with 90.0 MiB; at most"
    assert lines == [
        f"- {GROUP}, kvc-trt ({asked} 2 points a method): `tova` 11.0, `rocketkv` 60.0; at no point: `hybrid`.",
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
    assert "`needles` (19 % of its answers are here)" in text
    assert "`answered` (12 % of its answers are here)" in text  # one of eight tasks
    assert f"- {GROUP}: 70 of 70" in text
    assert "| niah-single-1, query-aware, through the chat template | 80.0 % (69-88; 70) |" in text
    assert "`snapkv` 128, niah-single-1" in text
    assert "too small" in text


def test_what_snapkv_depends_on_is_a_table_of_its_own(tmp_path: Path, found: Comparison):
    assert "## SnapKV's pool and window" not in page.measured(found)
    path = tmp_path / "more.json"
    changed = [ours(policy, 512, [1] * 12 + [0] * 4, 22) for policy in POOLS]
    path.write_text(json.dumps({**found.ours, "cells": [*found.ours["cells"], *changed]}))
    text = page.measured(read(path, None))
    assert "The whole cache answers 16 of them." in text
    assert "| window 32, pool 63 | n/a | n/a | 12 (51-90) |" in text
    assert "| `tova`: window 1, no pool, one list for all heads | n/a | 16 (81-100) | 16 (81-100) |" in text
    assert "`snapkv-gqa:window=1`" not in text


def test_figures_are_drawn_for_answers_and_likelihoods(found: Comparison):
    images = dict(page._images(found))
    assert sorted(images) == [
        f"accuracy-smollm2-{kind}-{axis}.png" for kind in ("answers", "likelihood") for axis in ("budget", "bytes")
    ]
    assert all(image.startswith(b"\x89PNG") for image in images.values())


def test_without_kvpress_the_page_is_ours_alone(found: Comparison, tmp_path: Path):
    alone = page.measured(read(tmp_path / "ours.json", tmp_path / "absent.json"))
    assert "Beside kvpress" not in alone
    assert "transformers read" not in alone


def test_what_the_whole_cache_does_not_answer_is_said_to_be_no_question_for_policies(tmp_path):
    lines, keys = {**PLACE, "task": "lines"}, {**PLACE, "task": "niah-multikey-2"}
    cells = [
        ours("full", None, [0] * 16, 90, lines),
        ours("full", None, [1] * 2 + [0] * 14, 90, keys),
        ours("full", None, [0] * 16, 90),
        ours("tova", 256, [0] * 16, 11),
    ]
    settings = {"checkpoint": "c", "weights": "fp32", "seed": 0, "max_new_tokens": {}}
    result = {"machine": MACHINE, "settings": settings, "spent": {"processor_seconds": 5}, "cells": cells}
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(result))
    text = page.measured(read(path, None))
    assert f"less than 10% of these, so policies are not asked them: {Group(**lines)} (0.0 %, n 16)." in text


def test_of_points_with_equal_bytes_the_larger_budget_is_the_larger_one(tmp_path):
    cells = [ours("full", None, RIGHT, 90), ours("hybrid", 256, WRONG, 120), ours("hybrid", 512, RIGHT, 120)]
    settings = {"checkpoint": "c", "weights": "fp32", "seed": 0, "max_new_tokens": {}}
    result = {"machine": MACHINE, "settings": settings, "spent": {"processor_seconds": 5}, "cells": cells}
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(result))
    assert "none; no smaller than the whole cache: `hybrid` 120.0." in page.measured(read(path, None))
