"""A conversation of the command line: with an engine, or with two policies that are asked the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import click

from kvc_trt.api.conversations import open_conversation
from kvc_trt.api.side import Side
from kvc_trt.cli.asking.beside import open_beside, side_by_side
from kvc_trt.cli.text.printing import answer_text, json_text, progress, show
from kvc_trt.cli.text.run_report import cache_of, held, logprobs_of

if TYPE_CHECKING:
    from kvc_trt import Engine
    from kvc_trt.api.rules import AnswerRules
    from kvc_trt.cli.options.run import RunArguments
    from kvc_trt.runtime import Event
    from kvc_trt.runtime.chat.conversation import Conversation, Reply


class Talk:
    """The conversations, which are asked one after the other, and how their answers are shown."""

    def __init__(self, engine: Engine, given: RunArguments, document: str | None = None) -> None:
        """Begin with the system message of the command line. A `document` stays through `Conversation.clear`."""
        self._engine, self._given, self.document = engine, given, document
        self.sides = [Side.of(engine), *([] if given.beside is None else [open_beside(given, engine)])]
        self.conversations: list[Conversation] = []
        self.begin(given.system)

    def begin(self, system: str | None) -> None:
        """Begin again under a system message, and read the document."""
        self.close()
        self.conversations = [
            open_conversation(
                self._engine.directory,
                side.session,
                system=system,
                document=self.document,
                rules=cast("AnswerRules", self._given.rules),
                progress=progress(),
            )
            for side in self.sides
        ]
        tokens = max([conversation.read_document() for conversation in self.conversations])
        if tokens:
            show(f"[the document ends after {tokens} tokens, and is not read again]", err=True)

    def ask(self, question: str, stop: Callable[[], bool] | None = None) -> None:
        """Ask and show the answers: streamed, side by side, or as one line of JSON.

        A question that one side does not answer is part of no side's conversation.
        """
        streamed = _show if not self._given.as_json and len(self.sides) == 1 else None
        replies = self._replies(question, streamed, stop)
        if self._given.as_json:
            first, *others = [_report(reply, side) for reply, side in zip(replies, self.sides, strict=True)]
            beside = {"beside": {"policy": self.sides[1].name, **others[0]}} if others else {}
            click.echo(json_text({"question": question, **first, **beside}))
        elif streamed is not None:
            click.echo()
            show(_line(replies[0], self.sides[0]), err=True)
        else:
            answers = [(reply.output, reply.read_seconds, reply.answer_seconds) for reply in replies]
            show(side_by_side(self.sides, answers))
        sys.stdout.flush()

    def _replies(
        self, question: str, streamed: Callable[[Event], None] | None, stop: Callable[[], bool] | None
    ) -> list[Reply]:
        replies: list[Reply] = []
        try:
            for one in self.conversations:
                settings: dict[str, Any] = {} if stop is None else {"stop": stop}
                replies.append(one.ask(question, streamed, **settings))
        except BaseException:
            for place, one in enumerate(self.conversations):
                if place < len(replies):
                    one.take_back()
                else:
                    one.close()  # so that all sides read the earlier messages in the same way
            raise
        return replies

    def close(self) -> None:
        """Give the rows back."""
        for conversation in self.conversations:
            conversation.close()


def _show(event: Event) -> None:
    sys.stdout.write(answer_text(event.text))
    sys.stdout.flush()


def _line(reply: Reply, side: Side) -> str:
    output = reply.output
    again = (
        "the chat template rewrites earlier messages, so the whole conversation was read again: "
        if reply.read_again
        else ""
    )
    return " | ".join(
        [
            f"[{again}{len(output.prompt_token_ids)} tokens read in {reply.read_seconds:.2f} s",
            f"{len(output.token_ids)} new ({output.finish_reason}) in {reply.answer_seconds:.2f} s",
            f"{held([output], side)}]",
        ]
    )


def _report(reply: Reply, side: Side) -> dict[str, object]:
    output = reply.output
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "read_token_ids": list(output.prompt_token_ids),
        "read_again": reply.read_again,
        "read_seconds": reply.read_seconds,
        "answer_seconds": reply.answer_seconds,
        "cache": cache_of(output, side),
        **logprobs_of(output),
    }
