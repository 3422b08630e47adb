"""SCBench: several questions about one context, `scbench_NAME.jsonl` or `multi_turn_NAME.jsonl`.

Each question is asked of the context alone, as SCBench's multi-request mode does; or, with the history, at the end of a
conversation in which the earlier ones were answered right, as its multi-turn mode does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.tasks.own.published.source import Line, files_named, filled, json_lines, parameters
from kvc_trt.validation import ForeignSchema

PREFIXES = ("scbench_", "multi_turn_")
_LETTERS = "ABCD"
_Answer = str | int | float | list[str] | list[int]


class _Turn(ForeignSchema):
    input: str
    answer: _Answer
    options: list[str] | None = None
    task: str | None = None


class _Line(ForeignSchema):
    context: str | list[int] | list[float]
    multi_turns: list[_Turn]


def scbench(directory: Path, *, history: bool) -> Iterator[Line]:
    """The questions of every data set whose file is there; each is a set of its name."""
    known, earlier = parameters("scbench"), dict[str, Path]()
    for stem, path in files_named(directory, [prefix + name for name in known for prefix in PREFIXES]).items():
        name = next(stem.removeprefix(prefix) for prefix in PREFIXES if stem.startswith(prefix))
        if earlier.setdefault(name, path) != path:
            raise InputError(f"{path} and {earlier[name].name} are the same data set: expected one of them")
        for place, line in enumerate(json_lines(path, _Line)):
            yield from _asked(name, known[name], place, line, history)


def _asked(name: str, rule: Mapping[str, Any], place: int, line: _Line, history: bool) -> Iterator[Line]:
    earlier: list[dict[str, str]] = []
    context = line.context if isinstance(line.context, str) else str(line.context)
    for number, turn in enumerate(line.multi_turns, 1):
        scored = rule if "tasks" not in rule else rule["tasks"].get(turn.task or "")
        prompt = filled(rule["prompt"].replace("{options}", _options(turn)), context, turn.input)
        text, asked = prompt["context"] + prompt["question"], prompt["question"].lstrip("\n")
        answers = _answers(turn, scored, f"{name}, context {place}, question {number}") if scored else []
        if scored is not None:
            parts = "" if "tasks" not in rule else f"-{(turn.task or '').removeprefix('scbench_')}"
            messages = [*earlier, {"role": "user", "content": asked if earlier else text}]
            yield {
                "id": f"{name}/{place}/{number}",
                "set": name + parts,
                **({"messages": messages} if history else prompt),
                "answers": answers,
                "score": scored["score"],
                "max_new_tokens": scored["max_new_tokens"],
            }
        said = turn.answer if isinstance(turn.answer, str) else " ".join(answers) or str(turn.answer)
        earlier += [
            {"role": "user", "content": asked if earlier else text},
            {"role": "assistant", "content": said},
        ]


def _options(turn: _Turn) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in zip(_LETTERS, turn.options or (), strict=False))


def _answers(turn: _Turn, scored: Mapping[str, Any], where: str) -> list[str]:
    given = turn.answer if isinstance(turn.answer, list) else [turn.answer]
    answers = [str(one) for one in given]
    if scored["score"] == "choice" and turn.options:
        answers = [_LETTERS[turn.options.index(one)] if one in turn.options[:4] else one for one in answers]
    if not answers or not all(answers):
        raise InputError(f"{where}: expected an answer, found {describe(turn.answer)}")
    return answers
