"""Callers of one scheduler in this process: conversations, contexts, drafts, cancelled and hostile requests.

A server's clients cannot ask for these. Every answer has to be that of the same scheduler when it was quiet.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.soak.outcomes import BUSY, DIFFERENT, EQUAL, LEFT, LOST, REFUSED, UNEXPLAINED, Outcomes
from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError, RequestFailed
from kvc_trt.runtime import Request, Sampling, Scheduler

_LONGEST_ANSWER = 120.0
"""Seconds after which a request counts as lost."""
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, float("nan"), 2**64, 10**400, "x", "\ud800", b"x", (), [5], [[1]], [None], {"a": 1},
    object(), Sampling(temperature=1.0, seed=1),
)  # fmt: skip
_ENDLESS = range(10**12)
"""A list that is refused by its length; past the door somebody would read it."""
Said = tuple[tuple[int, ...], str | None]
"""The tokens of an answer, and its text."""


@dataclass(frozen=True)
class Task:
    """Something to do with a scheduler that has one right result: the answers that it returns."""

    kind: str
    run: Callable[[Scheduler], list[Said]]


def tasks(encode: Callable[[str], list[int]], seed: int, distinct: int) -> list[Task]:
    """Return the different tasks; `encode` makes token ids of a text."""
    draw = random.Random(seed)
    words = ("lamp", "scarlet", "tiger", "lagos", "eight", "bear", "hanoi", "fourteen", "fork", "green")
    rules: tuple[dict[str, Any], ...] = (
        {}, {"ignore_eos": True}, {"stop_strings": ("lagos", "green")}, {"logprobs": 3, "ignore_eos": True},
        {"sampling": Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=3), "ignore_eos": True},
        {"sampling": Sampling(repetition_penalty=1.3, presence_penalty=0.5), "ignore_eos": True},
        {"bad_words": ("tiger",), "min_tokens": 4},
    )  # fmt: skip
    found = []
    for number in range(distinct):
        key, *value = draw.sample(words, 5)
        record = f"<record> {key} {' '.join(value)} {'amber ' * draw.choice((0, 8, 60, 400))}"
        own = {"max_new_tokens": draw.choice((8, 40)), **rules[number % len(rules)]}
        prompt, question = encode(f"{record}<query> {key}"), encode(f"<query> {key}")[1:]
        found.append(Task("alone", _alone(Request(prompt, **own))))
        if "logprobs" not in own and not own.get("sampling"):
            found.append(Task("conversation", _conversation(Request(prompt, stay=True, **own), question)))
            found.append(Task("context", _context(Request(encode(record), keep_context=True, **own), question)))
    return found


def _said(ticket: Any) -> Said:
    output = ticket.result(_LONGEST_ANSWER)
    return output.token_ids, output.text


def _alone(request: Request) -> Callable[[Scheduler], list[Said]]:
    return lambda scheduler: [_said(scheduler.submit(request))]


def _conversation(request: Request, question: list[int]) -> Callable[[Scheduler], list[Said]]:
    def run(scheduler: Scheduler) -> list[Said]:
        ticket = scheduler.submit(request)
        try:
            said = [_said(ticket)]
            for _ in range(2):
                ticket = scheduler.ask(ticket, question)
                said.append(_said(ticket))
            return said
        finally:
            ticket.cancel()

    return run


def _context(request: Request, question: list[int]) -> Callable[[Scheduler], list[Said]]:
    def run(scheduler: Scheduler) -> list[Said]:
        ticket = scheduler.submit(request)
        said = [_said(ticket)]
        following = replace(request, prompt_token_ids=question, context=ticket.context, keep_context=False)
        return [*said, _said(scheduler.submit(following))]

    return run


class Caller(threading.Thread):
    """Does one thing after another until `ends`, a time on the monotonic clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        quiet: Sequence[tuple[Task, list[Said]]],
        outcomes: Outcomes,
        seed: int,
        *,
        ends: float,
        pause_seconds: float,
    ) -> None:
        super().__init__(daemon=True)
        self._scheduler, self._quiet, self._outcomes = scheduler, quiet, outcomes
        self._draw, self._ends, self._pause_seconds = random.Random(seed), ends, pause_seconds

    def run(self) -> None:
        while time.monotonic() < self._ends:
            kind, act = self._draw.choices(
                (("task", self._ask), ("cancelled", self._cancel), ("hostile", self._attack)), (6, 2, 2)
            )[0]
            try:
                act()
            except Busy:
                self._outcomes.note(kind, BUSY)
            except TimeoutError as error:
                self._outcomes.note(kind, LOST, error)
            except Exception as error:  # of whatever kind: nothing of the sort may get here
                self._outcomes.note(kind, UNEXPLAINED, repr(error))
            time.sleep(self._draw.expovariate(1 / self._pause_seconds))

    def _ask(self) -> None:
        task, expected = self._draw.choice(self._quiet)
        found = task.run(self._scheduler)
        self._outcomes.note(task.kind, EQUAL if found == expected else DIFFERENT, f"{found} instead of {expected}")

    def _cancel(self) -> None:
        """End a request at some moment, by its ticket or by its deadline."""
        request = Request([1, *self._draw.choices(range(3, 40), k=self._draw.randrange(1, 300))], 100, ignore_eos=True)
        after, by_deadline = self._draw.choice((0.001, 0.02, 0.2)), self._draw.random() < 0.5
        deadline = self._scheduler.clock() + after if by_deadline else None
        with contextlib.suppress(Cancelled, DeadlineMissed):  # on a busy machine it has passed before it is submitted
            ticket = self._scheduler.submit(request, priority=self._draw.randint(-1, 1), deadline=deadline)
            time.sleep(after)
            if not by_deadline:
                ticket.cancel()
            ticket.result(_LONGEST_ANSWER)
        self._outcomes.note("cancelled", LEFT)

    def _attack(self) -> None:
        """Give one field a value of some type, at the door or past it."""
        of_sampling = self._draw.random() < 0.5
        name = self._draw.choice(fields(Sampling if of_sampling else Request)).name
        past = self._draw.random() < 0.3
        value = self._draw.choice(_VALUES if past else (*_VALUES, _ENDLESS))
        sampling = Sampling(temperature=0.5, top_k=3, seed=1)
        request = Request([1, 5, 6], 6, sampling=sampling)
        try:
            if past:
                object.__setattr__(sampling if of_sampling else request, name, value)
            elif of_sampling:
                request = replace(request, sampling=replace(sampling, **{name: value}))
            else:
                request = replace(request, **{name: value})
            ticket = self._scheduler.submit(request)
        except (InputError, TypeError, AttributeError, ValueError) as error:
            named = past or isinstance(error, InputError)
            self._outcomes.note("hostile", REFUSED if named else UNEXPLAINED, repr(error))
            return
        try:
            ticket.result(_LONGEST_ANSWER)
            self._outcomes.note("hostile", EQUAL)
        except (RequestFailed, InputError):
            self._outcomes.note("hostile", REFUSED)
        finally:
            ticket.cancel()
