"""Templates that want more than a conversation's text: every one ends in one line and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.runtime.chat import template_process
from kvc_trt.runtime.chat.template_process import TemplateProcess
from kvc_trt.runtime.chat.template_worker import CPU_SECONDS, LONGEST_TEXT

NAMES = {"messages": [{"role": "user", "content": "a"}]}
FOREVER = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


def process_of(template: str) -> TemplateProcess:
    return TemplateProcess(template, {}, "MODEL")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__ }}", "reaches for the attribute '__class__' of a str"),
        ("{{ ''['__class__'] }}", "reaches for the attribute '__class__' of a str"),
        ("{{ messages | attr('__class__') }}", "reaches for the attribute '__class__' of a list"),
        ("{{ messages | map(attribute='__class__') | list }}", "reaches for the attribute '__class__' of a dict"),
        ("{{ '{0.__class__}'.format(messages) }}", "reaches for the attribute '__class__' of a list"),
        ("{{ ('{0.__cla' ~ 'ss__}').format_map(messages[0]) }}", "cannot be rendered"),
        ("{{ cycler.__init__.__globals__.os }}", "reaches for the attribute '__init__' of a type"),
        ("{{ raise_exception.__globals__ }}", "reaches for the attribute '__globals__' of a function"),
        ("{{ self._TemplateReference__context }}", "reaches for the attribute"),
        ("{{ messages.append(1) }}", "reaches for the attribute 'append' of a list"),
        ("{{ messages[0].update(role='system') }}", "reaches for the attribute 'update' of a dict"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ " + "(" * 100_000 + ")" * 100_000 + " }}", "recursion"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10 ** 10 }}", "more than 512 MiB of memory"),
        ("{{ messages[0].content * 10 ** 10 }}", "more than 512 MiB of memory"),
        ("{{ messages[0].content | center(10 ** 10) }}", "more than 512 MiB of memory"),
        ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16777216 characters"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", "Range too big"),
        ("{{ '%c' | format(55296) }}", "half of a character"),
        (
            "{{ raise_exception('no\nsystem\x1b[31m message') }}",
            r"refuses these messages: 'no system\\x1b\[31m message'",
        ),
        ("{{ raise_exception('a' * 1000) }}", r"refuses these messages: 'aaa.*\.\.\.$"),
    ],
)
def test_hostile_templates_are_refused_in_one_line(template, message):
    process = process_of(template)
    for _ in range(2):  # the second time from the start, or from the process that is still there
        with pytest.raises(InputError, match=message) as raised:
            process.render(NAMES)
        assert "\n" not in raised.value.message
        assert len(raised.value.message) < 300
        assert raised.value.message.startswith("MODEL: the chat template ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "seconds"),
    [("{{ 10 ** (10 ** 8) }}", CPU_SECONDS), (FOREVER, 1), ("{% set n = 10 ** 8 %}{{ 7 ** n }}", 1)],
)
def test_a_template_that_never_ends_is_stopped(template, seconds, monkeypatch, tmp_path):
    """Two of these are one expression each, which no thread could be stopped in; one gets as much time as a user's."""
    monkeypatch.setattr(template_process, "WALL_SECONDS", 600.0)  # on a busy machine it ends later
    if seconds != CPU_SECONDS:
        code = Path(template_process.template_worker.__file__).read_text()
        limit = f"\nCPU_SECONDS = {CPU_SECONDS}\n"
        assert code.count(limit) == 1
        worker = tmp_path / "worker.py"
        worker.write_text(code.replace(limit, f"\nCPU_SECONDS = {seconds}\n"))
        monkeypatch.setattr(template_process.template_worker, "__file__", str(worker))
        monkeypatch.setattr(template_process, "CPU_SECONDS", seconds)
    process = process_of(template)
    with pytest.raises(InputError, match=f"took more than {seconds} s of processor time"):
        process.render(NAMES)


