"""docs/kernels.md agrees with the result, and keeps predictions out of the column of measurements."""

from __future__ import annotations

import copy
import re

import pytest

from benchmarks.predict import __main__ as command
from benchmarks.predict import page
from benchmarks.predict.bars import bars


def test_the_page_is_what_the_result_says() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.whole(text, page.read()) == text, "make predict"


def test_the_result_says_that_nothing_was_measured() -> None:
    result = page.read()
    assert result["measured"] is False
    assert result["kind"] == "prediction"
    for snapshot in (result["before"], result["now"]):
        assert {"commit", "nvcc", "architecture", "sources"} <= set(snapshot)


def test_no_prediction_stands_in_the_column_of_measurements() -> None:
    rows = [line.split(" | ") for line in page.predicted(page.read()).splitlines() if line.startswith("|")]
    start = next(number for number, row in enumerate(rows) if "measured" in row)
    column = rows[start].index("measured")
    bars_rows = rows[start + 2 :][: len({(bar.text, bar.case) for bar in bars(page.read()["now"])})]
    assert len(bars_rows) > 10
    assert all(re.fullmatch(r"not run: `[^`]+`", row[column]) for row in bars_rows)


def test_bars_that_only_the_lower_bandwidth_meets_are_counted() -> None:
    result = page.read()
    shares = [bar for bar in bars(result["now"]) if bar.of_published is not None]
    only = [bar for bar in shares if bar.predicted >= bar.limit > bar.of_published]
    assert only
    text = " ".join(page.predicted(result).split())
    assert f"Of {len(shares)} predicted shares (two GPUs each), **{len(only)} are met only because" in text
    assert all(f"{bar.of_published:.1f} % (missed)" in text for bar in only)


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.check() == 0
    changed = copy.deepcopy(page.read())
    changed["now"]["calls"][0]["gpus"]["H200"]["predicted_us"] += 1
    monkeypatch.setattr(page, "read", lambda: changed)
    assert command.check() == 1
    assert "kernels.md is not what" in capsys.readouterr().err


def test_merging_keeps_the_earlier_predictions_beside_the_new_ones() -> None:
    first, second, third = ({"commit": name} for name in "abc")
    result = command.merged({}, first, as_before=True)
    assert (result["before"], result["now"]) == (first, first)
    result = command.merged(result, second, as_before=False)
    assert (result["before"], result["now"]) == (first, second)
    result = command.merged(result, third, as_before=True)
    assert (result["before"], result["now"]) == (third, second)
