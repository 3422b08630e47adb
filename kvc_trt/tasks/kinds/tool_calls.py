"""Tool calls: which tool, with which argument, after a long list of tools and of what one of them returned?

The context is a prompt of an agent's model: a JSON description of each of a few tools, then a long text that a call
returned, with a JSON record for each subject somewhere in it, then two solved requests. The question asks for one of
the other subjects. Of the tool's name only the first words can be guessed: its last word is in the description, and the
code that the tool wants is in the subject's record. The task is our own.

The answer is read as servers read one (`kvc_trt.tool_calls`), and is right only if the name and all arguments are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from kvc_trt.tasks.haystack import FirstItems, fit_units, insert_needles
from kvc_trt.tasks.task import Encode, Task, TaskSample, sample_rng
from kvc_trt.tasks.words import draw_distinct, prose
from kvc_trt.tool_calls.deltas import Arguments
from kvc_trt.tool_calls.reader import CallMarks, Reader

NAME = "tool-calls"
MAX_NEW_TOKENS = 64
KINDS = ("audit", "check", "digest", "index", "report", "review", "survey", "tally")
"""The last words of tools' names."""
CODES = (100, 999)
TOOLS = 4
SHOWN = 2
"""Solved requests, of tools that the question does not ask for."""
OPENING = "You may call these tools:\n"
RETURNED = "A call of a tool returned this:\n"


class _Subject(NamedTuple):
    """Something to report on, the kind of its tool, and its code."""

    name: str
    kind: str
    code: str

    @property
    def tool(self) -> str:
        return f"{self.name.replace(' ', '_')}_{self.kind}"

    @property
    def description(self) -> str:
        parameters = {"subject": "string", "code": "string"}
        return json.dumps({"name": self.tool, "description": f"Reports on the {self.name}.", "parameters": parameters})

    @property
    def arguments(self) -> dict[str, str]:
        return {"subject": self.name, "code": self.code}

    @property
    def record(self) -> str:
        return json.dumps(self.arguments)

    @property
    def request(self) -> str:
        return f"\n\nRequest: report on the {self.name}.\nCall:"

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
    """Sample `index`; its one answer is the call as JSON. The returned text grows with the target."""
    rng = sample_rng(NAME, seed, index)
    names = [name.replace("-", " ") for name in draw_distinct(rng, "words", TOOLS)]
    kinds = rng.choice(KINDS, size=TOOLS, replace=False).tolist()
    first, last = CODES
    codes = (first + rng.choice(last - first + 1, size=TOOLS, replace=False)).tolist()
    subjects = list(map(_Subject, names, kinds, map(str, codes)))
    depths = [float(depth) for depth in rng.random(TOOLS)]
    asked, *others = rng.permutation(TOOLS).tolist()
    described = "\n".join(one.description for one in subjects)
    solved = "".join(f"{subjects[one].request} {subjects[one].call}" for one in others[:SHOWN])
    returned = FirstItems(prose(sample_rng(f"{NAME}/prose", seed, index)))

    def context(sentences: int) -> str:
        text = insert_needles(returned.first(sentences), [one.record for one in subjects], depths)
        return f"{OPENING}{described}\n{RETURNED}{' '.join(text)}{solved}"

    question = subjects[asked].request
    sentences = fit_units(
        lambda count: context(count) + question,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        minimum=0,
    )
    meta = {"sentences": sentences, "depth": depths[asked]}
    return TaskSample(NAME, seed, index, context(sentences), question, (subjects[asked].call,), meta)


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
        "a call of one of four tools, with a code from a long text that another call returned",
        MAX_NEW_TOKENS,
        generate,
        score,
        "share of the calls with the right name and arguments",
    ),
)
