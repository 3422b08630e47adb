"""Requests that `kvc-trt serve` refuses before anything is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import pytest

import kvc_trt
from kvc_trt.cli.commands.serve import check_host, served_engines
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.serving.dynamo.deployment import curl
from kvc_trt.serving.example import RECORDS

CHECKPOINT = Path(kvc_trt.__file__).parent / "models" / "checkpoints" / "retrieval-tiny"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    check_host(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(InputError, match="there is no API key"):
        check_host(host, None)
    check_host(host, "a secret")


def test_a_host_name_is_refused():
    with pytest.raises(InputError, match="expected an address"):
        check_host("example.com", "a secret")


def test_engines_are_asked_for_by_name_or_by_directory():
    found = served_engines(("engines/demo", "other=engines/demo"))
    assert [(one.name, str(one.engine)) for one in found] == [("demo", "engines/demo"), ("other", "engines/demo")]


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a\nb", "{{a}}", "../a", ".a", "é"])
def test_a_model_name_with_special_characters_is_refused(name):
    with pytest.raises(InputError, match="cannot be a model's name"):
        served_engines((f"{name}=engines/demo",))


def test_a_model_name_given_twice_is_refused():
    with pytest.raises(InputError, match="two engines have the name demo"):
        served_engines(("engines/demo", "others/demo"))


def test_serving_no_engine_is_refused():
    with pytest.raises(click.UsageError):
        served_engines(())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["frontend", "--rows", "4"], "runs no engine"),
        (["frontend", "--tool-parser", "hermes"], "runs no engine"),
        (["frontend", "--kv-proofs"], "runs no engine"),
        (["prefill", "engines/demo", "--cors", "*"], "takes no requests from clients"),
    ],
)
def test_an_option_that_a_role_would_not_read_is_refused(arguments, why, capsys):
    assert run(["serve", "--role", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is not None, reason="Dynamo is installed here")
def test_without_dynamo_it_says_what_to_install(capsys):
    assert run(["serve", "--dynamo", "engines/demo"]) == 3
    assert "make dynamo-env" in capsys.readouterr().err


def test_the_command_that_it_shows_is_quoted(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("a chat model")
    shown = curl("http://127.0.0.1:8000/v1", "a", tmp_path, api_key=True)
    assert shown.startswith(
        'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $KVC_TRT_API_KEY"'
    )
    assert '\'{"model": "a", "messages": [{"role": "user"' in shown


def test_the_command_that_it_shows_asks_what_the_shipped_model_answers():
    shown = curl("http://127.0.0.1:8000/v1", "a", CHECKPOINT, api_key=False)
    assert f'"prompt": "{RECORDS}"' in shown


def test_triton_listens_on_loopback_alone_and_has_no_roles(capsys):
    assert run(["serve", "--triton", "--host", "0.0.0.0", "engines/demo"]) == 2
    assert "listens on loopback only" in capsys.readouterr().err
    assert run(["serve", "--triton", "--role", "decode", "engines/demo"]) == 2
    assert "has no roles" in capsys.readouterr().err


def test_without_triton_it_says_where_it_looked(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KVC_TRT_TRITON", str(tmp_path / "none"))
    assert run(["serve", "--triton", "engines/demo"]) == 3
    said = capsys.readouterr().err
    assert "no tritonserver was found" in said
    assert "make triton-env" in said
