"""The page of the shipped model's accuracy follows from its result alone."""

from __future__ import annotations

import pytest

from benchmarks import store
from benchmarks.accuracy import page
from kvc_trt.accuracy.cell import Mean, mean


@pytest.fixture(scope="module")
def result():
    return store.recorded(page.NAME, "make bench-accuracy")


def test_the_page_is_that_of_the_result(result):
    assert page.MARKS.inside(page.PAGE) == page.measured(result), "python -m benchmarks.accuracy.page"
    assert page.CELLS.read_text(encoding="utf-8") == page.csv_of(result)
    assert len(page.CELLS.read_text(encoding="utf-8").splitlines()) == 1 + len(result["cells"])


def test_the_page_is_short():
    lines = page.PAGE.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("|") for line in lines) <= 100


def test_means_of_parts_make_the_mean_of_all():
    first, second = [1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 1.0]
    pooled, whole = page.pool([mean(first), mean(second)], page.TAKEN), mean([*first, *second])
    assert (pooled.value, pooled.standard_error) == pytest.approx((whole.value, whole.standard_error))
    assert page.pool([Mean(0.5, 0.0884, 32)], 0).standard_error == pytest.approx(0.0884)


def test_a_task_that_does_not_count_is_left_out_and_one_without_an_answer_leaves_no_mean(result):
    cell = {"evidence": True, "accuracy": 1.0, "standard_error": 0.0, "samples": 4}
    assert page._mean([cell, {**cell, "evidence": False, "accuracy": 0.0}], page.TAKEN) == "100.0 ± 0.0 (4)"
    assert page._mean([cell, {"evidence": True, "reason": "too small"}], page.TAKEN) == "n/a"
