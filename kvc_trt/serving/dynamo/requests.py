"""A message of Dynamo's frontend to a worker, as a request to the scheduler.

The frontend has tokenised the prompt, and finds stop strings in the answer by itself. It passes on fields that it does
not check and that we do not support: each of them is refused by its name, none is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.proof.record import ProofKind, proof_kind
from kvc_trt.runtime.answer_rules import Client, Rule, rules_of
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.kinds import Kind, listed
from kvc_trt.runtime.request import Request, request_under
from kvc_trt.serving.dynamo.bodies import KV_PROOF, WANTS_PROOF

_RULES = rules_of(Client.OPENAI)
_SAMPLING = {name: rule for name, rule in _RULES.items() if rule.of_sampling}
_OUTPUT = {name: rule for name, rule in _RULES.items() if rule.of_output}
_STOPPING = {name: rule for name, rule in _RULES.items() if not rule.of_sampling and not rule.of_output}
"""The rules by the names of the frontend, which sends them in three groups."""
_OTHER_SAMPLING: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
}
"""Sampling options that we do not have, and the values that ask for nothing."""
_MORE_STOP_TOKENS = ("stop_token_ids_hidden", "stop_token_ids_visible")
"""Fields that go with `stop_token_ids`."""
_OTHER_OUTPUT: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "skip_special_tokens": (True, False),  # the frontend does it
    "formatted_prompt": (True, False),
    "return_tokens_as_token_ids": (True, False),
}
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_result")


def request_of(asked: Mapping[str, Any], limits: Limits, start_tokens: Sequence[int] = ()) -> Request:
    """Return the request of a message of Dynamo's frontend, with `start_tokens` in front where they are missing.

    Without a temperature the best token is taken, as in `kvc-trt run`. Raises InputError for a value that is wrong, one
    that cannot fit, and for everything that this engine does not do. The session checks the rest.
    """
    for name in _MEDIA:
        if asked.get(name):
            raise InputError(f"{name}: this model reads text alone")
    stopping = _given(asked, "stop_conditions")
    _refuse_others(stopping, "stop_conditions", {}, known={*_STOPPING, *_MORE_STOP_TOKENS})
    output = _given(asked, "output_options")
    _refuse_others(output, "output_options", _OTHER_OUTPUT, known=_OUTPUT)
    sampling = _given(asked, "sampling_options")
    _refuse_others(sampling, "sampling_options", _OTHER_SAMPLING, known=_SAMPLING)
    prompt = prompt_of(asked, start_tokens)
    kv_proof = _kv_proof(asked)
    if kv_proof is None:
        # The frontend ends the answer at such a string by itself. A proof comes with the answer's last token, so the
        # row has to end there too.
        stopping.pop("stop", None)
    rules = _read(sampling, _SAMPLING) | _read(stopping, _STOPPING) | _read(output, _OUTPUT)
    more = [Kind.TOKENS.plain(stopping[name], name) for name in _MORE_STOP_TOKENS if name in stopping]
    rules["stop_token_ids"] = sum(more, rules.get("stop_token_ids", ()))
    rules["stop_strings"] = tuple(filter(None, rules.get("stop_strings", ())))
    _check_length(rules.get("max_new_tokens"), len(prompt), limits)
    return request_under(prompt, {**rules, "kv_proof": kv_proof})


def prompt_of(asked: Mapping[str, Any], start_tokens: Sequence[int] = ()) -> list[int]:
    """Return the prompt's token ids, with `start_tokens` in front where they are missing; the ids are unchecked."""
    tokens = _list(asked, "token_ids")
    start = list(start_tokens)
    return tokens if tokens[: len(start)] == start else [*start, *tokens]


def _list(asked: Mapping[str, Any], name: str) -> list[Any]:
    found = asked.get(name) or []
    if listed(found) is None:
        raise InputError(f"{name} is {describe(found)}, expected a list")
    return list(found)


def _given(asked: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the values of a group that are set."""
    found = asked.get(group)
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}


def _refuse_others(
    given: Mapping[str, Any], group: str, neutral: Mapping[str, tuple[object, ...]], *, known: Collection[str]
) -> None:
    for name, value in given.items():
        if name not in known and value not in neutral.get(name, ()) and value not in ([], {}):
            raise InputError(f"{name} of {group} is not supported here, found {describe(value)}")


def _read(given: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Return the values of a group by our own names of its rules; InputError for one of a wrong type."""
    return {
        rule.name: rule.kind.plain(given[name], name)
        for name, rule in rules.items()
        if name in given and given[name] not in rule.also_default
    }


def _check_length(tokens: int | None, prompt: int, limits: Limits) -> None:
    most = max(1, limits.max_sequence_len - prompt)
    if tokens is not None and not 1 <= tokens <= most:
        raise InputError(
            f"max_tokens is {tokens}, expected 1 to {most}: this model takes {limits.max_sequence_len} tokens "
            f"together, and the prompt has {prompt}"
        )


def _kv_proof(asked: Mapping[str, Any]) -> ProofKind | None:
    for annotation in _list(asked, "annotations"):
        if isinstance(annotation, str) and annotation.startswith(WANTS_PROOF):
            return proof_kind(annotation[len(WANTS_PROOF) :], KV_PROOF)
    return None
