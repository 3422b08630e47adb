from __future__ import annotations

import math

import pytest
from pydantic import model_validator

from kvc_trt.errors import InputError
from kvc_trt.validation import ForeignSchema, OwnSchema, parse_assignments, validated


class Own(OwnSchema):
    count: int
    share: float = 0.5


class Foreign(ForeignSchema):
    count: int
    share: float = 0.5


def test_our_files_have_no_unknown_keys_and_foreign_ones_may():
    with pytest.raises(InputError, match=r"^a\.yaml: unknown key 'cuont'; did you mean 'count'\?$"):
        validated(Own, {"count": 1, "cuont": 2}, "a.yaml")
    assert validated(Foreign, {"count": 1, "cuont": 2}, "a.json") == Foreign(count=1)


def test_null_counts_as_absent_in_foreign_files_only():
    assert validated(Foreign, {"count": 1, "share": None}, "a.json").share == 0.5
    with pytest.raises(InputError, match=r"^a\.json: missing key 'count'$"):
        validated(Foreign, {}, "a.json")
    with pytest.raises(InputError, match=r"^a\.json: count: expected a value, found null$"):
        validated(Foreign, {"count": None}, "a.json")
    with pytest.raises(InputError, match=r"share: .*, found None"):
        validated(Own, {"count": 1, "share": None}, "a.yaml")


@pytest.mark.parametrize("schema", [Own, Foreign])
@pytest.mark.parametrize("count", ["1", 1.0, True, [1], 1.5])
def test_values_of_another_type_are_not_converted(schema, count):
    with pytest.raises(InputError, match=r"count: .*, found"):
        validated(schema, {"count": count}, "file")


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_foreign_numbers_are_finite(share):
    with pytest.raises(InputError, match=r"share: .*finite number, found"):
        validated(Foreign, {"count": 1, "share": share}, "file")


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_file_that_is_no_mapping_is_refused(value):
    with pytest.raises(InputError, match=r"^file: expected a mapping of names to values, found"):
        validated(Foreign, value, "file")


@pytest.mark.parametrize("value", ["x" * 10_000, "a\nb", 10**5000, [[[]] * 1000]], ids="abcd")
def test_any_wrong_value_makes_one_short_line(value):
    with pytest.raises(InputError) as caught:
        validated(Own, {"count": 1, "share": value}, "file")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 200


def test_a_file_is_refused_in_its_own_spelling():
    with pytest.raises(InputError, match=r"^file: number: "):
        validated(Foreign, {"count": "x"}, "file", spelling={"count": "number"})


def test_assignments_are_yaml_scalars():
    given = ["a=8", "b=auto", "c=0.25", "d=a=b", "e="]
    assert parse_assignments(given) == {"a": 8, "b": "auto", "c": 0.25, "d": "a=b", "e": None}


@pytest.mark.parametrize(
    ("settings", "words"),
    [(["a"], "expected key=value"), (["=1"], "expected key=value"), (["a=1", "a=2"], "set twice")],
)
def test_malformed_assignments_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        parse_assignments(settings)


def test_a_schema_without_a_message_is_still_one_line():
    class Silent(OwnSchema):
        @model_validator(mode="after")
        def _refuse(self):
            raise ValueError("")

    with pytest.raises(InputError, match=r"^file: "):
        validated(Silent, {}, "file")


def test_keys_that_are_no_text_are_refused():
    with pytest.raises(InputError, match=r"^file: "):
        validated(Own, {1: 2, "count": 1}, "file")


@pytest.mark.parametrize("name", ["x" * 1_000_000, "a\nb", "\x1b[31m"])
def test_an_unknown_key_is_quoted_short_and_plain(name):
    with pytest.raises(InputError, match="unknown key") as caught:
        validated(Own, {"count": 1, name: 2}, "file")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400
