"""The page of the real model's accuracy follows from the two results alone, and says what is missing."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.accuracy.smollm2 import page, tables
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, read
from benchmarks.accuracy.smollm2.claims import kind_of, smallest_stored
from benchmarks.accuracy.smollm2.comparisons import (
    BYTES,
    NO_MORE_BYTES,
    TOKENS,
    beside_policies,
    beside_presses,
    verdicts,
)
from benchmarks.accuracy.smollm2.figures import against_bytes
from benchmarks.accuracy.smollm2.stages import POOLS, WIDE_POOL
from benchmarks.page import IMAGES, signed
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
"""Seventy questions, of which the full cache answers eight in ten."""
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


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def cell(found: Comparison, **wanted: str) -> dict[str, str]:
    """Return the one line of the cells' CSV with these values."""
    (one,) = (row for row in rows(tables.cells(found)) if wanted.items() <= row.items())
    return one


def compared(found: Comparison, **wanted: str) -> list[tuple[str, str, str, str]]:
    """Method, difference, standard error and verdict of the comparisons with these values."""
    chosen = (row for row in rows(tables.comparisons(found)) if wanted.items() <= row.items())
    return [(row["method"], row["difference"], row["standard_error"], row["verdict"]) for row in chosen]


def test_a_policy_is_judged_on_what_the_full_cache_answers(found: Comparison):
    one = found.cell(OURS, GROUP, "rocketkv", "budget 256")
    assert one is not None
    assert (one.mean.value, found.on_answered(one).value, found.on_answered(one).samples) == (0.8, 1.0, 56)
    row = cell(found, engine="kvc-trt", task="niah-single-1", method="rocketkv")
    assert (row["point"], row["stored_bytes"], row["questions"]) == ("budget 256", str(60 * MIB), "70")
    assert (row["mean"], row["low"], row["high"], row["minus_whole_cache"]) == ("0.8000", "0.6918", "0.8770", "0.0000")
    kept = [row[name] for name in ("of_its_answers", "of_its_answers_low", "of_its_answers_high", "its_answers")]
    assert kept == ["1.0000", "0.9358", "1.0000", "56"]
    row = cell(found, engine="kvc-trt", task="log-summary", method="rocketkv")
    assert (row["questions"], row["mean"], row["standard_error"]) == ("2", "2.2500", "0.2500")
    assert (row["minus_whole_cache"], row["minus_whole_cache_error"], row["low"]) == ("0.2500", "0.2500", "")
    assert "**One needle**: 100 % of 56 answers;" in page.measured(found)


def test_policies_stand_beside_presses_at_equal_tokens_and_equal_bytes(found: Comparison):
    place = {"task": "niah-single-1", "policy": "rocketkv"}
    tokens = compared(found, **place, engine="kvpress", equal="equal token budget")
    assert tokens[0] == ("snapkv", "0.8000", "0.0482", "better")
    equal_bytes = compared(found, **place, equal="equal bytes")
    absent = [("tova", "", "", "not asked"), ("adakv-snapkv", "", "", "frees no bytes")]
    assert equal_bytes == [("snapkv", "0.0000", "0.0000", "equal"), *absent]
    hybrid = compared(found, task="niah-single-1", policy="hybrid", equal="equal token budget")
    assert hybrid[:2] == [("snapkv", "0.0000", "0.0000", "equal"), ("tova", "-0.8000", "0.0482", "worse")]
    text = " ".join(page.measured(found).split())
    presses = "kvpress. At *equal bytes*: **never better than** `snapkv` (nor worse in 1, with 0.44 of the bytes)."
    assert presses in text
    assert "At an *equal token budget*: **never better than** `tova` (nor worse in 1, with 0.19 of" in text


def test_policies_stand_beside_each_other_at_equal_tokens_and_with_no_more_bytes(found: Comparison):
    text = " ".join(page.measured(found).split())
    larger = "With *no more bytes*: **never better than** `tova` (worse in 1 of 1, with 0.37 of the bytes)."
    equal = "**never better than** `tova` (nor worse in 1, with 0.18 of the bytes); better than `hybrid` (1 of 1)."
    assert f"- Our policies. {larger} At an *equal token budget*: {equal}" in text


