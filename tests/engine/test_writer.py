from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvc_trt.engine import writer
from kvc_trt.engine.writer import check_space, new_directory, place, writable_target
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.held import HeldFile

ENGINE = frozenset({"config.json", "tokenizer", "prefill.onnx"})


def build(target, text, *, replace=False):
    with new_directory(target, replaceable=ENGINE if replace else None) as directory:
        (directory / "config.json").write_text(text)
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "tokenizer.json").write_text(text)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_appears_whole_and_with_ordinary_permissions(tmp_path):
    target = tmp_path / "engines" / "a"
    build(target, "new")
    assert (target / "tokenizer" / "tokenizer.json").read_text() == "new"
    assert names(tmp_path / "engines") == ["a"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, error, existing):
    target = tmp_path / "a"
    if existing:
        build(target, "old")

    def fail():
        with new_directory(target, replaceable=ENGINE) as directory:
            (directory / "config.json").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == (["a"] if existing else [])
    if existing:
        assert (target / "config.json").read_text() == "old"


def test_an_existing_directory_is_kept_unless_it_may_be_replaced(tmp_path):
    build(tmp_path / "a", "old")
    with pytest.raises(InputError, match="nothing was overwritten"):
        build(tmp_path / "a", "new")
    assert (tmp_path / "a" / "config.json").read_text() == "old"
    build(tmp_path / "a", "new", replace=True)
    assert (tmp_path / "a" / "config.json").read_text() == "new"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("step", [0, 1])
def test_the_old_directory_comes_back_when_a_rename_fails(tmp_path, monkeypatch, step):
    target = tmp_path / "a"
    build(target, "old")
    calls = []
    rename = os.rename

    def failing(source, destination):
        calls.append(source)
        if len(calls) == step + 1:
            raise OSError(5, "input/output error")
        rename(source, destination)

    monkeypatch.setattr(writer.os, "rename", failing)
    with pytest.raises(OSError, match="input/output"):
        build(target, "new", replace=True)
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("foreign", ["thesis.tex", ".git", "prefill.onnx.bak"])
def test_directories_not_written_by_a_build_are_never_replaced(tmp_path, foreign):
    build(tmp_path / "a", "old")
    (tmp_path / "a" / foreign).write_text("mine")
    with pytest.raises(InputError, match="not part of an engine"):
        build(tmp_path / "a", "new", replace=True)
    assert (tmp_path / "a" / foreign).read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_directories_are_replaced(tmp_path, kind):
    target = tmp_path / "a"
    if kind == "file":
        target.write_text("mine")
    else:
        build(tmp_path / "real", "old")
        target.symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="engine directories only"):
        build(target, "new", replace=True)
    assert target.exists()


def test_leftovers_of_killed_builds_are_removed_and_running_ones_kept(tmp_path):
    (tmp_path / ".a.tmp-deaddeaddeaddead").mkdir()
    (tmp_path / ".a.tmp-deaddeaddeaddead" / "weights.safetensors").write_text("half")
    (tmp_path / ".b.tmp-other").mkdir()
    (tmp_path / ".a.notes-mine").mkdir()
    with new_directory(tmp_path / "a"):
        running = {path.name for path in tmp_path.iterdir() if path.name.startswith(".a.tmp-")}
        build(tmp_path / "a2", "x")
        assert running
        build(tmp_path / "a", "a second build, faster than the first")
        assert running <= set(names(tmp_path))
        shutil.rmtree(tmp_path / "a")
    assert names(tmp_path) == [".a.notes-mine", ".b.tmp-other", "a", "a2"]


def test_an_engine_that_a_killed_replacement_set_aside_comes_back(tmp_path):
    build(tmp_path / "a", "old")
    aside = tmp_path / ".a.old-deaddeaddeaddead"
    aside.mkdir()
    os.rename(tmp_path / "a", aside / "a")
    with pytest.raises(InputError, match="nothing was overwritten"):
        build(tmp_path / "a", "new")
    assert (tmp_path / "a" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_file_is_placed_without_a_copy_where_that_is_possible(tmp_path, monkeypatch):
    source = tmp_path / "weights"
    source.write_bytes(b"x")
    place(HeldFile(source), tmp_path / "linked")
    assert (tmp_path / "linked").stat().st_ino == source.stat().st_ino

    def crosses(*arguments, **options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(writer.os, "link", crosses)
    place(HeldFile(source), tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"x"
    assert (tmp_path / "copied").stat().st_ino != source.stat().st_ino


def test_a_target_that_can_never_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is not a directory"):
        writable_target(tmp_path / "file" / "sub" / "engine")
    assert writable_target(tmp_path / "new" / "engine") == tmp_path / "new" / "engine"
    assert not (tmp_path / "new").exists()
    assert writable_target(Path(".")).name


def test_too_little_space_is_noticed_before_the_work(tmp_path, monkeypatch):
    check_space(tmp_path / "new" / "engine", 1)
    with pytest.raises(UnsupportedEnvironment, match=r"needs 909494\.7 TiB"):
        check_space(tmp_path / "new" / "engine", 10**18)


def test_small_amounts_of_space_are_not_rounded_to_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(UnsupportedEnvironment, match=r"needs 1\.5 KiB, .* has 10 B left"):
        check_space(tmp_path / "engine", 1536)
