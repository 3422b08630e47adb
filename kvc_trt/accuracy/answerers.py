"""Who answers: one policy at one budget, as an engine in a session or, where it has none, in the PyTorch reference."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvc_trt import policies
from kvc_trt.accuracy.questions import Question
from kvc_trt.errors import InputError
from kvc_trt.runtime.batch import Batch, batch_of
from kvc_trt.runtime.executor import threads_for

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.reference.cache import ReferenceCache
    from kvc_trt.runtime import Output
    from kvc_trt.runtime.executor import Executor

Answers = list[tuple[int, ...]]
"""Token ids of every answer, the end token included where the model put one."""
MOST_ROWS = 16
ROWS_BYTES = 1 << 30
"""Most bytes that the full caches of questions answered together take."""
Prefilled = tuple["Tensor", "ReferenceCache"]
PREFILLED_BYTES = 1 << 30
"""Most bytes of prompts' caches that are remembered."""


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
        """The numbers that the engine was resolved to."""
        return self._parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of the state buffers, which were allocated for all rows, per row."""
        return self._session.executor.state_bytes() // self._session.max_batch_size

    @property
    def executor(self) -> str:
        """The backend's name."""
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


class Prefills:
    """What the reference read of prompts: policies that keep whole prompts need it once, whatever they read later."""

    def __init__(self, limit: int = PREFILLED_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._known: dict[tuple[bytes, int], Prefilled] = {}

    def get(self, batch: Batch, parameters: PolicyParameters) -> Prefilled | None:
        """A copy that may be advanced; None where the prompts have not been read yet."""
        found = self._known.get(self._key(batch, parameters))
        return None if found is None else copy.deepcopy(found)

    def put(self, batch: Batch, parameters: PolicyParameters, prefilled: Prefilled) -> None:
        """Remember prompts that a policy kept whole, as long as there is room."""
        size = sum(cache.keys.nbytes + cache.values.nbytes for cache in prefilled[1].caches)
        if parameters.selection.oracle and not parameters.eviction.evicts and self._bytes + size <= self._limit:
            self._known[self._key(batch, parameters)] = copy.deepcopy(prefilled)
            self._bytes += size

    def forget(self) -> None:
        """Drop them all: the next prompts are others."""
        self._known.clear()
        self._bytes = 0

    def _key(self, batch: Batch, parameters: PolicyParameters) -> tuple[bytes, int]:
        return batch.input_ids.tobytes() + batch.prompt_lengths.tobytes(), parameters.max_sequence_len


class ReferenceAnswerer:
    """A whole decoder in float32, prompt by prompt in prefill and all rows together in decode."""

    executor = "reference"

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        parameters: PolicyParameters,
        rows: int,
        end_token_ids: Iterable[int],
        prefills: Prefills,
    ) -> None:
        from kvc_trt.reference.decoder import ReferenceDecoder

        method = policies.method(parameters)
        self._decoder = ReferenceDecoder(config, weights, method=method, parameters=parameters)
        self._parameters = parameters
        self._rows, self._ends, self._prefills = rows, frozenset(end_token_ids), prefills
        self.row_bytes = 0

    @property
    def parameters(self) -> PolicyParameters:
        """The policy's resolved numbers."""
        return self._parameters

    def answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Greedy answers; a tie takes the lowest id, as a session does."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(threads_for(self._decoder.config) or before)
        try:
            rows = batches(questions, self._rows)
            return [answer for some in rows for answer in self._answer(some, max_new_tokens)]
        finally:
            torch.set_num_threads(before)

    def _answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Rows advance together; one that is done is fed its last token again, and what it then says is ignored."""
        import torch

        logits, cache = self._prefill(questions)
        self.row_bytes = sum(one.keys.nbytes + one.values.nbytes for one in cache.caches) // len(questions)
        late = [deque(question.continuation_ids) for question in questions]
        answers: list[list[int]] = [[] for _ in questions]
        while True:
            best = np.argmax(logits.numpy(), axis=1).tolist()
            tokens = [self._next(late[i], answers[i], best[i], max_new_tokens) for i in range(len(questions))]
            if not any(late) and all(self._done(answer, max_new_tokens) for answer in answers):
                return [tuple(answer) for answer in answers]
            logits = self._decoder.decode(torch.tensor(tokens), cache)

    def _prefill(self, questions: Sequence[Question]) -> Prefilled:
        import torch

        batch = batch_of([question.prompt_ids for question in questions])
        if (known := self._prefills.get(batch, self.parameters)) is not None:
            return known
        prefilled = self._decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
        self._prefills.put(batch, self.parameters, prefilled)
        return prefilled

    def _next(self, late: deque[int], answer: list[int], best: int, max_new_tokens: int) -> int:
        """The token that a row is fed: of its late question, or its best one, which is then part of the answer."""
        if late:
            return late.popleft()
        if not self._done(answer, max_new_tokens):
            answer.append(best)
        return answer[-1]

    def _done(self, answer: list[int], max_new_tokens: int) -> bool:
        return bool(answer) and (answer[-1] in self._ends or len(answer) >= max_new_tokens)


def rows_for(model: ModelConfig, sequence: int) -> int:
    """Questions of `sequence` tokens that are answered together. Rows do not depend on each other."""
    pairs = model.num_hidden_layers * model.num_key_value_heads * model.head_size
    return max(1, min(MOST_ROWS, ROWS_BYTES // (2 * 4 * pairs * sequence)))


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
