from __future__ import annotations

import pytest

from kvc_trt.backends.opening import open_session
from kvc_trt.backends.registry import names, runners
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.runtime import Request
from tests.backends.compiled import as_compiled


def test_a_session_of_an_engine_answers_requests(tiny_engine):
    session = open_session(tiny_engine, RunOptions(threads=1), max_batch_size=2)
    assert session.tokenizer is None
    assert session.executor.limits.max_input_len == 256
    outputs = session.generate([Request([3] * 100, 4, ignore_eos=True), Request([7], 2, ignore_eos=True)])
    assert [len(output.token_ids) for output in outputs] == [4, 2]
    assert outputs[0].logical_length == 103
    assert max(outputs[0].physical_lengths) < 103


def test_a_damaged_engine_is_refused_before_anything_is_loaded(tiny_engine):
    weights = tiny_engine / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match=r"weights\.safetensors"):
        open_session(tiny_engine)


def test_every_backend_that_builds_engines_says_what_runs_them():
    assert {name: runners(name) for name in names()} == {
        "onnxruntime": ("onnxruntime", "openvino", "torch"),
        "openvino": ("openvino", "onnxruntime", "torch"),
        "tensorrt": ("tensorrt", "torch"),
        "tensorrt-llm": ("torch",),
        "torch": ("torch", "onnxruntime", "openvino"),
    }


REFUSED = "an engine built for tensorrt-llm does not run on backend tensorrt-llm; expected torch"


@pytest.mark.parametrize(
    ("command", "code", "said", "hint"),
    [
        (["run", "ENGINE", "--prompt", "hello"], 2, REFUSED, "--backend torch"),
        (["verify", "ENGINE"], 2, REFUSED, "kvc-trt export tensorrt-llm"),
        (["run", "ENGINE", "--prompt", "hello", "--backend", "tensorrt"], 2, "on backend tensorrt; expected torch", ""),
        (["profile", "ENGINE"], 3, "engines for onnxruntime, openvino, tensorrt and torch", "--backend tensorrt"),
    ],
)
def test_an_engine_of_tensorrt_llm_says_what_runs_it(command, code, said, hint, tiny_engine, capfd):
    engine = as_compiled(tiny_engine, "tensorrt-llm")
    assert run([str(engine) if part == "ENGINE" else part for part in command]) == code
    printed = capfd.readouterr().err
    assert said in printed
    assert hint in printed


def test_an_engine_of_tensorrt_llm_can_be_inspected_and_run_in_torch(tiny_engine, capfd):
    engine = as_compiled(tiny_engine, "tensorrt-llm")
    assert run(["inspect", str(engine)]) == 0
    assert "built by kvc-trt" in (printed := capfd.readouterr().out)
    assert "for tensorrt-llm" in printed
    session = open_session(engine, RunOptions("torch"))
    (output,) = session.generate([Request([3] * 100, 2, ignore_eos=True)])
    assert len(output.token_ids) == 2
