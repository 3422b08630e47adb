"""The load of a measurement: how many requests, how long they are, and when they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from kvc_trt.errors import InputError, describe
from kvc_trt.profile.requests.lengths import Lengths
from kvc_trt.runtime.chat.messages import check_messages
from kvc_trt.tasks.own.reader import DataFile, Record, read_data_file

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

DEFAULT_WARMUP = 2
DEFAULT_REPEATS = 3
MOST_REQUESTS = 100_000


class LoadSettings(TypedDict, total=False):
    """The fields of `Load` that have plain values and defaults."""

    concurrency: int | None
    request_rate: float
    rows: int | None
    warmup: int
    repeats: int
    seed: int


@dataclass(frozen=True)
class Load:
    """The settings of a load; the names are those of `vllm bench serve` and `trtllm-bench` where they have them."""

    requests: int
    """Requests of one run."""
    concurrency: int | None = None
    """The most requests that are answered or wait at a time; None is the number of rows that the engine was built for.
    """
    input_len: Lengths | None = None
    """Tokens of prompts; None is the engine's longest prompt."""
    output_len: Lengths | None = None
    """Tokens of answers; None is the engine's longest answer, or that of the lines of `data`."""
    request_rate: float = math.inf
    """Requests per second, which arrive as a Poisson process; infinite: all at once."""
    rows: int | None = None
    """Rows of the engine; None is one for each of the `concurrency`."""
    warmup: int = DEFAULT_WARMUP
    """Requests before each side's first run, which are not counted."""
    repeats: int = DEFAULT_REPEATS
    """Runs of each side."""
    seed: int = 0
    data: Path | None = None
    """Prompts of one's own (docs/data.md); None: random token ids."""

    def __post_init__(self) -> None:
        bounds = (
            ("requests", 1, MOST_REQUESTS), ("concurrency", 1, MOST_REQUESTS), ("rows", 1, MOST_REQUESTS),
            ("warmup", 0, MOST_REQUESTS), ("repeats", 1, 100), ("seed", 0, 1 << 63),
        )  # fmt: skip
        for name, least, most in bounds:
            found = getattr(self, name)
            if found is None and name in ("concurrency", "rows"):
                continue
            if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
                raise InputError(f"{name} is {describe(found)}, expected a whole number from {least} to {most:,}")
        if not self.request_rate > 0:
            raise InputError(f"request_rate is {describe(self.request_rate)}, expected a number over 0, or infinity")
        if self.data is not None and self.input_len is not None:
            raise InputError("input_len and data: the prompts of a file are as long as they are; expected one of them")


@dataclass(frozen=True)
class LoadRequest:
    """One request: its prompt is made when it is asked, and its answer has `output_len` tokens, whatever they are."""

    prompt: Callable[[], Sequence[int]]
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Asking:
    """The requests of a load, in the order in which they come."""

    requests: tuple[LoadRequest, ...]
    arrivals: tuple[float, ...]
    """Seconds from the beginning of a run."""
    source: str
    """A description of the prompts."""

    @property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest prompt, and of the longest answer."""
        return max(one.input_len for one in self.requests), max(one.output_len for one in self.requests)

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens of prompt and answer together."""
        return sum(one.input_len + one.output_len for one in self.requests) / len(self.requests)


def asking(load: Load, engine: EngineDirectory) -> Asking:
    """Return the requests of a load, the same ones for equal seeds; InputError if the engine cannot take them."""
    generator = np.random.default_rng(load.seed)
    longest_input, longest_output = engine.parameters.max_input_len, engine.parameters.max_output_len
    for lengths, longest, name in (
        (load.input_len, longest_input, "input"),
        (load.output_len, longest_output, "output"),
    ):
        if lengths is not None:
            lengths.check(longest, f"{name}_len", f"--max-{name}-len")
    if load.data is None:
        input_len = load.input_len or Lengths.parse(longest_input)
        output_len = load.output_len or Lengths.parse(longest_output)
        inputs = input_len.draw(generator, load.requests, longest_input)
        outputs = output_len.draw(generator, load.requests, longest_output)
        vocabulary = engine.model.vocab_size
        requests = [
            LoadRequest(partial(_random_ids, load.seed, place, tokens, vocabulary), tokens, answer)
            for place, (tokens, answer) in enumerate(zip(inputs, outputs, strict=True))
        ]
        source = f"random token ids, seed {load.seed}"
    else:
        file = read_data_file(load.data)
        lines = [_own(record, file, engine) for record in file.records]
        requests = [lines[place % len(lines)] for place in range(load.requests)]
        if load.output_len is not None:
            outputs = load.output_len.draw(generator, load.requests, longest_output)
            requests = [
                LoadRequest(one.prompt, one.input_len, answer) for one, answer in zip(requests, outputs, strict=True)
            ]
        source = f"{file.path.name}, {len(lines)} lines, SHA-256 {file.digest}"
    return Asking(tuple(requests), _arrivals(load, generator), source)


def _random_ids(seed: int, place: int, tokens: int, vocabulary: int) -> list[int]:
    ids: list[int] = np.random.default_rng((seed, place)).integers(0, vocabulary, tokens).tolist()
    return ids


def _own(record: Record, file: DataFile, engine: EngineDirectory) -> LoadRequest:
    """A line as a request: through the chat template where the engine has one and the line does not refuse it."""
    source = f"{file.path} line {record.line}"
    tokenizer, template = engine.tokenizer, engine.chat_template
    if tokenizer is None:
        raise InputError(f"{engine.path} has no tokenizer, so it cannot read {file.path}")
    if record.messages and template is None:
        raise InputError(f"{source}: 'messages', and {engine.path} has no chat template")
    text = record.context + record.question
    if template is None or not record.template:
        ids = tokenizer.encode(text).ids
    else:
        messages: Any = record.messages or [{"role": "user", "content": text}]
        ids = tokenizer.encode(template.render(check_messages(messages, source)), add_special_tokens=False).ids
    longest = engine.parameters.max_input_len
    if not 1 <= len(ids) <= longest:
        raise InputError(
            f"{source}: a prompt of {len(ids):,} tokens; this engine takes 1 to {longest:,}",
            hint=f"build it with --max-input-len {len(ids)}" if ids else None,
        )
    return LoadRequest(partial(list, ids), len(ids), min(record.max_new_tokens, engine.parameters.max_output_len))


def _arrivals(load: Load, generator: np.random.Generator) -> tuple[float, ...]:
    """Return when requests come. Their last comes after requests / rate seconds, so that seeds differ in gaps alone."""
    if math.isinf(load.request_rate):
        return (0.0,) * load.requests
    gaps = np.cumsum(generator.exponential(1.0, load.requests))
    return tuple((gaps * (load.requests / load.request_rate / gaps[-1])).tolist())
