"""JSON of strangers: the same values as Python reads, and no more of them than other threads can wait for."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.files import foreign_json as module
from kvc_trt.files.foreign_json import foreign_json

TEXTS = st.text(st.sampled_from('"\\[]{},:a\u00e9'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def values_in(value: object) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else int(isinstance(value, str))


@given(VALUES, st.booleans(), st.integers(2, 9))
def test_values_are_read_and_counted_however_the_text_is_cut(value, escaped, short):
    text = json.dumps(value, ensure_ascii=escaped)
    count = values_in(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHORT", short)
        patch.setattr(module, "MOST_VALUES", count)
        assert foreign_json(text) == value
        if count and len(text) > short:
            patch.setattr(module, "MOST_VALUES", count - 1)
            with pytest.raises(InputError, match=f"more than {count - 1} objects, lists and texts"):
                foreign_json(text)


@pytest.mark.parametrize("text", ["", "[1,]", "NaN", "[-Infinity]", "[" * 100_000, "9" * 5000, '"a', "'a'"])
@pytest.mark.parametrize("short", [2, 1 << 20])
def test_malformed_json_is_an_error(monkeypatch, text, short):
    monkeypatch.setattr(module, "_SHORT", short)
    with pytest.raises((ValueError, RecursionError)):
        foreign_json(text)


def test_long_lists_of_numbers_are_read():
    assert foreign_json(f"[{'1,' * 50_000}-2.5e3]") == [1] * 50_000 + [-2500.0]
    assert math.isinf(foreign_json(f"[{'1,' * 50_000}1e999]")[-1])


@pytest.mark.parametrize("unit", ["[],", "{},", '"",', '{"a":1},', "[[[]]],"])
def test_many_values_are_refused_before_they_are_read(monkeypatch, unit):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(InputError, match="it holds more than 262144 objects, lists and texts"):
        foreign_json(f"[{unit * 300_000}1]")
