from __future__ import annotations

import io
import re
import threading
import time

import pytest

from kvc_trt import progress as module
from kvc_trt.progress import LineProgress, NullProgress, RichProgress, progress_on


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_how_far_a_long_task_is(clock):
    stream = io.StringIO()
    with LineProgress(stream).task("writing", 200) as advance:
        advance(50)
        clock[0] = 6.0
        advance(50)
    assert stream.getvalue() == "writing: 50%, about 6 s left\nwriting: done in 6.0 s\n"


def test_a_short_task_says_nothing(clock):
    stream = io.StringIO()
    with LineProgress(stream).task("writing", None) as advance:
        advance(1)
    assert stream.getvalue() == ""


def test_a_task_that_does_not_advance_says_how_long_it_has_taken(monkeypatch):
    """The innermost one, by a thread that ends with the outermost."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.5)
    stream = io.StringIO()
    shown = LineProgress(stream)
    with shown.task("outer", 2) as advance, shown.task("inner", None):
        time.sleep(2.5)
        assert re.fullmatch(r"inner: \d s so far", stream.getvalue().splitlines()[0])
        advance(1)
    assert "outer: 50%, about " in stream.getvalue()
    for _ in range(50):
        speaking = [thread for thread in threading.enumerate() if thread.name == "progress"]
        time.sleep(0.1 if speaking else 0.0)
    assert not speaking


def test_a_stream_that_cannot_be_written_ends_no_task(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with LineProgress(stream).task("outer", None):
        stream.close()
        time.sleep(1.5)
        monkeypatch.setattr(module, "SECONDS_WORTH_REPORTING", 100.0)


def test_a_task_that_fails_is_not_called_done(clock):
    stream = io.StringIO()

    def work():
        with LineProgress(stream).task("writing", 2):
            clock[0] = 9.0
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert "done" not in stream.getvalue()


def test_only_a_terminal_is_animated():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(progress_on(io.StringIO()), LineProgress)
    assert isinstance(progress_on(Terminal()), RichProgress)


@pytest.mark.parametrize("progress", [NullProgress(), RichProgress()])
def test_nested_tasks_print_nothing_to_stdout(progress, capsys):
    with progress.task("outer", 2) as outer, progress.task("inner", None) as inner:
        outer(1)
        inner(1)
        progress.note("a note")
    assert capsys.readouterr().out == ""


HOSTILE = "k.\x1b]0;title\x07\n\u202e[/red] done"


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_names_of_strangers_control_no_terminal(kind, clock, capfd, monkeypatch):
    stream = io.StringIO()
    if kind == "bars":
        monkeypatch.setattr(module.sys, "stderr", stream)
    shown = LineProgress(stream) if kind == "lines" else RichProgress()
    with shown.task(HOSTILE, 10) as advance:
        clock[0] = 9.0
        advance(5)
        shown.note(HOSTILE)
    shown.note(HOSTILE)
    said = stream.getvalue()
    assert said.count("k.\\x1b]0;title\\x07\\n\\u202e[/red] done") >= 2
    assert not {"\x1b]", "\x07", "\u202e"} & {said[i : i + n] for n in (1, 2) for i in range(len(said))}
