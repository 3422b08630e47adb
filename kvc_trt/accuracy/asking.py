"""Asking one group's questions of one policy after another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from kvc_trt.accuracy.answerer import Answerer
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.grid import FULL, Variant
from kvc_trt.accuracy.questions import QuestionSet
from kvc_trt.accuracy.subject import Room, Subject
from kvc_trt.errors import InputError


@dataclass(frozen=True)
class Asking:
    """One group's questions, and who is asked."""

    subject: Subject
    asked: QuestionSet
    seed: int

    @cached_property
    def room(self) -> Room:
        """The prompt's room is the group's length without the answer, or what positions leave of it."""
        new = self.asked.max_new_tokens + self.asked.late_tokens
        longest = max(len(question.prompt_ids) for question in self.asked.flat)
        positions = self.subject.model.max_position_embeddings
        return Room(max(longest, min(self.asked.group.length - self.asked.max_new_tokens, positions - new)), new)

    def full(self) -> Cell:
        """The full cache's cell. InputError where the subject cannot be asked these questions at all."""
        variant = Variant(FULL, None)
        cell = self._answered(self._empty(variant, None), self.subject.open(variant, self.room))
        return replace(cell, full_accuracy=cell.mean.value)

    def cell(self, variant: Variant, full: Cell) -> Cell:
        """Another policy's cell; one that has no engine of this budget says why."""
        empty = self._empty(variant, full.mean.value)
        try:
            answerer = self.subject.open(variant, self.room)
        except InputError as error:
            return replace(empty, reason=error.message)
        return self._answered(empty, answerer)

    def _empty(self, variant: Variant, full_accuracy: float | None) -> Cell:
        group = self.asked.group
        return Cell(
            task=group.task,
            family=self.asked.task.family,
            mode=group.mode,
            length=group.length,
            policy=variant.policy,
            token_budget=variant.token_budget,
            seed=self.seed,
            dataset=self.asked.digest,
            max_new_tokens=self.asked.max_new_tokens,
            full_accuracy=full_accuracy,
        )

    def _answered(self, empty: Cell, answerer: Answerer) -> Cell:
        started = time.monotonic()
        answers = answerer.answer(self.asked.flat, self.asked.max_new_tokens)
        return replace(
            empty,
            scores=self.asked.score(answers),
            depths=self.asked.depths,
            executor=answerer.executor,
            row_bytes=answerer.row_bytes,
            parameters=asdict(answerer.parameters),
            seconds=round(time.monotonic() - started, 3),
        )
