from __future__ import annotations

import errno
import os

import pytest

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.atomic import write_json, write_new_file, write_whole


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


@pytest.mark.parametrize("write", [lambda path: write_whole(path, b"x"), lambda path: write_json(path, {})])
def test_a_file_has_the_permissions_that_the_user_asks_for(tmp_path, umask, write):
    write(tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, fail)
    with pytest.raises(UnsupportedEnvironment, match="no space left while writing") as caught:
        write_whole(path, b"new")
    assert caught.value.hint == "free some space, then repeat the command", "a single file has no stages to keep"
    with pytest.raises(UnsupportedEnvironment, match="no space left while writing"):
        write_new_file(path, "new", replace=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_appear_during_the_write_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "file"
    link = os.link

    def late(*arguments, **settings):
        path.write_bytes(b"theirs")
        return link(*arguments, **settings)

    monkeypatch.setattr("os.link", late)
    with pytest.raises(InputError, match="exists and is not replaced"):
        write_new_file(path, "ours", replace=False)
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_is_never_replaced(tmp_path, replace):
    with pytest.raises(InputError, match="is a directory"):
        write_new_file(tmp_path, "x", replace=replace)


def test_numbers_that_json_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "file", {"x": float("nan")})
    assert not list(tmp_path.iterdir())
