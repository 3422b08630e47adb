"""The requests of the clients: some with one right answer each, others wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.serving.engines import Kind
from benchmarks.serving.load import Shape

TINY, CHAT = "tiny", "chat"
"""The names of the two engines that are served."""
_UNUSED = Shape((1, 1), (1, 1), 1)
ENGINES = {
    TINY: Kind("soak-tiny", "retrieval-tiny", "rocketkv", 64, 1536, 512, _UNUSED),
    CHAT: Kind("soak-chat", "smollm2-135m-instruct", "rocketkv", 128, 768, 64, _UNUSED),
}
TURNS = Kind(
    "soak-turns", "retrieval-tiny", "rocketkv", 64, 512, 128, _UNUSED,
    ("--max-conversation-len", "2048", "--draft-tokens", "4"),
)  # fmt: skip
"""The engine of callers in this process: it takes turns and checks drafts."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_WORDS = ("lamp", "scarlet", "tiger", "lagos", "eight", "bear", "hanoi", "fourteen", "fork", "green", "horse", "cairo")
_LOG = ROOT / "docs" / "demo" / "harbour-log.txt"


@dataclass(frozen=True)
class Asked:
    """A request that a server can answer."""

    kind: str
    """The request's name in the figures."""
    path: str
    body: Mapping[str, Any]


def requests(seed: int) -> list[Asked]:
    """Return the different requests of a run: short and long prompts under many rules, chats and conversations."""
    draw = random.Random(seed)
    return [*_completions(draw), *_chats(draw)]


def long_request(engine: str = TINY) -> Asked:
    """Return a request whose answer takes as long as the engine's answers can."""
    rules = {"max_tokens": ENGINES[engine].max_output_len, "ignore_eos": True}
    body = {**_body(_prompt(random.Random(0), 4), 1), "model": engine, **rules}
    return Asked("long answer", COMPLETIONS, body)


def _completions(draw: random.Random) -> list[Asked]:
    found = []
    for number in range(40):
        words = draw.choice((0, 8, 60, 400, 1200))
        body = _body(_prompt(draw, words), draw.choice((4, 12, 60)))
        kind, rules = _RULES[number % len(_RULES)]
        found.append(Asked(f"{'long' if words > 60 else 'short'} prompt, {kind}", COMPLETIONS, {**body, **rules}))
    return found


_RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {}),
    ("past the end", {"ignore_eos": True}),
    ("stop string", {"stop": ["lagos", "green horse"]}),
    ("stop token", {"stop_token_ids": [9, 10, 11], "ignore_eos": True}),
    ("log-probabilities", {"logprobs": 3}),
    ("drawn", {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 11, "ignore_eos": True}),
    ("penalties", {"repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True}),
    ("least length", {"min_tokens": 3}),
)


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": TINY, "prompt": prompt, "max_tokens": tokens}


def _prompt(draw: random.Random, words: int) -> str:
    key, *value = draw.sample(_WORDS, 5)
    return f"<record> {key} {' '.join(value)} {'amber ' * words}<query> {key}"


def _chats(draw: random.Random) -> list[Asked]:
    lines = _LOG.read_text(encoding="utf-8").splitlines()
    found = []
    for number in range(6):
        begin = draw.randrange(len(lines) - 4)
        text = "\n".join(lines[begin : begin + draw.choice((1, 4))])
        messages = [{"role": "user", "content": f"{text}\n\nWhat does this say? Answer in one line."}]
        if number % 2:  # the turn after an answer: the frontend sends the conversation again as a whole
            messages += [
                {"role": "assistant", "content": "It says what the harbour saw."},
                {"role": "user", "content": "And in three words?"},
            ]
        body = {"model": CHAT, "messages": messages, "max_tokens": 8 + 4 * (number % 3)}
        found.append(Asked("conversation" if number % 2 else "chat", CHATS, body))
    return found


VALUES: tuple[Any, ...] = (
    "", "x", "\ud800", -1, 0, 5.5, 1e300, 2**31, 2**64, 2**70, True, [], ["a"], [[1]], [None], {}, {"a": 1}, [5, "x"],
    [2**40], "9" * 400, [""] * 9,
)  # fmt: skip
FIELDS = (
    "model", "prompt", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "n", "best_of", "echo", "suffix", "logit_bias", "nvext", "return_kv_proof", "guided_json", "annotations", "unknown",
)  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """Return a body that is no request, or a request in which one field has some value of some type."""
    body = json.dumps({**_body("<query> lamp", 4), draw.choice(FIELDS): draw.choice(VALUES)}).encode()
    how = draw.randrange(6)
    if how == 0:
        return draw.randbytes(draw.randrange(200))
    if how == 1:
        return body[: draw.randrange(len(body))]
    if how == 2:
        return b"[" * draw.choice((10, 100_000))
    return body
