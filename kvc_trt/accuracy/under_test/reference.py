"""The PyTorch reference as an answerer, for policies that have no engine: oracles."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt import policies
from kvc_trt.accuracy.questions import Question
from kvc_trt.accuracy.under_test.answerer import Answers, batches
from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import threads_for
from kvc_trt.runtime.session.batch import Batch, batch_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.reference.cache import ReferenceCache

Prefilled = tuple["Tensor", "ReferenceCache"]
PREFILLED_BYTES = 1 << 30
"""Most bytes of prompts' caches that are remembered."""


class Prefills:
    """Prompts that the reference has read: policies that keep whole prompts share them, however little their steps
    read."""

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
        from kvc_trt.reference.model.decoder import ReferenceDecoder

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
        """Greedy answers; a tie takes the lowest id, as a session does. InputError for a second question."""
        from kvc_trt.reference.model.threads import torch_threads

        if any(question.turn_ids for question in questions):
            raise InputError(f"{self.parameters.policy} has no engine, and second questions are asked of engines")
        with torch_threads(threads_for(self._decoder.config)):
            rows = batches(questions, self._rows)
            return [answer for some in rows for answer in self._answer(some, max_new_tokens)]

    def surprise(self, questions: Sequence[Question]) -> list[float]:
        """InputError: continuations are fed to engines alone."""
        raise InputError(f"{self.parameters.policy} has no engine, and likelihoods are measured on engines")

    def along_targets(self, questions: Sequence[Question]) -> list[NDArray[np.float32]]:
        """InputError: the whole cache's answers are fed to engines alone."""
        raise InputError(f"{self.parameters.policy} has no engine, and faithfulness is measured on engines")

    def _answer(self, questions: Sequence[Question], max_new_tokens: int) -> Answers:
        """Decode all rows together. A row that is done is fed its last token again, and its further output is
        ignored."""
        import torch

        logits, cache = self._prefill(questions)
        self.row_bytes = sum(one.keys.nbytes + one.values.nbytes for one in cache.caches) // len(questions)
        late = [deque(question.continuation_ids) for question in questions]
        answers: list[list[int]] = [[] for _ in questions]
        while True:
            best = np.argmax(logits.numpy(), axis=1).tolist()
            done = list(map(self._done, questions, answers, repeat(max_new_tokens)))
            tokens = [self._next(late[i], answers[i], best[i], done[i]) for i in range(len(questions))]
            if not any(late) and all(map(self._done, questions, answers, repeat(max_new_tokens))):
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

    def _next(self, late: deque[int], answer: list[int], best: int, done: bool) -> int:
        """The token that a row is fed: of its late question, or its best one, which is then part of the answer."""
        if late:
            return late.popleft()
        if not done:
            answer.append(best)
        return answer[-1]

    def _done(self, question: Question, answer: list[int], max_new_tokens: int) -> bool:
        if not answer:
            return False
        return answer[-1] in self._ends or len(answer) >= max_new_tokens or question.is_answered(answer)
