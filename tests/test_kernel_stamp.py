"""The stamp of the kernels' tests holds for the same inputs, and for no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kernel_stamp
from tests.kernel_stamp import FILES, FOLDERS, VARIABLE, digests, first_difference, loaded_files

MODULE = "kvc_trt/reference/methods/hybrid.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (*FILES, *(f"{folder}/part/a.cu" for folder in FOLDERS), MODULE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_the_same_inputs_keep_the_stamp(tree):
    before = digests([MODULE], tree)
    (tree / "kvc_trt" / "reference" / "tova.py").write_text("not loaded by any test of kernels")
    assert first_difference(before, digests([MODULE], tree)) is None


@pytest.mark.parametrize("name", [*FILES, MODULE, f"{FOLDERS[0]}/part/a.cu", f"{FOLDERS[1]}/part/a.cu"])
@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_changed_input_breaks_the_stamp(tree, name, change):
    before = digests([MODULE], tree)
    if change == "written":
        (tree / name).write_text("other")
    else:
        (tree / name).unlink()
    assert first_difference(before, digests([MODULE], tree)) == name


def test_a_new_file_in_a_folder_breaks_the_stamp(tree):
    before = digests([MODULE], tree)
    (tree / FOLDERS[0] / "new.cuh").touch()
    assert first_difference(before, digests([MODULE], tree)) == f"{FOLDERS[0]}/new.cuh"


def test_another_compiler_breaks_the_stamp(tree, monkeypatch):
    before = digests([MODULE], tree)
    monkeypatch.setattr(kernel_stamp, "COMPILERS", ("no such compiler",))
    assert first_difference(before, digests([MODULE], tree)) == "versions"


def test_modules_of_this_process_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "loaded"))
    kernel_stamp.record()
    (file,) = (tmp_path / "loaded").iterdir()
    assert file.read_text().splitlines() == loaded_files()
    assert {"tests/kernel_stamp.py", "tests/conftest.py"} <= set(loaded_files())


def test_a_build_folder_without_a_stamp_says_so(tmp_path, capsys):
    assert kernel_stamp.main([str(tmp_path), "--check"]) == 1
    assert "there is none" in capsys.readouterr().out
