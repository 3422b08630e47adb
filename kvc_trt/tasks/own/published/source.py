"""The parts that all converters use: strict readers of others' files, and prompts with places to fill."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input, read_text_input
from kvc_trt.files.strict_yaml import parsed_yaml
from kvc_trt.tasks.own.reader import LARGEST_DATA_FILE, LONGEST_LINE, numbered_lines
from kvc_trt.validation import validated

Schema = TypeVar("Schema", bound=BaseModel)
Line = dict[str, Any]
"""A question of one's own, ready for `reader.line_of`."""
CONTEXT, INPUT = "{context}", "{input}"


@cache
def parameters(name: str) -> Mapping[str, Any]:
    """The parameters of a published data set: a YAML file of this package."""
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = parsed_yaml(text, f"{name}.yaml")
    return found


def filled(prompt: str, context: str, asked: str) -> Line:
    """Context and question of a prompt with places for both, parted where its context ends.

    Where neither has white space there, the context's last line belongs to the question: nothing may come between.
    """
    before, _, after = prompt.partition(CONTEXT)
    context, question = before + context, after.replace(INPUT, asked)
    if context[-1:].isspace() or question[:1].isspace() or not question:
        return {"context": context, "question": question}
    end = context.rfind("\n") + 1
    return {"context": context[:end], "question": context[end:] + question}


def files_named(directory: Path, known: Iterable[str], suffixes: Iterable[str] = (".jsonl",)) -> dict[str, Path]:
    """The files of a directory whose names are known, in the order of `known`. InputError if none exists."""
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory", hint="give the folder with the data set's files")
    names = list(known)
    found = {name: path for name in names for suffix in suffixes if (path := directory / f"{name}{suffix}").is_file()}
    if not found:
        expected = ", ".join(f"{name}{next(iter(suffixes))}" for name in names[:4])
        raise InputError(f"{directory} has none of the data set's files: expected {expected}, ...")
    return found


def json_lines(path: Path, schema: type[Schema]) -> Iterator[Schema]:
    """Every line of a file; InputError names the one that is not as published."""
    for number, content in numbered_lines(path, LARGEST_DATA_FILE):
        if content.strip():
            yield validated(schema, _parsed(content, f"{path} line {number}"), f"{path} line {number}")


def table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file and where each stands: JSON lines, a JSON list, or CSV with a header, by the file's name."""
    if path.suffix == ".csv":
        csv.field_size_limit(min(LONGEST_LINE, sys.maxsize))
        rows = csv.DictReader(io.StringIO(read_text_input(path, LARGEST_DATA_FILE), newline=""))
        try:
            for row in rows:
                yield f"{path} line {rows.line_num}", row
        except csv.Error as error:
            raise InputError(f"{path} line {rows.line_num}: {error}") from error
    elif path.suffix == ".json":
        found = read_json_input(path, LARGEST_DATA_FILE)
        if not isinstance(found, list):
            raise InputError(f"{path}: expected a list of objects, found {describe(found)}")
        for place, row in enumerate(found):
            yield f"{path} item {place}", _mapping(row, f"{path} item {place}")
    else:
        for number, content in numbered_lines(path, LARGEST_DATA_FILE):
            if content.strip():
                where = f"{path} line {number}"
                yield where, _mapping(_parsed(content, where), where)


def _parsed(content: bytes, where: str) -> object:
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    return found


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected an object, found {describe(value)}")
    return value
