"""Steps of a session whose executor finds the best tokens itself."""

from __future__ import annotations

import pytest

from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Sampling, Session
from tests.runtime.fake_executor import FakeExecutor, FakeGreedyExecutor

PROMPTS = [[1, 2, 3], [4] * 40, [5], list(range(20)), [9, 8, 7, 6], [11] * 13]


class TestGreedyOnTheDevice:
    """Executors that find the best tokens themselves are asked for nothing else, and nobody can tell."""

    @pytest.mark.parametrize("coarse", [False, True])
    def test_answers_are_those_of_logits_on_the_host(self, coarse):
        requests = [Request(prompt, max_new_tokens=4, continuation_token_ids=[2] * (i % 3))
                    for i, prompt in enumerate(PROMPTS)]  # fmt: skip
        greedy, plain = FakeGreedyExecutor(), FakeExecutor()
        greedy.coarse = plain.coarse = coarse
        assert Session(greedy, None, 2).generate(requests) == Session(plain, None, 2).generate(requests)
        assert greedy.asked == ["best"] * plain.runs

    def test_one_row_that_samples_needs_everybodys_logits(self):
        requests = [
            Request([1], max_new_tokens=3, sampling=Sampling(temperature=0.8, seed=1)),
            Request([2], max_new_tokens=6),
        ]
        greedy = FakeGreedyExecutor()
        assert Session(greedy, None, 2).generate(requests) == Session(FakeExecutor(), None, 2).generate(requests)
        assert greedy.asked == ["logits"] * 2 + ["best"] * 3

    def test_broken_logits_are_the_same_error(self):
        messages = []
        for executor in (FakeExecutor(), FakeGreedyExecutor()):
            executor.poisoned = {3}
            session = Session(executor, None, 1)
            session.add([Request([1])])
            session.step()
            session.step()
            with pytest.raises(InputError) as refused:
                session.step()
            messages.append(refused.value.message)
        assert messages == ["row 0: the engine's logits are not finite after 3 tokens"] * 2
