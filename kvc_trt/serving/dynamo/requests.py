"""Turn a message of Dynamo's frontend to a worker into a request to the scheduler.

A message of our gateway has its rules in an annotation (`wire.py`). For any other message the frontend has tokenised
the prompt, and finds stop strings in the answer itself. It also passes on fields that it does not check and that we do
not support: each of them is refused by its name, none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.answer_rules import AnswerRule, Client, rules_of
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.kinds import Kind, listed
from kvc_trt.runtime.request import Request, request_under
from kvc_trt.serving.dynamo.wire import is_ours, request_in

_RULES = rules_of(Client.OPENAI)
_SAMPLING = {name: rule for name, rule in _RULES.items() if rule.of_sampling}
_OUTPUT = {name: rule for name, rule in _RULES.items() if rule.of_output}
_STOPPING = {name: rule for name, rule in _RULES.items() if not rule.of_sampling and not rule.of_output}
"""The rules by their names in messages of the frontend, which sends them in these three groups."""
_OTHER_SAMPLING: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
}
"""Sampling options that we do not support, each with the values that are accepted because they ask for nothing."""
_MORE_STOP_TOKENS = ("stop_token_ids_hidden", "stop_token_ids_visible")
"""Fields whose tokens are added to `stop_token_ids`."""
_OTHER_OUTPUT: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "skip_special_tokens": (True, False),  # the frontend does it
    "formatted_prompt": (True, False),
    "return_tokens_as_token_ids": (True, False),
}
_GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""The supported fields of `guided_decoding`."""
_OF_OTHER_GRAMMARS = ("backend", "whitespace_pattern")
"""The ignored fields of `guided_decoding`, which are for other grammar libraries."""
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_result")


def request_of(asked: Mapping[str, Any], limits: Limits, start_tokens: Sequence[int] = ()) -> Request:
    """Return the request of a message of Dynamo's frontend; its prompt gets `start_tokens` if it lacks them.

    Without a temperature the best token is taken, as in `kvc-trt run`. Raises InputError for a wrong value, for a
    length that cannot fit, and for options that are not supported. The session checks the rest.
    """
    if is_ours(asked):
        return request_in(asked)
    for name in _MEDIA:
        if asked.get(name):
            raise InputError(f"{name}: this model reads text alone")
    stopping = _given(asked, "stop_conditions")
    _refuse_others(stopping, "stop_conditions", {}, known={*_STOPPING, *_MORE_STOP_TOKENS})
    output = _given(asked, "output_options")
    _refuse_others(output, "output_options", _OTHER_OUTPUT, known=_OUTPUT)
    sampling = _given(asked, "sampling_options")
    guided = sampling.pop("guided_decoding", None)
    _refuse_others(sampling, "sampling_options", _OTHER_SAMPLING, known=_SAMPLING)
    prompt = prompt_of(asked, start_tokens)
    stopping.pop("stop", None)  # the frontend itself ends the answer at such a string
    rules = _read(sampling, _SAMPLING) | _read(stopping, _STOPPING) | _read(output, _OUTPUT)
    more = [Kind.TOKENS.plain(stopping[name], name) for name in _MORE_STOP_TOKENS if name in stopping]
    rules["stop_token_ids"] = sum(more, rules.get("stop_token_ids", ()))
    rules["stop_strings"] = tuple(filter(None, rules.get("stop_strings", ())))
    rules["grammar"] = _grammar(guided)
    _check_length(rules.get("max_new_tokens"), len(prompt), limits)
    return request_under(prompt, rules)


def prompt_of(asked: Mapping[str, Any], start_tokens: Sequence[int] = ()) -> list[int]:
    """Return the prompt's unchecked token ids, with `start_tokens` in front unless the prompt begins with them.

    A message of our gateway is left as it is: the gateway has added them.
    """
    tokens = _list(asked, "token_ids")
    start = [] if is_ours(asked) else list(start_tokens)
    return tokens if tokens[: len(start)] == start else [*start, *tokens]


def _list(asked: Mapping[str, Any], name: str) -> list[Any]:
    found = asked.get(name) or []
    if listed(found) is None:
        raise InputError(f"{name} is {describe(found)}, expected a list")
    return list(found)


def _given(asked: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the fields of one group of a message that are not null."""
    found = asked.get(group)
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}


def _refuse_others(
    given: Mapping[str, Any], group: str, neutral: Mapping[str, tuple[object, ...]], *, known: Collection[str]
) -> None:
    for name, value in given.items():
        if name not in known and value not in neutral.get(name, ()) and value not in ([], {}):
            raise InputError(f"{name} of {group} is not supported here, found {describe(value)}")


def _read(given: Mapping[str, Any], rules: Mapping[str, AnswerRule]) -> dict[str, Any]:
    """Return the rules in a group of fields by our names; InputError for a value of a wrong type."""
    return {
        rule.name: rule.kind.plain(given[name], name)
        for name, rule in rules.items()
        if name in given and given[name] not in rule.also_default
    }


def _grammar(guided: object) -> Grammar | None:
    """Return the grammar in `guided_decoding`, which the frontend passes on unchecked; None without one."""
    if not isinstance(guided, Mapping):
        return None
    given = {name: value for name, value in guided.items() if value is not None and name not in _OF_OTHER_GRAMMARS}
    if len(given) > 1 or not given.keys() <= _GRAMMARS.keys():
        raise InputError(f"guided_decoding has {', '.join(map(str, given))}: expected one of {', '.join(_GRAMMARS)}")
    for name, value in given.items():
        return _GRAMMARS[str(name)](value)
    return None


def _check_length(tokens: int | None, prompt: int, limits: Limits) -> None:
    most = max(1, limits.max_sequence_len - prompt)
    if tokens is not None and not 1 <= tokens <= most:
        raise InputError(
            f"max_tokens is {tokens}, expected 1 to {most}: this model takes {limits.max_sequence_len} tokens "
            f"together, and the prompt has {prompt}"
        )
