"""The answer to a served request, in pieces as they come or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvc_trt.proof import Proof
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.request import Event, FinishReason, Output
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.serving.errors import serving_error
from kvc_trt.serving.request import ServedRequest


@dataclass(frozen=True)
class End:
    """The end of an answer: its reason, and numbers of tokens, of which those kept are summed over all caches."""

    finish_reason: FinishReason
    output_tokens: int
    kept_tokens: int
    """The number of stored tokens, summed over all caches."""
    logical_tokens: int
    """The sum over all caches if they kept every token that the model has seen."""
    reused_tokens: int
    """The number of tokens of a shared prefix, which were not computed again."""
    kv_proof: Proof | None = None
    """The proof of the tokens that the caches kept and read, if the request asks for it."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer. The texts of all pieces, one after the other, are the answer's text."""

    text: str
    """The new text, in whole characters."""
    token_ids: tuple[int, ...]
    """The ids of the tokens since the previous piece. Their text may come with a later piece."""
    logprobs: tuple[float, ...] | None = None
    """Natural logarithms of the tokens' probabilities, if the request asks for them."""
    end: End | None = None
    """The end of the answer; None for all pieces but the last."""


class Answer:
    """The answer to one request; consume it once, with `pieces` or with `whole`."""

    def __init__(self, request: ServedRequest, ticket: Ticket, limits: Limits) -> None:
        self._request, self._ticket, self._limits = request, ticket, limits

    @property
    def input_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return self._ticket.prompt_tokens

    def cancel(self) -> None:
        """End the answer now; its row is free after the current step or slice of a prefill."""
        self._ticket.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer as it comes, at least one piece; leaving the loop early cancels the answer.

        Raises ServingError if the answer cannot be completed.
        """
        text, events = self._request.text if self._request.echo and self._request.text else "", list[Event]()
        try:
            async for event in self._ticket:
                text += event.text
                events.append(event)
                if text or event.output is not None:
                    yield self._piece(text, events)
                    text, events = "", []
        except Exception as error:
            raise serving_error(error) from error
        finally:
            self._ticket.cancel()

    async def whole(self) -> Piece:
        """Wait for the answer and return it in one piece; ServingError if it cannot be completed."""
        pieces = [piece async for piece in self.pieces()]
        ids = tuple(token for piece in pieces for token in piece.token_ids)
        logprobs = tuple(one for piece in pieces for one in piece.logprobs or ())
        last = pieces[-1]
        return Piece(
            "".join(piece.text for piece in pieces), ids, None if last.logprobs is None else logprobs, last.end
        )

    def _piece(self, text: str, events: list[Event]) -> Piece:
        logprobs = tuple(event.logprobs.logprob for event in events if event.logprobs is not None)
        output = events[-1].output
        return Piece(
            text,
            tuple(event.token_id for event in events),
            None if self._request.rules.logprobs is None else logprobs,
            None if output is None else self._end(output),
        )

    def _end(self, output: Output) -> End:
        caches = len(output.physical_lengths)
        logical = caches * output.logical_length
        return End(
            finish_reason=output.finish_reason,
            output_tokens=len(output.token_ids),
            kept_tokens=logical if self._limits.keeps_whole else sum(output.physical_lengths),
            logical_tokens=logical,
            reused_tokens=output.reused_tokens,
            kv_proof=output.kv_proof,
        )
