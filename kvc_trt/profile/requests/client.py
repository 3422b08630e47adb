"""The client of a measurement: it asks a scheduler, and follows each answer to its end.

Times of tokens are those at which the scheduler has them. So waiting for a row, and the prompts and steps of other
rows, are part of a latency, and a client whose thread gets no processor is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvc_trt.runtime.request import Request

if TYPE_CHECKING:
    from kvc_trt.profile.requests.load import Asking, LoadRequest
    from kvc_trt.progress import Advance
    from kvc_trt.runtime.scheduler.scheduler import Scheduler

Result = TypeVar("Result")


@dataclass(frozen=True)
class Answered:
    """One request that was answered; times in seconds."""

    input_len: int
    arrived: float
    tokens: tuple[float, ...]
    """The time at which each token of the answer arrived."""


@dataclass(frozen=True)
class Run:
    """All requests of one run."""

    seconds: float
    """The time from the first request until the last answer is whole."""
    answered: tuple[Answered, ...]


def ask_all(scheduler: Scheduler, asked: Asking, concurrency: int, advance: Advance) -> Run:
    """Ask every request when it is due, at most `concurrency` at a time; raises the first failure's exception."""
    return _finished(_ask_all(scheduler, asked, concurrency, advance))


async def _ask_all(scheduler: Scheduler, asked: Asking, concurrency: int, advance: Advance) -> Run:
    gate = asyncio.Semaphore(concurrency)

    async def one(request: LoadRequest) -> Answered:
        async with gate:
            answered = await _ask(scheduler, request)
        advance(1)
        return answered

    began = time.perf_counter()
    tasks = []
    for request, due in zip(asked.requests, asked.arrivals, strict=True):
        if due > (now := time.perf_counter() - began):
            await asyncio.sleep(due - now)
        tasks.append(asyncio.create_task(one(request)))
    answered = await asyncio.gather(*tasks)
    return Run(time.perf_counter() - began, tuple(answered))


async def _ask(scheduler: Scheduler, asked: LoadRequest) -> Answered:
    ticket = scheduler.submit(Request(asked.prompt(), max_new_tokens=asked.output_len, ignore_eos=True))
    try:
        await ticket.answer()
    finally:
        ticket.cancel()
    return Answered(asked.input_len, ticket.arrived, tuple(ticket.token_times))


def _finished(work: Coroutine[object, object, Result]) -> Result:
    """Run work to its end, also where a loop runs in this thread already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
