"""The bytes of an engine that are hashed are the bytes that are loaded, whatever happens to its files in between."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvc_trt
from kvc_trt import Engine
from kvc_trt.errors import InputError, UnsupportedEnvironment
from tests.hostile.tampering import PROMPT, Trials, flip, replace, truncate

TRIALS = 60
BACKENDS = ["onnxruntime", pytest.param("torch", marks=pytest.mark.filterwarnings("ignore"))]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "untouched"
    kvc_trt.build("retrieval-tiny", token_budget=64, output=path, verify=False)
    return path


@pytest.fixture
def engine_dir(untouched, tmp_path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "engine"))


def answer(engine: Engine) -> tuple[int, ...]:
    return engine.generate(PROMPT).token_ids


@pytest.fixture(scope="module")
def expected(untouched) -> tuple[int, ...]:
    with Engine.open(untouched, threads=1) as engine:
        return answer(engine)


@pytest.mark.slow
def test_no_tampering_gives_other_tokens(untouched, tmp_path):
    trials = Trials(untouched, tmp_path)
    for seed in range(TRIALS):
        trials.run(seed)
    assert trials.found.wrong == []
    assert trials.found.refused.total() > TRIALS / 10
    assert trials.found.harmless.total() > TRIALS / 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_replaced_weights_change_nothing(backend, engine_dir, expected, chance):
    """They gave other tokens without a word."""
    engine = Engine.open(engine_dir, backend=backend, threads=1)
    replace(engine_dir / "weights.safetensors", chance)
    assert answer(engine) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [flip, truncate])
def test_weights_written_in_place_are_refused_with_the_way_out(kind, backend, engine_dir, chance):
    engine = Engine.open(engine_dir, backend=backend, threads=1)
    kind(engine_dir / "weights.safetensors", chance)
    with pytest.raises(InputError, match=r"weights\.safetensors was changed") as raised:
        answer(engine)
    assert raised.value.hint is not None
    assert "kvc-trt build --config" in raised.value.hint


def test_a_replaced_tokenizer_changes_nothing(engine_dir, expected):
    engine = Engine.open(engine_dir, threads=1)
    other = engine_dir.parent / "other.json"
    other.write_text("{}")
    other.replace(engine_dir / "tokenizer" / "tokenizer.json")
    assert answer(engine) == expected


def test_a_link_to_the_weights_while_the_engine_is_open_changes_nothing(engine_dir, expected):
    """An export links the files, which changes the time of their last change."""
    engine = Engine.open(engine_dir, threads=1)
    os.link(engine_dir / "weights.safetensors", engine_dir.parent / "linked")
    assert answer(engine) == expected


def test_a_file_that_is_written_all_the_time_is_refused_soon(engine_dir, monkeypatch):
    """Each wait for its last change to be old enough sees the next change."""
    graph, waits, wait = engine_dir / "decode.onnx", [], time.sleep

    def write_again(seconds: float) -> None:
        waits.append(seconds)
        wait(seconds)
        with graph.open("r+b") as file:
            file.write(b"\x08")

    write_again(0)
    monkeypatch.setattr("kvc_trt.files.held.time.sleep", write_again)
    with pytest.raises(InputError, match=r"decode\.onnx was changed again and again"):
        Engine.open(engine_dir)
    assert sum(waits) < 10, "it is written for as long as anybody waits"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory that can be sealed")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sealed_engine_needs_its_directory_no_more(backend, engine_dir, expected, chance):
    engine = Engine.open(engine_dir, backend=backend, threads=1, sealed=True)
    for name in ("weights.safetensors", "decode.onnx"):
        flip(engine_dir / name, chance)
    assert answer(engine) == expected
    shutil.rmtree(engine_dir)
    engine._session = None
    assert answer(engine) == expected


def test_a_sealed_copy_cannot_be_written(engine_dir):
    file = Engine.open(engine_dir, sealed=True).directory.weight_file
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{file.descriptor}", 0)


def test_a_system_without_sealed_memory_is_refused_by_name(engine_dir, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedEnvironment, match="no memory that can be sealed"):
        Engine.open(engine_dir, sealed=True)


def open_files(directory: Path) -> list[str]:
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return [link for link in links if link.startswith((str(directory), "/memfd:"))]


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("ended", ["closed", "collected"])
def test_no_descriptor_is_left(ended, sealed, engine_dir, expected):
    gc.collect()
    before = len(open_files(engine_dir))
    engine = Engine.open(engine_dir, threads=1, sealed=sealed)
    assert answer(engine) == expected
    assert len(open_files(engine_dir)) > before
    if ended == "closed":
        engine.close()
    else:
        del engine
    gc.collect()
    assert len(open_files(engine_dir)) == before


def test_a_closed_engine_answers_again_and_checks_again(engine_dir, expected, chance):
    engine = Engine.open(engine_dir, threads=1)
    engine.close()
    assert answer(engine) == expected
    engine.close()
    replace(engine_dir / "weights.safetensors", chance)
    with pytest.raises(InputError, match="was changed: expected SHA-256"):
        answer(engine)


AUDITED = """
import os, sys
from kvc_trt import Engine
engine = Engine.open(sys.argv[1], backend=sys.argv[3], threads=1)
opened = []
inside = os.path.realpath(sys.argv[1])
def hook(event, arguments):
    if event in ("open", "os.open") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        if os.path.realpath(os.fsdecode(arguments[0])).startswith(inside) and "/proc/" not in str(arguments[0]):
            opened.append(arguments[0])
