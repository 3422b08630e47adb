"""A data set: samples of one task as JSON lines, the same bytes wherever and whenever they are drawn.

The first line describes the samples (task, seed, sizes, options, tokenizer); each other line is one sample. The digest
is the SHA-256 of the whole file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_text_input
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.kinds.associative_recall import ids_of
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Encode, Task, TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer
from kvc_trt.validation import OwnSchema, validated_document

VERSION = 2
"""The version of the file's layout and of the generators: raised when equal arguments give other samples."""
LARGEST_DATA_SET = 1 << 30
"""Bytes; a thousand samples of 128K tokens have some 600 million."""


@dataclass(frozen=True)
class DataSet:
    """Samples 0, 1, ... of a task, and the settings they were drawn with."""

    task: str
    seed: int
    target_tokens: int
    max_new_tokens: int
    tokenizer: str | None
    """SHA-256 of tokenizer.json; None for a task of token ids."""
    samples: tuple[TaskSample, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION
    frame: tuple[str, str] | None = None
    """Text that a chat template puts around a prompt, which shortens samples; left out of the file if empty."""

    def to_jsonl(self) -> str:
        """The text of the data set's file."""
        header = {name: value for name, value in vars(self).items() if name != "samples"}
        if self.frame is None:
            del header["frame"]
        header["count"] = len(self.samples)
        lines = [header, *(asdict(sample) for sample in self.samples)]
        return "".join(f"{_json(line)}\n" for line in lines)

    @property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.to_jsonl().encode()).hexdigest()


class _Header(OwnSchema):
    """The first line of the file."""

    task: str
    seed: int
    target_tokens: Annotated[int, Field(ge=1, lt=1 << 63)]
    max_new_tokens: Annotated[int, Field(ge=1, lt=1 << 63)]
    tokenizer: str | None
    options: dict[str, Any]
    version: int
    count: Annotated[int, Field(ge=0, lt=1 << 63)]
    frame: tuple[str, str] | None = None


class _Sample(OwnSchema):
    """Any other line: a `TaskSample`."""

    task: str
    seed: int
    index: Annotated[int, Field(ge=0, lt=1 << 63)]
    context: str
    question: str
    answers: Annotated[tuple[str, ...], Field(min_length=1)]
    meta: dict[str, Any]

    def sample(self) -> TaskSample:
        return TaskSample(**dict(self))


def draw_data_set(
    chosen: Task,
    *,
    seed: int,
    samples: int,
    target_tokens: int,
    tokenizer: TaskTokenizer | None,
    max_new_tokens: int | None = None,
    options: Mapping[str, Any] | None = None,
    framing: Framing | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """Draw samples 0 .. `samples` - 1. A task of token ids takes only the vocabulary's size from the tokenizer.

    Text is as long as its `framing` allows, which is plain where none is given. InputError where the target is too
    short for the task or too long for the model, or the tokenizer cannot spell it.
    """
    given = dict(options or {})
    encode: Encode = ids_of
    if tokenizer is not None:
        tokenizer.require_positions(chosen.name, target_tokens)
    if chosen.reads == "ids":
        if tokenizer is not None:
            given.setdefault("vocabulary_size", tokenizer.vocabulary_size)
    elif tokenizer is None:
        raise InputError(f"task {chosen.name} is text, and needs a tokenizer to be sized with")
    else:
        encode = tokenizer.encode if framing is None else framing.encode
    room = chosen.max_new_tokens if max_new_tokens is None else max_new_tokens
    drawn = []
    with (progress or NullProgress()).task(chosen.name, samples) as advance:
        for index in range(samples):
            sample = chosen.sample(
                seed=seed, index=index, target_tokens=target_tokens, encode=encode, max_new_tokens=room, **given
            )
            if tokenizer is not None and chosen.reads == "text":
                tokenizer.check_spelling(sample)
            drawn.append(sample)
            advance(1)
    is_text = tokenizer is not None and chosen.reads == "text"
    fingerprint = tokenizer.fingerprint if tokenizer is not None and is_text else None
    frame = framing.frame if framing is not None and is_text else None
    return DataSet(chosen.name, seed, target_tokens, room, fingerprint, tuple(drawn), given, frame=frame)


def read_data_set(path: Path) -> DataSet:
    """The data set of a file; InputError where it cannot be read, is not whole, or is of another version."""
    text = read_text_input(path, LARGEST_DATA_SET)
    try:
        header, *lines = [json.loads(line) for line in text.splitlines()]
        version = header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a data set of kvc-trt", hint=f"write one: {_again(path)}") from error
    if version != VERSION:
        message = f"{path} is of version {describe(version)}, expected {VERSION}"
        raise InputError(message, hint=f"write it again: {_again(path)}")
    source = f"{path} is not a data set of kvc-trt: line"
    said = validated_document(_Header, header, f"{source} 1")
    samples = tuple(validated_document(_Sample, line, f"{source} {at}").sample() for at, line in enumerate(lines, 2))
    if len(samples) != said.count:
        raise InputError(f"{path} has {len(samples)} samples, its header says {said.count}", hint=_again(path))
    task(said.task)
    found = DataSet(samples=samples, **said.model_dump(exclude={"count"}))
    try:
        found.to_jsonl().encode()
    except ValueError as error:  # nobody wrote it with `to_jsonl`: numbers that are not finite, halves of characters
        raise InputError(f"{path} holds what a data set cannot: {describe(str(error))}") from error
    return found


def _again(path: Path) -> str:
    return f"kvc-trt tasks write TASK -o {path}"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
