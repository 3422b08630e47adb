"""One row of a session: its text, the tokens that it feeds next, and the end of its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.proof import Proof, Recorder
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from kvc_trt.runtime.executor import NOT_FINITE, Answer, Drawn, Limits
from kvc_trt.runtime.grammar.matcher import Matcher
from kvc_trt.runtime.logprobs import token_logprobs
from kvc_trt.runtime.request import Event, FinishReason, Output
from kvc_trt.runtime.sampling.answer_text import AnswerText, Ends
from kvc_trt.runtime.sampling.banned import Banned
from kvc_trt.runtime.sampling.draw_rules import DrawRules
from kvc_trt.runtime.sampling.sampler import Sampler
from kvc_trt.runtime.session.admitted import Admitted
from kvc_trt.runtime.speculation.drafts import Draft, StoredDraft
from kvc_trt.runtime.speculation.ngram import NgramText

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer


class Row:
    """The state of one row except for its caches.

    `answer` is the model's output for the last token fed: logits [vocab], or the token that the executor has drawn.
    """

    def __init__(
        self,
        identity: int,
        admitted: Admitted,
        limits: Limits,
        tokenizer: Tokenizer | None,
        text: NgramText | None = None,
    ) -> None:
        assert admitted.answer is not None, "its prompt has been read"
        assert admitted.cache_lengths is not None, "its prompt has been read"
        request, context, prompt = admitted.request, admitted.context, admitted.prompt
        self.identity = identity
        self.answer: Answer = admitted.answer
        self.position = len(prompt) if context is None else context.logical_length
        """The logical position of the token that is fed next."""
        self.cache_lengths = admitted.cache_lengths
        """[caches]: the number of tokens stored per cache."""
        self.forced: deque[int] = deque(() if admitted.reads_at_once else admitted.unread)
        """The tokens to feed before the row samples again."""
        self.next_token: int | None = None
        """The token that was sampled but not fed yet; None if there is none."""
        self.stored: StoredDraft | None = None
        """The tokens of a draft that the latest pass stored; None if there is nothing to feed or to take back."""
        self.recorder = admitted.recorder
        """The recorder of the tokens that the row's caches keep and read, if its answer has a proof."""
        self.text = text
        """The tokens read so far, without those of the request's own context; None if no drafts are made of them."""
        self.reused = 0 if context is None else context.logical_length
        """The number of tokens in the stored context from which the row started."""
        self.stays = request.stay
        """True if the row waits for a turn after its answer."""
        self._digest = NO_TOKENS if context is None else context.token_digest
        self._undigested = prompt[:] if context is None else []
        self._prompt = tuple(prompt)
        self._continuation = tuple(request.continuation_token_ids)
        self._proven = (*request.context_token_ids, *prompt)
        self._keep_logits = request.keep_logits
        self._wanted_logprobs = request.logprobs
        self._max_new_tokens = admitted.max_new_tokens
        self._limits = limits
        self._tokenizer = tokenizer
        self._ends = Ends(admitted.ends, request.stop_strings, request.min_tokens)
        self._so_far = AnswerText(tokenizer, self._ends)
        ends = [token for token in admitted.ends if 0 <= token < limits.vocab_size]
        self._sampler = Sampler(
            request.sampling, Banned(admitted.banned, ends, request.min_tokens), request.logit_bias, label=self.label
        )
        if request.context is None:
            known = prompt[: len(prompt) - len(admitted.unread)]
            self._sampler.read(known)
            if text is not None:
                text.read(known)
        else:
            self._sampler.read(request.context_token_ids)
        self._sampler.begin_answer()

    @property
    def label(self) -> str:
        """The beginning of errors about the row."""
        return f"row {self.identity}"

    @property
    def is_greedy(self) -> bool:
        """True if the row always takes the best token and needs no logits."""
        return self._sampler.is_greedy and self._wanted_logprobs is None and not self._needs_logits

    @property
    def _needs_logits(self) -> bool:
        """True if the logits of every step must be copied to the host."""
        return self._keep_logits or self.recorder is not None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end the row's answers."""
        return self._ends.token_ids

    def constrain(self, matcher: Matcher | None) -> None:
        """Constrain the next answer by the grammar of `matcher`; None allows any text."""
        self._sampler.constrain(matcher)

    @property
    def is_finite(self) -> bool:
        """True if `answer` has finite logits, so that a token can be drawn, or a token drawn from such logits."""
        return _is_finite(self.answer)

    def not_finite(self) -> InputError:
        """Return the error of a row whose logits are not finite."""
        return InputError(
            f"{self.label}: the engine's logits are not finite after {self.position} tokens",
            hint="kvc-trt verify ENGINE_DIR",
        )

    @property
    def physical_lengths(self) -> tuple[int, ...]:
        """The number of tokens stored in each cache."""
        return tuple(np.minimum(self.cache_lengths, self._limits.capacities).tolist())

    def room(self) -> int:
        """Return the number of tokens that can still be fed, by the fullest cache and the logical positions left."""
        return self._limits.room(self.position, self.cache_lengths.tolist())

    def check_no_proof(self) -> None:
        """Raise InputError if the row's answer has a proof, which cannot cover further tokens."""
        if self.recorder is not None:
            raise InputError(
                f"{self.label}: a KV proof covers a prompt, its continuation and one answer, and no more tokens"
            )

    def check_room(self, tokens: int, what: str) -> None:
        """Raise InputError, naming `what`, unless `tokens` more tokens can be fed."""
        if tokens > self.room():
            raise InputError(
                f"{what}: {tokens} tokens do not fit after {self.position} tokens, found room for {self.room()}",
                hint="build the engine with a larger --max-output-len",
            )

    def sample(self) -> Event:
        """Draw the next token, and return its event, which has the output if the answer ends with it."""
        logprobs = None
        if isinstance(self.answer, Drawn):
            token, logprobs = self.answer
            self._sampler.take(token)
        else:
            token = self._sampler.choose(self.answer)
            if self._wanted_logprobs is not None:
                logprobs = token_logprobs(self.answer, token, self._wanted_logprobs)
        text, reason = self._so_far.push(token, logprobs, self._no_room())
        self.next_token = token
        return Event(self.identity, token, text, None if reason is None else self._output(reason), logprobs)

    def interrupted(self) -> Output:
        """End the answer with the token drawn last, because the caller wants no more, and return its output."""
        self._so_far.cut()
        return self._output("interrupted")

    def feed(self) -> int:
        """Return the token to feed now; the caller runs the model and then calls `fed`."""
        if self.next_token is not None:
            return self.next_token
        assert self.forced, "sample() first"
        return self.forced[0]

    def prepare(self) -> None:
        """Start computing the grammar's next mask on another thread; to be called just before a step."""
        self._sampler.prepare()

    def fed(self, answer: Answer) -> None:
        """Record that the token of `feed` was appended to every cache of this row, and the model's output after it."""
        token = self.feed()
        self._undigested.append(token)
        self._sampler.read((token,))
        if self.text is not None:
            self.text.feed(token)
        if self.next_token is not None:
            self.next_token = None
        else:
            self.forced.popleft()
        self.position += 1
        self.cache_lengths = self.cache_lengths + 1
        self.answer = answer

    def draw_rules(self, tokens: Sequence[int]) -> list[DrawRules | None]:
        """Return the rules of the draw after each of `tokens`: the one that is fed next, and those of a draft.

        Each rule assumes that the tokens up to it are those that the row has queued or draws; the list ends at a token
        that the row cannot draw. The entries are None if the row needs its logits.
        """
        if self._needs_logits:
            return [None] * len(tokens)
        ahead, queued = self._sampler.ahead(), len(self.unfed())
        found: list[DrawRules | None] = []
        for place, token in enumerate(tokens):
            try:
                if place >= queued:
                    ahead.take(token)
                ahead.read((token,))
                found.append(ahead.rules(self._limits.vocab_size, self._wanted_logprobs))
            except InputError:
                return found or [None]  # the draw on the host then raises the error
        return found

    def own_answer(self) -> None:
        """Replace `answer` by a copy: the executor overwrites its buffer in the next step, in which the row waits."""
        if not isinstance(self.answer, Drawn):
            self.answer = self.answer.copy()

    def draft(self, count: int) -> Draft:
        """Return up to `count` tokens that may follow the next one.

        They are the queued tokens, then those that the grammar forces, then those that the text suggests.
        """
        assert self.text is not None
        first, *queued = self.unfed()
        certain = [*queued, *self._sampler.forced()]
        tokens = certain[:count]
        if len(tokens) < count:
            suggested = self.text.draft([first, *certain], count - len(tokens))
            tokens += self._sampler.possible(suggested, after=certain[len(queued) :])
        self.text.watch([first], tokens)
        return Draft(tokens, max(len(certain[:count]), min(self.text.expected, len(tokens))))

    def store(self, tokens: list[int], answers: Sequence[Answer], undo: Any) -> None:
        """Record that a pass stored `tokens` after the one that was just fed, and the model's output after each."""
        self.stored = StoredDraft(tokens, answers, undo, self.cache_lengths - 1)

    def feed_stored(self) -> bool:
        """Feed the next token if it is stored already and the logits after it are finite; return whether it was fed."""
        stored = self.stored
        if stored is None or not stored.left or stored.tokens[stored.kept - 1] != self.feed():
            return False
        answer = stored.answers[stored.kept - 1]
        if not _is_finite(answer):  # a plain step then feeds the token again, and reports the error
            return False
        self.fed(answer)
        stored.kept += 1
        return True

    def token_digest(self) -> str:
        """Return the digest of all tokens that were fed, including those of a context."""
        self._digest = extended_digest(self._digest, self._undigested)
        self._undigested = []
        return self._digest

    def unfed(self) -> list[int]:
        """Return the tokens to feed before the row samples again: a sampled one, and queued ones."""
        return [*(() if self.next_token is None else (self.next_token,)), *self.forced]

    def take_turn(
        self,
        tokens: list[int],
        new: list[int],
        answer: Answer,
        cache_lengths: NDArray[np.int64],
        max_new_tokens: int | None,
    ) -> None:
        """Record a turn of `tokens` that was taken, and begin its answer; the last of them, `new`, are its prompt."""
        self.next_token = None
        self.forced.clear()
        self.read(tokens, answer, cache_lengths)
        self._prompt = tuple(new)
        self._so_far = AnswerText(self._tokenizer, self._ends)
        self._sampler.begin_answer()
        if max_new_tokens is not None:
            self._max_new_tokens = max_new_tokens

    def read(self, tokens: list[int], answer: Answer, cache_lengths: NDArray[np.int64]) -> None:
        """Record that `tokens` were read at once, the caches' lengths after them, and the model's output."""
        self._undigested += tokens
        self._sampler.read(tokens)
        if self.text is not None:
            self.text.read(tokens)
        self.position += len(tokens)
        self.cache_lengths = cache_lengths
        self.answer = answer

    def _no_room(self) -> FinishReason | None:
        """Return the finish reason if no token can follow the one that is drawn now; otherwise None."""
        if self._sampler.is_complete:
            return "stop"
        if len(self._so_far.token_ids) + 1 >= self._max_new_tokens:
            return "length"
        return "capacity" if self.room() == 0 else None

    def _output(self, reason: FinishReason) -> Output:
        return Output(
            prompt_token_ids=self._prompt,
            token_ids=tuple(self._so_far.token_ids),
            text=self._so_far.text,
            finish_reason=reason,
            logical_length=self.position,
            physical_lengths=self.physical_lengths,
            reused_tokens=self.reused,
            logprobs=None if self._wanted_logprobs is None else tuple(self._so_far.logprobs),
            kv_proof=None if self.recorder is None else self._proof(self.recorder),
        )

    def _proof(self, recorder: Recorder) -> Proof:
        return recorder.proof(self._proven, self._continuation, self._so_far.token_ids)


def _is_finite(answer: Answer) -> bool:
    """Return whether the answer has finite logits, or is a token drawn from such logits."""
    return answer.token != NOT_FINITE if isinstance(answer, Drawn) else bool(np.isfinite(answer.max()))
