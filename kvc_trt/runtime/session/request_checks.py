"""Checks of an admitted request that need more than its own rules: its proof, its stored text, its continuation."""

from __future__ import annotations

from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.request import check_token_ids
from kvc_trt.runtime.session.admitted import Admitted
from kvc_trt.runtime.session.reported_lists import ReportedLists


def check_proof(admitted: Admitted, lists: ReportedLists | None) -> None:
    """Raise InputError for a request that asks for a proof which cannot be given."""
    request = admitted.request
    if request.kv_proof is None:
        return
    if lists is None:
        raise admitted.error(
            "a KV proof is asked for, and the engine was not opened for proofs",
            hint="Engine.open(ENGINE_DIR, proofs=True), kvc-trt run --kv-proof, or kvc-trt serve --kv-proofs",
        )
    begun = request.kv_proof_prompt
    if request.context is not None and begun is None:
        raise admitted.error("a KV proof covers the whole prompt, and a stored context is not read again")
    if begun is not None and (request.context is None or not request.context_token_ids or request.prompt_token_ids):
        raise admitted.error("the record of a prompt goes with its context and its tokens, and no others")
    if begun is not None and begun.kind != request.kv_proof:
        raise admitted.error(f"a proof of kind {request.kv_proof} cannot go on from a record of {begun.kind}")
    if request.stay:
        raise admitted.error("a KV proof covers a prompt and one answer, and no further turns")


def check_context_text(admitted: Admitted, limits: Limits) -> None:
    """Raise InputError if sampling looks back at the text of a request's context, and the request does not give it.

    Raises it also for `context_token_ids` that are not those of the context.
    """
    request = admitted.request
    if request.context is None:
        if request.context_token_ids:
            raise admitted.error("context_token_ids without a context")
        return
    if request.context_token_ids:
        tokens = check_token_ids(request.context_token_ids, limits, f"{admitted.label}: context_token_ids")
        if extended_digest(NO_TOKENS, tokens) != request.context.token_digest:
            raise admitted.error(
                f"context_token_ids are not the {request.context.logical_length} tokens of its context"
            )
        return
    for rule, looks_back in (
        ("a repetition penalty", request.sampling.repetition_penalty != 1.0),
        ("a banned sequence of several tokens", any(len(sequence) > 1 for sequence in admitted.banned)),
    ):
        if looks_back:
            raise admitted.error(
                f"{rule} looks back at the text, and of a stored context only a digest is known",
                hint="give its tokens (Request.context_token_ids in Python), or the whole text as the prompt",
            )


def check_continuation(admitted: Admitted, limits: Limits) -> None:
    """Raise InputError for a continuation that cannot fit after its prompt, even if the caches keep little of that."""
    prompt, tokens = len(admitted.prompt), len(admitted.continuation)
    keeping = limits.keeping or (False,) * len(limits.capacities)
    room = limits.room(prompt, [prompt if keeps else 0 for keeps in keeping])
    if tokens > room:
        raise admitted.error(
            f"continuation: {tokens} tokens do not fit after {prompt} tokens, found room for {room}",
            hint="build the engine with a larger --max-output-len",
        )
