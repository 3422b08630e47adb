from __future__ import annotations

from benchmarks import store
from benchmarks.accuracy import tool_calls_page as page

CELL = {"task": "tool-calls", "mode": "query-aware", "length": 640, "framing": "plain", "max_new_tokens": 40}
RESULT = {
    "machine": {"versions": {"kvc_trt": "0", "onnxruntime": "1"}, "commit": "abc", "device": "a CPU"},
    "spent": {"processor_seconds": 1234},
    "settings": {"weights": "fp32"},
    "cells": [
        {**CELL, "policy": "full", "scores": [1, 1, 1, 0, 1]},
        {**CELL, "policy": "snapkv", "token_budget": 8, "scores": [0, 0, 1, 1]},
        {**CELL, "policy": "none", "reason": "it cannot"},
    ],
}


def test_each_row_compares_a_policy_on_the_same_questions():
    text = page.text(RESULT)
    assert "1,234 s of processor time" in text.replace("\n", " ")
    assert "| `full` | - | 80.0 % " in text
    assert "| `snapkv` | 8 | 50.0 % " in text
    assert "| 2 : 1 | -25.0 ± " in text
    assert "`none`: it cannot" in text


def test_the_page_is_that_of_the_result():
    assert page.MARKS.inside(page.PAGE) == page.text(page.read(store.RESULTS)), (
        "python -m benchmarks.accuracy.tool_calls_page"
    )
