"""Settings and configuration files, read strictly: no unknown or repeated keys; errors name the nearest known key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.files.inputs import read_text_input

Schema = TypeVar("Schema", bound=BaseModel)
Document = TypeVar("Document")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
LARGEST_CONFIGURATION = 4 << 20
"""Bytes; a configuration file beyond this is not one."""
_RULES = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, defer_build=True)
"""A command imports more schemas than it reads documents: each is built at its first use."""
_LONGEST_PROBLEM = 500
"""Characters of a schema's message about a value."""


class OwnSchema(BaseModel):
    """A file in a format of ours: unknown keys are errors, numbers are finite, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", **_RULES)


class ForeignSchema(BaseModel):
    """A file in somebody else's format: unknown keys are passed over, null means absent, and nothing is converted."""

    model_config = ConfigDict(extra="ignore", **_RULES)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}


def parse_assignments(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set key=value` arguments; values are read as YAML (`8`, `auto`, `0.25`, `[1, 2]`)."""
    from kvc_trt.files.strict_yaml import parsed_yaml

    parsed: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise InputError(f"--set {setting}: expected key=value")
        if key in parsed:
            raise InputError(f"--set {setting}: '{key}' is set twice")
        parsed[key] = parsed_yaml(text, f"--set {setting}: the value")
    return parsed


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML (or JSON) file that holds one mapping; repeated keys are errors.

    Raises InputError for a missing, oversized or malformed file.
    """
    from kvc_trt.files.strict_yaml import parsed_yaml

    value = parsed_yaml(read_text_input(path, LARGEST_CONFIGURATION), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold one mapping of names to values")
    return value


def validated(
    schema: type[Schema], mapping: object, source: str, *, spelling: Mapping[str, str] | None = None
) -> Schema:
    """Return `schema` filled from `mapping`; every problem becomes an InputError that names `source` and the key.

    `spelling` renames keys in errors, where the file has other names than the schema.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{source}: expected a mapping of names to values, found {describe(mapping)}")
    try:
        return schema.model_validate(dict(mapping))
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(error, schema, spelling or {}, mapping)}") from error


def validated_document(schema: type[Document], document: object, source: str) -> Document:
    """Return a model or a dataclass filled from a JSON document, in which lists are tuples, and nothing is converted.

    Every problem becomes an InputError that names `source` and the whole path of the key.
    """
    try:
        filled: Document = _adapter(schema).validate_json(json.dumps(document), strict=True)
        return filled
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        path, found = _followed(problem["loc"], document)
        where = f"{source}: {path}" if path else source
        if problem["type"] == "missing":
            raise InputError(f"{where}: '{problem['loc'][-1]}' is missing") from error
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        raise InputError(f"{where}: {message}, found {describe(found)}") from error


def _followed(location: Iterable[int | str], document: Any) -> tuple[str, Any]:
    """Return the part of a location that a document has, as a path, and the value there; the rest names types."""
    path: list[str] = []
    for part in location:
        try:
            document = document[part]
        except (LookupError, TypeError):
            break
        path.append(describe(str(part)).strip("'"))
    return ".".join(path), document


def _first_problem(
    error: ValidationError, schema: type[BaseModel], spelling: Mapping[str, str], found_in: Mapping[str, Any]
) -> str:
    problem = error.errors(include_url=False)[0]
    given = ".".join(describe(str(part))[1:-1] for part in problem["loc"][:1])
    key = spelling.get(given, given)
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'{did_you_mean(key, schema.model_fields)}"
    if problem["type"] == "missing":
        return f"{key}: expected a value, found null" if given in found_in else f"missing key '{key}'"
    found = f", found {describe(problem['input'])}" if problem["loc"] else ""
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:_LONGEST_PROBLEM]
    return f"{key}: {message}{found}" if key else message
