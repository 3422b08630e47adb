from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files import unfinished
from kvc_trt.files.atomic import write_new_pieces, write_together, write_whole
from kvc_trt.files.cache import cache_root, scratch_directory

MARK = "0123456789abcdef"


@pytest.fixture(params=["without a name", "with a name"])
def _both_kinds_of_files(request, monkeypatch) -> None:
    """Run each test on a file system that has files without names, and on one that has not."""
    if request.param == "with a name":
        monkeypatch.setattr(unfinished, "_nameless", lambda directory: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("_both_kinds_of_files")
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("name", ["file", "[a]*.json"])
def test_a_write_leaves_its_file_alone_and_removes_what_a_killed_one_left(tmp_path, name, replace):
    (tmp_path / f".{name}.tmp-{MARK}").write_text("half")
    (tmp_path / f".{name}.old-{MARK}").mkdir()
    if replace:
        (tmp_path / name).write_text("old")
    write_new_pieces(tmp_path / name, [b"ne", b"w"], replace=replace)
    assert names(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "new"


@pytest.mark.usefixtures("_both_kinds_of_files")
def test_files_of_a_living_process_are_kept(tmp_path):
    live = tmp_path / f".file.tmp-{MARK}"
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(tmp_path / "file", b"new")
        assert names(tmp_path) == [live.name, "file"]
    write_whole(tmp_path / "file", b"newer")
    assert names(tmp_path) == ["file"]


@pytest.mark.usefixtures("_both_kinds_of_files")
def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    def pieces():
        yield b"first "
        write_whole(tmp_path / "file", b"second")
        yield b"wins"

    write_new_pieces(tmp_path / "file", pieces(), replace=True)
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"first wins"


def test_files_that_are_not_ours_are_kept(tmp_path):
    os.mkfifo(tmp_path / f".file.tmp-{MARK}")
    (tmp_path / f".file.old-{MARK}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".other.tmp-{MARK}").touch()
    (tmp_path / ".file.tmp-notes").touch()
    before = names(tmp_path)
    write_whole(tmp_path / "file", b"new")
    assert names(tmp_path) == [*before, "file"]


def test_a_file_has_no_name_before_it_is_whole(tmp_path):
    descriptor = unfinished._nameless(tmp_path)
    if descriptor is None:
        pytest.skip("this file system wants a name for every file")
    os.close(descriptor)

    def pieces():
        yield b"half"
        assert names(tmp_path) == []

    write_new_pieces(tmp_path / "file", pieces(), replace=False)
    assert names(tmp_path) == ["file"]


@pytest.mark.usefixtures("_both_kinds_of_files")
def test_a_writer_whose_file_was_removed_makes_another(tmp_path, monkeypatch):
    flock, taken = fcntl.flock, []

    def late(file, operation):
        if not taken:
            taken.extend(path for path in tmp_path.iterdir() if ".tmp-" in path.name)
            for path in taken:
                unfinished.remove(path)
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", late)
    write_whole(tmp_path / "file", b"new")
    with unfinished.unfinished_directory(tmp_path / "directory") as made:
        assert made.is_dir()
    assert names(tmp_path) == ["file"]


def test_a_scratch_directory_goes_and_so_does_one_that_a_killed_process_left(tmp_path):
    left = cache_root() / "scratch" / f".accuracy.tmp-{MARK}"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_text("half")
    with scratch_directory("accuracy") as directory, scratch_directory("accuracy") as another:
        assert names(cache_root() / "scratch") == sorted([directory.name, another.name])
    assert names(cache_root() / "scratch") == []


@pytest.mark.parametrize("renames", range(4))
def test_the_final_mark_never_stands_beside_files_of_two_writes(tmp_path, monkeypatch, renames):
    replace, done = os.replace, []

    def limited(source, target):
        if len(done) == renames:
            raise OSError(28, "No space left on device")
        done.append(target)
        replace(source, target)

    write_together(tmp_path, {"a": b"1", "b": b"1", "sign": b"1"})
    monkeypatch.setattr("os.replace", limited)
    if renames < 3:
        with pytest.raises(UnsupportedEnvironment, match="no space left"):
            write_together(tmp_path, {"a": b"2", "b": b"2", "sign": b"2"})
        assert names(tmp_path) == ["a", "b"]
    else:
        write_together(tmp_path, {"a": b"2", "b": b"2", "sign": b"2"})
        assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"2"}


def test_remove_own_removes_all_unfinished_files(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "_nameless", lambda directory: None)
    with unfinished.unfinished_directory(tmp_path / "a") as made, unfinished.UnfinishedFile(tmp_path / "b"):
        (made / "half").touch()
        assert len(names(tmp_path)) == 2
        unfinished.remove_own()
        assert names(tmp_path) == []
