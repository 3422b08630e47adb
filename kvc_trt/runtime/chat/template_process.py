"""Render an untrusted Jinja template in a process of its own, with limits that it cannot lift.

Jinja's sandbox keeps a template away from Python's internals, but does not limit time and memory: `10 ** 10 ** 9` is
one expression, during which no thread can be stopped. So the template runs in `template_worker`, which the kernel
limits and which is killed at a deadline. The process is kept for later conversations; it takes about 0.1 s to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvc_trt.errors import InputError, UnsupportedEnvironment, describe
from kvc_trt.runtime.chat import template_worker
from kvc_trt.runtime.chat.template_worker import CPU_SECONDS, LONGEST_TEXT, as_line

WALL_SECONDS = 9.0
"""The time limit for one text, including the template's compilation: three times the limit of processor time, because
the machine may be busy."""
_SECONDS_PER_MIB = 0.25
"""The additional time for each MiB of a conversation, which is sent to the process and back."""
_LONGEST_ANSWER = 6 * LONGEST_TEXT + 1024
"""The largest answer in bytes: JSON writes a control character in six."""
_SECONDS_TO_END = 1.0
"""The time in which a process that has closed its output must end."""
_WITHOUT_IT = "ask without the template: kvc-trt run --prompt TEXT --raw, or Engine.generate in Python"


class TemplateProcess:
    """One template, compiled in a process that starts at the first use; may be used from several threads."""

    def __init__(self, template: str, variables: Mapping[str, Any], source: str) -> None:
        self._first = {"template": template, "variables": dict(variables)}
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes]], TemplateProcess] | None = None
        self._lock = threading.Lock()

    def render(self, names: Mapping[str, Any]) -> str:
        """Return the rendered text for these variables (plain values); InputError, one line, if rendering fails."""
        conversation = as_line(names)
        seconds = WALL_SECONDS + _SECONDS_PER_MIB * len(conversation) / (1 << 20)
        with self._lock:
            limit = _Limit(seconds, time.monotonic() + seconds)
            if self._process is None:
                self._process = _start()
                self._ending = weakref.finalize(self, _end, self._process)
                self._ask(self._process, as_line(self._first), limit)
            return self._ask(self._process, conversation, limit).get("text", "")

    def _ask(self, process: subprocess.Popen[bytes], request: bytes, limit: _Limit) -> dict[str, str]:
        try:
            answer = _exchanged(process, request, limit)
        except _Ended as ended:
            self._give_up()
            raise InputError(f"{self._source}: the chat template {ended}", hint=_WITHOUT_IT) from None
        except BaseException:  # interrupted between a request and its answer: the next one would get the wrong answer
            self._give_up()
            raise
        if "missing" in answer:
            self._give_up()
            problem = f"{sys.executable!r} cannot render a chat template: {answer['missing']}"
            raise UnsupportedEnvironment(problem, hint="pip install jinja2")
        if "refused" in answer:
            raise InputError(
                f"{self._source}: the chat template refuses these messages: {_one_line(answer['refused'])}"
            )
        if "error" in answer:  # the process may not have read the whole request, so it cannot be used again
            self._give_up()
            problem = _one_line(answer["error"])
            raise InputError(f"{self._source}: the chat template cannot be rendered: {problem}", hint=_WITHOUT_IT)
        return answer

    def _give_up(self) -> None:
        """Kill the process; the next conversation starts another one."""
        if self._ending is not None:
            self._ending()
        self._process = self._ending = None


class _Ended(Exception):
    """The process ended, or had to be ended, without an answer."""


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", template_worker.__file__, *filter(None, sys.path)]
    try:
        # In a session of its own: Ctrl-C in the terminal must reach the caller alone, who ends this process.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise UnsupportedEnvironment(f"cannot start {sys.executable!r} to render a chat template: {error}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class _Limit(NamedTuple):
    seconds: float
    deadline: float
    """The end of these seconds, on the monotonic clock."""


def _exchanged(process: subprocess.Popen[bytes], request: bytes, limit: _Limit) -> dict[str, str]:
    """Write one line and read one before the deadline; raises `_Ended` with the reason if there is no answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    to_write, answer = memoryview(request), bytearray()
    source, sink = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(sink, False)
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    waiting.register(sink, select.POLLOUT)
    while not answer.endswith(b"\n"):
        ready = dict(waiting.poll(max(0, int(1000 * (limit.deadline - time.monotonic())))))
        if not ready:
            raise _Ended(f"took more than {limit.seconds:.0f} s")
        if ready.get(sink) == select.POLLOUT:
            with contextlib.suppress(BrokenPipeError):
                to_write = to_write[os.write(sink, to_write[: 1 << 16]) :]
        if sink in ready and (not to_write or ready[sink] != select.POLLOUT):
            waiting.unregister(sink)
        if source in ready:
            received = os.read(source, 1 << 20)
            answer += received
            if not received or len(answer) > _LONGEST_ANSWER:
                raise _Ended(_reason(process) if not received else "wrote an answer that is too long")
    return _parsed(bytes(answer))


def _reason(process: subprocess.Popen[bytes]) -> str:
    """Return the reason why the process has closed its output."""
    try:
        status = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "closed its output"
    if status == -signal.SIGXCPU:
        return f"took more than {CPU_SECONDS} s of processor time"
    return f"ended the process that renders it (status {status})"


def _parsed(answer: bytes) -> dict[str, str]:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _Ended("broke the process that renders it")
    return found


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if line.isprintable() and len(line) <= 200 else describe(line, 200)
