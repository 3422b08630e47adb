"""`kvc-trt verify` as a user calls it: exit codes, JSON alone on stdout, the stored report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest

from kvc_trt.cli.main import run
from kvc_trt.engine.files import sha256
from kvc_trt.engine.manifest import MANIFEST_FILE, SELF_DIGEST, sealed


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "random"
    settings = ["--model", "retrieval-tiny", "--random-weights", "0", "--token-budget", "32"]
    lengths = ["--max-input-len", "256", "--max-output-len", "16"]
    assert run(["build", *settings, *lengths, "--no-verify", "-o", str(path)]) == 0
    return path


def tampered_by_its_maker(engine: Path, directory: Path) -> Path:
    """Return a copy whose decode graph reads twice as many tokens as config.json says, sealed as if it were right."""
    directory.mkdir()
    for path in engine.iterdir():
        if path.is_file():
            os.link(path, directory / path.name)
    graph = onnx.load(engine / "decode.onnx", load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "top_k":
                attribute.i *= 2
    (directory / "decode.onnx").unlink()
    (directory / "decode.onnx").write_bytes(graph.SerializeToString())
    manifest = json.loads((engine / MANIFEST_FILE).read_text())
    record = manifest["files"]["decode.onnx"]
    record["sha256"], record["size"] = sha256(directory / "decode.onnx"), (directory / "decode.onnx").stat().st_size
    manifest = {key: value for key, value in manifest.items() if key != SELF_DIGEST}
    (directory / MANIFEST_FILE).unlink()
    (directory / MANIFEST_FILE).write_bytes(sealed(manifest))
    return directory


def test_a_right_engine_exits_0_with_json_alone(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored = tmp_path / "report.json"
    assert run(["verify", str(engine), "--level", "ops", "--steps", "3", "--json", "-o", str(stored)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is True
    assert printed == json.loads(stored.read_text())
    assert {rung["name"]: rung["status"] for rung in printed["rungs"]} == {
        "ops": "passed", "dense twin": "passed", "activity": "passed",
    }  # fmt: skip


def test_a_wrong_engine_exits_1_and_names_the_check(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wrong = tampered_by_its_maker(engine, tmp_path / "wrong")
    assert run(["verify", str(wrong), "--level", "ops", "--steps", "3"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert "did not pass verification: ops: " in captured.err


@pytest.mark.parametrize(
    "arguments",
    [["nowhere"], ["{engine}", "--level", "deep"], ["{engine}", "--steps", "0"], ["{engine}", "--steps", "17"],
     ["{engine}", "-o", "/no/such/directory/report.json"]],
)  # fmt: skip
def test_wrong_usage_exits_2(arguments: list[str], engine: Path):
    assert run(["verify", *(argument.format(engine=engine) for argument in arguments)]) == 2


class TestReplay:
    @pytest.fixture
    def proof(self, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        def written(of: Path, kind: str) -> str:
            ids = tmp_path / "ids.json"
            ids.write_text(json.dumps([3 + i % 40 for i in range(200)]))
            file = str(tmp_path / "proof.json")
            asked = ["--prompt-ids", str(ids), "--max-new-tokens", "4", "--ignore-eos"]
            assert run(["run", str(of), *asked, "--kv-proof", kind, "-o", file]) == 0
            capsys.readouterr()
            return file

        return written

    @pytest.mark.parametrize("kind", ["digest", "lists"])
    def test_an_honest_proof_exits_0(self, kind, engine, proof, tmp_path, capsys):
        file = proof(engine, kind)
        assert run(["verify", str(engine), "--replay", file]) == 0
        assert "lists differ at near-ties" in capsys.readouterr().out
        stored = tmp_path / "report.json"
        assert run(["verify", str(engine), "--replay", file, "--json", "-o", str(stored)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(stored.read_text())
        assert printed["passed"] is True
        assert printed["equal"] == printed["lists"] > 0

    def test_an_engine_that_reads_more_than_it_says_is_caught(self, engine, proof, tmp_path, capsys):
        """The engine's graph, sealed as if it were right, reads twice as many tokens as the policy says."""
        wrong = tampered_by_its_maker(engine, tmp_path / "wrong")
        for kind, expected in (
            ("digest", "neither the reference nor the engine"),
            ("lists", "tokens were taken, expected"),
        ):
            assert run(["verify", str(engine), "--replay", proof(wrong, kind)]) == 1
            error = capsys.readouterr().err
            assert "cache 0, step 1" in error
            assert expected in error

    def test_wrong_use_of_replay_is_refused(self, engine, proof, tmp_path, capsys):
        file = proof(engine, "digest")
        (tmp_path / "broken.json").write_text(Path(file).read_text()[:-100])
        for arguments, message in (
            ([str(engine), "--replay", str(tmp_path / "none.json")], "cannot read"),
            ([str(engine), "--replay", str(tmp_path / "broken.json")], "is not valid JSON"),
            ([str(engine), "--replay", file, "--level", "full"], "--replay goes with ENGINE, -o and --json"),
            ([str(engine), "--replay", file, "--seed", "0"], "found --seed"),
            (["--replay", file], "Missing argument 'ENGINE'"),
        ):
            assert run(["verify", *arguments]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert error.startswith("error: ")