sys.addaudithook(hook)
engine.generate(sys.argv[2])
engine.directory.chat_template
engine.parameters, engine.kernels
print(opened)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_nothing_of_an_engine_is_opened_by_its_path_after_the_check(backend, engine_dir):
    command = [sys.executable, "-c", AUDITED, str(engine_dir), PROMPT, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


MAPPED = """
import os, sys, threading
import numpy as np
from kvc_trt.files.lost import report_lost_files
from kvc_trt.files.held import HeldFile
report_lost_files()
read = np.frombuffer(HeldFile(sys.argv[1]).map(), np.float32)
os.truncate(sys.argv[1], 0)
def torch_reads():
    import torch
    torch.set_num_threads(2)
    torch.from_numpy(read.reshape(64, -1)).sum(0)
def numpy_reads():
    read.sum()
if sys.argv[2].startswith("thread"):
    thread = threading.Thread(target=numpy_reads)
    thread.start()
    thread.join()
globals().get(sys.argv[2].replace("thread ", ""))()
print("still here")
"""
RUNNING = """
import os, sys
from kvc_trt import Engine
from kvc_trt.files.lost import report_lost_files
report_lost_files()
engine = Engine.open(sys.argv[1], threads=int(sys.argv[2]))
engine.session()
os.truncate(sys.argv[1] + "/weights.safetensors", 4096)
engine.generate("lamp " * 200)
print("still here")
"""
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other signals")


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@needs_linux
@pytest.mark.parametrize("reader", ["numpy_reads", "thread numpy_reads", "torch_reads"])
def test_a_mapped_file_that_is_cut_short_ends_in_one_line(reader, tmp_path):
    """It ended by SIGBUS, without a word."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 << 20))
    done = ended(MAPPED, str(file), reader)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"error: {file} was cut short while it was in use")
    assert len(done.stderr.splitlines()) == 2


@needs_linux
@pytest.mark.parametrize("threads", ["1", "2"])
def test_weights_that_are_cut_short_under_a_running_engine_end_in_one_line(threads, engine_dir):
    done = ended(RUNNING, str(engine_dir), threads)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"error: {engine_dir / 'weights.safetensors'} was cut short" in done.stderr


@needs_linux
def test_a_bus_error_outside_engine_files_ends_the_process_as_usual(tmp_path):
    code = """
import mmap, os, sys
from kvc_trt.files.lost import report_lost_files
report_lost_files()
file = open(sys.argv[1], "r+b")
read = mmap.mmap(file.fileno(), 0)
os.truncate(sys.argv[1], 0)
read[0]
"""
    file = tmp_path / "other"
    file.write_bytes(bytes(8192))
    assert ended(code, str(file)).returncode == -7
