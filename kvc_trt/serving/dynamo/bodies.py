"""The bodies of requests and answers as the gateway reads them; nothing here knows of connections."""

from __future__ import annotations

import json
from typing import Any, Literal

from kvc_trt.errors import InputError, describe
from kvc_trt.proof.record import proof_kind

WANTS_ERRORS = "kvc-trt.errors"
"""An annotation by which the gateway asks workers to write a refusal into the answer, where the frontend leaves it."""
WANTS_PROOF = "kvc-trt.kv_proof."
"""The beginning of an annotation by which the gateway asks workers for a proof; what follows is its kind."""
KV_PROOF = "return_kv_proof"
"""A field of requests that is ours, and that the frontend would refuse."""
OUR_DATA = "engine_data"
"""The field of `nvext` in which an answer carries what workers say of it."""
_DROPPED: dict[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that Dynamo's frontend ignores silently, and the values that ask for nothing."""
_UNKNOWN = "the server failed at this request"

Refusal = tuple[int, str]
"""A status and its reason."""


def checked_body(content: bytes) -> dict[str, Any]:
    """Return a request's JSON object for the frontend, asking for the reasons of refusals.

    `return_kv_proof`, which the frontend does not know, travels among the annotations. Raises InputError for what is
    not an object, and for fields that the frontend would drop.
    """
    try:
        body = json.loads(content)
    except UnicodeDecodeError as error:
        raise InputError(f"the body is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise InputError("the body is not valid JSON") from error
    if not isinstance(body, dict):
        raise InputError(f"the body: expected a JSON object, found {describe(body)}")
    for name, nothing in _DROPPED.items():
        value = body.get(name)
        if value is not None and value not in nothing:
            raise InputError(f"{name} is not supported here, found {describe(value)}")
    if not isinstance(body.get("prompt", ""), (str, list)):
        raise InputError(f"prompt: expected text or token ids, found {describe(body['prompt'])}")
    if not isinstance(body.get("messages", []), list):
        raise InputError(f"messages: expected a list, found {describe(body['messages'])}")
    if body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        raise InputError("top_logprobs: expected beside logprobs true")  # the frontend would drop it
    extension = body.get("nvext")
    if extension is None:
        extension = {}
    if not isinstance(extension, dict):
        raise InputError(f"nvext: expected a JSON object, found {describe(extension)}")
    annotations = [] if _is_batch(body) else [WANTS_ERRORS]
    proof = proof_kind(body.pop(KV_PROOF, None), KV_PROOF)
    if proof is not None:
        if _is_batch(body):
            raise InputError(f"{KV_PROOF}: a proof is of one answer, and there are several prompts")
        annotations.append(f"{WANTS_PROOF}{proof}")
    lists = {"extra_fields": [OUR_DATA], "annotations": annotations}
    for name, ours in lists.items():
        theirs = extension.get(name) or []
        if not isinstance(theirs, list):
            raise InputError(f"{name} of nvext: expected a list, found {describe(theirs)}")
        if ours:
            extension = {**extension, name: [*theirs, *(one for one in ours if one not in theirs)]}
    return {**body, "nvext": extension}


def error_of_answer(content: bytes) -> Refusal | None:
    """Return the refusal that a worker wrote into an answer of status 200; None for an answer."""
    try:
        return _refusal(json.loads(content))
    except (ValueError, RecursionError):
        return None


def error_of_status(status: int, content: bytes) -> Refusal:
    """Return a failed request's status and reason; of what is not the client's fault, no more than that it failed."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = body["error"]
    message = body.get("message") if isinstance(body, dict) else None
    if status == 404 and not message:
        return status, "there is no such model here, or it does not take this kind of request"
    if not isinstance(message, str) or (status >= 500 and status != 503):
        return status, _UNKNOWN
    return status, message


def error_of_stream(begun: bytes, *, ended: bool = False) -> Refusal | Literal[False] | None:
    """Return the error with which a stream of events begins, False for another beginning, None while it is unclear."""
    for event in begun.split(b"\n\n")[: None if ended else -1]:
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            continue  # a comment
        try:
            first = json.loads(b"\n".join(lines))
        except (ValueError, RecursionError):
            return False
        if isinstance(first, dict) and isinstance(first.get("error"), dict):
            code = first["error"].get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            return error_of_status(status, json.dumps(first).encode())
        return _refusal(first) or False
    return False if ended else None


def _refusal(answer: object) -> Refusal | None:
    found = answer
    for name in ("nvext", OUR_DATA, "kvc", "error"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None
    return int(found["code"]), str(found["message"])


def _is_batch(body: dict[str, Any]) -> bool:
    """Return whether a request has several prompts, whose answers must be kept apart."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt)