def test_too_few_questions_give_no_verdict(found: Comparison):
    """Two questions: no verdict; where the whole prompt fits, that is said."""
    place = {"task": "log-summary", "policy": "rocketkv"}
    assert compared(found, **place, equal="equal token budget")[0] == ("snapkv", "-2.0000", "0.0000", "too few")
    assert compared(found, **place, equal="equal bytes")[0] == ("snapkv", "", "", "the whole prompt fits")
    text = page.measured(found)
    assert "summary**" not in text
    assert "nothing is" not in text


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


def test_many_comparisons_raise_the_bar_for_each():
    """Better on six questions of 64, and worse on none: chance of 3 %, unless that is one of several comparisons."""
    better, equal, few = cells_of((1.0,) * 6 + (0.0,) * 58, (0.0,) * 64, (0.0,) * 63)
    assert list(verdicts([(better, equal)]).values()) == ["better"]
    assert list(verdicts([(better, equal), (better, better)]).values()) == ["equal", "equal"]
    assert list(verdicts([(better, equal), (better, few)]).values()) == ["better", "too few"]


def test_a_difference_without_spread_has_no_error_bar():
    assert signed(mean([-1, -1]), 100, 1) == "-100.0 on each"
    assert signed(mean([1, 0]), 100, 1) == "+50.0 ± 50.0"


def test_the_smallest_cache_counts_only_if_all_larger_ones_answer_too(found: Comparison):
    """tova answers at 11 MiB, fails at 44 and answers at 66; AdaKV frees nothing, and hybrid never answers."""
    text = " ".join(page.measured(found).split())
    assert "90 % need, of 90.0 MiB: `tova` 11.0, `rocketkv` 60.0; kvpress `snapkv` 26.4, `tova` 66.4." in text
    assert smallest_stored(found, [one for one in found.of(OURS, GROUP) if one.method == "hybrid"]) is None


def test_adakv_counts_the_bytes_of_the_whole_cache(found: Comparison):
    one, full = found.cell(KVPRESS, GROUP, "adakv-snapkv", "budget 256"), found.full(GROUP, KVPRESS)
    assert one is not None
    assert full is not None
    assert one.stored == full.stored == 2048 * 46080
    assert cell(found, method="adakv-snapkv")["stored_bytes"] == str(90 * MIB)
    assert "| kvpress `adakv-snapkv` | - / 90.0 / - |" in page.measured(found)


@pytest.mark.parametrize(("field", "value"), [("settings", {"checkpoint": "other"}), ("dataset", "other")])
def test_answers_to_other_questions_are_not_paired(found: Comparison, tmp_path: Path, field: str, value: object):
    changed = {**found.theirs, field: value}
    if field == "dataset":
        changed = {**found.theirs, "cells": [{**one, field: value} for one in found.theirs["cells"]]}
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"expected answers .* found other; run make"):
        read(tmp_path / "ours.json", path)


def test_the_page_names_missing_answers(found: Comparison):
    text = page.measured(found)
    assert "`needles` (19 % of its answers are here)" in text
    assert "`answered` (12 % of its answers are here)" in " ".join(text.split())  # one of eight tasks
    assert "score 72 of 72 questions alike" in text
    assert "| whole cache | 90.0 | 80 | 2.00 nats |" in text
    assert cell(found, method="full", engine="kvc-trt", task="niah-single-1")["mean"] == "0.8000"
    assert cell(found, method="snapkv", point="budget 128")["reason"] == "too small"


def test_the_page_compares_snapkvs_pools_and_windows(tmp_path: Path, found: Comparison):
    assert "SnapKV's pool and window" not in page.measured(found)
    path = tmp_path / "more.json"
    changed = [ours(policy, 512, [1] * 12 + [0] * 4, 22) for policy in POOLS]
    path.write_text(json.dumps({**found.ours, "cells": [*found.ours["cells"], *changed]}))
    more = read(path, None)
    text = " ".join(page.measured(more).split())
    assert "of the first 16 questions of one needle, of which the whole cache answers 16," in text
    assert "pool 63: n/a, n/a, 12;" in text
    assert "`tova`: n/a, 16, 16." in text
    assert "`snapkv-gqa:window=1`" not in text
    assert cell(more, method="snapkv-gqa:window=1")["mean"] == "0.7500"


