"""`kvc-trt serve` as a process of its own: ready, asked, and ended as a user ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvc_trt.cli.main import run
from tests.serving.dynamo.served import LONG, PATHS, Served, eventually

pytestmark = pytest.mark.slow

BODY = {"model": "demo", "prompt": [5] * 8, "ignore_eos": True}


@contextmanager
def serving(engine: Path, *options: str, **environment: str) -> Iterator[Served]:
    arguments = [f"demo={engine}", "--port", "0", "--threads", "1", *options]
    one = Served(*arguments, python=Path(sys.executable), environment=environment)
    try:
        one.until("ready at")
        yield one
    finally:
        one.process.kill()
        one.process.wait(60)


def test_the_server_says_how_to_ask_and_listens_on_this_machine_alone(demo_engine):
    import psutil

    with serving(demo_engine) as one:
        client = one.client()
        assert f"curl http://127.0.0.1:{client.port}/v1/completions" in one.until('"model": "demo"')
        process = psutil.Process(one.process.pid)
        listening = [found.laddr.ip for found in process.net_connections() if found.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        assert process.children() == []
        assert one.end(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_waits_for_the_answers_that_have_begun(demo_engine, answers, number):
    with serving(demo_engine, KVC_TRT_API_KEY="a secret") as one:
        client = one.client("a secret")
        assert one.client().ask("/v1/models")[0] == 401
        stream = client.stream("/v1/completions", {**BODY, "max_tokens": 600})
        events = [next(stream)]
        ending = threading.Thread(target=lambda: events.extend(stream))
        ending.start()
        assert one.end(number) == 0
        ending.join(60)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == answers(BODY["prompt"], 600, ignore_eos=True).text


def test_a_second_ctrl_c_ends_the_server_at_once(demo_engine):
    with serving(demo_engine) as one:
        client = one.client()
        connection = client.open("/v1/completions", {**BODY, "max_tokens": LONG, "stream": True})
        answer = connection.getresponse()
        answer.readline()
        one.process.send_signal(signal.SIGINT)
        eventually(lambda: refuses(client.port))
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(20) == 0
        assert b"[DONE]" not in answer.read()
        connection.close()


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return True
    return False


def test_ctrl_c_while_the_server_loads_ends_it(demo_engine):
    command = [sys.executable, "-m", "kvc_trt", "serve", str(demo_engine), "--port", "0"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    # A signal while Python itself begins would end it with 1, whatever it was to run: NumPy is read after that.
    eventually(lambda: "numpy" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130, -signal.SIGINT)
    process.communicate()


def test_an_address_in_use_is_reported_in_one_line(demo_engine, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", str(demo_engine), "--port", str(taken.getsockname()[1])]) == 3
    said = capsys.readouterr().err
    assert "cannot listen at 127.0.0.1 port" in said
    assert "--port PORT" in said


def test_an_engine_without_a_tokenizer_is_refused_in_one_line(tiny_engine, capsys):
    assert run(["serve", str(tiny_engine), "--port", "0"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
