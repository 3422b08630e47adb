"""The one place that opens files which a user names: regular files only, bounded, never blocking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvc_trt.errors import InputError
from kvc_trt.input_files import open_input, read_input, read_json_input, read_text_input


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a text")
    assert read_input(path, 6) == b"a text"
    with open_input(path) as file:
        assert file.read() == b"a text"


def test_pipes_devices_and_directories_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(InputError, match=f"{path}: {kind}; expected a regular file"):
            read_input(path, 10)


def test_a_file_beyond_its_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="expected at most 10 B"):
        read_input(path, 10)


@pytest.mark.parametrize("name", ["nothing\0here", "\ud800", "a" * 300, "missing"])
def test_names_that_cannot_be_opened_are_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        open_input(tmp_path / name)


def test_a_link_is_refused_where_none_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("file")
    assert read_json_input(tmp_path / "link", 10) == [1]
    with pytest.raises(InputError, match="cannot read"):
        read_json_input(tmp_path / "link", 10, follow_links=False)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"1" * 5000, b"\xff"])
def test_what_is_not_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json_input(path, 1 << 20)


def test_text_names_the_first_byte_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(b"ab\xffc")
    with pytest.raises(InputError, match="byte 2 is 0xff"):
        read_text_input(path, 10)