@pytest.mark.slow
def test_no_template_keeps_its_caller_waiting_for_ten_seconds():
    process, started = process_of("{{ lipsum(10 ** 8) }}"), time.monotonic()
    with pytest.raises(InputError, match="took more than "):
        process.render(NAMES)
    assert time.monotonic() - started < 10


def test_one_deadline_is_for_a_template_that_has_to_be_compiled_first(monkeypatch):
    asked = []

    def exchanged(process, request, limit):
        asked.append(limit.deadline - time.monotonic())
        time.sleep(0.1)
        return {}

    monkeypatch.setattr(template_process, "_exchanged", exchanged)
    process_of("a").render(NAMES)
    assert len(asked) == 2
    assert asked[1] <= asked[0] - 0.1


def test_the_deadline_holds_where_no_time_is_spent(monkeypatch):
    monkeypatch.setattr(template_process, "WALL_SECONDS", 2.0)
    process = process_of("{{ messages[0].content }}")
    assert process.render(NAMES) == "a"
    child = process._process.pid
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(InputError, match="took more than 2 s"):
        process.render(NAMES)
    assert not os.path.exists(f"/proc/{child}")
    assert process.render(NAMES) == "a"  # by a new one


def test_a_process_that_died_is_replaced():
    process = process_of("{{ messages[0].content }}")
    assert process.render(NAMES) == "a"
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="ended the process that renders it"):
        process.render(NAMES)
    assert process.render(NAMES) == "a"


def test_a_dropped_template_process_is_ended():
    process = process_of("a")
    assert process.render(NAMES) == "a"
    child = process._process.pid
    del process
    gc.collect()
    assert not os.path.exists(f"/proc/{child}")


def test_failed_renderings_leave_no_process_behind():
    """A process for each, and each of them forgotten: no finalizer holds on to it."""
    process = process_of("{{ 1 // 0 }}")
    for _ in range(3):
        with pytest.raises(InputError, match="division") as raised:
            process.render(NAMES)
        assert "--prompt TEXT" in raised.value.hint
    held = [each for each in weakref.finalize._registry if (found := each.peek()) and found[0] is process]
    assert held == []


@pytest.mark.slow
@pytest.mark.parametrize("character", ["\N{SNOWMAN}", "\x01", "\N{GRINNING FACE}"])
def test_the_longest_conversation_is_rendered_whole(character):
    """Whatever its characters take in memory and on the way to the process."""
    text = character * (LONGEST_TEXT - 1)
    process = process_of("<{{ messages[0].content }}")
    assert process.render({"messages": [{"role": "user", "content": text}]}) == f"<{text}"


def test_a_template_with_half_of_a_character_is_refused():
    with pytest.raises(InputError, match="half of a character"):
        process_of("\ud800").render(NAMES)


def test_a_process_that_closes_its_output_is_ended(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import os, time\nos.close(1)\ntime.sleep(100)")
    monkeypatch.setattr(template_process.template_worker, "__file__", str(worker))
    with pytest.raises(InputError, match="closed its output"):
        process_of("a").render(NAMES)


def test_a_missing_jinja2_is_named(monkeypatch):
    monkeypatch.setattr("sys.path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(UnsupportedEnvironment, match="cannot render a chat template: No module named 'jinja2'"):
        process_of("a").render(NAMES)


def test_several_threads_get_their_own_answers():
    process, answers = process_of("{{ messages }}"), {}

    def ask(number: int) -> None:
        for _ in range(20):
            answers.setdefault(number, set()).add(process.render({"messages": f"{number}" * 100_000}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: {f"{number}" * 100_000} for number in range(4)}


def test_a_missing_python_interpreter_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(UnsupportedEnvironment, match="cannot start '/nowhere/python'"):
        process_of("a").render(NAMES)


def test_the_template_process_has_dropped_its_rights():
    process = process_of("a")
    process.render(NAMES)
    limits = Path(f"/proc/{process._process.pid}/limits").read_text().splitlines()
    for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
        line = next(line for line in limits if line.startswith(name))
        assert line.removeprefix(name).split()[:2] == ["0", "0"]
