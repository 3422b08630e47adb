"""Prompts as token ids: from text, token ids or messages, one prompt or a batch of them."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvc_trt.errors import BarePromptWarning, InputError, describe
from kvc_trt.runtime.chat.messages import check_messages
from kvc_trt.runtime.kinds import Kind, listed

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.sources.tokenizer_library import Tokenizer
    from kvc_trt.runtime.chat.template import ChatTemplate

_BARE_PROMPT = (
    "the model has a chat template, and this prompt bypasses it: chat models often give no answer then; "
    "Engine.chat asks through the template"
)
Messages: TypeAlias = Sequence[Mapping[str, str]]
"""A conversation: messages, each with role (system, user, assistant or tool) and content."""


def prompt_ids(engine: EngineDirectory, prompts: Any, *, continues: bool = False) -> tuple[list[Sequence[int]], bool]:
    """Return the token ids of each prompt (text, or ids already), and whether the prompts are a batch.

    Text that `continues` another may be empty and gets no start token. Warns of other text for a model with a chat
    template; InputError for anything else than text or ids.
    """
    if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
        prompts = list(prompts)
    if not isinstance(prompts, str) and listed(prompts) is None:
        raise InputError(f"prompts: expected text, token ids or a list of prompts, found {describe(prompts)}")
    is_batch = not isinstance(prompts, str) and len(prompts) > 0 and not isinstance(prompts[0], numbers.Integral)
    batch = prompts if is_batch else [prompts]
    if not continues and any(isinstance(prompt, str) for prompt in batch) and _is_chat_model(engine):
        warnings.warn(_BARE_PROMPT, BarePromptWarning, stacklevel=3)
    return [_ids_of(engine, prompt, continues) for prompt in batch], is_batch


def chat_ids(
    engine: EngineDirectory, messages: str | Messages | Sequence[Messages], system: str | None
) -> tuple[list[list[int]], bool]:
    """Return the token ids of each conversation's prompt, and whether the conversations are a batch.

    A text is one message of the user. `system` becomes a first message. Raises InputError for an engine without a
    tokenizer or a chat template, and for messages that it cannot take.
    """
    is_batch = _is_list(messages) and len(messages) > 0 and _is_list(messages[0])
    batch: Sequence[Any] = messages if is_batch else [messages]
    conversations = []
    for index, conversation in enumerate(batch):
        if isinstance(conversation, str) and not is_batch:
            conversation = [{"role": "user", "content": conversation}]
        what = f"conversation {index}" if is_batch else "messages"
        conversations.append(check_messages(conversation, what, system=system))
    template, tokenizer = chat_model(engine)
    rendered = [template.render(conversation) for conversation in conversations]
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in rendered], is_batch


def chat_model(engine: EngineDirectory) -> tuple[ChatTemplate, Tokenizer]:
    """Return the object that encodes messages as token ids; InputError for an engine without a tokenizer or a chat
    template."""
    template, tokenizer = engine.chat_template, _tokenizer(engine)
    if template is None:
        raise InputError(
            f"{engine.path} has no chat template: its model came without one",
            hint="--prompt TEXT, or Engine.generate in Python, gives the model a text as it is",
        )
    return template, tokenizer


def _is_chat_model(engine: EngineDirectory) -> bool:
    """True if the engine has a chat template, even one that cannot be read: this is no reason to refuse a text."""
    try:
        return engine.chat_template is not None
    except InputError:
        return True


def _is_list(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, (str, bytes))


def _ids_of(engine: EngineDirectory, prompt: Any, continues: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        if listed(prompt) is None:
            raise InputError(f"a prompt is {describe(prompt)}, expected text or token ids")
        return list(prompt)
    prompt = Kind.TEXT.plain(prompt, "the prompt")
    if continues and not prompt:
        return []
    tokenizer = _tokenizer(engine)
    if not prompt:  # checked before encoding: many tokenizers put a start token in front of nothing
        raise InputError("the prompt is empty")
    return list(tokenizer.encode(prompt, add_special_tokens=not continues).ids)


def _tokenizer(engine: EngineDirectory) -> Tokenizer:
    if engine.tokenizer is None:
        raise InputError(
            f"{engine.path} has no tokenizer, so it cannot read text",
            hint="give token ids: --prompt-ids FILE (a JSON list), or a list of them in Python",
        )
    return engine.tokenizer
