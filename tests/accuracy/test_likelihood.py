from __future__ import annotations

import math

import numpy as np
import pytest

from kvc_trt.accuracy.under_test.answerer import mean_negative_log_likelihood


def test_likelihood_is_the_mean_over_tokens_in_nats():
    shares = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    logits = np.log(shares).astype(np.float32) + 7  # what is added to all logits of a row changes nothing
    expected = -(math.log(0.25) + math.log(0.8)) / 2
    assert mean_negative_log_likelihood(logits, [2, 2]) == pytest.approx(expected, abs=1e-6)


def test_large_logits_do_not_overflow():
    logits = np.array([[3e4, -3e4]], np.float32)
    assert mean_negative_log_likelihood(logits, [0]) == 0
    assert mean_negative_log_likelihood(logits, [1]) == pytest.approx(6e4)


@pytest.mark.parametrize(("rows", "tokens"), [(2, [1]), (1, [1, 1]), (0, [])])
def test_every_token_has_one_row(rows, tokens):
    with pytest.raises(ValueError, match=f"{rows} rows of logits for {len(tokens)} tokens"):
        mean_negative_log_likelihood(np.zeros((rows, 4), np.float32), tokens)
