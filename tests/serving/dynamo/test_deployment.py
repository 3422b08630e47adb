"""The files that `kvc-trt serve` prepares and leaves behind, without a process of Dynamo."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path

import pytest

from kvc_trt.serving.dynamo import deployment as module
from kvc_trt.serving.dynamo.deployment import DeployedEngine, Deployment, Running
from kvc_trt.serving.dynamo.records import write_record
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.owners import OWNER_FILE, owner


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(module, "require_dynamo", lambda: None)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def prefill(store=None, **settings):
    return Running(
        Deployment([DeployedEngine("demo", Path("engines/demo"))], "prefill", store=store, **settings), print
    )


def dead(name="1"):
    boot, namespace, pid, _ = owner().split()
    return f"{boot} {namespace} {pid} {name}"


def test_serving_settings_reach_the_workers_command_line(tmp_path):
    settings = ServingSettings(3, 9, prefill_slice_ms=12.5, threads=2, backend="onnxruntime", kv_proofs=True)
    command = prefill(tmp_path / "store", settings=settings, tool_parser="hermes")._workers["demo"]._command
    said = dict(itertools.pairwise(command))
    names = ("rows", "queue-limit", "prefill-slice-ms", "threads", "backend", "tool-parser")
    assert [said[f"--{name}"] for name in names] == ["3", "9", "12.5", "2", "onnxruntime", "hermes"]
    assert "--kv-proofs" in command
    bare = prefill(tmp_path / "other")._workers["demo"]._command
    assert not {"--rows", "--prefill-slice-ms", "--kv-proofs"} & {*bare}


def test_a_directory_for_these_alone_goes_with_them(temporary):
    running = prefill()
    (made,) = temporary.iterdir()
    assert made.name.startswith("kvc-trt-serve-")
    assert (made / OWNER_FILE).read_text() == owner()
    asyncio.run(running._end())
    assert list(temporary.iterdir()) == []


def test_files_of_a_killed_deployment_are_removed_by_the_next(temporary):
    left, alive = temporary / "kvc-trt-serve-dead", temporary / "kvc-trt-serve-alive"
    for path, text in ((left, dead()), (alive, owner())):
        path.mkdir()
        (path / OWNER_FILE).write_text(text)
    asyncio.run(prefill()._end())
    assert list(temporary.iterdir()) == [alive]


def test_a_deployment_that_cannot_be_prepared_leaves_nothing(temporary, monkeypatch):
    def none_free(*_):
        raise OSError("no port")

    monkeypatch.setattr(module, "_free_port", none_free)
    with pytest.raises(OSError, match="no port"):
        prefill()
    assert list(temporary.iterdir()) == []


def test_in_a_store_of_several_only_what_is_ones_own_goes(tmp_path):
    workers, logs = tmp_path / "workers", tmp_path / "logs"
    workers.mkdir()
    (workers / "dead").write_text(f"1 4000 {dead()}")
    write_record(workers / "other", 2, "4001")
    running = prefill(tmp_path)
    assert [path.name for path in workers.iterdir()] == ["other"], "nobody asks the dead one's port"
    (worker,) = running._workers.values()
    write_record(workers / worker.name, 3, "4002")
    worker.log.write_text("something")
    asyncio.run(running._end())
    assert [path.name for path in workers.iterdir()] == ["other"]
    assert list(logs.iterdir()) == []
    assert (tmp_path / "models").exists()


def test_an_engine_called_frontend_has_a_log_of_its_own(tmp_path):
    one = Running(Deployment([DeployedEngine("frontend", Path("a"))], "prefill", store=tmp_path), print)
    assert one._workers["frontend"].log != one._new_frontend().log


def test_an_address_of_ipv6_is_in_brackets(tmp_path):
    running = Running(Deployment([], "prefill", host="::1", store=tmp_path), print)
    running._gateway = object()
    assert "http://[::1]:8000/v1" in running._ready(8000)
