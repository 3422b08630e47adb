"""The record of an engine's verifications: what it says, of which engine, and that it is no part of the engine."""

from __future__ import annotations

import json
import shutil

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine.files import VERIFICATION_FILE
from kvc_trt.engine.verification import Verification, is_verified, record_verification, verifications_of
from kvc_trt.errors import InputError

QUICK = Verification(level="quick", passed=True, run_by="onnxruntime 1", seed=3, samples=8, steps=16)


@pytest.fixture
def engine(tiny_engine, tmp_path):
    shutil.copytree(tiny_engine, tmp_path / "copy")
    return open_engine(tmp_path / "copy")


def inspected(engine, capfd, *options):
    capfd.readouterr()
    assert run(["inspect", str(engine.path), *options]) == 0
    return capfd.readouterr().out


def test_inspect_says_how_an_engine_was_verified(engine, capfd):
    assert f"verified   no; to check it: kvc-trt verify {engine.path}" in inspected(engine, capfd)
    record_verification(engine, QUICK.model_copy(update={"passed": False}))
    assert "verified   quick: FAILED on onnxruntime 1, seed 3, 8 samples, 16 steps; 20" in inspected(engine, capfd)
    assert not is_verified(engine)
    tasks = Verification(level="tasks", passed=True, run_by="onnxruntime", seed=0, samples=50)
    record_verification(engine, tasks)
    record_verification(engine, QUICK)
    assert is_verified(engine)
    found = json.loads(inspected(engine, capfd, "--json"))["verifications"]
    assert [(one["level"], one["passed"], one["samples"]) for one in found] == [("tasks", True, 50), ("quick", True, 8)]


def test_the_record_is_no_part_of_the_engine(engine):
    digest = engine.digest
    record_verification(engine, QUICK)
    assert open_engine(engine.path).digest == digest
    assert VERIFICATION_FILE not in engine.files
    (engine.path / "verification.yaml").touch()
    with pytest.raises(InputError, match=r"verification\.yaml is not in the manifest"):
        open_engine(engine.path)


def test_another_build_of_the_directory_is_not_verified(engine, tiny_arguments, capfd):
    record_verification(engine, QUICK)

    assert run([*tiny_arguments, "--max-output-len", "16", "-o", str(engine.path), "--force"]) == 0
    again = open_engine(engine.path)
    assert again.digest != engine.digest
    assert verifications_of(again) == ()
    record_verification(engine, QUICK)  # of the engine that was there: its digest is another
    assert verifications_of(again) == ()
    assert "verified   no; " in inspected(again, capfd)


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 99, b'{"engine": "x"}', b"\xff"])
def test_a_damaged_record_counts_for_nothing(engine, content, capfd):
    (engine.path / VERIFICATION_FILE).write_bytes(content)
    assert verifications_of(engine) == ()
    record_verification(engine, QUICK)
    assert verifications_of(engine) == (QUICK,)


def test_an_engine_that_cannot_be_written_to_stays_without(engine, monkeypatch):
    def refuse(path, document):
        raise PermissionError(path)

    monkeypatch.setattr("kvc_trt.engine.verification.write_json", refuse)
    record_verification(engine, QUICK)
    assert verifications_of(engine) == ()