def test_plots_are_drawn_for_answers_and_likelihoods(found: Comparison):
    groups = page.plotted(found)
    assert [page.image(group).name for group in groups] == [
        f"accuracy-smollm2-{task}-2048-query-aware.png" for task in ("niah-single-1", "log-summary")
    ]
    assert all(against_bytes(found, group).startswith(b"\x89PNG") for group in groups)


@pytest.fixture(scope="module")
def committed() -> Comparison:
    return page.recorded()


def test_the_page_is_that_of_the_results(committed: Comparison):
    command = "python -m benchmarks.accuracy.smollm2.page"
    assert page.MARKS.inside(page.PAGE) == page.measured(committed), command
    for path, text in page.sidecars(committed).items():
        assert path.read_text(encoding="utf-8") == text, command
    drawn = {page.image(group) for group in page.plotted(committed)}
    assert drawn == set(IMAGES.glob("accuracy-smollm2-*")), command


def test_the_page_is_short(committed: Comparison):
    assert len(page.PAGE.read_text(encoding="utf-8").splitlines()) <= 120
    assert len(page.plotted(committed)) == 5


def test_every_cell_is_in_the_csv(committed: Comparison):
    assert len(rows(tables.cells(committed))) == len(committed.cells) + len(committed.absent)


def test_the_pages_introduction_follows_from_the_results(committed: Comparison):
    """On needles that the prompt asks for, RocketKV is never better than these, which store less."""
    asked = [group for group in committed.groups if kind_of(group) == "query-aware"]
    beside = [row for group in asked for row in beside_policies(committed, group) if row.alike == NO_MORE_BYTES]
    for method in ("snapkv++", "tova", WIDE_POOL):
        judged = [row for row in beside if row.method == method]
        assert len(judged) == 12
        assert {row.verdict for row in judged} <= {"equal", "worse"}
        assert all(row.other.stored < row.mine.stored for row in judged)
    tova = [
        row.verdict
        for group in asked
        for row in beside_policies(committed, group)
        if (row.method, row.alike) == ("tova", TOKENS)
    ]
    claim = f"At an equal token budget it beats TOVA in {tova.count('better')} of {len(tova)} comparisons.**"
    assert claim in " ".join(page.PAGE.read_text(encoding="utf-8").split())
    late = [group for group in committed.groups if kind_of(group) != "query-aware" and committed.of(OURS, group)]
    presses = [row for group in late for row in beside_presses(committed, group) if row.mine.method == "rocketkv"]
    matched = {
        (row.mine.group, row.method): "better" not in [
            other.verdict for other in presses
            if (other.mine.group, other.method, other.alike) == (row.mine.group, row.method, BYTES)
        ]
        for row in presses if row.alike == BYTES and row.other is not None
    }  # fmt: skip
    for group in late:
        alike = [held for (one, _), held in matched.items() if one == group]
        assert sum(alike) > len(alike) / 2


def test_without_kvpress_the_page_is_ours_alone(found: Comparison, tmp_path: Path):
    alone = page.measured(read(tmp_path / "ours.json", tmp_path / "absent.json"))
    assert "kvpress" not in alone
    assert "transformers" not in alone


def test_tasks_that_the_whole_cache_fails_are_named_as_no_test_of_policies(tmp_path):
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
    said = "less than 10 % of these, so policies are not asked them: lines."
    others = "Of the other groups that no policy was asked (1), it answers 12 %."
    assert f"{said} {others}" in " ".join(text.split())


def test_of_two_points_with_equal_bytes_the_larger_budget_decides(tmp_path):
    cells = [ours("full", None, RIGHT, 90), ours("hybrid", 256, WRONG, 120), ours("hybrid", 512, RIGHT, 120)]
    settings = {"checkpoint": "c", "weights": "fp32", "seed": 0, "max_new_tokens": {}}
    result = {"machine": MACHINE, "settings": settings, "spent": {"processor_seconds": 5}, "cells": cells}
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(result))
    found = read(path, None)
    assert smallest_stored(found, found.of(OURS, GROUP)) == 120 * MIB
