"""LongBench and LongBench-E: the 21 data sets' files, `data/NAME.jsonl` and `data/NAME_e.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvc_trt.tasks.own.published.source import Line, files_named, filled, json_lines, parameters
from kvc_trt.validation import ForeignSchema

EVEN = "_e"
"""The end of the names of LongBench-E, whose lengths are evenly spread."""


class _Line(ForeignSchema):
    input: str
    context: str
    answers: list[str]
    all_classes: list[str] | None = None


def longbench(directory: Path) -> Iterator[Line]:
    """The questions of every data set whose file is there; each is a set of its name."""
    known = parameters("longbench")
    inside = directory / "data"
    folder = inside if inside.is_dir() else directory
    for name, path in files_named(folder, [*known, *(name + EVEN for name in known)]).items():
        rule = known[name.removesuffix(EVEN)]
        for place, line in enumerate(json_lines(path, _Line)):
            classes = {"classes": line.all_classes} if rule["score"].startswith("classification") else {}
            yield {
                "id": f"{name}/{place}",
                "set": name,
                **filled(rule["prompt"], line.context, line.input),
                "answers": line.answers,
                "score": rule["score"],
                **classes,
                "max_new_tokens": rule["max_new_tokens"],
                "template": rule.get("template", True),
            }
