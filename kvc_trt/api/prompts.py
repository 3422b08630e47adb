"""What an engine is asked, as token ids: text, token ids or messages, one prompt or a batch of them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvc_trt.engine import EngineDirectory

Conversation: TypeAlias = Sequence[Mapping[str, str]]
"""Messages, each with role (system, user, assistant or tool) and content."""


def prompt_ids(engine: EngineDirectory, prompts: Any) -> tuple[list[Sequence[int]], bool]:
    """Return the token ids of each prompt (text, or ids already), and whether the prompts are a batch."""
    is_batch = not isinstance(prompts, str) and len(prompts) > 0 and not isinstance(prompts[0], numbers.Integral)
    return [_ids_of(engine, prompt) for prompt in (prompts if is_batch else [prompts])], is_batch


def chat_ids(
    engine: EngineDirectory, messages: str | Conversation | Sequence[Conversation], system: str | None
) -> tuple[list[list[int]], bool]:
    """Return the token ids of each conversation's prompt, and whether the conversations are a batch.

    A text is one message of the user. `system` becomes a first message. Raises InputError for an engine without a
    tokenizer or a chat template, and for messages that it cannot take.
    """
    from kvc_trt.runtime.chat import check_messages

    is_batch = not isinstance(messages, str) and len(messages) > 0 and _is_conversation(messages[0])
    batch: Sequence[Any] = messages if is_batch else [messages]
    conversations = []
    for index, conversation in enumerate(batch):
        if isinstance(conversation, str) and not is_batch:
            conversation = [{"role": "user", "content": conversation}]
        what = f"conversation {index}" if is_batch else "messages"
        conversations.append(check_messages(conversation, what, system=system))
    template, tokenizer = engine.chat_template, _tokenizer(engine)
    if template is None:
        raise InputError(
            f"{engine.path} has no chat template: its model came without one",
            hint="--prompt TEXT gives the model a text as it is",
        )
    rendered = [template.render(conversation) for conversation in conversations]
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in rendered], is_batch


def _is_conversation(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, (str, bytes))


def _ids_of(engine: EngineDirectory, prompt: Any) -> Sequence[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = _tokenizer(engine)
    if not prompt:  # checked before encoding: many tokenizers put a start token in front of nothing
        raise InputError("the prompt is empty")
    return list(tokenizer.encode(prompt).ids)


def _tokenizer(engine: EngineDirectory) -> Tokenizer:
    if engine.tokenizer is None:
        raise InputError(
            f"{engine.path} has no tokenizer, so it cannot read text",
            hint="give token ids: --prompt-ids FILE (a JSON list)",
        )
    return engine.tokenizer
