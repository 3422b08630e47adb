"""A request from outside, by the names that clients use, checked as far as that needs no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.proof.record import proof_kind
from kvc_trt.runtime.request import Request, Sampling
from kvc_trt.serving.fields import FIELDS, OTHER_NAMES, SAMPLING_FIELDS, Field
from kvc_trt.serving.values import checked

RETURNS = "return_"
"""What the names of fields begin with that ask for more than the text."""


@dataclass(frozen=True)
class ServedRequest:
    """What a client wants. Either `text` or `token_ids` is the prompt."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    rules: Request = field(default_factory=lambda: Request(()))
    """All of the request but its prompt."""
    stream: bool = False
    """True if the answer is wanted in pieces, as they come."""
    echo: bool = False
    """True if the prompt's text goes before the answer's."""
    returns: frozenset[str] = frozenset()
    """What is wanted besides the text, such as `finish_reason`."""


def parse_request(given: Mapping[str, object]) -> ServedRequest:
    """Return the request of these fields (`fields.py`); InputError, naming the field, for whatever is wrong with one.

    A client's values may be JSON's or NumPy's, and its texts UTF-8. `sampling_parameters` is a JSON object in which
    rules may be given instead, by vLLM's names; a rule that is given twice is refused.
    """
    values = _fields(given, FIELDS)
    values |= _of_sampling_parameters(values)
    text, token_ids = values.get("text_input"), values.get("input_ids")
    if (text is None) == (token_ids is None):
        found = "neither" if text is None else "both"
        raise InputError(f"the prompt is text_input or input_ids, found {found}")
    if not text and not token_ids:
        raise InputError("the prompt is empty")
    echo = not values.get("exclude_input_in_output", True)
    if echo and text is None:
        raise InputError("exclude_input_in_output is false, and input_ids have no text that could go before the answer")
    return ServedRequest(
        text=text,
        token_ids=token_ids,
        rules=_rules(values),
        stream=values.get("stream", False),
        echo=echo,
        returns=frozenset(name.removeprefix(RETURNS) for name in values if name.startswith(RETURNS) and values[name]),
    )


def _fields(given: Mapping[str, object], known: Mapping[str, Field], where: str = "") -> dict[str, Any]:
    """Return the values of what was given, checked; null is what was not."""
    for name in given:
        if name not in known:
            raise InputError(f"{where}unknown parameter {describe(name)}{did_you_mean(str(name), known)}")
    return {name: checked(known[name], value) for name, value in given.items() if value is not None}


def _of_sampling_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    text = values.get("sampling_parameters", "")
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"sampling_parameters is not valid JSON: {describe(text)}") from error
    if not isinstance(given, dict):
        raise InputError(f"sampling_parameters is {describe(given)}, expected a JSON object")
    found: dict[str, Any] = {}
    for name, value in _fields(given, SAMPLING_FIELDS, "sampling_parameters: ").items():
        name = OTHER_NAMES.get(name, name)
        if name in values or name in found:
            raise InputError(f"{name} is given twice, also in sampling_parameters")
        found[name] = value
    return found


def _rules(values: Mapping[str, Any]) -> Request:
    max_tokens = values.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, found {max_tokens}")
    of_sampling = {one.name: values[one.name] for one in fields(Sampling) if one.name in values}
    if of_sampling.get("top_k") == -1:  # vLLM's way to say all
        of_sampling["top_k"] = 0
    return Request(
        (),
        max_tokens,
        sampling=Sampling(**of_sampling),
        stop_token_ids=values.get("stop_token_ids", ()),
        stop_strings=values.get("stop_words", ()),
        min_tokens=values.get("min_tokens", 0),
        bad_words=values.get("bad_words", ()),
        logprobs=0 if values.get("return_log_probs") else None,
        kv_proof=proof_kind(values.get("return_kv_proof"), "return_kv_proof"),
        ignore_eos=values.get("ignore_eos", False),
    )
