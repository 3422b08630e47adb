"""What Dynamo's frontend asks of a worker, as a request to the scheduler.

The frontend has tokenised the prompt, and finds stop strings in the answer by itself. It passes on a number of
things that it does not check, and that we do not do: each of them is refused by its name, none is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.proof.record import ProofKind, proof_kind
from kvc_trt.runtime import Request, Sampling
from kvc_trt.runtime.executor import Limits
from kvc_trt.serving.dynamo.bodies import KV_PROOF, WANTS_PROOF

_SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Fields of `Sampling` that have the same names there, and the values that stand for their absence."""
_OTHER_SAMPLING: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
}
"""Sampling options that we do not have, and the values that ask for nothing."""
_STOPPING = frozenset(
    {"max_tokens", "min_tokens", "stop", "stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible"}
    | {"ignore_eos"}
)
_OUTPUT: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "skip_special_tokens": (True, False),  # the frontend does it
    "formatted_prompt": (True, False),
    "return_tokens_as_token_ids": (True, False),
}
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_result")
_ALL_TOKENS = -1
"""How some clients write that `top_k` keeps all tokens."""


def request_of(asked: Mapping[str, Any], limits: Limits, start_tokens: Sequence[int] = ()) -> Request:
    """Return the request of a message of Dynamo's frontend, with `start_tokens` in front where they are missing.

    Without a temperature the best token is taken, as in `kvc-trt run`. Raises InputError for a value that is wrong, one
    that cannot fit, and for everything that this engine does not do. The session checks the rest.
    """
    for name in _MEDIA:
        if asked.get(name):
            raise InputError(f"{name}: this model reads text alone")
    stopping = _given(asked, "stop_conditions")
    _refuse_others(stopping, "stop_conditions", {}, known=_STOPPING)
    output = _given(asked, "output_options")
    _refuse_others(output, "output_options", _OUTPUT, known=frozenset({"logprobs"}))
    prompt = prompt_of(asked, start_tokens)
    kv_proof = _kv_proof(asked)
    return Request(
        prompt,
        _max_new_tokens(stopping, len(prompt), limits),
        sampling=_sampling(_given(asked, "sampling_options")),
        stop_token_ids=_stop_token_ids(stopping),
        min_tokens=_whole(stopping.get("min_tokens", 0), "min_tokens"),
        logprobs=None if "logprobs" not in output else _whole(output["logprobs"], "logprobs"),
        ignore_eos=bool(stopping.get("ignore_eos")),
        kv_proof=kv_proof,
        # The frontend would end the answer at such a string by itself, and the proof comes with its last token.
        stop_strings=_texts(stopping.get("stop", ()), "stop") if kv_proof else (),
    )


def prompt_of(asked: Mapping[str, Any], start_tokens: Sequence[int] = ()) -> list[int]:
    """Return the prompt's token ids, with `start_tokens` in front where they are missing; unchecked."""
    tokens = list(asked.get("token_ids") or ())
    start = list(start_tokens)
    return tokens if tokens[: len(start)] == start else [*start, *tokens]


def _given(asked: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the values of a group that are set."""
    found = asked.get(group)
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}


def _refuse_others(
    given: Mapping[str, Any], group: str, neutral: Mapping[str, tuple[object, ...]], *, known: frozenset[str]
) -> None:
    for name, value in given.items():
        if name not in known and value not in neutral.get(name, ()) and value not in ([], {}):
            raise InputError(f"{name} of {group} is not supported here, found {describe(value)}")


def _sampling(given: Mapping[str, Any]) -> Sampling:
    _refuse_others(given, "sampling_options", _OTHER_SAMPLING, known=frozenset(_SAMPLING))
    chosen: dict[str, Any] = {}
    for name, absent in _SAMPLING.items():
        value = given.get(name, absent)
        if name == "top_k" and value == _ALL_TOKENS:
            value = absent
        if value != absent:
            chosen[name] = _whole(value, name) if name in ("top_k", "seed") else _number(value, name)
    return Sampling(**chosen)


def _max_new_tokens(stopping: Mapping[str, Any], prompt: int, limits: Limits) -> int | None:
    value = stopping.get("max_tokens")
    if value is None:
        return None
    tokens, most = _whole(value, "max_tokens"), limits.max_sequence_len - prompt
    if not 1 <= tokens <= max(1, most):
        raise InputError(
            f"max_tokens is {tokens}, expected 1 to {max(1, most)}: this model takes {limits.max_sequence_len} tokens "
            f"together, and the prompt has {prompt}"
        )
    return tokens


def _stop_token_ids(stopping: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")
    return tuple(_whole(token, name) for name in names for token in stopping.get(name) or ())


def _kv_proof(asked: Mapping[str, Any]) -> ProofKind | None:
    for annotation in asked.get("annotations") or ():
        if isinstance(annotation, str) and annotation.startswith(WANTS_PROOF):
            return proof_kind(annotation[len(WANTS_PROOF) :], KV_PROOF)
    return None


def _texts(value: object, name: str) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name}: expected texts, found {describe(value)}")
    return tuple(text for text in texts if text)


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: expected a whole number, found {describe(value)}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}: expected a number, found {describe(value)}")
    return float(value)
