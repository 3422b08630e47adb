"""vLLM's `/tokenize` and `/detokenize`: turn a text or a conversation into token ids, and token ids into text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvc_trt.errors import InputError, KvcError, describe, did_you_mean
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.request import check_token_ids
from kvc_trt.serving.protocol.errors import NO_FIELD, refused
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.prompts import no_template

TOKENIZE = frozenset(
    {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "chat_template_kwargs",
     "tools", "return_token_strs"}
)  # fmt: skip
DETOKENIZE = frozenset({"model", "tokens"})
_MOST_CHARACTERS = 16 << 20


def tokenized(body: Mapping[str, object], model: ServedModel) -> dict[str, Any]:
    """Return the token ids of `prompt`, or of `messages` in the chat template; ApiError for neither or both of them."""
    given = _given(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise refused("expected either prompt or messages")
    try:
        ids = _ids(given, model)
    except KvcError as error:
        raise refused(error.message) from error
    spelled = [model.spelling.text(one) for one in ids] if _switch(given, "return_token_strs", False) else None
    return {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": spelled}


def detokenized(body: Mapping[str, object], model: ServedModel) -> dict[str, Any]:
    """Return the text of `tokens`; ApiError if they are not a list of the model's token ids."""
    given = _given(body, DETOKENIZE)
    if "tokens" not in given:
        raise refused("tokens is missing", "tokens")
    try:
        ids = check_token_ids(given["tokens"], model.limits, "tokens")
        return {"prompt": model.tokenizer.decode(ids, skip_special_tokens=False)}
    except InputError as error:
        raise refused(error.message, "tokens") from error


def _given(body: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    for name in body:
        if name not in known:
            raise refused(f"unknown field {describe(name)}{did_you_mean(name, known)}", name, code=NO_FIELD)
    return {name: value for name, value in body.items() if value is not None}


def _ids(given: Mapping[str, object], model: ServedModel) -> list[int]:
    if "prompt" in given:
        text = Kind.TEXT.plain(given["prompt"], "prompt")
        if len(text) > _MOST_CHARACTERS:
            raise InputError(f"prompt has {len(text)} characters, expected at most {_MOST_CHARACTERS}")
        return list(model.tokenizer.encode(text, add_special_tokens=_switch(given, "add_special_tokens", True)).ids)
    if model.template is None:
        raise no_template(model)
    messages: Any = given["messages"]
    tools: Any = given.get("tools")
    variables: Any = given.get("chat_template_kwargs")
    opened = _switch(given, "add_generation_prompt", True)
    text = model.template.render(messages, tools=tools, variables=variables, add_generation_prompt=opened)
    return list(model.tokenizer.encode(text, add_special_tokens=_switch(given, "add_special_tokens", False)).ids)


def _switch(given: Mapping[str, object], name: str, default: bool) -> bool:
    return bool(Kind.SWITCH.plain(given.get(name, default), name))
