"""Speculation on a real chat model: the greedy answers of plain steps, on texts that copy and on texts that do not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.speculate import CLOSE, COPIES, QUESTIONS
from kvc_trt import Engine, build
from kvc_trt.runtime import Request
from kvc_trt.runtime.session import drafting
from tests.runtime.test_speculation import Always

pytestmark = pytest.mark.slow
TOKENS = 32
USUAL = {"rocketkv": (*COPIES[1:], QUESTIONS[0]), "full": (COPIES[0], QUESTIONS[0])}
"""Texts that copy, under the policy's budget too, and one that does not. `make test-everything` takes all."""


@pytest.fixture(scope="module", params=["rocketkv", "full"])
def path(request, smollm2_gguf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / request.param
    budget = {} if request.param == "full" else {"token_budget": 128}
    build(
        "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), policy=request.param, **budget, max_input_len=512,
        max_output_len=TOKENS + 8, weights="fp32", draft_tokens=4, verify=False, output=directory,
    )  # fmt: skip
    return directory


def gap_at(session, prompt, place):
    """Return the difference of the two best logits from which plain steps drew the answer's token at `place`."""
    (row,) = session.add([Request(prompt, ignore_eos=True, keep_logits=True)])
    for _ in range(place):
        session.step()
    second, first = np.sort(session.take(row).logits)[-2:]
    session.remove(row)
    return float(first - second)


@pytest.mark.one_in(2)
def test_greedy_answers_are_those_of_steps(path, monkeypatch, record_property, pytestconfig):
    plain = Engine.open(path)
    texts = (*COPIES, *QUESTIONS) if pytestconfig.option.everything else USUAL[path.name]
    prompts = [plain.chat_prompt(text) for text in texts]
    rules = {"max_new_tokens": TOKENS, "ignore_eos": True}
    expected = [plain.generate(prompt, **rules).token_ids for prompt in prompts]
    monkeypatch.setattr(drafting, "Payoff", Always)  # every draft is checked, whether it saves time or not
    engine = Engine.open(path, speculate="ngram:4")
    found = [engine.generate(prompt, **rules).token_ids for prompt in prompts]
    timings, exceptions = engine.session().timings, 0
    assert timings.accepted_tokens > len(prompts) * TOKENS // 4
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        if ours != theirs:
            place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
            assert gap_at(plain.session(), prompt, place) <= CLOSE
            exceptions += 1
    record_property("exceptions", exceptions)
    print(f"{exceptions} of {len(prompts)} answers differ where the two best logits do by at most {CLOSE}")
    assert exceptions <= 1
