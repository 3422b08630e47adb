"""An engine for servers: opened and checked, with a scheduler that answers all callers at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvc_trt.api.engine import Engine
from kvc_trt.errors import Busy, DeadlineMissed, InputError
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.request import Request
from kvc_trt.serving.errors import ServingError, invalid, serving_error
from kvc_trt.serving.request import ServedRequest
from kvc_trt.serving.served_answer import Answer
from kvc_trt.serving.tokens import token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from kvc_trt.runtime.scheduler.ticket import Ticket


@dataclass(frozen=True)
class ServingSettings:
    """The load that a served engine accepts. None leaves a setting to `Engine.open` and `Engine.scheduler`."""

    rows: int | None = None
    """The number of answers that run at once."""
    queue_limit: int | None = None
    """The number of requests that may wait; further ones are refused."""
    memory_bytes: int | None = None
    """The most memory that rows and one prefill may take together."""
    prefill_slice_ms: float | None = None
    """The longest time for which one slice of a prefill delays running answers, if the backend can cut so finely."""
    threads: int | None = None
    backend: str | None = None
    prefix_bytes: int = 0
    """The memory for shared prefixes of prompts; 0 shares none."""
    kv_proofs: bool = False
    """True if requests may ask for a proof of what the caches kept and read (docs/proof.md)."""
    sealed: bool = False
    """True if the engine's files are copied to memory that nobody can write (docs/security.md)."""


class ServedEngine:
    """Answers requests from any thread. Make one with `open`, and `close` it."""

    def __init__(self, engine: Engine, settings: ServingSettings | None = None) -> None:
        settings = settings or ServingSettings()
        self.engine = engine
        self._scheduler = engine.scheduler(
            settings.rows,
            prefill_slice_ms=settings.prefill_slice_ms,
            queue_limit=settings.queue_limit,
            memory_bytes=settings.memory_bytes,
        )
        self.limits = self._scheduler.session.executor.limits
        """The engine's limits: its vocabulary, its longest prompt, and so on."""
        session = self._scheduler.session
        self._cache_bytes = session.executor.state_bytes()
        self._row_bytes = self._cache_bytes // session.max_batch_size
        self.shares_prompts = settings.prefix_bytes > 0
        """True if a prompt may reuse the cached prefix of another request's prompt."""
        self._scheduler.start()

    @classmethod
    def open(
        cls, path: str | PathLike[str], settings: ServingSettings | None = None, *, digest: str | None = None
    ) -> ServedEngine:
        """Check the whole engine directory, load it and begin to answer.

        `digest`, if given, is the expected engine's (`EngineDirectory.digest`). Raises InputError for a damaged or
        different engine before anything of it runs; UnsupportedEnvironment if it cannot run here.
        """
        settings = settings or ServingSettings()
        engine = Engine.open(
            path,
            backend=settings.backend,
            threads=settings.threads,
            prefix_bytes=settings.prefix_bytes,
            warm_up=True,
            proofs=settings.kv_proofs,
            sealed=settings.sealed,
        )
        if digest is not None and engine.directory.digest != digest:
            raise InputError(
                f"{engine.path} is another engine than the one that was exported: its digest is "
                f"{engine.directory.digest}, expected {digest}",
                hint="export it again: kvc-trt export --help",
            )
        return cls(engine, settings)

    @property
    def most_answers(self) -> int:
        """The largest number of answers that may run and wait at once."""
        return self._scheduler.most_requests

    def submit(self, request: ServedRequest, *, priority: int = 0, seconds: float | None = None) -> Answer:
        """Take a request and return its answer, whose pieces may be read at once or later.

        `seconds` is the time within which the answer must be complete. Raises ServingError for an invalid request, for
        a full queue, and if no time is left.
        """
        try:
            ids = self._token_ids(request)
            wanted, positions = request.rules.max_new_tokens, self.limits.max_sequence_len
            if wanted is not None and wanted > positions:
                raise InputError(f"max_tokens is {wanted}, and the engine has positions for {positions} tokens in all")
        except InputError as error:
            raise invalid(error) from error
        ticket = self.take(replace(request.rules, prompt_token_ids=ids), priority=priority, seconds=seconds)
        return Answer(request, ticket, self.limits)

    def take(self, request: Request, *, priority: int = 0, seconds: float | None = None) -> Ticket:
        """Take a request whose prompt is token ids, and return its ticket; deadline and errors as for `submit`."""
        try:
            if seconds is not None:
                seconds = Kind.NUMBER.plain(seconds, "seconds")
            deadline = None if seconds is None else self._scheduler.clock() + seconds
            return self._scheduler.submit(request, priority=priority, deadline=deadline)
        except InputError as error:
            raise invalid(error) from error
        except (Busy, DeadlineMissed) as error:
            raise serving_error(error) from error

    def answer_once(self) -> None:
        """Answer a prompt of one token with one token, and wait for it; ServingError if that fails."""
        asyncio.run(self._one_token())

    async def begin(self, answers: Sequence[Ticket]) -> None:
        """Return at once: requests that `take` accepted are already being answered."""

    async def answers(self) -> bool:
        """Return whether a one-token request succeeds or is refused only because the server is busy.

        It awaits the answer and blocks no thread, because the queue may be long.
        """
        try:
            await self._one_token()
        except ServingError as error:
            return error.reason == "busy"
        return True

    def metrics(self) -> dict[str, Any]:
        """Return the scheduler's figures (docs/scheduler.md), and the bytes of its rows' caches in total and in use."""
        figures = self._scheduler.metrics()
        taken = figures["running"] + figures["staying"]
        return {**figures, "cache_bytes": self._cache_bytes, "cache_bytes_in_use": taken * self._row_bytes}

    def close(self, *, drain: bool = False) -> None:
        """Refuse new requests and end; pending requests are cancelled, or with `drain` answered first."""
        self._scheduler.close(drain=drain)
        self.engine.close()

    async def _one_token(self) -> None:
        await self.submit(ServedRequest(token_ids=(0,), rules=Request((), 1))).whole()

    def _token_ids(self, request: ServedRequest) -> tuple[int, ...]:
        tokenizer = self.engine.directory.tokenizer
        if tokenizer is None and request.rules.stop_strings:
            raise InputError("this model has no tokenizer, so it cannot find stop_words; give stop_token_ids")
        if request.text is None:
            return request.token_ids or ()
        if tokenizer is None:
            raise InputError("this model has no tokenizer, so it cannot read text_input; give input_ids")
        return token_ids(tokenizer, request.text, self.limits.max_input_len)
