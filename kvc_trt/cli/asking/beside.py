"""`--beside`: another policy, or another engine of the model, answers the same prompts; both are shown together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.api.prompts import prompt_ids
from kvc_trt.api.rules import requests_of
from kvc_trt.api.side import Side
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.cli.text.printing import progress
from kvc_trt.cli.text.run_report import held
from kvc_trt.errors import InputError
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt import Engine
    from kvc_trt.cli.options.run import RunArguments
    from kvc_trt.runtime import Output

_NARROW, _WIDE = 80, 160
"""Columns of output that goes to no terminal, and of output to a wide one."""


def open_beside(given: RunArguments, engine: Engine, rows: int = 1) -> Side:
    """Return the other side that `--beside` names: an engine's directory, or a policy over the weights of `engine`.

    InputError for another model's engine, and for a policy that cannot be had.
    """
    assert given.beside is not None
    if not Path(given.beside).is_dir() and "/" not in given.beside:
        options = RunOptions(threads=given.threads, prefill_precision=given.prefill_precision)
        return Side.under(engine.directory, given.beside, options, rows=rows, progress=progress())
    other = type(engine).open(given.beside, threads=given.threads, sealed=given.sealed, progress=progress())
    if other.model != engine.model:
        names = f"{other.directory.build.model}, and {engine.path} of {engine.directory.build.model}"
        raise InputError(f"--beside {given.beside} is an engine of {names}; expected the same model and precision")
    other.session(rows)
    return Side.of(other)


def answer_beside(sides: Sequence[Side], engine: Engine, prompts: Sequence[Any], rules: Any) -> list[list[Output]]:
    """Return the answers of each side to all prompts."""
    ids, _ = prompt_ids(engine.directory, prompts)
    return [side.session.generate(requests_of(ids, rules)) for side in sides]


def side_by_side(sides: Sequence[Side], answers: Sequence[tuple[Output, float, float]]) -> str:
    """Return a table of the answers, each with its seconds of reading and of answering; a column for each side."""
    texts = [_answer(output) for output, _, _ in answers]
    lines = max(map(len, texts)) + 1
    columns = [
        [*text, *[""] * (lines - len(text)), *_figures(output, side, read, answered)]
        for text, side, (output, read, answered) in zip(texts, sides, answers, strict=True)
    ]
    names = [side.name for side in sides]
    return text_table(names, zip(*columns, strict=True), widest=_WIDE if sys.stdout.isatty() else _NARROW, even=True)


def _answer(output: Output) -> list[str]:
    """Return the lines of the text, or the token ids of an engine without a tokenizer."""
    return (" ".join(map(str, output.token_ids)) if output.text is None else output.text).splitlines() or [""]


def _figures(output: Output, side: Side, read: float, answered: float) -> list[str]:
    steps = len(output.token_ids) - 1
    step = f"{steps} steps" + (f" of {1000 * answered / steps:.1f} ms" if steps else "")
    kept, _, size = held([output], side).partition(", ")
    return [
        f"{len(output.prompt_token_ids)} tokens read in {read:.2f} s",
        f"{len(output.token_ids)} new ({output.finish_reason}), {step}",
        kept,
        size,
    ]
