"""Tool calls: which tool, with which argument, after a long list of tools and of what one of them returned?

The context is what an agent's model reads: a JSON description of each tool, then records that a call returned, then two
solved requests. The question asks for a report on one subject. Of the tool's name only the words can be guessed: its
number is in the description, and the station that the tool wants is in the subject's record. The task is our own.

The answer is read as servers read one (`kvc_trt.tool_calls`), and is right only if the name and all arguments are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from kvc_trt.tasks.haystack import fit_units, insert_needles
from kvc_trt.tasks.task import Encode, Task, TaskSample, sample_rng
from kvc_trt.tasks.words import NOUNS, available, draw_distinct
from kvc_trt.tool_calls.deltas import Arguments
from kvc_trt.tool_calls.reader import CallMarks, Reader

NAME = "tool-calls"
MAX_NEW_TOKENS = 64
TOOL_NUMBERS = (100, 999)
SHOWN = 4
"""Solved requests."""
OPENING = "You may call these tools:\n"
RETURNED = "\nA tool returned these stations:\n"


class _Subject(NamedTuple):
    """Something to report on, the number of its tool, and its station."""

    name: str
    number: int
    station: str

    @property
    def tool(self) -> str:
        return f"{self.name.replace(' ', '_')}_{self.number}"

    @property
    def description(self) -> str:
        parameters = {"subject": "string", "station": "string"}
        return json.dumps({"name": self.tool, "description": f"Reports on the {self.name}.", "parameters": parameters})

    @property
    def arguments(self) -> dict[str, str]:
        return {"subject": self.name, "station": self.station}

    @property
    def record(self) -> str:
        return json.dumps(self.arguments)

    @property
    def request(self) -> str:
        return f"\n\nRequest: a report on the {self.name}.\nCall:"

    @property
    def call(self) -> str:
        return json.dumps({"name": self.tool, "arguments": self.arguments})


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> TaskSample:
    """Sample `index`; its one answer is the call as JSON. Tools and records grow with the target."""
    rng = sample_rng(NAME, seed, index)
    most = min(target_tokens, available("words"))
    names = [word.replace("-", " ") for word in draw_distinct(rng, "words", most)]
    first, last = TOOL_NUMBERS
    numbers = (first + rng.integers(last - first + 1, size=most)).tolist()
    asked, *others = map(_Subject, names, numbers, rng.choice(NOUNS, size=most).tolist())
    depths = [float(depth) for depth in rng.random(2)]
    solved = "".join(f"{one.request} {one.call}" for one in others[:SHOWN])

    def context(lines: int) -> str:
        tools, records = others[: lines // 2], others[: lines - lines // 2]
        described = insert_needles([one.description for one in tools], [asked.description], depths[:1])
        returned = insert_needles([one.record for one in records[::-1]], [asked.record], depths[1:])
        return OPENING + "\n".join(described) + RETURNED + "\n".join(returned) + solved

    lines = fit_units(
        lambda count: context(count) + asked.request,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        minimum=2 * SHOWN,
        maximum=2 * len(others),
    )
    meta = {"lines": lines, "depths": depths}
    return TaskSample(NAME, seed, index, context(lines), asked.request, (asked.call,), meta)


def score(output: str, answers: Sequence[str]) -> float:
    """1 if the output begins with a call of the reference's name, with equal arguments."""
    expected = json.loads(answers[0])
    reader = Reader(CallMarks(bare=True), [expected["name"]], parallel=False)
    deltas = [*reader.feed(output), *reader.finish()]
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, Arguments))
    try:
        return float(json.loads(arguments) == expected["arguments"])
    except ValueError:  # no call, or one that was cut
        return 0.0


TASKS = (
    Task(
        NAME,
        "tools",
        "a call of one of many tools, with a station that an earlier call returned",
        MAX_NEW_TOKENS,
        generate,
        score,
        "share of the calls with the right name and arguments",
    ),
)
