"""The sources of questions: tasks that are generated at any length, or a user's own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from kvc_trt.accuracy.grid import QuestionGroup
from kvc_trt.accuracy.questions import ModelVocabulary, draw
from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.tasks.dataset import VERSION, DataSet
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.own.fitting import Truncate, fitted, sample_of, tokens_of
from kvc_trt.tasks.own.reader import DataFile, Record
from kvc_trt.tasks.own.sets import tasks_of
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample

Rooms = int | Mapping[str, int] | None
"""The longest answer, of every task or by name; None, and tasks not named, take the task's own."""


class Draw(Protocol):
    """The questions of each group."""

    @property
    def seed(self) -> int:
        """The seed of generated questions; 0 where they come from a file."""

    def settings(self) -> dict[str, Any]:
        """The settings that all results of one file share."""

    def task(self, name: str) -> Task:
        """The task of that name; InputError for an unknown one."""

    def count_of(self, name: str) -> int:
        """The number of questions that a group of this task is asked."""

    def answer_room(self, name: str) -> int:
        """The longest answer to this task."""

    def data_set(self, group: QuestionGroup, vocabulary: ModelVocabulary) -> DataSet:
        """The samples of a group, sized for its length. InputError where they do not fit, or cannot be spelled."""


def _room_of(rooms: Rooms, name: str) -> int | None:
    return rooms.get(name) if isinstance(rooms, Mapping) else rooms


@dataclass(frozen=True)
class QuestionDraw:
    """Generated questions: their number and their seeds."""

    samples: int
    seed: int
    max_new_tokens: Rooms = None
    asked: int | None = None
    """Ask only this many samples, the first ones; None asks all."""

    def settings(self) -> dict[str, Any]:
        """Its fields, and the version of the generators."""
        return {**vars(self), "tasks_version": VERSION}

    def task(self, name: str) -> Task:
        """The registered task."""
        return task(name)

    def count_of(self, name: str) -> int:
        """Return the number of samples, which is the same for every task."""
        return self.samples if self.asked is None else min(self.asked, self.samples)

    def room(self, name: str) -> int | None:
        """The longest answer of one task; None is the task's own limit."""
        return _room_of(self.max_new_tokens, name)

    def answer_room(self, name: str) -> int:
        """The given value, or the task's own."""
        return self.room(name) or task(name).max_new_tokens

    def data_set(self, group: QuestionGroup, vocabulary: ModelVocabulary) -> DataSet:
        """Samples as long as the group's length allows."""
        return draw(
            group.task,
            group.length,
            vocabulary,
            samples=self.samples,
            seed=self.seed,
            max_new_tokens=self.room(group.task),
            framing=group.framing,
        )


@dataclass(frozen=True)
class FileDraw:
    """The questions of a file, each set of which is a task."""

    data: DataFile
    samples: int | None = None
    """Ask only the first ones of every set; None asks all."""
    max_new_tokens: Rooms = None
    """Never longer than a question's own limit."""
    truncate: Truncate | None = None

    seed = 0

    def settings(self) -> dict[str, Any]:
        """The file, by name and digest, and how it is asked."""
        return {
            "data": self.data.path.name,
            "data_sha256": self.data.digest,
            "truncate": self.truncate,
            "samples": self.samples,
            "max_new_tokens": self.max_new_tokens,
        }

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """The sets as tasks, by name."""
        return tasks_of(self.data)

    def task(self, name: str) -> Task:
        """The set of that name."""
        if name not in self.tasks:
            raise InputError(
                f"{self.data.path} has no set {describe(name)}{did_you_mean(name, self.tasks)}",
                hint=f"kvc-trt tasks check {self.data.path}",
            )
        return self.tasks[name]

    def count_of(self, name: str) -> int:
        """Return the number of a set's questions that are asked: `samples`, or all if the set has fewer."""
        count = len(self.data.sets[name])
        return count if self.samples is None else min(count, self.samples)

    def answer_room(self, name: str) -> int:
        """Return the longest limit of the set's questions, or the given limit if that is shorter."""
        own, given = self.task(name).max_new_tokens, _room_of(self.max_new_tokens, name)
        return own if given is None else min(own, given)

    def data_set(self, group: QuestionGroup, vocabulary: ModelVocabulary) -> DataSet:
        """The set's questions, in the order of the file."""
        if (tokenizer := vocabulary.tokenizer) is None:
            raise InputError("the model has no tokenizer, and questions of a file are text")
        room = self.answer_room(group.task)
        if room >= group.length:
            raise InputError(
                f"{group.task}: an answer may have {room} tokens, which leaves no room for a prompt in {group.length}",
                hint="give longer --lengths, or a smaller --max-new-tokens",
            )
        samples = []
        for index, record in enumerate(self.data.sets[group.task][: self.count_of(group.task)]):
            sample = sample_of(record, index, group.task)
            framing = self._framing_of(record, sample, vocabulary, group.framing)
            samples.append(fitted(sample, framing, group.length - room, str(self.data.path), self.truncate))
        options = {"file": self.data.digest, "truncate": self.truncate}
        frame = vocabulary.framing(group.framing).frame
        return DataSet(group.task, 0, group.length, room, tokenizer.fingerprint, tuple(samples), options, frame=frame)

    def length(
        self,
        names: Sequence[str],
        vocabulary: ModelVocabulary,
        framing: str,
        longest: int,
        progress: Progress | None = None,
    ) -> int:
        """Tokens that the longest of these sets' prompts takes with its answer, at most `longest` if it may be cut.

        InputError for a prompt that is longer and may not be cut: it names its line.
        """
        needed, where, longer = 0, "", 0
        counts = {name: self.count_of(name) for name in names}
        progress = progress or NullProgress()
        with progress.task("prompts", sum(counts.values())) as advance:
            for name, count in counts.items():
                for record in self.data.sets[name][:count]:
                    sample = sample_of(record, 0, name)
                    framed = self._framing_of(record, sample, vocabulary, framing)
                    tokens = tokens_of(sample, framed) + self.answer_room(name)
                    longer += tokens > longest
                    if tokens > needed:
                        needed, where = tokens, f"{self.data.path} line {record.line}"
                    advance(1)
        if needed > longest and self.truncate is None:
            raise InputError(
                f"{where}: prompt and answer take {needed:,} tokens, expected at most {longest:,}",
                hint="--truncate middle leaves out the middle of such prompts",
            )
        if longer:
            progress.note(f"{longer:,} of {sum(counts.values()):,} prompts lose their middle: {longest:,} tokens fit")
        return min(needed, longest)

    def _framing_of(self, record: Record, sample: TaskSample, vocabulary: ModelVocabulary, name: str) -> Framing:
        """Return a question's framing; InputError, with its line, for a conversation that the template refuses."""
        framing = vocabulary.framing_of(sample, name)
        try:
            framing.texts(sample)
        except InputError as error:
            raise InputError(f"{self.data.path} line {record.line}: {error.message}", hint=error.hint) from error
        return framing
