"""The one place that opens files which a user names: regular files only, bounded, never blocking."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvc_trt.accuracy.results import LARGEST_RESULTS, Results
from kvc_trt.cli.options.prompts import LARGEST_PROMPT, read_messages, read_prompt_ids, read_text
from kvc_trt.config import read_configuration
from kvc_trt.contexts.file import inspect_context
from kvc_trt.engine.resolution import head_pattern
from kvc_trt.engine.resolution.calibration import LARGEST_CALIBRATION
from kvc_trt.engine.resolution.head_pattern import read_head_pattern
from kvc_trt.errors import InputError
from kvc_trt.files.inputs import (
    open_appended,
    open_input,
    read_input,
    read_json_input,
    read_text_input,
    sha256_of_input,
)
from kvc_trt.files.strict_yaml import LARGEST_YAML
from kvc_trt.models.formats import is_path, open_checkpoint, read_model_config
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.header import MAX_HEADER_BYTES
from kvc_trt.models.sources import checkpoint, hugging_face, safetensors_file
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES, read_tokenizer
from kvc_trt.proof.file import LARGEST_FILE, read_proof
from kvc_trt.sizes import readable_size
from kvc_trt.tasks.dataset import LARGEST_DATA_SET, read_data_set
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from kvc_trt.validation import LARGEST_CONFIGURATION

READERS: dict[str, Callable[[Path], object]] = {
    "configuration": read_configuration,
    "head pattern": read_head_pattern,
    "prompt": read_text,
    "prompt ids": read_prompt_ids,
    "messages": read_messages,
    "proof": read_proof,
    "context": inspect_context,
    "data set": read_data_set,
    "tokenizer": read_tokenizer,
    "tokenizer of a data set": lambda path: load_task_tokenizer(str(path)),
    "GGUF": GgufCheckpoint,
    "results": lambda path: Results(path, {}).__enter__(),
    "digest": sha256_of_input,
}
"""The doors through which a file comes in, by what it is."""


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
def test_names_that_cannot_be_opened_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        open_input(tmp_path / name)


def test_a_link_is_refused_where_none_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("file")
    assert read_json_input(tmp_path / "link", 10) == [1]
    with pytest.raises(InputError, match="cannot read"):
        read_json_input(tmp_path / "link", 10, follow_links=False)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"1" * 5000, b"\xff"])
def test_malformed_json_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json_input(path, 1 << 20)


def test_text_names_the_first_byte_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(b"ab\xffc")
    with pytest.raises(InputError, match="byte 2 is 0xff"):
        read_text_input(path, 10)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_reader_waits_for_a_pipe_or_reads_a_device(
    tmp_path: Path, kind: str, reader: Callable[[Path], object]
) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(InputError, match=f"a {kind}; expected a regular file") as caught:
        reader(path)
    assert (kind == "pipe") == ("write its content to a file first" in (caught.value.hint or ""))


@pytest.mark.parametrize("reader", [reader for what, reader in READERS.items() if what != "results"])
@pytest.mark.parametrize("name", ["nothing\0here", "\ud800", "a" * 300, "\x1b[31m"])
def test_no_name_is_more_than_an_error_of_one_plain_line(
    tmp_path: Path, name: str, reader: Callable[[Path], object]
) -> None:
    with pytest.raises(InputError) as caught:
        reader(tmp_path / "absent" / name)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 900


@pytest.mark.parametrize("name", ["nothing\0here", "\ud800", "a" * 5000])
def test_bad_names_of_checkpoints_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    assert not is_path(name)
    for reader in (open_checkpoint, read_model_config, Checkpoint):
        with pytest.raises(InputError):
            reader(tmp_path / name)
    with pytest.raises(InputError):
        contained(tmp_path, name)


def test_a_process_substitution_is_called_a_pipe() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(InputError, match="a pipe; expected a regular file") as caught:
            read_input(f"/proc/self/fd/{reading}", 10)
        assert "write its content to a file first" in (caught.value.hint or "")
    finally:
        os.close(reading)
        os.close(writing)


def test_a_file_is_made_or_continued_by_appending(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with open_appended(tmp_path / "lines", 100) as file:
            file.write(line)
    with open_appended(tmp_path / "lines", 100) as file:
        file.seek(0)
        assert file.read() == b"one\ntwo\n"
    with pytest.raises(InputError, match="expected at most 7 B"):
        open_appended(tmp_path / "lines", 7)


def test_a_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content := os.urandom((4 << 20) + 17))
    assert sha256_of_input(tmp_path / "file") == hashlib.sha256(content).hexdigest()


LIMITS = {
    "configuration, as JSON": LARGEST_CONFIGURATION,
    "configuration, as YAML; a value of `--set`": LARGEST_YAML,
    "prompt, document, token ids, messages, calibration prompts": LARGEST_PROMPT,
    "head pattern": head_pattern.LARGEST_PATTERN,
    "proof, data set": LARGEST_FILE,
    "results of an accuracy measurement": LARGEST_RESULTS,
    "`config.json` and `generation_config.json` of a checkpoint": hugging_face.LARGEST_CONFIG,
    "index of shards": checkpoint.LARGEST_INDEX,
    "header of a safetensors file": safetensors_file.LARGEST_HEADER,
    "header of a GGUF file, or of each part of one": MAX_HEADER_BYTES,
    "`tokenizer.json`": TOKENIZER_FILES["tokenizer.json"],
}


def test_the_page_has_the_limits() -> None:
    assert LARGEST_PROMPT == LARGEST_CALIBRATION
    assert LARGEST_FILE == LARGEST_DATA_SET
    page = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")
    section = page.split("## Files that a user names")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    assert dict(rows) == {what: readable_size(size).replace(".0 ", " ") for what, size in LIMITS.items()}
