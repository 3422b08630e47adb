"""Read a client's request by the table of its fields, with every check that needs no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.proof.record import proof_kind
from kvc_trt.runtime.answer_rules import RULES, Client, rules_of
from kvc_trt.runtime.request import Request, request_under
from kvc_trt.serving.fields import FIELDS, OTHER_NAMES, SAMPLING_FIELDS, Field
from kvc_trt.serving.values import checked

RETURNS = "return_"
"""The prefix of fields that ask for further outputs beside the text."""
_RULES = rules_of(Client.TRITON)


@dataclass(frozen=True)
class ServedRequest:
    """A client's request, checked. Either `text` or `token_ids` is the prompt."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    rules: Request = field(default_factory=lambda: Request(()))
    """The request without its prompt."""
    stream: bool = False
    """True if the answer is sent in pieces, as they come."""
    echo: bool = False
    """True if the answer's text begins with the prompt's."""
    returns: frozenset[str] = frozenset()
    """The names of outputs to return beside the text, such as `finish_reason`."""


def parse_request(given: Mapping[str, object]) -> ServedRequest:
    """Return the request in these fields (`fields.py`); InputError, naming the field, if one is wrong.

    Values may come from JSON or NumPy, texts also as UTF-8 bytes. `sampling_parameters` is a JSON object that may hold
    rules instead, under vLLM's names or ours; a rule that is given twice is refused.
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
    """Return the checked values of the given fields; a null value counts as not given."""
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
    rules = {
        rule.name: values[name]
        for name, rule in _RULES.items()
        if name in values and values[name] not in rule.also_default
    }
    RULES["max_new_tokens"].check(rules.get("max_new_tokens"), name="max_tokens")
    # Here `logprobs` is a switch: true asks for those of the drawn tokens alone. An empty text asks for no proof.
    rules["logprobs"] = 0 if rules.get("logprobs") else None
    rules["kv_proof"] = proof_kind(rules.get("kv_proof"), "return_kv_proof")
    return request_under((), rules)
