"""Clients of the server: each asks, leaves early or sends nonsense, by random numbers of its own."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak import catalogue
from benchmarks.soak.catalogue import CHAT, Asked
from benchmarks.soak.outcomes import BUSY, DIFFERENT, EQUAL, LEFT, LOST, REFUSED, Outcomes

TIMEOUT = 120.0
_CLOSE = 2e-3
"""A logarithm of a probability may differ by this much: rounding depends on the rows of a step."""


@dataclass(frozen=True)
class Answer:
    """An answer as it came back, whole or piece by piece."""

    status: int
    text: str = ""
    reason: str | None = None
    tokens: int | None = None
    logprobs: tuple[float, ...] = ()
    error: str | None = None


def ask(port: int, asked: Asked, *, stream: bool) -> Answer:
    """Send a request and return its answer; OSError or HTTPException where nothing whole comes back."""
    body = {**asked.body, "stream": True, "stream_options": {"include_usage": True}} if stream else asked.body
    status, content = send(port, asked.path, json.dumps(body).encode())
    if stream and status == 200:
        return _of_events(
            [json.loads(one[6:]) for one in content.split(b"\n\n") if one.startswith(b"data: {")], content
        )
    return _of_document(status, content)


def send(port: int, path: str, content: bytes) -> tuple[int, bytes]:
    """Return status and content of the server's answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _of_document(status: int, content: bytes) -> Answer:
    found = json.loads(content)
    if "error" in found:
        return Answer(status, error=str(found["error"].get("message")))
    (choice,) = found["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(status, text or "", choice["finish_reason"], found["usage"]["completion_tokens"], _logprobs(choice))


def _of_events(events: Sequence[Mapping[str, Any]], content: bytes) -> Answer:
    """Put the pieces of a stream together; without its end mark it is an error, as it is where one of them says so."""
    text, reason, tokens = "", None, None
    logprobs: tuple[float, ...] = ()
    for event in events:
        if "error" in event:
            return Answer(200, text, error=str(event["error"].get("message")))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            reason = choice.get("finish_reason") or reason
            logprobs += _logprobs(choice)
    if b"data: [DONE]" not in content:
        raise http.client.IncompleteRead(content[-200:])
    return Answer(200, text, reason, tokens, logprobs)


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())


def same(one: Answer, other: Answer) -> bool:
    """Return whether two answers say the same, with probabilities that are equal but for rounding."""
    plain = (one.text, one.reason, one.tokens) == (other.text, other.reason, other.tokens)
    return (
        plain
        and len(one.logprobs) == len(other.logprobs)
        and all(abs(a - b) <= _CLOSE for a, b in zip(one.logprobs, other.logprobs, strict=True))
    )


class Client(threading.Thread):
    """Asks again and again until it has to end; `may_ask` is clear while the server is left in peace."""

    def __init__(
        self,
        port: int,
        quiet: Sequence[tuple[Asked, Answer]],
        outcomes: Outcomes,
        seed: int,
        *,
        may_ask: threading.Event,
        pause_seconds: float,
    ) -> None:
        super().__init__(daemon=True)
        self._port, self._quiet, self._outcomes = port, quiet, outcomes
        self._draw = random.Random(seed)
        self._may_ask, self._pause_seconds = may_ask, pause_seconds
        self.ending = False
        self.idle = threading.Event()
        """Set while it has nothing under way."""

    def run(self) -> None:
        while not self.ending:
            self.idle.set()
            self._may_ask.wait(1.0)
            time.sleep(self._draw.expovariate(1 / self._pause_seconds))
            if not self._may_ask.is_set():
                continue
            self.idle.clear()
            action = self._draw.random()
            if action < 0.7:
                self._ask()
            elif action < 0.85:
                self._leave()
            else:
                self._send_nonsense()
        self.idle.set()

    def _ask(self) -> None:
        asked, expected = self._draw.choice(self._quiet)
        stream, began = self._draw.random() < 0.5, time.monotonic()
        kind = f"{asked.kind}{', stream' if stream else ''}"
        try:
            answer = ask(self._port, asked, stream=stream)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._outcomes.note(kind, LOST, f"{error!r} for {asked.body}")
            return
        if answer.error is not None:
            busy = answer.status == 503 and "busy" in answer.error
            outcome = BUSY if busy else self._outcomes.of_error(began)
            self._outcomes.note(kind, outcome, f"{answer} for {asked.body}")
        else:
            outcome = EQUAL if same(answer, expected) else DIFFERENT
            self._outcomes.note(kind, outcome, f"{answer} instead of {expected} for {asked.body}")

    def _leave(self) -> None:
        """Close the connection at some moment, before, in or after the answer."""
        asked = self._draw.choice([catalogue.long_request(), self._draw.choice(self._quiet)[0]])
        after = self._draw.choice((0.0, 0.01, 0.05, 0.3)) * (10 if asked.body["model"] == CHAT else 1)
        body = {**asked.body, "stream": self._draw.random() < 0.5}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        try:
            connection.request("POST", asked.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            assert connection.sock is not None
            connection.sock.settimeout(max(after, 1e-3))
            connection.sock.recv(1 << 16)
        except (TimeoutError, OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        self._outcomes.note("client that leaves", LEFT)

    def _send_nonsense(self) -> None:
        """Send a malformed request, which must be refused with a reason or mean something after all."""
        content, began = catalogue.malformed(self._draw), time.monotonic()
        path = self._draw.choice((catalogue.COMPLETIONS, catalogue.COMPLETIONS, catalogue.CHATS))
        try:
            status, found = send(self._port, path, content)
            error = json.loads(found).get("error")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as raised:
            self._outcomes.note("malformed", LOST, f"{raised!r} for {content[:200]!r}")
            return
        if error is None:
            outcome = EQUAL
        elif status == 503 and "busy" in str(error):
            outcome = BUSY
        else:
            outcome = REFUSED if 400 <= status < 500 else self._outcomes.of_error(began)
        self._outcomes.note("malformed", outcome, f"{status} {error} for {content[:200]!r}")
