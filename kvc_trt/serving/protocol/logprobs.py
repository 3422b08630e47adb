"""Write the log-probabilities of an answer's tokens in the form of each endpoint, with the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvc_trt.runtime.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

_UNDECIDED = "\N{REPLACEMENT CHARACTER}"


class Spelling:
    """The text of each token inside of an answer: decoded alone, a token would lose its leading space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer.encode("a", add_special_tokens=False).ids)
        self._opening = self._decoded(self._before)
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return a token's text; a replacement character for a token that is a part of a character."""
        found = self._texts.get(token_id)
        if found is None:
            whole = self._decoded([*self._before, token_id])
            found = whole[len(self._opening) :] if whole.startswith(self._opening) else self._decoded([token_id])
            self._texts[token_id] = found
        return found

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class AnswerToken(NamedTuple):
    """A token of an answer with its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs


def chat_logprobs(drawn: Sequence[AnswerToken], spelling: Spelling) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = spelling.text(token_id)
        spelled = None if _UNDECIDED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelled}

    content = [
        {**one(token, found.logprob), "top_logprobs": [one(*best) for best in found.top]} for token, found in drawn
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(drawn: Sequence[AnswerToken], spelling: Spelling, offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice; its first token begins at character `offset` of the text."""
    texts, offsets = [spelling.text(token) for token, _ in drawn], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [
        {spelling.text(token): logprob for token, logprob in reversed((*found.top, (drawn_token, found.logprob)))}
        for drawn_token, found in drawn
    ]
    wants_top = any(found.top for _, found in drawn)
    return {
        "tokens": texts,
        "token_logprobs": [found.logprob for _, found in drawn],
        "top_logprobs": top if wants_top else None,
        "text_offset": offsets,
    }
