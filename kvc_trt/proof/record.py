"""Record the choices of one answer's caches, step by step, and the root over all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from kvc_trt.errors import InputError, describe
from kvc_trt.proof.lists import Lists, digest_at, encode

ProofKind = Literal["digest", "lists"]
PROOF_KINDS: tuple[ProofKind, ...] = get_args(ProofKind)
DIGEST_BYTES = hashlib.sha256().digest_size
PrefillPrecision = Literal["f32", "bf16"]


def proof_kind(asked: object, name: str) -> ProofKind | None:
    """Return the kind of proof in a client's field `name`; None for no proof, InputError for any other value."""
    for kind in PROOF_KINDS:
        if asked == kind:
            return kind
    if asked in (None, ""):
        return None
    raise InputError(f"{name} is {describe(asked)}, expected {' or '.join(PROOF_KINDS)}")


@dataclass(frozen=True)
class MadeBy:
    """The engine that answered: SHA-256 digests (hex), and names for messages.

    A proof can be checked with every engine of equal `weights`, `model` and `policy`, whatever runs it.
    """

    engine: str
    """The digest of the engine's manifest. It differs between backends, and proofs can be checked regardless of it."""
    weights: str
    """The digest of the weight file."""
    model: str
    """The digest of the model's configuration."""
    policy: str
    """The digest of the resolved policy parameters."""
    model_name: str
    policy_name: str
    prefill_precision: PrefillPrecision
    """The precision in which the prompt was read: f32 or bf16."""


@dataclass(frozen=True)
class CacheRecord:
    """The digests of one cache's lists, and the lists themselves if they were asked for."""

    cache: int
    kept: bytes | None
    """The digest of the kept prompt positions, [heads, .]; None for a cache that writes no such list."""
    read: tuple[bytes, ...]
    """The digests of the slots that each step reads, [heads, .]; empty for a cache that is read whole."""
    kept_lists: bytes | None = None
    read_lists: tuple[bytes, ...] | None = None
    """The lists of the read slots, encoded like `kept_lists` by `lists.encode`; None in a proof of digests."""


@dataclass(frozen=True)
class PromptRecord:
    """A row's record of its prompt, for a row elsewhere (as in another process) that answers from the same caches."""

    kind: ProofKind
    prefill_precision: PrefillPrecision
    caches: tuple[CacheRecord, ...]
    """The records in the order of the caches' numbers; nothing has been read of any cache."""


@dataclass(frozen=True)
class Proof:
    """The tokens that the caches kept of a prompt, and those that each step of its answer read."""

    made_by: MadeBy
    kind: ProofKind
    prompt_token_ids: tuple[int, ...]
    continuation_token_ids: tuple[int, ...]
    """The tokens fed through decode after the prompt was compacted, and before the answer."""
    answer_token_ids: tuple[int, ...]
    """The tokens of the answer; the last one was not fed, so nothing was read for it."""
    prompt_digest: str
    answer_digest: str
    """The digest of continuation and answer."""
    caches: tuple[CacheRecord, ...]
    """The records in the order of the caches' numbers."""
    root: str

    @property
    def fed(self) -> tuple[int, ...]:
        """The token of each decode step."""
        return (*self.continuation_token_ids, *self.answer_token_ids[:-1])

    @property
    def of_prompt(self) -> PromptRecord:
        """The part about the prompt alone."""
        caches = (
            CacheRecord(one.cache, one.kept, (), one.kept_lists, None if one.read_lists is None else ())
            for one in self.caches
            if one.kept is not None
        )
        return PromptRecord(self.kind, self.made_by.prefill_precision, tuple(caches))

    def problems(self) -> Iterator[str]:
        """Yield the inconsistencies of the proof by the names of its parts; a proof without any may still be untrue."""
        if self.prompt_digest != prompt_digest(self.prompt_token_ids):
            yield "prompt_token_ids are not those of prompt_digest"
        if self.answer_digest != answer_digest(self.continuation_token_ids, self.answer_token_ids):
            yield "continuation_token_ids and answer_token_ids are not those of answer_digest"
        for record in self.caches:
            for step, digest, lists in lists_of(record):
                if digest_at(record.cache, step, lists) != digest:
                    yield f"cache {record.cache}, step {step}: the lists are not those of the digest"
        if self.root != root_of(self.made_by, self.prompt_digest, self.answer_digest, self.caches):
            yield "the root is not that of engine, policy, tokens and digests"


