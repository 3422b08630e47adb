"""A compressed context: everything that a row has stored of a text, independent of the executor that stored it.

A row that starts from a context continues like the row that it was taken from: with the same caches, the same logits of
the last token, and the same position. A request's own state (random numbers, stop rules, the answer) is not part of it.
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
    """An engine that differs from a given one only in whether it takes turns, and the message for its contexts.

    An engine that takes turns stores the position of each slot in the text, and cannot take a turn without it.
    """

    state: str
    """The digest of its list of state tensors."""
    reason: str
    """The reason why its contexts do not fit the given engine; follows the name of the context in the message."""
    hint: str


@dataclass(frozen=True)
class Fingerprint:
    """The engine that made a context: SHA-256 digests, and two names for messages.

    A context fits every engine that is equal in `weights`, `model`, `parameters` and `state`, whatever runs it.
    """

    engine: str
    """The digest of the engine's manifest. It differs between backends, and contexts fit regardless of it."""
    weights: str
    """The digest of the weight file."""
    model: str
    """The digest of the model's configuration."""
    parameters: str
    """The digest of the resolved policy parameters."""
    state: str
    """The digest of the list of state tensors: names, types and shapes."""
    model_name: str
    policy_name: str
    kv_cache: str = AUTO
    """The format of keys and values, which the digests `parameters` and `state` include."""

    @property
    def compatibility(self) -> str:
        """The digest that is equal for all engines which one context fits."""
        parts = (self.weights, self.model, self.parameters, self.state)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def check_same(self, needed: Fingerprint, what: str, other_turns: OtherTurns | None = None) -> None:
        """Raise InputError, naming `what` and the first reason, unless contexts of this engine fit engine `needed`.

        With `other_turns`, a context of that engine gets its message.
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
    """The number of tokens of the text; the next token is at this position."""
    cache_lengths: tuple[int, ...]
    """Per cache, the number of tokens that count as stored; more than its slots in a cache whose steps evict."""
    token_digest: str
    """The `extended_digest` of the text's tokens."""
    logits: NDArray[np.float32]
    """[vocab]: the model's output after the last token."""
    tensors: Mapping[str, Array]
    """State by name: `k.N` and `v.N` of cache N, [G,kept,D] in the cache's type, or codes with the tensors that turn
    them into values; and further state that cannot be rebuilt from these."""

    def __post_init__(self) -> None:
        """Check the types; the session checks whether the context fits its engine."""
        Kind.INTEGER.plain(self.logical_length, "a context: logical_length")
        for length in tokens_in(self.cache_lengths, MOST_LISTED, "a context: cache_lengths"):
            Kind.INTEGER.plain(length, "a context: a cache length")
        Kind.TEXT.plain(self.token_digest, "a context: token_digest")
        for name, kind in (("fingerprint", Fingerprint), ("logits", np.ndarray), ("tensors", Mapping)):
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"a context: {name} is {describe(getattr(self, name))}, expected a {kind.__name__}")

    @property
    def nbytes(self) -> int:
        """The size of the context's tensors in bytes, logits included."""
        return self.logits.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())


class Packing(Protocol):
    """Turns one row of an executor's state tensors into a context's tensors and back."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of the engine that makes these contexts."""

    @property
    def other_turns(self) -> OtherTurns | None:
        """The engine that differs from this one only in whether it takes turns; None if turns need no extra state."""

    @property
    def keeps_every_token(self) -> bool:
        """True if every token of the text stays stored, so that a later turn can read it."""

    @property
    def reads_everything(self) -> bool:
        """True if a step reads every stored token."""

    def pack(self, row: Mapping[str, Array], cache_lengths: Iterable[int], logical_length: int) -> dict[str, Array]:
        """Return copies of a row's tensors, without empty slots and without tensors that `unpack` can rebuild."""

    def nbytes(self, cache_lengths: Sequence[int], logical_length: int) -> int:
        """Return the size in bytes of a context with these lengths: the tensors that `pack` returns, and the logits."""

    def unpack(self, context: Context) -> Iterator[tuple[str, Array]]:
        """Yield every state tensor of a row with its name, in the shape of one row."""


def extended_digest(digest: str, token_ids: Iterable[int]) -> str:
    """Return the digest (hex) of a text after these tokens, given the digest of the text before them.

    Each token is hashed together with the previous digest, so a text's digest follows from that of its beginning.
    """
    running = bytes.fromhex(digest)
    for token in token_ids:
        running = hashlib.sha256(running + token.to_bytes(8, "little")).digest()
    return running.hex()
