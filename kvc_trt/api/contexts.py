"""`Engine.context` and `Engine.turn_logits`: one row of a session that reads a text and leaves again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.api.prompts import prompt_ids
from kvc_trt.api.rules import requests_of
from kvc_trt.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvc_trt.engine import EngineDirectory
    from kvc_trt.runtime import Context, Session


def read_prompt(
    directory: EngineDirectory, load: Callable[[], Session], prompt: str | Sequence[int], context: Context | None
) -> Context:
    """Read a prompt, which continues `context` if there is one; return what its caches hold.

    `load` is called once the prompt is known to be one."""
    ids, is_batch = prompt_ids(directory, prompt, continues=context is not None)
    if is_batch:
        raise InputError(f"a context is of one prompt, found a list of {len(ids)}")
    session = load()
    session.check_idle("context needs an idle session")
    (request,) = requests_of(ids, {"context": context})
    (row,) = session.add([replace(request, keep_logits=True)])
    try:
        while session.queued(row):
            session.advance()
        return session.take(row)
    finally:
        if session.holds(row):  # a run that failed has taken it out
            session.remove(row)


def turn_logits(
    directory: EngineDirectory, load: Callable[[], Session], text: str | Sequence[int], context: Context
) -> NDArray[np.float32]:
    """Read a text that continues `context` as a turn; return the logits [tokens, vocab] after each of its tokens.

    `load` is called once the text is known to be one."""
    ids, is_batch = prompt_ids(directory, text, continues=True)
    if is_batch:
        raise InputError(f"turn_logits takes one text, found a list of {len(ids)}")
    session = load()
    session.check_idle("turn_logits needs an idle session")
    (row,) = session.add(requests_of([()], {"context": context}))
    try:
        return session.turn_logits(row, ids[0])
    finally:
        if session.holds(row):  # a run that failed has taken it out
            session.remove(row)
