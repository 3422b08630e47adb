"""YAML as a stranger may write it: plain values, bounded time, one line for everything else."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvc_trt
from kvc_trt.config import parse_settings, read_configuration
from kvc_trt.errors import InputError
from kvc_trt.files.strict_yaml import DEEPEST, LARGEST_YAML, MOST_VALUES, parsed_yaml

LONGEST_SECONDS = 10.0
"""Processor time; the slowest text takes a quarter of a second on a slow machine."""
ALIASES = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)
INLINE_ALIASES = "[&a [1,1,1], &b [*a,*a,*a], &c [*b,*b,*b]]"
VALUES = {
    "": None, "~": None, "null": None, "true": True, "False": False, "yes": "yes", "off": "off", "1:30": "1:30",
    "2026-01-01": "2026-01-01", "2026-01-01 10:20:30": "2026-01-01 10:20:30", "010": 10, "0o17": 15, "0x1f": 31,
    "1_000": "1_000", "-3": -3, "1e3": 1000.0, ".5": 0.5, ".inf": ".inf", ".nan": ".nan", "'7'": "7", '"true"': "true",
    "<<": "<<", "=": "=", "[1, a]": [1, "a"], "{a: 1}": {"a": 1}, "a b": "a b", "0b11": "0b11", "größe": "größe",
}  # fmt: skip
REFUSED = {
    "a: 1\na: 2": "line 2: key 'a' is repeated",
    '{"a": 1, "a": 2}': "key 'a' is repeated",
    "1: 2": "line 1: key 1 is not text",
    "a: {1.5: 2}": "key 1.5 is not text",
    "true: 2": "key True is not text",
    "null: 2": "key None is not text",
    "? [a]\n: 2": "is not text",
    "? {a: 1}\n: 2": "is not text",
    "a: &a 1": "line 1: an anchor",
    "a: *a": "line 1: an alias",
    ALIASES: "line 1: an anchor",
    "a: !!python/object/apply:os.system [x]": "line 1: a tag",
    "a: !!timestamp foo": "a tag",
    "a: !!bool foo": "a tag",
    "a: !!int ''": "a tag",
    "a: !!binary x": "a tag",
    "a: ! b": "a tag",
    "a: 1\n---\nb: 2": "a second document",
    "a: [1": "expected ',' or ']'",
    'a: "\\UFFFFFFFF"': "an escape .* no character",
    'a: "\\ud800"': "half of a character",
    '{"a": "\\ud800"}': "half of a character",
    "a: " + "9" * 101: "an integer of more than 100 digits",
    '{"a": ' + "9" * 200 + "}": "an integer of more than 100 digits",
    "a: 1e999": "beyond what 64 bits hold",
    '{"a": 1e999}': "beyond what 64 bits hold",
    '{"a": NaN}': "NaN is not a number of JSON",
    "a: " + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1): f"nested more than {DEEPEST} deep",
    '{"a": ' + "[" * 500 + "]" * 500 + "}": f"nested more than {DEEPEST} deep",
    '{"a": ' + "[" * 20_000: "nested more than",
    "a\x00b": "special characters are not allowed",
    "a: \x1b[31m": "special characters are not allowed",
    "%YAML 2.0\n---\na: 1": "incompatible YAML document",
    "#" * (2 * LARGEST_YAML): r"expected at most 32\.0 KiB, or JSON",
    '{"a": [' + "1," * MOST_VALUES + "1]}": f"more than {MOST_VALUES} values",
}
SLOW = {
    "keys": "".join(f"k{number}: 1\n" for number in range(3500)),
    "unknown keys of JSON": json.dumps({f"k{number}": 1 for number in range(90_000)}),
    "a list": "a: [" + "1," * 16_000 + "1]",
    "a list that does not end": '{"a": [' + "1," * 16_000,
    "a list in lines": "a:\n" + "- 1\n" * 8_000,
    "brackets": "a: " + "[" * 32_000,
    "braces": "a: " + "{" * 32_000,
    "complex keys": "? " * 16_000,
    "sexagesimals": "a: " + ":".join(["59"] * 10_000),
    "digits": "a: " + "9" * 32_000,
    "digits of a fraction": "a: 0." + "9" * 32_000,
    "a timestamp": "a: 2026-01-01 10:20:30." + "9" * 32_000,
    "words": "a: " + "x " * 16_000,
    "a long name": "a" * 32_000 + ": 1",
    "escapes": 'a: "' + "\\x41" * 8_000 + '"',
    "blank lines": "\n" * 32_000,
    "anchors": "a: [" + ",".join(f"&a{number} 1" for number in range(3000)) + "]",
}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_a_scalar_means_what_the_core_schema_says(text: str, value: Any) -> None:
    found = parsed_yaml(f"a: {text}", "f")
    assert found == {"a": value}
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=range(len(REFUSED)))
def test_unsupported_yaml_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "build.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"build\.yaml is not valid YAML: .*{message}") as caught:
        read_configuration(tmp_path / "build.yaml")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(("text", "message"), [(INLINE_ALIASES, "an anchor"), ("!!bool foo", "a tag"), ("[1", "','")])
def test_a_setting_is_read_as_strictly_as_a_file(text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"--set model=.*: the value is not valid YAML: .*{message}"):
        parse_settings([f"model={text}"])
    assert parse_settings(["split=1:30"]) == {"split": "1:30"}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_hostile_text_is_refused_quickly(text: str, tmp_path: Path) -> None:
    from kvc_trt.config import configured

    (tmp_path / "build.yaml").write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(InputError) as caught:
        configured(tmp_path / "build.yaml")
    assert time.process_time() - began < LONGEST_SECONDS
    assert len(caught.value.message) < 600


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab:-?[]{},&*!|>'\"%@`#\n 0123456789.eExo_~<=\\u", max_size=80),
    st.lists(
        st.sampled_from(
            ["a: ", "- ", "? ", ": ", "[", "]", "{", "}", ",", "\n", "  ", "1", "1.5", "1:30", "~", "yes", "*a", "&a ",
             "!!str ", "!!set ", "<<", "'", '"', "\\", "\\ud800", "|\n", ">-\n", "---\n", "...\n", "%YAML 1.1\n", "b"]
        ),
        max_size=40,
    ).map("".join),
)  # fmt: skip


def check_plain(value: Any) -> None:
    assert type(value) in (str, int, float, bool, type(None), list, dict)
    if isinstance(value, str):
        value.encode()
    if isinstance(value, float):
        assert math.isfinite(value)
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_plain(below)


@settings(max_examples=400, deadline=1000)
@given(TEXTS)
def test_values_read_from_any_text_are_plain(text: str) -> None:
    with contextlib.suppress(InputError):
        check_plain(parsed_yaml(text, "f"))


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**90), 10**90), st.text(max_size=20))
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=1000)
@given(st.dictionaries(st.text(max_size=8), PLAIN, max_size=5))
def test_json_is_read_as_json(value: dict[str, Any]) -> None:
    assert parsed_yaml(json.dumps(value), "f") == value
    assert parsed_yaml(json.dumps(value, ensure_ascii=False), "f") == value


def test_nothing_else_reads_yaml() -> None:
    package = Path(kvc_trt.__file__).parent
    readers = {"yaml.safe_load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.compose", "yaml.parse("}
    found = [
        path.relative_to(package).as_posix()
        for path in sorted(package.rglob("*.py"))
        if any(reader in path.read_text(encoding="utf-8") for reader in readers)
    ]
    assert found == ["files/strict_yaml.py"]
