"""A prompt on which float16 overflows fails alone: the rows beside it answer as without it, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt import Engine, build
from kvc_trt.errors import InputError
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.runtime import Request, Scheduler

HUGE_TOKEN = 49


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    """An engine in float16 of a model in which one token's embedding fits the type, and not what is added to it."""
    drawn = RandomWeights.read_rows

    def read_rows(self, name, start, stop):
        rows = drawn(self, name, start, stop)
        if name == "model.embed_tokens.weight" and start <= HUGE_TOKEN < stop:
            rows[HUGE_TOKEN - start] = 65504.0
        if name.endswith("o_proj.weight"):
            rows *= np.float32(1e4)
        return rows

    path = tmp_path_factory.mktemp("overflowing") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomWeights, "read_rows", read_rows)
        build(
            str(tiny_model), policy="rocketkv", weights="fp16", random_weights=0, output=path, verify=False,
            token_budget=64, max_input_len=256, max_output_len=32,
        )  # fmt: skip
    return path


def prompts():
    generator = np.random.default_rng(0)
    return [generator.integers(2, HUGE_TOKEN, length).tolist() for length in (150, 70, 40)]


def answers(opened, *, overflowing):
    """Return the tokens and logprobs of three prompts, beside one that overflows between them or without it."""
    scheduler = Scheduler(opened.session(4), prefill_slice_ms=1e6)  # one slice, so that the rows step together
    requests = [Request(prompt, 8, logprobs=3, ignore_eos=True) for prompt in prompts()]
    tickets = [scheduler.submit(request) for request in requests[:1]]
    if overflowing:
        bad = scheduler.submit(Request([*prompts()[0][:30], HUGE_TOKEN], 8, ignore_eos=True))
    tickets += [scheduler.submit(request) for request in requests[1:]]
    while scheduler.advance():
        pass
    if overflowing:
        with pytest.raises(InputError, match="logits are not finite after 31 tokens"):
            bad.result(0)
    assert scheduler.session.free == 4
    outputs = [ticket.result(0) for ticket in tickets]
    return [(output.token_ids, repr(output.logprobs)) for output in outputs]


def test_neighbours_of_a_row_that_overflows_answer_as_without_it(engine):
    opened = Engine.open(engine, threads=1)
    quiet = answers(opened, overflowing=False)
    assert answers(opened, overflowing=True) == quiet
    assert len({str(one) for one in quiet}) == 3
