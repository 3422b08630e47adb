"""Questions of a file as samples that fit: as they are, or with the middle of the prompt left out.

The middle goes because instructions and the question stand at the ends. As LongBench and the papers that use it do it:
the prompt is tokenized whole, without a chat template, and its first and last tokens stay, half of the room each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from kvc_trt.errors import InputError
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.own.reader import Record
from kvc_trt.tasks.task import TaskSample

Truncate = Literal["middle"]
SEAM = 4
"""Tokens that a prompt is left shorter than its room: fed in two parts, it may have some more where they meet."""


def sample_of(record: Record, index: int, task: str) -> TaskSample:
    """The question as it is in the file."""
    meta = {
        "id": record.id,
        "line": record.line,
        "messages": [dict(message) for message in record.messages],
        "template": record.template,
        "max_new_tokens": record.max_new_tokens,
        "answer_prefix": "",
    }
    return TaskSample(task, 0, index, record.context, record.question, record.answers or (), meta)


def tokens_of(sample: TaskSample, framing: Framing) -> int:
    """Tokens of the prompt, with the template's words, the tokenizer's start tokens, and the seam's."""
    return len(framing.ids(sample, query_aware=True).context) + SEAM


def fitted(sample: TaskSample, framing: Framing, room: int, source: str, truncate: Truncate | None) -> TaskSample:
    """The sample with a prompt of at most `room` tokens, cut where `truncate` says how. `source` names the file.

    InputError names the line of one that is longer and may not be cut, or whose question alone is too long.
    """
    tokens = tokens_of(sample, framing)
    if tokens <= room:
        return sample
    where = f"{source} line {sample.meta['line']}"
    if truncate is None:
        raise InputError(
            f"{where}: the prompt has {tokens} tokens, expected at most {room}",
            hint="--truncate middle leaves out the middle of such prompts",
        )
    if sample.meta["messages"]:
        raise InputError(f"{where}: a conversation of {tokens} tokens cannot be cut, expected at most {room}")
    places = framing.tokenizer.encode(sample.prompt, add_special_tokens=False).offsets
    keep = room - (tokens - len(places))
    while (cut := _without_middle(sample, places, keep // 2)) is not None:
        if (excess := tokens_of(cut, framing) - room) <= 0:
            return replace(cut, meta={**sample.meta, "truncated": True})
        keep -= excess  # the ends may take some more tokens where they meet
    raise InputError(
        f"{where}: the question is longer than half of the {room} tokens that a prompt may have",
        hint="give longer --lengths, or a shorter question",
    )


def _without_middle(sample: TaskSample, places: Sequence[tuple[int, int]], half: int) -> TaskSample | None:
    """The prompt's first and last `half` tokens, which stand at `places`; None where the question is cut."""
    if half < 1 or (tail := places[-half][0]) > len(sample.context):
        return None
    return replace(sample, context=sample.context[: places[half - 1][1]] + sample.context[tail:])
