from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime.logprobs import LEAST, token_logprobs

LOGITS = st.lists(
    st.one_of(st.sampled_from([-np.inf, -3.0, 0.5]), st.floats(-80, 80, width=32)), min_size=2, max_size=30
).filter(lambda values: max(values) > -np.inf)


@given(LOGITS, st.integers(0, 20), st.data())
def test_logprobs_are_logarithms_of_softmax_best_first(values, count, data):
    logits = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    expected = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1).tolist()
    found = token_logprobs(logits, token, count)
    assert found.logprob == pytest.approx(max(expected[token], LEAST), abs=1e-5)
    order = sorted((i for i in range(len(values)) if logits[i] > -np.inf), key=lambda i: (-logits[i], i))[:count]
    assert [one for one, _ in found.top] == order
    assert [logprob for _, logprob in found.top] == pytest.approx([expected[i] for i in order], abs=1e-5)


def test_a_token_without_a_probability_is_least():
    assert token_logprobs(np.array([0.0, -np.inf], np.float32), 1, 2) == (LEAST, ((0, 0.0),))
