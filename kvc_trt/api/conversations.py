"""A conversation with an engine, over a session of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.api.prompts import chat_model
from kvc_trt.api.rules import requests_of
from kvc_trt.runtime.chat.conversation import Conversation

if TYPE_CHECKING:
    from kvc_trt.api.rules import AnswerRules
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.progress import Progress
    from kvc_trt.runtime import Session


def open_conversation(
    engine: EngineDirectory,
    session: Session,
    *,
    system: str | None,
    document: str | None,
    rules: AnswerRules,
    progress: Progress | None,
) -> Conversation:
    """Return a conversation over a session of the engine's model; InputError as `Engine.conversation` raises it."""
    template, tokenizer = chat_model(engine)
    (request,) = requests_of([()], rules)
    return Conversation(
        session,
        template,
        tokenizer,
        end_token_ids=engine.model.eos_token_ids,
        system=system,
        document=document,
        rules=request,
        progress=progress,
    )
