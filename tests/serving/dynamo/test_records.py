"""Records of workers that run are shown; those of dead ones are not asked, and are removed."""

from __future__ import annotations

import os

import pytest

from kvc_trt.serving.dynamo.records import WorkerRecord, forget_dead, read_record, status_urls, write_record
from kvc_trt.serving.owners import owner


def dead(path, number=7, port="4000"):
    boot, namespace, pid, _ = owner().split()
    path.write_text(f"{number} {port} {boot} {namespace} {pid} 1")


def test_a_record_is_read_as_it_was_written(tmp_path):
    write_record(tmp_path / "one", 2**64 - 1, "20001")
    assert read_record(tmp_path / "one") == WorkerRecord(2**64 - 1, 20001, owner())
    write_record(tmp_path / "two", 3, None)
    assert read_record(tmp_path / "two") == WorkerRecord(3, None, owner())
    assert status_urls(tmp_path) == ["http://127.0.0.1:20001"]


@pytest.mark.parametrize("text", [
    b"", b"1", b"x 20001 a b c d", b"1 x a b c d", b"\xff\xfe", b"-1 20001 a", b"1 0 a", b"1 70000 a",
    b"1" * 30 + b" 20001 a", b"1 " + b"9" * 5000 + b" a", b"1 20001 " + b"a" * 5000,
])  # fmt: skip
def test_invalid_records_are_passed_over(text, tmp_path):
    (tmp_path / "one").write_bytes(text)
    assert read_record(tmp_path / "one") is None
    assert status_urls(tmp_path) == []
    forget_dead(tmp_path)
    assert (tmp_path / "one").exists()
    assert read_record(tmp_path / "missing") is None


def test_a_pipe_is_not_read_as_a_record(tmp_path):
    os.mkfifo(tmp_path / "one")
    assert read_record(tmp_path / "one") is None


def test_the_port_of_a_dead_worker_is_not_asked(tmp_path):
    """Somebody else may listen there by now."""
    write_record(tmp_path / "alive", 1, "20001")
    dead(tmp_path / "dead")
    assert status_urls(tmp_path) == ["http://127.0.0.1:20001"]
    forget_dead(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["alive"]
