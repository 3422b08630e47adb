"""The choice of the library of native operators, and the message about one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.backends.onnxruntime import native
from kvc_trt.errors import UnsupportedEnvironment


def test_the_setting_none_disables_native_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, native.NONE)
    assert native.native_operators() is None
    assert native.describe_choice() == "none, the operators' bodies run (KVC_TRT_CPU_KERNELS=none)"


def test_the_package_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE)
    monkeypatch.setattr(native, "_PACKAGE", tmp_path / "kvc_trt")
    monkeypatch.setattr(native, "_CHECKOUT", tmp_path)
    assert native.library_path() is None
    in_build = tmp_path / "build" / "libkvc_cpu.so"
    in_package = tmp_path / "kvc_trt" / "lib" / "libkvc_cpu.so"
    for path in (in_build, in_package):
        path.parent.mkdir(parents=True)
    in_build.touch()
    assert native.library_path() is None, "a folder called build beside an installed package is somebody else's"
    (tmp_path / "plugins_cpu").mkdir()
    assert native.library_path() == in_build
    in_package.touch()
    assert native.library_path() == in_package


def test_a_named_library_is_used(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, str(library))
    found = native.native_operators()
    assert found is not None
    assert "KvcDenseAttention" in found.operators
    assert found.describe() == f"native operators ({found.instructions})"
    assert native.describe_choice() == f"{library}: 22 operators, {found.instructions}"
    assert native.native_operators("float16") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("build/libkvc_cpu.so", "expected an absolute path or 'none'"),
        ("/nowhere/libkvc_cpu.so", "/nowhere/libkvc_cpu.so: no native operators there"),
    ],
)
def test_a_missing_library_is_refused_in_one_line(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, value)
    with pytest.raises(UnsupportedEnvironment, match=message):
        native.native_operators()
    assert native.describe_choice().startswith("unusable: ")


def test_a_library_that_everybody_can_write_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libkvc_cpu.so"
    path.touch()
    path.chmod(0o666)
    monkeypatch.setenv(native.VARIABLE, str(path))
    with pytest.raises(UnsupportedEnvironment, match="can be written by everybody; expected a library that nobody"):
        native.native_operators()


def test_a_file_that_is_no_library_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libkvc_cpu.so"
    path.write_text("text")
    monkeypatch.setenv(native.VARIABLE, str(path))
    with pytest.raises(UnsupportedEnvironment, match="holds no native operators"):
        native.native_operators()


def test_a_library_of_another_interface_is_refused_in_one_line(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(native, "interface", lambda: 7)
    native._loaded.cache_clear()
    request.addfinalizer(native._loaded.cache_clear)
    with pytest.raises(UnsupportedEnvironment, match=r"has interface \d+; expected 7"):
        native._loaded(library)


def test_an_instruction_set_that_nobody_has_is_refused(library: Path) -> None:
    with pytest.raises(ValueError, match=r"has no sse9 for this processor; expected .*portable"):
        native.load(library).use_instructions("sse9")
