"""A real chat model: needles through its template, and the summary of a log, with all of the text and with its end."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt import build
from kvc_trt.accuracy.under_test.answerer import mean_negative_log_likelihood
from kvc_trt.backends.opening import harness_for, open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.tasks import framing
from kvc_trt.tasks.registry import task
from kvc_trt.verify.engine_run import run
from kvc_trt.verify.ladder import verify

pytestmark = pytest.mark.slow
CONTEXT = 320


@pytest.fixture(scope="module")
def engine(smollm2_gguf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "smollm2"
    build(
        "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), policy="rocketkv", token_budget=128,
        max_input_len=CONTEXT, max_output_len=128, weights="fp32", verify=False, output=directory,
    )  # fmt: skip
    return open_engine(directory)


def test_needles_are_asked_through_its_template_and_found(engine):
    report = verify(engine, level="retrieval", samples=2)
    assert report.passed, report.failures
    aware, _, late, _ = report.rungs[0].checks
    assert aware.detail == late.detail == "niah-single-1, through the chat template, budget 128"
    assert str(aware.measured).startswith("100.0% ± 0.0% | ")
    assert str(late.measured).startswith("100.0% ± 0.0% | ")


@pytest.mark.exhaustive
def test_a_summary_is_likelier_after_the_whole_log_than_after_its_end(engine):
    how = framing.chat(engine.tokenizer, engine.chat_template)
    sample = task("log-summary").sample(seed=0, index=0, target_tokens=CONTEXT + 128, encode=how.encode)
    prompt, summary = how.ids(sample, query_aware=True).context, how.continuation(sample)
    twin = harness_for(engine, RunOptions("onnxruntime")).open_twin()

    def surprise(ids) -> float:
        fed = np.array(summary[:-1], np.int64)[:, None]
        logits = run(twin, batch_of([list(ids)]), len(fed), tokens=fed).logits[:, 0]
        return mean_negative_log_likelihood(logits, summary)

    assert surprise(prompt) < surprise(prompt[-128:]) - 0.5
