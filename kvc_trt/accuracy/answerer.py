"""Who answers: one policy at one budget, as an engine in a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvc_trt.accuracy.questions import Question
from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.runtime import Output
    from kvc_trt.runtime.executor import Executor

Answers = list[tuple[int, ...]]
"""Token ids of every answer, the end token included where the model put one."""


class Answerer(Protocol):
    """One policy at one budget, resolved for one length."""

    @property
    def parameters(self) -> PolicyParameters:
        """The policy's numbers."""

    @property
    def row_bytes(self) -> int:
        """Allocated cache of one sequence."""

    @property
    def executor(self) -> str:
        """What runs it: a backend's name, or reference."""

    def answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Greedy answers, at most `max_new_tokens` long, in the order of the questions."""


class SessionAnswerer:
    """An engine; late questions are fed through decode, as `Request.continuation_token_ids`."""

    def __init__(
        self,
        executor: Executor,
        parameters: PolicyParameters,
        name: str,
        rows: int,
        end_token_ids: Iterable[int],
    ) -> None:
        from kvc_trt.runtime import Session

        self._session = Session(executor, None, rows, end_token_ids=end_token_ids)
        self._parameters, self._name = parameters, name

    @property
    def parameters(self) -> PolicyParameters:
        """The engine's."""
        return self._parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of the state buffers, which were allocated for all rows, per row."""
        return self._session.executor.state_bytes() // self._session.max_batch_size

    @property
    def executor(self) -> str:
        """The backend."""
        return self._name

    def answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """As many questions at a time as there are rows, so that every policy prefills the same batches."""
        from kvc_trt.runtime import Request

        answers: Answers = []
        for some in batches(questions, self._session.max_batch_size):
            requests = [Request(q.prompt_ids, max_new_tokens, continuation_token_ids=q.continuation_ids) for q in some]
            outputs = self._session.generate(requests)
            _check_room(outputs, self._parameters)
            answers += [output.token_ids for output in outputs]
        return answers


def _check_room(outputs: Sequence[Output], parameters: PolicyParameters) -> None:
    """An answer that the cache cut short says nothing about what the policy keeps."""
    cut = sum(output.finish_reason == "capacity" for output in outputs)
    if cut:
        raise InputError(
            f"{cut} of {len(outputs)} answers do not fit the engine's max_output_len of {parameters.max_output_len}, "
            "which holds late questions too",
            hint="build the engine with a larger --max-output-len, or measure with a smaller --max-new-tokens",
        )


def batches(questions: Sequence[Question], rows: int) -> Iterable[Sequence[Question]]:
    """The questions in order, `rows` at a time."""
    return (questions[first : first + rows] for first in range(0, len(questions), rows))
