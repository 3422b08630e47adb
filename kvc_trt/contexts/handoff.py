"""A context as bytes in memory, for a reader in another process, on this machine or elsewhere.

The bytes are the logits and then every tensor in the order of `RowPacking.layout`, nothing between them. Their reader
knows that order and every size from its own engine and the document that comes with them, and checks all of it before
it makes anything of the bytes: the engine's digests, whose text it is, the lengths, how many bytes, their checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvc_trt.contexts.content import impossible
from kvc_trt.contexts.header import ContextHeader, Count, Digest, check_lengths, header_of
from kvc_trt.contexts.packing import RowPacking
from kvc_trt.errors import HandoffRefused, InputError
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.runtime.context import NO_TOKENS, Array, Context, extended_digest
from kvc_trt.validation import OwnSchema

Bytes = NDArray[np.uint8]
LOGITS = "logits"
WHAT = "the handoff"


class Handoff(OwnSchema):
    """The description of a context's bytes, which a reader gets before them."""

    context: ContextHeader
    nbytes: Count
    checksum: Digest
    """The SHA-256 of the bytes."""


def largest_handoff(packing: RowPacking) -> int:
    """Return the bytes of the largest context that a prompt can have."""
    limits = packing.limits
    evicting = limits.evicting or (False,) * len(limits.capacities)
    longest = limits.max_input_len
    lengths = [
        longest if evicts else min(slots, longest) for slots, evicts in zip(limits.capacities, evicting, strict=True)
    ]
    return packing.nbytes(lengths, longest)


def write_handoff(context: Context, packing: RowPacking, into: Bytes) -> Handoff:
    """Write a context of the engine of `packing` into the first bytes of `into` [n], and return their description."""
    end = 0
    for name, dtype, shape in _tensors(packing, context.cache_lengths, context.logical_length):
        tensor = context.logits if name == LOGITS else context.tensors[name]
        assert (str(tensor.dtype), tensor.shape) == (dtype, shape), "it is a context of this engine"
        start, end = end, end + tensor.nbytes
        into[start:end] = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return Handoff(context=header_of(context), nbytes=end, checksum=hashlib.sha256(into[:end].data).hexdigest())


def check_handoff(handoff: Handoff, packing: RowPacking, prompt: Sequence[int]) -> None:
    """Raise HandoffRefused, with the first reason, unless it announces a context of `prompt` for this engine."""
    header = handoff.context
    try:
        header.fingerprint.check_same(packing.fingerprint, WHAT, packing.other_turns)
        if header.compatibility != packing.fingerprint.compatibility:
            raise InputError(f"{WHAT}: its compatibility digest does not follow from its other digests")
        check_lengths(header, packing, WHAT)
    except InputError as error:
        raise HandoffRefused(error.message) from None
    if header.logical_length != len(prompt):
        raise HandoffRefused(f"{WHAT} is of {header.logical_length} tokens, and the prompt has {len(prompt)}")
    if header.tokens != extended_digest(NO_TOKENS, prompt):
        raise HandoffRefused(f"{WHAT} is of another text than the prompt")
    expected = packing.nbytes(header.cache_lengths, header.logical_length)
    if handoff.nbytes != expected:
        raise HandoffRefused(f"{WHAT} has {handoff.nbytes} bytes, expected {expected}")


def read_handoff(handoff: Handoff, packing: RowPacking, content: Bytes) -> Context:
    """Return the context in the first bytes of `content` [n], copied.

    HandoffRefused if the checksum differs, and for tensors that no engine can have made (`contexts/content.py`).
    """
    if hashlib.sha256(content[: handoff.nbytes].data).hexdigest() != handoff.checksum:
        raise HandoffRefused(
            f"{WHAT} has another checksum than was announced: it was overwritten, or changed on its way"
        )
    header, end = handoff.context, 0
    tensors: dict[str, Array] = {}
    for name, dtype, shape in _tensors(packing, header.cache_lengths, header.logical_length):
        element = numpy_dtype(dtype)
        start, end = end, end + element.itemsize * math.prod(shape)
        tensors[name] = content[start:end].copy().view(element).reshape(shape)
    context = Context(
        fingerprint=header.fingerprint,
        logical_length=header.logical_length,
        cache_lengths=tuple(header.cache_lengths),
        token_digest=header.tokens,
        logits=tensors.pop(LOGITS),
        tensors=tensors,
    )
    problem = impossible(context)
    if problem is not None:
        raise HandoffRefused(f"{WHAT}: {problem}")
    return context


def _tensors(
    packing: RowPacking, cache_lengths: Sequence[int], logical_length: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, type and shape of every tensor, in the order of the bytes."""
    yield LOGITS, "float32", (packing.limits.vocab_size,)
    for name, (dtype, shape) in packing.layout(cache_lengths, logical_length).items():
        yield name, dtype, shape
