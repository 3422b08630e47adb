"""Who answers: one policy at one budget, as an engine in a session or, where it has none, in the PyTorch reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.accuracy.questions import Question
from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.session.batch import batch_of

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.runtime import Output
    from kvc_trt.runtime.executor import Executor

Answer = tuple[int, ...]
"""Token ids of one answer, the end token included where the model put one."""
Answers = list[Answer]
MOST_ROWS = 16
ROWS_BYTES = 768 << 20
"""Most bytes of cache that the rows of one policy take."""
QUESTIONS_BYTES = 1536 << 20
"""Most bytes that the full caches of the questions take that every policy is asked before the next ones."""


class Answerer(Protocol):
    """One policy at one budget, resolved for one length."""

    @property
    def parameters(self) -> PolicyParameters:
        """The policy's resolved numbers."""

    @property
    def row_bytes(self) -> int:
        """Bytes of cache allocated for one sequence."""

    @property
    def executor(self) -> str:
        """The name of the backend that runs it, or `reference`."""

    def answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Greedy answers, at most `max_new_tokens` long, in the order of the questions."""

    def surprise(self, questions: Sequence[Question]) -> list[float]:
        """Mean negative log-likelihood of each question's true continuation, in nats.

        InputError where the policy has no engine: nothing is measured token by token in the reference.
        """

    def along_targets(self, questions: Sequence[Question]) -> list[NDArray[np.float32]]:
        """The logits [N,vocab] of each question's N target tokens, each after the true ones before it.

        InputError where the policy has no engine.
        """


class SessionAnswerer:
    """An engine; late questions are fed through decode, as `Request.continuation_token_ids`, others as turns.

    All rows' caches are allocated for as long as questions are asked: dozens of engines are open at a time.
    """

    def __init__(
        self,
        executor: Executor,
        parameters: PolicyParameters,
        name: str,
        rows: int,
        end_token_ids: Iterable[int],
    ) -> None:
        self._executor, self._rows, self._ends = executor, rows, frozenset(end_token_ids)
        self._parameters, self._name = parameters, name
        self._row_bytes = 0

    @property
    def parameters(self) -> PolicyParameters:
        """The numbers that the engine was resolved to."""
        return self._parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of the state buffers, which are allocated for all rows, per row; 0 before the first question."""
        return self._row_bytes

    @property
    def executor(self) -> str:
        """The backend's name."""
        return self._name

    def answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Return the answers, asking one question per row at a time, so that every policy prefills the same batches."""
        with self._session() as session:
            return [
                answer
                for some in batches(questions, session.max_batch_size)
                for answer in self._answered(session, some, max_new_tokens)
            ]

    def surprise(self, questions: Sequence[Question]) -> list[float]:
        """The continuations fed one token per step; a row that has no more of them leaves."""
        with self._session() as session:
            return [
                mean_negative_log_likelihood(logits, question.target_ids)
                for some in batches(questions, session.max_batch_size)
                for question, logits in zip(some, _along_targets(session, some), strict=True)
            ]

    def along_targets(self, questions: Sequence[Question]) -> list[NDArray[np.float32]]:
        """Return the logits along each question's target, which is fed one token per step, one question per row."""
        with self._session() as session:
            return [
                logits
                for some in batches(questions, session.max_batch_size)
                for logits in _along_targets(session, some)
            ]

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        """A session with its caches, which are given back."""
        session = Session(self._executor, None, self._rows, end_token_ids=self._ends)
        self._row_bytes = self._executor.state_bytes() // self._rows
        try:
            yield session
        finally:
            self._executor.allocate(1)

    def _answered(self, session: Session, questions: Sequence[Question], max_new_tokens: int) -> Iterable[Answer]:
        """Rows advance together; one whose answer is complete leaves before the model goes on."""
        requests = [
            Request(q.prompt_ids, max_new_tokens, continuation_token_ids=q.continuation_ids, stay=bool(q.turn_ids))
            for q in questions
        ]
        asked = dict(zip(session.add(requests), questions, strict=True))
        answers: dict[int, list[int]] = {row: [] for row in asked}
        turns = {row: question.turn_ids for row, question in asked.items() if question.turn_ids}
        for row in [row for row in turns if not asked[row].answers_first]:
            session.turn(row, turns.pop(row))
        while session.rows:
            second = []
            for event in session.sample():
                row, answer = event.row, answers[event.row]
                answer.append(event.token_id)
                if event.output is not None:
                    _check_room(event.output, self._parameters)
                    if row in turns:
                        second.append((row, event.token_id))
                        answer.clear()
                    elif asked[row].turn_ids:
                        session.remove(row)  # it waits for another turn
                elif row not in turns and asked[row].is_answered(answer):
                    session.remove(row)
            session.advance()
            for row, last in second:
                self._take_turn(session, row, turns.pop(row), last)
        return map(tuple, answers.values())

    def _take_turn(self, session: Session, row: int, token_ids: tuple[int, ...], last: int) -> None:
        """Ask the second question. A template says the end of the first answer, as the model does if it ends it."""
        session.turn(row, token_ids, feed_last=not (last in self._ends and token_ids[0] == last))


