from __future__ import annotations

import subprocess
import sys

import click
import pytest

from kvc_trt import __version__
from kvc_trt.cli import main as module
from kvc_trt.cli.main import COMMANDS, run
from kvc_trt.errors import InputError, UnsupportedEnvironment, VerificationFailed

HEAVY = {
    "numpy",
    "pydantic",
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "rich",
    "yaml",
    "transformers",
    "matplotlib",
}


class PanicException(BaseException):  # as the libraries in Rust call it
    """The exception that a library in Rust raises when it panics."""


def python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_click_alone():
    code = "import sys; from kvc_trt.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = python(code)
    assert all(name in done.stdout for name in COMMANDS)
    assert "Exit codes" in done.stdout
    assert not HEAVY & set(done.stderr.split())


@pytest.mark.parametrize("command", ["models", "policies", "inspect", "plan"])
def test_light_commands_import_no_heavy_library(command, tiny_engine):
    arguments = {"inspect": [str(tiny_engine)], "plan": ["--model", "llama3.1-8b", "--token-budget", "512"]}
    code = "import sys; from kvc_trt.cli.main import run; code = run(sys.argv[1:])"
    code += "; print(*sys.modules, file=sys.stderr); sys.exit(code)"
    done = python(code, command, *arguments.get(command, []))
    assert done.returncode == 0, done.stderr
    assert not {"torch", "onnx", "onnxruntime", "onnxscript", "transformers"} & set(done.stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capfd):
    assert run([name, "--help"]) == 0
    assert "Usage: kvc-trt" in capfd.readouterr().out


def test_the_version_is_the_packages(capfd):
    assert run(["--version"]) == 0
    assert __version__ in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bild"], "did you mean 'build'?"),
        (["xyzzy"], "no such command 'xyzzy'"),
        (["models", "--jsn"], "--json"),
        (["inspect"], "ENGINE_DIR"),
        (["build", "--weights", "fp3"], "fp3"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(arguments, message, capfd):
    assert run(arguments) == 2
    streams = capfd.readouterr()
    error, hint = streams.err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: kvc-trt")
    assert streams.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerificationFailed("wrong"), 1),
        (InputError("wrong\nin two lines", hint="do this"), 2),
        (UnsupportedEnvironment("wrong"), 3),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (RuntimeError("wrong\nin two lines"), 70),
        (PanicException("wrong"), 70),
        (click.exceptions.Exit(1), 1),
    ],
)
def test_every_outcome_has_its_exit_code(monkeypatch, capfd, error, code):
    def fail():
        raise error

    monkeypatch.setattr(module.group, "get_command", lambda context, name: click.Command("models", callback=fail))
    assert run(["models"]) == code
    streams = capfd.readouterr()
    assert streams.out == ""
    assert len([line for line in streams.err.splitlines() if line.startswith("error: ")]) == (
        code != 1 or "wrong" in str(error)
    )
    assert "Traceback" not in streams.err


def test_an_internal_error_says_how_to_see_the_traceback(monkeypatch, capfd):
    def fail():
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(module.group, "get_command", lambda context, name: click.Command("models", callback=fail))
    assert run(["models"]) == 70
    assert "KVC_TRT_TRACEBACK=1" in capfd.readouterr().err
    monkeypatch.setenv("KVC_TRT_TRACEBACK", "1")
    assert run(["models"]) == 70, "and not 1, which means that verification failed"
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: oh" in said


def test_a_signal_ends_the_command_with_its_own_code(monkeypatch):
    def fail():
        raise SystemExit(143)

    monkeypatch.setattr(module.group, "get_command", lambda context, name: click.Command("models", callback=fail))
    with pytest.raises(SystemExit) as caught:
        run(["models"])
    assert caught.value.code == 143


@pytest.mark.parametrize("arguments", [["inspect"], ["run", "--prompt", "a"], ["verify"], ["context", "inspect"], []])
def test_names_of_files_control_no_terminal(arguments, capfd):
    assert run([*arguments, "none\x1b[2J\u202e\nerror: it is yours\udcff"]) == 2
    error, *rest = capfd.readouterr().err.splitlines()
    assert r"none\x1b[2J\u202e" in error
    assert r"error: it is yours\udcff" in error
    assert all(line.startswith("hint: ") for line in rest)
    assert all(line.isprintable() for line in (error, *rest))


def test_a_closed_pipe_at_the_reader_is_no_error():
    command = f"{sys.executable} -m kvc_trt models --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
