"""The prompts in the order in which they are asked: shuffled once, so that the first ones stand for the whole file."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from kvc_trt.accuracy.draw import FileDraw
from kvc_trt.accuracy.grid import QuestionGroup
from kvc_trt.accuracy.questions import ModelVocabulary
from kvc_trt.errors import InputError
from kvc_trt.progress import Progress
from kvc_trt.tasks.dataset import DataSet
from kvc_trt.tasks.task import Task


@dataclass(frozen=True)
class OrderedPrompts:
    """A file's questions in one order for all candidates; a `Draw` of the first `asked` of them.

    All sets have room for the same answer, so that one engine serves them.
    """

    file: FileDraw
    """With the records in the order in which they are asked."""
    names: tuple[str, ...]
    """The set of every record, in that order."""
    asked: int

    seed = 0

    @classmethod
    def of(cls, given: FileDraw, sets: Sequence[str] | None, order: int) -> OrderedPrompts:
        """Shuffle the records by the seed `order`; `sets` None takes all. `given` says how they are asked.

        InputError for an unknown set, and for questions with answers beside questions without any.
        """
        data = given.data
        for name in sets or ():
            given.task(name)
        chosen = {name: records for name, records in data.sets.items() if sets is None or name in sets}
        answered = {name: records[0].answers is not None for name, records in chosen.items()}
        if len(set(answered.values())) > 1:
            named = ",".join(name for name, has in answered.items() if has)
            raise InputError(
                f"{data.path} has questions with answers and without: expected one kind, since right answers and "
                "faithfulness cannot be weighed against each other",
                hint=f"--sets {named} chooses those with answers",
            )
        wanted = {record.id for records in chosen.values() for record in records}
        records = [record for record in data.records if record.id in wanted]
        random.Random(order).shuffle(records)
        if given.samples is not None:
            records = records[: given.samples]
        ordered = replace(data, records=tuple(records))
        set_of = {record.id: name for name, records in ordered.sets.items() for record in records}
        names = tuple(set_of[record.id] for record in ordered.records)
        return cls(replace(given, data=ordered, samples=None), names, len(names))

    def first(self, count: int) -> OrderedPrompts:
        """The first `count` of them."""
        return replace(self, asked=min(count, len(self.names)))

    @property
    def labelled(self) -> bool:
        """True if right answers are known; else candidates are judged by how closely they follow the whole cache."""
        return self.file.data.records[0].answers is not None

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets, in the order in which they are first asked."""
        return tuple(dict.fromkeys(self.names))

    @cached_property
    def places(self) -> tuple[tuple[str, int], ...]:
        """For every prompt its set, and its place there."""
        counts: Counter[str] = Counter()
        found = []
        for name in self.names:
            found.append((name, counts[name]))
            counts[name] += 1
        return tuple(found)

    def settings(self) -> dict[str, Any]:
        """The file, and how it is asked."""
        return {**self.file.settings(), "samples": len(self.names), "sets": list(self.sets)}

    def task(self, name: str) -> Task:
        """The set of that name."""
        return self.file.task(name)

    def count_of(self, name: str) -> int:
        """Return the number of a set's questions that have been asked so far."""
        return self.names[: self.asked].count(name)

    @property
    def room(self) -> int:
        """The longest answer to any question in tokens."""
        return max(self.file.answer_room(name) for name in self.sets)

    def answer_room(self, name: str) -> int:
        """The longest answer of all sets."""
        return self.room

    def data_set(self, group: QuestionGroup, vocabulary: ModelVocabulary) -> DataSet:
        """All of a set's questions, asked by now or later."""
        return self._roomy.data_set(group, vocabulary)

    def length(self, vocabulary: ModelVocabulary, framing: str, longest: int, progress: Progress) -> int:
        """Tokens that the longest prompt takes with the longest answer. InputError as `FileDraw.length`."""
        return self._roomy.length(self.sets, vocabulary, framing, longest, progress)

    @cached_property
    def _roomy(self) -> FileDraw:
        """The file, whose sets all have the same room for an answer."""
        file = self.file
        return _OneRoom(file.data, file.samples, file.max_new_tokens, file.truncate, self.room)


@dataclass(frozen=True)
class _OneRoom(FileDraw):
    room: int = 0

    @override
    def answer_room(self, name: str) -> int:
        """Return the longest answer in tokens, which is the same for all sets."""
        return self.room
