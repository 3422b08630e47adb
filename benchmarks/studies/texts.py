"""Documents that studies read: of a manual, of a log and of facts, cut to a length, and the questions about them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from benchmarks.accuracy.formats.divergence import plain_text
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer

AT_END, AT_BEGINNING = POSITIONS = ("end", "beginning")
"""Places of an instruction in a prompt: behind the document, or in front of it."""
MODULES = ("argparse", "ast", "calendar", "configparser", "csv", "difflib", "fractions", "heapq", "json.decoder",
           "mailbox", "pathlib", "pprint", "shlex", "statistics", "tarfile", "textwrap", "threading", "uuid", "zipfile",
           "typing")  # fmt: skip
"""Python's own modules whose source is the text `code`."""


@dataclass(frozen=True)
class Document:
    """A text, and instructions that each ask for something else in it."""

    text: str
    instructions: tuple[str, ...]

    def prompt(self, framing: Framing, instruction: str, position: str = AT_END) -> list[int]:
        """Return the prompt's token ids, as a user's message."""
        parts = (self.text, instruction) if position == AT_END else (instruction, self.text)
        sample = TaskSample("study", 0, 0, f"{parts[0]}\n\n", parts[1], (), {"answer_prefix": ""})
        return list(framing.ids(sample, query_aware=True).context)


def manual(tokenizer: TaskTokenizer, index: int, tokens: int) -> Document:
    """Return the index-th piece of the Python language's documentation."""
    return Document(
        _piece(tokenizer, "manual", index, tokens),
        (
            "Summarise the text in three sentences.",
            "List the names of statements, functions and classes that the text explains.",
            "Write four questions that a reader of the text should be able to answer.",
        ),
    )


def code(tokenizer: TaskTokenizer, index: int, tokens: int) -> Document:
    """Return the index-th piece of the source of Python's own modules."""
    return Document(_piece(tokenizer, "code", index, tokens), ("Explain what the code does.",))


def log(tokenizer: TaskTokenizer, index: int, tokens: int) -> Document:
    """Return a log of purchases in prose."""
    sample = task("log-summary").sample(
        seed=0, index=index, target_tokens=tokens, encode=tokenizer.encode, max_new_tokens=32
    )
    return Document(
        sample.context,
        (
            "Who bought something, and for how many coins?",
            "Where were the things left that somebody bought?",
            "Describe the weather and the streets of the town.",
        ),
    )


def facts(tokenizer: TaskTokenizer, index: int, tokens: int) -> Document:
    """Numbers of lockers in prose, each asked for by an instruction of its own."""
    sample = task("multi-instruction").sample(
        seed=0, index=index, target_tokens=tokens, encode=tokenizer.encode, max_new_tokens=16, instructions=3
    )
    return Document(sample.context, tuple(f"Which number does locker {key} have?" for key in sample.meta["asked"]))


def records(tokenizer: TaskTokenizer, index: int, tokens: int) -> Document:
    """Lines with a key and a number each; one of them is asked for."""
    sample = task("lines").sample(seed=0, index=index, target_tokens=tokens, encode=tokenizer.encode, max_new_tokens=16)
    return Document(sample.context, (sample.question.strip(),))


Read = Callable[[TaskTokenizer, int, int], Document]
KINDS: Mapping[str, Read] = {"manual": manual, "code": code, "log": log, "facts": facts, "records": records}
"""Kinds of documents: a tokenizer, the document's number and its length in tokens give one."""


@cache
def _whole(kind: str) -> str:
    if kind == "manual":
        return plain_text()
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", inspect.getsource(import_module(name))) for name in MODULES)


@cache
def _ids(tokenizer: TaskTokenizer, kind: str) -> Sequence[int]:
    return tokenizer.encode(_whole(kind))


def _piece(tokenizer: TaskTokenizer, kind: str, index: int, tokens: int) -> str:
    """Return the index-th piece of `tokens` tokens; neighbours lie a hundredth of the text apart, or a piece."""
    ids = _ids(tokenizer, kind)
    step = max(tokens, len(ids) // 101)
    start = index * step % (len(ids) - tokens)
    return str(tokenizer.tokenizer.decode(list(ids[start : start + tokens])))
