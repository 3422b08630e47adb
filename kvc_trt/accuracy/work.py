"""The expected time of the answers to a group of questions, so that the time left is right from the first line on.

A prompt takes much longer to read than a short answer to give, and all policies share its reading; a count of answers
would take every answer for one with a prompt. The unit is the time of reading one token of a prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvc_trt.accuracy.grid import QuestionGroup

STEP = 8
"""Tokens of a prompt that are read in the time of one decode step, roughly."""
_GIVEN = 0.5
"""Share of the longest answer that is given, roughly: many end before it."""
_LATE_QUESTION = 32
"""Tokens of a question that arrives after compaction, each fed in a step of its own, roughly."""


class GroupWork:
    """The work of a group, and the part of it that is done; several threads may report to it."""

    def __init__(self, group: QuestionGroup, room: int, count: int, lacking: Sequence[int], *, read_once: bool) -> None:
        """`room` is the longest answer in tokens, `count` the number of samples, `lacking` how many of them each
        policy lacks. `read_once` says whether policies share the reading of a prompt."""
        late = _LATE_QUESTION if group.mode == "query-agnostic" else 0
        self._answer = STEP * (late + max(1, round(_GIVEN * room)))
        self._prompt = max(1, group.length - room)
        self._read_once = read_once
        self._read = count - max(lacking, default=0)
        """Samples whose prompts were read for the policy that has most answers."""
        prompts = max(lacking, default=0) if read_once else sum(lacking)
        self.total = self._answer * sum(lacking) + self._prompt * prompts
        self._reporting = threading.Lock()

    def done(self, answers: int, samples: int) -> int:
        """Return the work of `answers` new answers of a policy that has those to the first `samples` samples."""
        with self._reporting:
            prompts = max(0, samples - self._read) if self._read_once else answers if samples else 0
            self._read = max(self._read, samples)
            return self._answer * answers + self._prompt * prompts