def _along_targets(session: Session, questions: Sequence[Question]) -> list[NDArray[np.float32]]:
    """Return the logits [N,vocab] of each question's true continuation, after its prompt was compacted.

    Row i of logits predicts token i: the first comes from the last token of prompt and late question.
    """
    executor, batch = (
        session.executor,
        batch_of([q.prompt_ids for q in questions], session.executor.limits.prompt_block),
    )
    prefilled = executor.prefill(batch.input_ids, batch.prompt_lengths)
    fed = [(*question.continuation_ids, *question.target_ids[:-1]) for question in questions]
    order = sorted(range(len(questions)), key=lambda i: -len(fed[i]))  # the rows that go on are always the first ones
    late = [len(questions[i].continuation_ids) for i in order]
    said = [[] if late[row] else [prefilled.logits[i].copy()] for row, i in enumerate(order)]
    for row, i in enumerate(order):
        executor.insert(prefilled, i, row)
    positions, stored = batch.prompt_lengths[order], prefilled.cache_lengths[:, order]
    for step in range(max(map(len, fed))):
        rows = sum(step < len(fed[i]) for i in order)
        tokens = np.array([fed[i][step] for i in order[:rows]], np.int64)
        logits = executor.decode(tokens, positions[:rows] + step, stored[:, :rows] + step)
        for row in range(rows):
            if step + 1 >= late[row]:
                said[row].append(logits[row].copy())
    of = {i: np.stack(rows) for i, rows in zip(order, said, strict=True)}
    return [of[i] for i in range(len(questions))]


def rows_for(row_bytes: int) -> int:
    """Return how many questions to answer together, given a row's bytes of cache. Rows are independent."""
    return max(1, min(MOST_ROWS, ROWS_BYTES // row_bytes))


def questions_for(model: ModelConfig, sequence: int) -> int:
    """Questions of `sequence` tokens that every policy is asked before the next ones are prefilled."""
    return max(1, min(MOST_ROWS, QUESTIONS_BYTES // full_row_bytes(model, sequence)))


def full_row_bytes(model: ModelConfig, sequence: int) -> int:
    """Bytes of the whole cache of `sequence` tokens, in fp32."""
    return 2 * 4 * model.num_hidden_layers * model.num_key_value_heads * model.head_size * sequence


def _check_room(output: Output, parameters: PolicyParameters) -> None:
    """An answer that the cache cut short says nothing about what the policy keeps."""
    if output.finish_reason == "capacity":
        raise InputError(
            f"an answer does not fit the engine's max_output_len of {parameters.max_output_len}, "
            "which holds late questions too",
            hint="build the engine with a larger --max-output-len, or measure with a smaller --max-new-tokens",
        )


def batches(questions: Sequence[Question], rows: int) -> Iterable[Sequence[Question]]:
    """The questions in order, `rows` at a time."""
    return (questions[first : first + rows] for first in range(0, len(questions), rows))


def mean_negative_log_likelihood(logits: NDArray[np.float32], token_ids: Sequence[int]) -> float:
    """Return the mean over N tokens of -log p(token), in nats. Row i of `logits` [N, vocab] predicts token i.

    Row 0 comes from the prompt's last token, so the last token of a continuation need not be fed. ValueError where
    there are no tokens, or not one row for each.
    """
    if not len(token_ids) or len(logits) != len(token_ids):
        raise ValueError(f"{len(logits)} rows of logits for {len(token_ids)} tokens: expected one for each, at least 1")
    exact = logits.astype(np.float64)
    largest = exact.max(axis=-1)
    normaliser = largest + np.log(np.exp(exact - largest[:, None]).sum(axis=-1))
    return float(np.mean(normaliser - exact[np.arange(len(token_ids)), list(token_ids)]))
