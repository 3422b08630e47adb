"""The end of a build: verification, output, and the exit code."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.registry import backends
from kvc_trt.building import verified
from kvc_trt.cli.main import run
from kvc_trt.cli.text import printing
from kvc_trt.errors import InputError
from tests.backends.compiled import as_compiled


@pytest.fixture
def arguments(tiny_arguments, tmp_path):
    """Like tiny_arguments, with verification on."""
    return [*(argument for argument in tiny_arguments if argument != "--no-verify"), "-o", str(tmp_path / "engine")]


@pytest.fixture
def ladder(monkeypatch):
    """A ladder whose answer the test sets; it counts its calls."""
    description = {"backend": "onnxruntime", "seed": 0, "samples": 1, "steps": 2}
    report = SimpleNamespace(level="quick", passed=True, failures=[], description=description)
    report.to_json = lambda: {"passed": report.passed}
    report.as_text = lambda: f"passed: {report.passed}"
    state = SimpleNamespace(report=report, engines=[], backends=[])

    def verify(engine, *, options, level, checkpoint, progress):
        assert (level, checkpoint) == ("quick", None)
        state.engines.append(engine.path)
        state.backends.append(options.backend)
        return report

    module = ModuleType("kvc_trt.verify.ladder")
    module.verify = verify
    monkeypatch.setitem(sys.modules, "kvc_trt.verify.ladder", module)
    return state


def test_a_passing_engine_is_verified_once(arguments, ladder, tmp_path, capfd):
    assert run(arguments) == 0
    assert ladder.engines == [tmp_path / "engine"]
    assert "passed: True" in capfd.readouterr().out
    assert run(arguments) == 0
    assert len(ladder.engines) == 1
    streams = capfd.readouterr()
    assert "up to date" in streams.out
    assert "passed after an earlier build" in streams.err


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_an_engine_is_verified_by_the_backend_it_was_built_for(backend, arguments, ladder):
    assert run([*arguments, "--backend", backend]) == 0
    assert ladder.backends == [backend]


def test_a_tensorrt_llm_engine_is_verified_in_pytorch_and_the_build_says_so(ladder, tiny_engine, capfd):
    engine = open_engine(as_compiled(tiny_engine, "tensorrt-llm"))
    result = SimpleNamespace(engine=engine, status="built")
    assert verified(result, None, printing.progress()).passed
    assert ladder.backends == ["torch"]
    assert "nothing here runs plans of tensorrt-llm" in capfd.readouterr().err


def test_too_few_rows_to_verify_a_tensorrt_engine_are_refused_before_the_build():
    with pytest.raises(InputError, match="the engine takes 2 rows at once; verification needs 8") as caught:
        backends()["tensorrt"].check_verifiable(2, "the engine")
    assert "--no-verify" in caught.value.hint


def test_a_failing_engine_stays_fails_and_is_never_called_fine(arguments, ladder, tmp_path, capfd):
    ladder.report.passed, ladder.report.failures = False, ["logits: maximal error is 3"]
    for _ in range(2):
        assert run(arguments) == 1
        streams = capfd.readouterr()
        assert "did not pass verification: logits: maximal error is 3" in streams.err
        assert f"hint: kvc-trt verify {tmp_path / 'engine'}" in streams.err
        open_engine(tmp_path / "engine")
    assert len(ladder.engines) == 2


def test_no_verify_skips_verification(arguments, ladder, capfd):
    assert run([*arguments, "--no-verify"]) == 0
    assert run([*arguments, "--set", "verify=false"]) == 0
    assert ladder.engines == []


def test_json_is_alone_on_stdout_and_complete(arguments, ladder, tmp_path, capfd):
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["status"] == "built"
    assert result["engine"] == str(tmp_path / "engine")
    assert result["backend"]["name"] == "onnxruntime"
    assert result["backend"]["reason"] == "the first that can run here; kvc-trt doctor shows all"
    assert result["parameters"]["token_budget"] == 32
    assert [stage["name"] for stage in result["stages"]] == ["weights", "prefill", "decode", "extend"]
    assert all(stage["seconds"] >= 0 and stage["peak_rss_bytes"] > 0 for stage in result["stages"])
    assert result["verification"] == {"passed": True}


def test_a_missing_torch_is_noticed_before_the_build(arguments, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(arguments) == 3
    assert "hint: pip install 'kvc-trt[verify]', or build with --no-verify" in capfd.readouterr().err
    assert run([*arguments, "--no-verify", "--layer-budget", "squeeze"]) == 3
    assert "measures layers with PyTorch, which is not installed" in capfd.readouterr().err
    assert not (tmp_path / "engine").exists()


def test_a_build_names_its_backend_and_the_reason_for_it(tiny_arguments, tmp_path, capfd):
    assert run([*tiny_arguments, "-o", str(tmp_path / "engine")]) == 0
    said = capfd.readouterr()
    assert "backend: onnxruntime (the first that can run here; kvc-trt doctor shows all)" in said.err
    assert "tensorrt" not in f"{said.out}{said.err}".lower()
    assert run([*tiny_arguments, "--backend", "tensorrt", "-o", str(tmp_path / "other")]) == 3
    assert "TensorRT: expected" in capfd.readouterr().err


@pytest.mark.parametrize(("budget", "said"), [("32", False), ("288", True)])
def test_a_budget_that_no_sequence_exceeds_compresses_nothing(budget, said, tiny_arguments, tmp_path, capfd):
    lengths = ("--max-input-len", "256", "--max-output-len", "32", "--token-budget", budget)
    assert run([*tiny_arguments, *lengths, "-o", str(tmp_path / "engine")]) == 0
    line = "nothing is compressed: with a token budget of 288, a step of the longest sequence, 288 tokens, reads "
    assert (line in capfd.readouterr().out) == said


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_file_in_the_way_is_refused_with_what_helps(force, tiny_arguments, tmp_path, capfd):
    """`--force` replaces engines alone, so it is no advice here."""
    (tmp_path / "mine").write_text("mine")
    assert run([*tiny_arguments, "-o", str(tmp_path / "mine"), "--no-verify", *force]) == 2
    error = capfd.readouterr().err
    assert "mine exists and is not a directory" in error
    assert "hint: choose another directory with -o" in error
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_default_output_names_model_and_policy(tiny_arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*tiny_arguments, "--policy", "snapkv++", "--set", "window=8"]) == 0
    assert (tmp_path / "engines" / "tiny-snapkv++" / "manifest.json").exists()


def test_a_measured_break_even_is_stored_and_reused(tiny_arguments, tmp_path, capfd):
    arguments = [*tiny_arguments, "--dense-until", "auto", "-o", str(tmp_path / "engine"), "--json"]
    assert run(arguments) == 0
    first = json.loads(capfd.readouterr().out)
    assert first["configuration"]["dense_until"] == first["parameters"]["dense_until"] >= 32
    assert run(arguments) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "up to date"


def test_the_commit_of_a_fetched_checkpoint_is_recorded_and_replayed(tmp_path, monkeypatch, tiny_model, capfd):
    import shutil

    from kvc_trt.engine.resolution import model_choice
    from kvc_trt.models import presets
    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.models.sources.hugging_face import read_config
    from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors

    commit, asked = "c" * 40, []
    directory = tmp_path / commit
    shutil.copytree(tiny_model, directory)
    source = RandomWeights(read_config(directory), 1)
    plans = [TensorPlan(name, "float32", source.shape(name), lambda n=name: source.read(n)) for name in source.names()]
    write_safetensors(directory / "model.safetensors", plans, {}, lambda amount: None)
    preset = presets.Preset("tiny", "", read_config(directory), "someone/tiny", None, {"max_input_len": 256})
    monkeypatch.setattr(model_choice, "load_preset", lambda name: preset)

    def fetch(repository, revision, ways_out):
        asked.append((repository, revision))
        return directory, commit

    monkeypatch.setattr(model_choice, "fetch", fetch)
    engine = tmp_path / "engine"
    arguments = ["build", "--model", "tiny", "--token-budget", "32", "--set", "window=8", "--no-verify"]
    assert run([*arguments, "--revision", "main", "-o", str(engine)]) == 0
    assert open_engine(engine).manifest.checkpoint.commit == commit
    assert run(["build", "--config", str(engine / "config.json"), "-o", str(tmp_path / "again"), "--no-verify"]) == 0
    assert asked == [("someone/tiny", "main"), ("someone/tiny", commit)]
    assert (tmp_path / "again" / "config.json").read_bytes() == (engine / "config.json").read_bytes()


def test_a_revision_without_the_hub_is_refused(tiny_arguments, tmp_path, capfd):
    assert run([*tiny_arguments, "--revision", "main", "-o", str(tmp_path / "engine")]) == 2
    assert "do not come from the Hugging Face Hub" in capfd.readouterr().err
