"""Framing: put a sample to a model as plain text, or as a user's message through its chat template.

Plain, the prompt is context and question, which ends with the beginning of the answer. Through the template, context
and question are the user's message; the template opens the reply, and the beginning of the answer is put there. Either
way the text is cut where the context ends: the rest is fed last, or after compaction where a question arrives late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Protocol

from kvc_trt.errors import InputError
from kvc_trt.tasks.task import TaskSample

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

FramingName = Literal["plain", "chat"]
_PROBE = "Which words stand around this message?"
DATE = datetime(2025, 1, 1)
"""The date that templates write into prompts: questions are the same on every day."""
_MOVED_BORDERS = 3
"""`encode` measures prompt and frame before the beginning of the answer is moved behind the frame. Texts meet at other
places then, and each such border may cost a token."""


class Template(Protocol):
    """A chat template, as `kvc_trt.runtime.chat.template.ChatTemplate` is one."""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The text of a conversation at a time, None being the clock's; it ends where the reply begins."""


@dataclass(frozen=True)
class FramedIds:
    """A sample as token ids."""

    context: tuple[int, ...]
    """The part that is compacted: the whole prompt if it contains the question."""
    question: tuple[int, ...]
    """Fed through decode after compaction, the beginning of the answer included; empty where it is in the prompt."""


@dataclass(frozen=True)
class Framing:
    """Text before and after a user's message; empty for plain prompts."""

    tokenizer: Tokenizer
    frame: tuple[str, str] | None = None
    """The template's words before and after a message; None for plain prompts."""
    between: str | None = ""
    """The template's words between an answer and the user's next message; None if it rewrites or refuses
    earlier messages."""
    template: Template | None = None
    """The template itself, which conversations go through; None for plain prompts."""

    @property
    def name(self) -> FramingName:
        """The framing's name: plain or chat."""
        return "plain" if self.frame is None else "chat"

    def encode(self, prompt: str) -> list[int]:
        """Return token ids, at least as many as the framed prompt has, by which samples are sized."""
        if self.frame is None:
            return list(self.tokenizer.encode(prompt).ids)
        before, after = self.frame
        ids = self._continued(before + prompt + after)
        return [*ids, *ids[-_MOVED_BORDERS:]]

    def texts(self, sample: TaskSample) -> tuple[str, str]:
        """Split a sample's prompt at the end of its context: of a conversation, where its last message begins."""
        if messages := sample.meta.get("messages"):
            return self._conversation(messages)
        if self.frame is None:
            return sample.context, sample.question
        before, after = self.frame
        prefix = sample.answer_prefix
        asked = sample.question.removesuffix(prefix)
        return before + sample.context, asked + after + prefix.lstrip()

    def ids(self, sample: TaskSample, *, query_aware: bool) -> FramedIds:
        """The sample as it is fed. A tokenizer's own first tokens come only before plain prompts: a template has them.

        Query-aware, text and question are encoded as one text, and the question is empty.
        """
        context, question = self.texts(sample)
        whole = context + question if query_aware else context
        first = self.tokenizer.encode(whole, add_special_tokens=self.frame is None).ids
        return FramedIds(tuple(first), () if query_aware else tuple(self._continued(question)))

    def turn(self, sample: TaskSample) -> tuple[int, ...]:
        """A question that follows an answer, as it is fed; the template's end of that answer comes first.

        InputError for a template that rewrites earlier messages.
        """
        if self.between is None:
            raise InputError(
                "the chat template rewrites earlier messages before a second question",
                hint="ask with the framing plain",
            )
        return tuple(self._continued(self.between + self.texts(replace(sample, context=""))[1]))

    def continuation(self, sample: TaskSample) -> tuple[int, ...]:
        """The true continuation of a sample that is scored by likelihood: fed after the question, never sampled."""
        return tuple(self._continued(sample.answers[0]))

    def _conversation(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        if self.template is None:
            raise InputError("a conversation takes a chat template", hint="--framing chat")
        last = messages[-1]
        rendered, probed = (
            self.template.render([*messages[:-1], one], add_generation_prompt=True, now=DATE)
            for one in (last, {**last, "content": _PROBE})
        )
        before, found, _ = probed.rpartition(_PROBE)
        question = rendered.removeprefix(before)
        if not found or not rendered.startswith(before) or not question.lstrip().startswith(last["content"].strip()):
            raise InputError("the chat template changes the last message of a conversation")
        return before, question

    def _continued(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def plain(tokenizer: Tokenizer) -> Framing:
    """Prompts as they are."""
    return Framing(tokenizer)


def chat(tokenizer: Tokenizer, template: Template) -> Framing:
    """Prompts through a template, on the same `DATE` for all.

    InputError for one that does not repeat a user's message as it is, once, or says something else every time.
    """
    messages = [{"role": "user", "content": _PROBE}]
    rendered, again = (template.render(messages, add_generation_prompt=True, now=DATE) for _ in range(2))
    if rendered != again:
        raise InputError(
            "the chat template makes another prompt of the same message each time", hint="ask without the template"
        )
    before, found, after = rendered.partition(_PROBE)
    if not found or _PROBE in after:
        raise InputError(
            f"the chat template shows a user's message {rendered.count(_PROBE)} times, expected once",
            hint="ask without the template",
        )
    return Framing(tokenizer, (before, after), _between(template, before, after), template)


def _between(template: Template, before: str, after: str) -> str | None:
    """The template's text between an answer and the next message; None if it has no such text."""
    answer, again = "These stand around it.", "And which stand around this one?"
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", _PROBE), ("assistant", answer), ("user", again))
    ]
    try:
        rendered = template.render(messages, add_generation_prompt=True, now=DATE)
    except InputError:
        return None
    first, last = f"{before}{_PROBE}{after}{answer}", f"{again}{after}"
    if not (rendered.startswith(first) and rendered.endswith(last)):
        return None
    return rendered[len(first) : len(rendered) - len(last)]
