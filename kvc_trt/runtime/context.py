"""A compressed context: everything that a row has stored, apart from the executor that stored it.

A row that starts from a context goes on as the row that it was taken from: the same caches, the same logits of the last
token, the same position. What belongs to a request (random numbers, stop rules, the answer so far) is not part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.runtime.kinds import MOST_LISTED, Kind, tokens_in

Array = NDArray[Any]
NO_TOKENS = hashlib.sha256(b"kvc-trt tokens").hexdigest()
"""The token digest of an empty text."""


class OtherTurns(NamedTuple):
    """An engine that takes turns where another one does not, or the other way round, and is the same otherwise.

    One that takes turns keeps the places of its slots in the text, and cannot take a turn without them.
    """

    state: str
    """Digest of its list of state tensors."""
    reason: str
    """Why its contexts do not fit the other one; follows what names the context."""
    hint: str


@dataclass(frozen=True)
class Fingerprint:
    """The engine that made a context: SHA-256 digests, and two names for messages.

    A context fits every engine that is equal in `weights`, `model`, `parameters` and `state`, whatever runs it.
    """

    engine: str
    """Of the engine's manifest. It differs between backends and does not decide."""
    weights: str
    """Of the weight file."""
    model: str
    """Of the model's configuration."""
    parameters: str
    """Of the resolved policy parameters."""
    state: str
    """Of the list of state tensors: names, types and shapes."""
    model_name: str
    policy_name: str
    kv_cache: str = AUTO
    """The format of keys and values; part of what `parameters` and `state` digest."""

    @property
    def compatibility(self) -> str:
        """The digest of what decides whether a context fits an engine."""
        parts = (self.weights, self.model, self.parameters, self.state)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def check_same(self, needed: Fingerprint, what: str, other_turns: OtherTurns | None = None) -> None:
        """Raise InputError, naming `what` and the first reason, unless a context of this fits engine `needed`.

        `other_turns` tells the context of an engine that differs from `needed` in taking turns alone.
        """
        again = "it fits engines of equal weights, policy and settings; make it again with kvc-trt context save"
        if self.model != needed.model:
            raise InputError(f"{what} is of model {self.model_name}; this engine has {needed.model_name}", hint=again)
        same_parameters = self.parameters == needed.parameters
        if self.kv_cache != needed.kv_cache and (same_parameters or self.policy_name == needed.policy_name):
            raise InputError(
                f"{what} has keys and values in format {self.kv_cache}; this engine has {needed.kv_cache}",
                hint="make it again with this engine: kvc-trt context save, or build one with the settings that it "
                f"was made with, --kv-cache {self.kv_cache} among them",
            )
        if not same_parameters:
            other = needed.policy_name
            differ = "has the same with other numbers" if self.policy_name == other else f"has {other}"
            raise InputError(f"{what} was made under policy {self.policy_name}; this engine {differ}", hint=again)
        if other_turns is not None and self.weights == needed.weights and self.state == other_turns.state:
            raise InputError(f"{what} {other_turns.reason}", hint=other_turns.hint)
        for name, own, other in (
            ("weights", self.weights, needed.weights),
            ("state tensors", self.state, needed.state),
        ):
            if own != other:
                found = f"expected digest {other[:12]}, found {own[:12]}"
                raise InputError(f"{what} was made by an engine with other {name}: {found}", hint=again)


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens and state that one row has stored of a text."""

    fingerprint: Fingerprint
    logical_length: int
    """Tokens of the text; the next one is at this position."""
    cache_lengths: tuple[int, ...]
    """Per cache, the tokens that count as stored: more than its slots where a step evicts."""
    token_digest: str
    """`extended_digest` of the text's tokens."""
    logits: NDArray[np.float32]
    """[vocab]: the model's answer to the last token."""
    tensors: Mapping[str, Array]
    """State by name: `k.N` and `v.N` of cache N, [G,kept,D] in the cache's type, or codes and beside them what turns
    them into values, and what cannot be rebuilt."""

    def __post_init__(self) -> None:
        """Check the types; whether a context fits an engine is for its session to say."""
        Kind.INTEGER.plain(self.logical_length, "a context: logical_length")
        for length in tokens_in(self.cache_lengths, MOST_LISTED, "a context: cache_lengths"):
            Kind.INTEGER.plain(length, "a context: a cache length")
        Kind.TEXT.plain(self.token_digest, "a context: token_digest")
        for name, kind in (("fingerprint", Fingerprint), ("logits", np.ndarray), ("tensors", Mapping)):
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"a context: {name} is {describe(getattr(self, name))}, expected a {kind.__name__}")

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, logits included."""
        return self.logits.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())


class Packing(Protocol):
    """Turns one row of an executor's state tensors into a context's tensors and back."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of the engine that makes these contexts."""

    @property
    def other_turns(self) -> OtherTurns | None:
        """The engine that differs from this one in taking turns alone; None where nothing is kept for turns."""

    @property
    def keeps_every_token(self) -> bool:
        """True if a later turn can read every token."""

    @property
    def reads_everything(self) -> bool:
        """True if a step reads every token that is kept."""

    def pack(self, row: Mapping[str, Array], cache_lengths: Iterable[int], logical_length: int) -> dict[str, Array]:
        """Return copies of what a row holds, without empty slots and without what can be rebuilt."""

    def nbytes(self, cache_lengths: Sequence[int], logical_length: int) -> int:
        """Return the bytes of a context with these lengths: what `pack` returns, and the logits."""

    def unpack(self, context: Context) -> Iterator[tuple[str, Array]]:
        """Yield every state tensor of a row, by name, in the shape of one row."""


def extended_digest(digest: str, token_ids: Iterable[int]) -> str:
    """Return the digest (hex) of a text with these tokens added, given the digest of what came before.

    Each token is hashed with the digest before it: a text that goes on is known by the digest of its beginning.
    """
    running = bytes.fromhex(digest)
    for token in token_ids:
        running = hashlib.sha256(running + token.to_bytes(8, "little")).digest()
    return running.hex()
