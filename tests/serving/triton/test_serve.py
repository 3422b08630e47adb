"""`kvc-trt serve --triton` as a user runs it: a real tritonserver, real answers, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

import kvc_trt
from tests.serving.triton.prompts import ANSWER, LAMP
from tests.serving.triton.server import ENVIRONMENT, ROOT, SHARED_MEMORY, check_environment, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]


class Served:
    """A running `kvc-trt serve --triton` with a cache of its own."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        check_environment()
        self.cache = cache
        variables = {"PYTHONPATH": str(ROOT), "KVC_TRT_TRITON": str(ENVIRONMENT), "KVC_TRT_CACHE": str(cache)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvc_trt", "serve", "--triton", "--threads", "1", *arguments],
            env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    def ready(self) -> int:
        """Wait until it says that it is, and return the port."""
        out: list[int] = []

        def said() -> bool:
            assert self.process.poll() is None, self.lines
            found = [re.search(r"ready at http://127\.0\.0\.1:(\d+)", line) for line in tuple(self.lines)]
            out.extend(int(one[1]) for one in found if one)
            return bool(out)

        wait_until(said, 300)
        return out[0]

    def end(self, number: int) -> int:
        """Ask it to end, check that nothing of it is left, and return its exit code."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        code = self.process.wait(120)
        _, left = psutil.wait_procs(below, timeout=60)
        assert left == [], "no process is left"
        assert list(self.cache.glob("triton-*")) == [], "nor the repository"
        assert list(SHARED_MEMORY.glob(f"kvc_{self.process.pid}_*")) == [], "nor shared memory"
        return code


def ask(port, model, **fields):
    url = f"http://127.0.0.1:{port}/v2/models/{model}/generate"
    with urllib.request.urlopen(url, json.dumps(fields).encode(), 300) as response:
        return json.loads(response.read())["text_output"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny"
    kvc_trt.build("retrieval-tiny", token_budget=64, max_output_len=1500, output=path, verify=False)
    return path


@pytest.fixture
def cache(tmp_path):
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    return made


def test_engines_answer_under_their_names_until_ctrl_c(engine, cache):
    served = Served(cache, str(engine), f"other={engine}", "--port", "0")
    try:
        port = served.ready()
        assert [ask(port, name, text_input=LAMP) for name in ("tiny", "other")] == [ANSWER, ANSWER]
        wait_until(lambda: any(f"127.0.0.1:{port}/v2/models/other/generate" in line for line in served.lines))
        listening = [
            one.laddr.ip.removeprefix("::ffff:")
            for process in psutil.Process(served.process.pid).children(recursive=True)
            for one in process.net_connections(kind="inet")
            if one.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}
        assert served.end(signal.SIGINT) == 0
    finally:
        served.process.kill()


def test_an_answer_that_has_begun_is_finished(engine, cache):
    served = Served(cache, str(engine), "--port", "0")
    try:
        port = served.ready()
        url = f"http://127.0.0.1:{port}/v2/models/tiny/generate_stream"
        body = {
            "text_input": LAMP,
            "ignore_eos": True,
            "max_tokens": 1500,
            "stream": True,
            "return_finish_reason": True,
        }
        with urllib.request.urlopen(url, json.dumps(body).encode(), 300) as stream:
            first = stream.readline()
            ending = threading.Thread(target=served.process.terminate)
            ending.start()
            events = [json.loads(line[6:]) for line in [first, *stream.readlines()] if line.startswith(b"data: ")]
        ending.join()
        assert events[-1]["finish_reason"] in ("length", "capacity")
        assert served.process.wait(120) == 0
    finally:
        served.process.kill()


def test_a_port_in_use_is_reported(engine, cache):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        served = Served(cache, str(engine), "--port", str(port))
        assert served.process.wait(120) == 3
        wait_until(lambda: any(f"cannot listen at 127.0.0.1 port {port}" in line for line in served.lines))
    assert list(cache.glob("triton-*")) == []


def test_a_tampered_engine_is_refused_before_a_server_starts(tmp_path, cache):
    path = tmp_path / "tampered"
    kvc_trt.build("retrieval-tiny", token_budget=64, output=path, verify=False)
    weights = path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    served = Served(cache, str(path), "--port", "0")
    assert served.process.wait(120) == 2
    wait_until(lambda: any("weights.safetensors" in line for line in served.lines))
    assert list(cache.glob("triton-*")) == []


def test_a_server_that_dies_is_started_again(engine, cache):
    served = Served(cache, str(engine), "--port", "0")
    try:
        port = served.ready()
        (server,) = [
            one for one in psutil.Process(served.process.pid).children() if one.name().startswith("tritonserver")
        ]
        server.kill()
        wait_until(lambda: any("is started again" in line for line in served.lines))

        def answers():
            try:
                return ask(port, "tiny", text_input=LAMP) == ANSWER
            except OSError:
                return False

        wait_until(answers)
        time.sleep(0.1)
        assert served.end(signal.SIGTERM) == 0
    finally:
        served.process.kill()


def test_files_of_a_killed_server_are_removed_by_the_next(engine, cache):
    """The next server removes the repository with the engine's files, and shared memory that nobody else removed."""
    killed = Served(cache, str(engine), "--port", "0")
    killed.ready()
    below = psutil.Process(killed.process.pid).children(recursive=True)
    for process in (killed.process, *below):
        process.kill()
    psutil.wait_procs(below, timeout=60)
    (left,) = cache.glob("triton-*")
    killed.process.wait(60)
    served = Served(cache, str(engine), "--port", "0")
    try:
        served.ready()
        assert not left.exists()
        assert list(SHARED_MEMORY.glob(f"kvc_{killed.process.pid}_*")) == []
        assert served.end(signal.SIGTERM) == 0
    finally:
        served.process.kill()
