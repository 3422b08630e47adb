"""The search for a tritonserver, and the message where there is none."""

from __future__ import annotations

import os

import pytest

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.triton.installation import Installation, find_triton


def wheel(environment):
    server = environment / "lib" / "python3.11" / "site-packages" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.touch()
    return server


def program(directory):
    directory.mkdir()
    file = directory / "tritonserver"
    file.touch(mode=0o755)
    return file


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "prefix"))


def test_the_installation_named_by_the_environment_comes_first(tmp_path):
    server = wheel(tmp_path / "named")
    wheel(tmp_path / "build" / "triton")
    program(tmp_path / "bin")
    variables = {"KVC_TRT_TRITON": str(tmp_path / "named"), "PATH": str(tmp_path / "bin")}
    assert find_triton(variables) == Installation(server, tmp_path / "named")


def test_an_installation_in_the_build_folder_comes_before_the_path(tmp_path):
    on_path = program(tmp_path / "bin")
    variables = {"PATH": str(tmp_path / "bin")}
    assert find_triton(variables) == Installation(on_path)
    server = wheel(tmp_path / "build" / "triton")
    assert find_triton(variables) == Installation(server, tmp_path / "build" / "triton")


@pytest.mark.parametrize("named", [False, True])
def test_a_missing_triton_names_the_places_and_the_next_command(tmp_path, named):
    variables = {"PATH": "", **({"KVC_TRT_TRITON": str(tmp_path / "none")} if named else {})}
    with pytest.raises(UnsupportedEnvironment) as refused:
        find_triton(variables)
    assert "no tritonserver was found" in refused.value.message
    assert (str(tmp_path / "none") in refused.value.message) == named
    assert refused.value.hint == "make triton-env"


def test_an_installation_on_the_path_needs_no_settings(tmp_path):
    found = Installation(program(tmp_path / "bin"))
    assert found.arguments(tmp_path) == [str(tmp_path / "bin" / "tritonserver")]
    assert found.variables({"A": "b"}) == {"A": "b"}


def test_an_environment_without_its_parts_is_incomplete(tmp_path):
    found = Installation(wheel(tmp_path / "half"), tmp_path / "half")
    with pytest.raises(UnsupportedEnvironment, match="is missing from"):
        found.arguments(tmp_path)
    with pytest.raises(UnsupportedEnvironment, match="does not run"):
        found.variables(dict(os.environ))
