"""What an engine is asked: prompts, messages, stored contexts, conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from kvc_trt.api.opened import OpenedEngine, StrPath
from kvc_trt.api.prompts import Messages, chat_ids, chat_model, prompt_ids
from kvc_trt.api.rules import requests_of
from kvc_trt.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from kvc_trt.api.rules import AnswerRules, PromptRules
    from kvc_trt.runtime import Context, Event, Output
    from kvc_trt.runtime.chat.conversation import Conversation


class AskedEngine(OpenedEngine):
    """The part of `Engine` that answers."""

    @overload
    def generate(
        self,
        prompts: str | Sequence[int],
        **rules: Unpack[PromptRules],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: str | Sequence[int] | list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> Output | list[Output]:
        """Answer a prompt (text, or token ids); a list of prompts is a batch, and gives a list in its order.

        `rules` are the fields of `PromptRules`; none of them takes the best token at each step, up to the engine's
        max_output_len. An answer ends with `finish_reason` stop (an end token, or one of the texts `stop`), length
        (`max_new_tokens`) or capacity (the cache is full). Raises InputError for any bad prompt before anything runs.
        """
        ids, is_batch = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        outputs = self.session(self.rows_for(requests)).generate(requests)
        return outputs if is_batch else outputs[0]

    def generate_in_slices(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        *,
        prefill_slice_ms: float,
        **rules: Unpack[PromptRules],
    ) -> list[Output]:
        """Answer a batch as `generate` does, under the same `rules`, but let no prompt stop the rows that are answered.

        A scheduler reads each prompt in slices of at most `prefill_slice_ms` milliseconds, with a step of the running
        rows after each. Raises what `generate` raises.
        """
        ids, _ = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        rows = self.rows_for(requests)
        with self.scheduler(
            rows, prefill_slice_ms=prefill_slice_ms, queue_limit=len(requests), conversations=False
        ) as scheduler:
            tickets = [scheduler.submit(request) for request in requests]
            return [ticket.result() for ticket in tickets]

    def stream(
        self,
        prompts: str | Sequence[int] | list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> Iterator[Event]:
        """Yield the answer token by token: `event.text` as it comes, `event.output` with the last token of an answer.

        `event.row` is the prompt's place in a batch. Otherwise like `generate`. An iterator that is left early ends its
        answers when it is closed; until then the engine answers nothing else.
        """
        ids, _ = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        return _numbered(self.session(self.rows_for(requests)).stream(requests))

    def context(self, prompt: str | Sequence[int], *, context: Context | None = None) -> Context:
        """Read a prompt (text, or token ids) and return what its caches hold, compressed by the policy.

        With `context`, the prompt continues that one. `generate` and `stream` start from a context without computing
        its tokens again. Raises InputError as they do.
        """
        ids, is_batch = prompt_ids(self.directory, prompt, continues=context is not None)
        if is_batch:
            raise InputError(f"a context is of one prompt, found a list of {len(ids)}")
        session = self.session()
        if session.rows:
            raise ValueError(f"context needs an idle session, found rows {session.rows}")
        (request,) = requests_of(ids, {"context": context})
        (row,) = session.add([replace(request, keep_logits=True)])
        try:
            while session.queued(row):
                session.advance()
            return session.take(row)
        finally:
            if session.holds(row):  # a run that failed has taken it out
                session.remove(row)

    def turn_logits(self, text: str | Sequence[int], *, context: Context) -> NDArray[np.float32]:
        """Read a text (or token ids) that continues a stored one as a turn; return the logits [tokens, vocab] after it.

        Row i is of what follows the text's token i; `context.logits` is of its first token. So likelihoods of an answer
        take one pass. Raises InputError for an engine that was built without `all_logits`, and as `generate` does.
        """
        ids, is_batch = prompt_ids(self.directory, text, continues=True)
        if is_batch:
            raise InputError(f"turn_logits is of one text, found a list of {len(ids)}")
        session = self.session()
        session.check_idle("turn_logits needs an idle session")
        (row,) = session.add(requests_of([()], {"context": context}))
        try:
            return session.turn_logits(row, ids[0])
        finally:
            if session.holds(row):  # a run that failed has taken it out
                session.remove(row)

    def share(self, context: Context) -> None:
        """Let every later prompt that begins with this context's text start from it; `reused_tokens` says that one did.

        The least recently used make room within `prefix_bytes`. A policy that evicts has not seen what follows, which
        can cost answers; where it keeps and reads everything, prompts are shared by themselves. Raises InputError for
        another engine's context, and for one larger than `prefix_bytes`.
        """
        self.session().contexts.share(context)

    def save_context(self, context: Context, path: StrPath, *, replace: bool = False) -> None:
        """Write a context to a file, whole or not at all; with `replace` over an old one."""
        from kvc_trt.contexts import write_context

        write_context(Path(path), context, replace=replace)

    def load_context(self, path: StrPath) -> Context:
        """Read a context that an engine of the same weights and settings has saved.

        Raises InputError for a file that is damaged or was changed, and for another engine's or policy's context.
        """
        from kvc_trt.contexts import packing_of, read_context

        return read_context(Path(path), packing_of(self.directory))

    @overload
    def chat_prompt(self, messages: str | Messages, *, system: str | None = None) -> list[int]: ...

    @overload
    def chat_prompt(self, messages: Sequence[Messages], *, system: str | None = None) -> list[list[int]]: ...

    def chat_prompt(
        self, messages: str | Messages | Sequence[Messages], *, system: str | None = None
    ) -> list[int] | list[list[int]]:
        """Return the token ids that the model's chat template makes of messages, ready for `generate` and `stream`.

        A message is a mapping with `role` (system, user, assistant or tool) and `content`; a text is one message of the
        user, and a list of conversations is a batch. `system` becomes the first message. Raises InputError for a model
        without a chat template, and for messages that it refuses.
        """
        ids, is_batch = chat_ids(self.directory, messages, system)
        return ids if is_batch else ids[0]

    @overload
    def chat(
        self,
        messages: str | Messages,
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> list[Output]: ...

    def chat(
        self,
        messages: str | Messages | Sequence[Messages],
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Output | list[Output]:
        """Answer messages (see `chat_prompt`) as the model was trained to; otherwise like `generate`.

        `stream(engine.chat_prompt(messages))` gives the same answer token by token.
        """
        ids, is_batch = chat_ids(self.directory, messages, system)
        requests = requests_of(ids, rules)
        outputs = self.session(self.rows_for(requests)).generate(requests)
        return outputs if is_batch else outputs[0]

    def conversation(
        self,
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Conversation:
        """Return a conversation to `ask` question after question, each for one pass over what is new of it.

        `system` is its first message; the other arguments are those of `generate`, for every answer. Until it is
        closed, ask nothing of the engine itself. Raises InputError for an engine without a chat template, or one that
        takes no turns, with the command that builds it again.
        """
        from kvc_trt.runtime.chat.conversation import Conversation

        template, tokenizer = chat_model(self.directory)
        (request,) = requests_of([()], rules)
        ends = self.model.eos_token_ids
        return Conversation(self.session(), template, tokenizer, end_token_ids=ends, system=system, rules=request)


def _numbered(events: Generator[tuple[int, Event], None, None]) -> Iterator[Event]:
    with contextlib.closing(events):
        for index, event in events:
            yield replace(event, row=index)