def lists_of(record: CacheRecord) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield step, digest and bytes of each of a cache's lists; nothing in a proof of digests."""
    if record.kept is not None and record.kept_lists is not None:
        yield 0, record.kept, record.kept_lists
    for step, (digest, lists) in enumerate(zip(record.read, record.read_lists or (), strict=False), start=1):
        yield step, digest, lists


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of a prompt."""
    return _of_tokens("prompt", token_ids)


def answer_digest(continuation: Sequence[int], answer: Sequence[int]) -> str:
    """Return the digest of the tokens after a prompt: those of the continuation, and those of the answer."""
    return hashlib.sha256(
        (_of_tokens("continuation", continuation) + _of_tokens("answer", answer)).encode()
    ).hexdigest()


def root_of(made_by: MadeBy, prompt: str, answer: str, caches: Sequence[CacheRecord]) -> str:
    """Return the digest over everything that a proof states, given the digests of its tokens.

    The digests of lists come by step, and within a step by cache, so that it can be formed while the answer is made.
    """
    chain = hashlib.sha256()
    for record in caches:
        chain.update(b"" if record.kept is None else record.kept)
    reading = [record for record in caches if record.read]
    for step in range(max((len(record.read) for record in reading), default=0)):
        for record in reading:
            chain.update(record.read[step] if step < len(record.read) else b"")
    return _root(made_by, prompt, answer, caches, chain.digest())


def _root(made_by: MadeBy, prompt: str, answer: str, caches: Sequence[CacheRecord], chain: bytes) -> str:
    stated = [
        "kvc-trt kv proof 1",
        *(f"{name} {value}" for name, value in asdict(made_by).items()),
        f"prompt {prompt}",
        f"answer {answer}",
        *(f"cache {one.cache} kept {int(one.kept is not None)} read {len(one.read)}" for one in caches),
        f"lists {chain.hex()}",
    ]
    return hashlib.sha256("\n".join(stated).encode()).hexdigest()


def _of_tokens(what: str, token_ids: Iterable[int]) -> str:
    return hashlib.sha256(f"kvc-trt {what} {','.join(map(str, token_ids))}".encode()).hexdigest()


class Recorder:
    """Records the lists of one row as they are chosen.

    For `digest` it keeps 32 bytes per cache and step, however long the lists are. `prompt` is the record of the row
    that read the prompt, of the same kind, if this row answers from its caches.
    """

    def __init__(self, made_by: MadeBy, kind: ProofKind, prompt: PromptRecord | None = None) -> None:
        records = () if prompt is None else prompt.caches
        if prompt is not None:
            made_by = replace(made_by, prefill_precision=prompt.prefill_precision)
        self._made_by, self._kind = made_by, kind
        self._kept = {one.cache: one.kept for one in records if one.kept is not None}
        self._read: dict[int, bytearray] = {}
        self._kept_lists = {one.cache: one.kept_lists for one in records if one.kept_lists is not None}
        self._read_lists: dict[int, list[bytes]] = {}
        self._step = 0

    def keep(self, lists: Mapping[int, Lists]) -> None:
        """Record the prompt positions [heads, width] that each cache keeps."""
        for cache, table in lists.items():
            data = encode(table)
            self._kept[cache] = digest_at(cache, 0, data)
            if self._kind == "lists":
                self._kept_lists[cache] = data

    def step(self, lists: Mapping[int, Lists]) -> None:
        """Record the slots [heads, width] that each cache reads for one more token."""
        self._step += 1
        for cache, table in lists.items():
            data = encode(table)
            self._read.setdefault(cache, bytearray()).extend(digest_at(cache, self._step, data))
            if self._kind == "lists":
                self._read_lists.setdefault(cache, []).append(data)

    def proof(self, prompt: Sequence[int], continuation: Sequence[int], answer: Sequence[int]) -> Proof:
        """Return the proof of an answer whose tokens, but for the last, were all fed."""
        caches = tuple(self._record(cache) for cache in sorted(self._kept.keys() | self._read.keys()))
        of_prompt, of_answer = prompt_digest(prompt), answer_digest(continuation, answer)
        return Proof(
            self._made_by, self._kind, tuple(prompt), tuple(continuation), tuple(answer), of_prompt, of_answer, caches,
            root_of(self._made_by, of_prompt, of_answer, caches),
        )  # fmt: skip

    def _record(self, cache: int) -> CacheRecord:
        digests = bytes(self._read.get(cache, b""))
        read = tuple(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))
        if self._kind == "digest":
            return CacheRecord(cache, self._kept.get(cache), read)
        return CacheRecord(
            cache, self._kept.get(cache), read, self._kept_lists.get(cache), tuple(self._read_lists.get(cache, ()))
        )
