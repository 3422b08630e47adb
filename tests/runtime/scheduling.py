"""A scheduler over fakes that a test advances step by step, and the answers that it has to give."""

from __future__ import annotations

from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.fake_executor import FakeExecutor, FakePacking
from tests.runtime.slicing_executor import Clock, FakeSlicingExecutor


def scheduler(rows=2, executor=None, **options):
    """One without a thread: the test takes each turn."""
    clock = Clock()
    return Scheduler(Session(executor or FakeSlicingExecutor(clock), None, rows), clock=clock, **options)


def context_of(tokens):
    maker = Session(FakeExecutor(), None, 1, packing=FakePacking(FakeExecutor()))
    (row,) = maker.add([Request(tokens, keep_logits=True)])
    return maker.take(row)


def finish(one):
    while one.advance():
        pass


def tokens_alone(request):
    return Session(FakeExecutor(), None, 1).generate([request])[0].token_ids
