"""Whole engines on ranks: a chat model that nobody here trained, and the emulated CUDA kernels."""

from __future__ import annotations

import pytest

import kvc_trt
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.verify.ladder import verify
from tests.backends.torch.conftest import emulation

__all__ = ["emulation"]

QUESTION = "What is the capital of France, and what is the capital of Italy? Answer in one sentence."


@pytest.mark.slow
def test_ranks_call_the_kernel_library_that_was_chosen(new_processes, emulation, tmp_path):
    """Two ranks through the emulated kernels, judged at every rung."""
    path = tmp_path / "two"
    settings = {"token_budget": 64, "max_input_len": 512, "max_output_len": 32, "weights": "fp32"}
    kvc_trt.build("retrieval-tiny", policy="rocketkv", tensor_parallel=2, verify=False, output=path, **settings)
    report = verify(open_engine(path), RunOptions("torch"), kernels=emulation.path, steps=3, samples=1)
    assert report.passed, report.failures
    assert report.description["backend"].endswith(", 2 ranks")
    assert report.description["kernels"].startswith(f"{emulation.path} (emulation")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_three_ranks_of_a_real_model_answer_as_one_process(smollm2_gguf, tmp_path):
    """Nine query heads and three KV heads: a number of ranks that is no power of two."""
    answers = []
    for ranks in (1, 3):
        path = tmp_path / str(ranks)
        engine = kvc_trt.build(
            "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), backend="torch", weights="fp32", policy="rocketkv",
            token_budget=32, max_input_len=256, max_output_len=24, tensor_parallel=ranks, verify=False, output=path,
        )  # fmt: skip
        with engine:
            answers.append(engine.chat([{"role": "user", "content": QUESTION}], max_new_tokens=16).text)
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]
