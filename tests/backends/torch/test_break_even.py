"""`--dense-until auto` for engines that run in PyTorch: its measurement, and its refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvc_trt import policies
from kvc_trt.backends import break_even as shared
from kvc_trt.backends.registry import backend
from kvc_trt.backends.torch import benchmark as module
from kvc_trt.cli.main import run
from kvc_trt.errors import UnsupportedEnvironment
from tests.small_model import SMALL as MODEL

CPU = torch.device("cpu")


@pytest.fixture
def parameters():
    return policies.resolve("rocketkv", model=MODEL, token_budget=32, max_input_len=256, max_output_len=32)


def test_a_build_for_pytorch_asks_pytorch(parameters, monkeypatch):
    monkeypatch.setattr(module, "break_even", lambda *asked: asked)
    assert backend("torch").break_even(MODEL, parameters, "float16") == (MODEL, parameters, "float16")
    assert backend("onnxruntime").break_even(MODEL, parameters, "float32") >= parameters.token_budget


@pytest.mark.parametrize(("dtype", "kv_cache"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int4")])
def test_sparse_and_dense_steps_run_at_every_length(dtype, kv_cache, parameters, monkeypatch):
    """Runs on the CPU, where the answer is of no use."""
    seen = []
    timed = shared.step_seconds

    def recording(executor, length):
        seen.append((executor.program.parameters.dense_until, length))
        return timed(executor, length)

    monkeypatch.setattr(shared, "step_seconds", recording)
    monkeypatch.setattr(shared, "REPEATS", 1)
    parameters = dataclasses.replace(parameters, kv_cache=kv_cache, fp8_bounds=kv_cache != "auto")
    found = module.measure(MODEL, parameters, dtype, CPU, state_bytes=1 << 16)
    lengths = shared.lengths_to_try(parameters)
    assert set(seen) == {(until, length) for until in (32, parameters.capacity) for length in lengths}
    assert parameters.token_budget <= found <= parameters.capacity


def test_a_cache_takes_as_many_layers_as_are_asked_for(parameters):
    row = 2 * 2 * 16 * 2 * parameters.capacity
    assert shared.attention_only(MODEL, parameters, "bfloat16", 2 * row).num_hidden_layers == 2
    assert shared.attention_only(MODEL, parameters, "bfloat16", 1).num_hidden_layers == 1
    assert shared.attention_only(MODEL, parameters, "float32", 1 << 40).num_hidden_layers == MODEL.num_hidden_layers


def test_without_a_gpu_it_is_refused_with_what_to_do(parameters, tiny_arguments, tmp_path, capsys):
    with pytest.raises(UnsupportedEnvironment, match="says nothing about them"):
        module.break_even(MODEL, parameters, "bfloat16")
    engine = tmp_path / "engine"
    assert run([*tiny_arguments, "--backend", "torch", "--dense-until", "auto", "-o", str(engine)]) == 3
    told = capsys.readouterr().err
    assert "--dense-until auto measures the kernels on a GPU" in told
    assert "--dense-until TOKENS" in told
    assert not engine.exists()


def test_measurements_are_kept_per_gpu_and_kernels(parameters, tmp_path, monkeypatch):
    """The GPU's parts are replaced: two libraries give two measurements, the same library gives one."""
    answers = iter([40, 50])
    monkeypatch.setattr(module, "choose_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(module, "measure", lambda *arguments: next(answers))
    for name, expected in (("one", 40), ("one", 40), ("other", 50)):
        path = tmp_path / name
        path.write_text(name)
        monkeypatch.setattr(module, "current_library", lambda path=path: type("Library", (), {"path": path}))
        assert module.break_even(MODEL, parameters, "bfloat16") == expected
