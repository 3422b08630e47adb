"""The next process removes the files of a killed one, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from kvc_trt.serving import owners
from kvc_trt.serving.owners import OWNER_FILE, is_gone, own_directory, owner, remove_abandoned, runs

MAKE = """
import sys, time
from pathlib import Path
from kvc_trt.serving.owners import own_directory
print(own_directory(Path(sys.argv[1]), "made-"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process with a directory, which goes with it where nobody kills it."""
    process = subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    made = tmp_path / process.stdout.readline().strip()
    yield process, made
    process.kill()
    process.wait()


def left_by(described, directory):
    """Return a directory of an owner that is described so."""
    directory.mkdir(parents=True)
    (directory / "file").write_text("something")
    (directory / OWNER_FILE).write_text(described)
    return directory


def described(**changes):
    """Return a description of this process with some facts changed."""
    fields = dict(zip(("boot", "namespace", "pid", "start"), owner().split(), strict=True))
    return " ".join({**fields, **changes}.values())


def a_number_of_nobody():
    return next(str(pid) for pid in range(4_000_000, 100, -1) if not runs(pid))


def test_directories_of_a_killed_process_are_removed(tmp_path, other):
    process, made = other
    assert made.stat().st_mode & 0o777 == 0o700
    assert remove_abandoned(tmp_path, "made-") == []
    assert made.exists(), "its process runs"
    process.send_signal(signal.SIGKILL)
    while owners._described(process.pid) is not None:
        pass
    assert remove_abandoned(tmp_path, "made-") == [process.pid], "it is dead, also before anybody has waited for it"
    assert not made.exists()


def test_a_number_that_another_process_has_now_is_not_its_owner(tmp_path):
    left = left_by(described(start="1"), tmp_path / "made-1")
    assert remove_abandoned(tmp_path, "made-") == [os.getpid()]
    assert not left.exists()


def test_own_directories_and_those_of_other_names_are_kept(tmp_path):
    own, named = own_directory(tmp_path, "made-"), left_by(described(start="1"), tmp_path / "other-1")
    assert remove_abandoned(tmp_path, "made-") == []
    assert own.exists()
    assert named.exists()


@pytest.mark.parametrize(
    "changes", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"pid": "x"}, {"pid": ""}, {"start": "1 2"}]
)
def test_directories_of_unknown_owners_are_kept(tmp_path, changes):
    """Another machine, a container beside this one, or a file that says something else."""
    text = described(**{"pid": a_number_of_nobody(), **changes})
    assert not is_gone(text)
    assert left_by(text, tmp_path / "made-1").exists()
    assert remove_abandoned(tmp_path, "made-") == []
    assert (tmp_path / "made-1" / "file").exists()


def test_no_owner_is_taken_for_gone_on_a_system_without_proc(tmp_path, monkeypatch):
    text = described(pid=a_number_of_nobody())
    assert is_gone(text)
    monkeypatch.setattr(owners, "_PROC", tmp_path)
    assert owner() == ""
    assert not is_gone(text)
    assert not is_gone("")
    assert own_directory(tmp_path, "made-").exists()
    assert remove_abandoned(tmp_path, "made-") == []


def test_a_directory_without_an_owner_is_kept(tmp_path):
    (tmp_path / "made-1").mkdir()
    (tmp_path / "made-2").write_text(described(pid=a_number_of_nobody()))
    (tmp_path / "made-3" / OWNER_FILE).mkdir(parents=True)
    (tmp_path / "made-4").mkdir()
    (tmp_path / "made-4" / OWNER_FILE).write_bytes(b"\xff" * 1000)
    (tmp_path / "made-5").mkdir()
    os.mkfifo(tmp_path / "made-5" / OWNER_FILE)
    before = sorted(tmp_path.iterdir())
    assert remove_abandoned(tmp_path, "made-") == []
    assert sorted(tmp_path.iterdir()) == before


def test_links_are_not_followed(tmp_path):
    gone = described(pid=a_number_of_nobody())
    elsewhere = left_by(gone, tmp_path / "elsewhere")
    (tmp_path / "made-1").symlink_to(elsewhere)
    (tmp_path / "made-2").mkdir()
    (tmp_path / "made-2" / OWNER_FILE).symlink_to(elsewhere / OWNER_FILE)
    left_by(gone, tmp_path / "made-3").joinpath("link").symlink_to(elsewhere)
    assert len(remove_abandoned(tmp_path, "made-")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "made-1", "made-2"]
    assert (elsewhere / "file").exists()


def test_directories_of_other_users_are_kept(tmp_path, monkeypatch):
    left = left_by(described(pid=a_number_of_nobody()), tmp_path / "made-1")
    with monkeypatch.context() as patched:
        patched.setattr(owners.os, "geteuid", lambda: left.stat().st_uid + 1)
        assert remove_abandoned(tmp_path, "made-") == []
    assert left.exists()
    assert len(remove_abandoned(tmp_path, "made-")) == 1


def test_directories_that_cannot_be_removed_are_no_error(tmp_path, monkeypatch):
    left_by(described(pid=a_number_of_nobody()), tmp_path / "made-1")

    def refused(path, ignore_errors):
        assert ignore_errors

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert len(remove_abandoned(tmp_path, "made-")) == 1
