"""Make a request's prompts: the token ids of messages in the chat template, of texts, or as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError, KvcError
from kvc_trt.runtime.request import check_token_ids
from kvc_trt.serving.protocol.errors import TOO_LONG, ApiError, refused
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.request import field_of
from kvc_trt.serving.tokens import TooLong, token_ids

if TYPE_CHECKING:
    from kvc_trt.runtime.executor import Limits
    from kvc_trt.runtime.grammar.grammar import Grammar
    from kvc_trt.serving.protocol.model import ServedModel
    from kvc_trt.serving.protocol.request import ApiRequest, Prompt


@dataclass(frozen=True)
class ReadPrompt:
    """One prompt as token ids."""

    token_ids: tuple[int, ...]
    text: str = ""
    """The prompt's text if the request wants it before its answers (`echo`); otherwise empty."""
    grammar: Grammar | None = None
    """The grammar that its answers follow."""
    rendered: str = ""
    """A chat's messages as text, by the chat template; empty for a completion."""


def read_prompts(asked: ApiRequest, model: ServedModel) -> list[ReadPrompt]:
    """Return the prompts of a request, a single one for a chat; ApiError if any is invalid or too long.

    The chat template may take seconds: do not call this on an asyncio loop.
    """
    try:
        if asked.endpoint is Endpoint.CHAT:
            prompts = [_chat(asked, model)]
        else:
            prompts = [_read(prompt, asked, model) for prompt in asked.prompts]
    except TooLong as error:
        raise refused(error.message, _field(asked), code=TOO_LONG) from error
    except KvcError as error:
        raise refused(error.message, field_of(error, _field(asked))) from error
    for prompt in prompts:
        check_length(len(prompt.token_ids), asked.rules.max_new_tokens, model.limits, _field(asked))
    return prompts


def check_length(prompt: int, answer: int | None, limits: Limits, field: str) -> None:
    """Raise ApiError if a prompt of `prompt` tokens is too long, or leaves no room for `answer` more tokens."""
    if prompt > limits.max_input_len:
        raise refused(
            f"the prompt has {prompt} tokens, expected at most {limits.max_input_len}: this model takes no longer ones",
            field,
            code=TOO_LONG,
        )
    most = max(1, limits.max_sequence_len - prompt)
    if answer is not None and answer > most:
        raise refused(
            f"max_tokens is {answer}, expected 1 to {most}: this model takes {limits.max_sequence_len} tokens "
            f"together, and the prompt has {prompt}",
            "max_tokens",
            code=TOO_LONG,
        )


def no_template(model: ServedModel) -> ApiError:
    """Return the error of a chat with a model that has no chat template."""
    return refused(
        f"the model {model.name} has no chat template, so it takes no messages: ask {Endpoint.COMPLETIONS.value}",
        "model",
    )


def _chat(asked: ApiRequest, model: ServedModel) -> ReadPrompt:
    if model.template is None:
        raise no_template(model)
    text = model.template.render(
        asked.messages,
        tools=asked.tools.offered,
        variables=asked.template_variables,
        add_generation_prompt=asked.opens_answer,
    )
    grammar = model.tool_format.constrained(asked.tools, text, asked.rules.grammar, model.special_tokens)
    ids = token_ids(model.tokenizer, text, model.limits.max_input_len, add_special_tokens=False)
    if not ids:
        raise InputError("the chat template makes an empty prompt of these messages")
    return ReadPrompt(ids, grammar=grammar, rendered=text)


def _read(prompt: Prompt, asked: ApiRequest, model: ServedModel) -> ReadPrompt:
    if isinstance(prompt, str):
        ids, text = token_ids(model.tokenizer, prompt, model.limits.max_input_len), prompt
    else:
        ids = tuple(check_token_ids(prompt, model.limits, "prompt"))
        text = model.tokenizer.decode(list(ids)) if asked.echo else ""
    return ReadPrompt(ids, text if asked.echo else "", asked.rules.grammar)


def _field(asked: ApiRequest) -> str:
    return "messages" if asked.endpoint is Endpoint.CHAT else "prompt"
