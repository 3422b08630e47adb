"""TensorRT's phases as progress: in any order, from any thread, and nothing raised reaches TensorRT."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from kvc_trt.backends.tensorrt.building.progress import STEPS_WORTH_SHOWING, CallbackErrors, Phases


class Recorded:
    def __init__(self):
        self.events = []

    @contextmanager
    def task(self, description, total):
        self.events.append(("open", description, total))
        yield lambda amount: self.events.append(("advance", description, amount))
        self.events.append(("close", description))

    def note(self, message):
        raise AssertionError(message)


def test_long_phases_are_tasks_and_short_ones_are_not():
    progress, kept = Recorded(), CallbackErrors()
    phases = Phases(progress, kept)
    phases.start("timing", 20)
    phases.start("one", STEPS_WORTH_SHOWING - 1)
    assert phases.step("timing", 0)
    assert phases.step("one", 0)
    assert phases.step("timing", 4)  # several at once
    assert phases.step("timing", 2)  # late, from another thread
    phases.finish("one")
    phases.finish("timing")
    phases.finish("never started")
    name = "TensorRT: timing"
    assert progress.events == [("open", name, 20), ("advance", name, 1), ("advance", name, 4), ("close", name)]


def test_a_failed_build_closes_its_progress():
    progress = Recorded()
    phases = Phases(progress, CallbackErrors())
    phases.start("a", 20)
    phases.start("b", 20)
    phases.start("a", 20)  # a phase of the same name inside of it
    phases.close()
    assert [event[0] for event in progress.events] == ["open", "open", "close", "close"]


def test_a_kept_error_asks_the_builder_to_stop_and_is_raised_later():
    kept = CallbackErrors()
    phases = Phases(Recorded(), kept)
    kept.raise_again()
    assert phases.step("any", 0)
    kept.keep(KeyboardInterrupt())
    kept.keep(ValueError("later"))
    assert not phases.step("any", 1)
    with pytest.raises(KeyboardInterrupt):
        kept.raise_again()


def test_steps_from_several_threads_add_up():
    progress = Recorded()
    phases = Phases(progress, CallbackErrors())
    phases.start("timing", 400)
    threads = [
        threading.Thread(target=lambda part=part: [phases.step("timing", step) for step in range(part, 400, 4)])
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    phases.finish("timing")
    assert sum(event[2] for event in progress.events if event[0] == "advance") == 400
