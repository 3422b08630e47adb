"""LongEval's line retrieval [1] in wording of our own: every line holds a number, and one line is asked for.

The score is 1 if the last integer of the output is the number of the line.

[1] D. Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", LMSYS, 2023.
"""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import fit_units
from kvc_trt.tasks.task import Encode, Task, TaskSample, last_integer, sample_rng
from kvc_trt.tasks.words import FIVE_DIGITS, Kind, draw_distinct

NAME = "lines"
INTRODUCTION = "Remember what every line holds."
MAX_NEW_TOKENS = 16
_KEY_NUMBERS = (1, 999_999)


def generate_lines(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
    key_kind: Kind = "words",
    depth: float | None = None,
) -> TaskSample:
    """Sample `index`; the line asked for is at `depth` in 0..1, or anywhere. Values have five digits, to 50,000."""
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"{NAME}: depth is {depth}, expected 0 to 1")
    rng = sample_rng(NAME, seed, index)
    where = rng.random() if depth is None else depth  # before the lines, whose number depends on the target
    keys = draw_distinct(rng, key_kind, target_tokens, _KEY_NUMBERS)  # a line is at least one token
    first, last = FIVE_DIGITS
    values = rng.integers(first, last + 1, size=len(keys)).tolist()

    def render(lines: int) -> tuple[str, str, int]:
        asked = min(lines - 1, int(where * lines))
        text = "\n".join([INTRODUCTION, *map(line, keys[:lines], values[:lines])])
        return text, question(keys[asked]), asked

    lines = fit_units(
        lambda lines: "".join(render(lines)[:2]),
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        maximum=len(keys),
    )
    context, text, asked = render(lines)
    meta = {"depth": where, "asked": keys[asked], "lines": lines}
    return TaskSample(NAME, seed, index, context, text, (str(values[asked]),), meta)


def line(key: str, value: int) -> str:
    """One line, without its line break."""
    return f"Line {key} holds {value}"


def question(key: str) -> str:
    """Question and prefix of the answer."""
    return f"\nQuestion: what does line {key} hold? Answer: line {key} holds"


def answer(value: int) -> str:
    """The text that follows `question` in an answer of the shipped model."""
    return f" {value}."


TASKS = (
    Task(
        NAME,
        "lines",
        "the number of one line of many",
        MAX_NEW_TOKENS,
        generate_lines,
        last_integer,
        "whether the last integer of the answer is the reference",
        options={"key_kind": str, "depth": float},
    ),
)
