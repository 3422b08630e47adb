from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime import Sampling
from kvc_trt.runtime.sampling.penalties import Penalties

VOCABULARY = 12
LOGITS = st.lists(st.floats(-50, 50, width=32, allow_subnormal=False), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda values: np.array(values, np.float32)
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)


def penalised(logits, text, answer, **settings):
    penalties = Penalties(Sampling(**settings))
    penalties.read(text)
    for token in answer:
        penalties.answered(token)
        penalties.read([token])
    changed = logits.copy()
    penalties.apply(changed)
    return changed


@given(LOGITS, TOKENS.filter(len), TOKENS, st.sampled_from([0.5, 1.0, 1.1, 1.7, 5.0]))
def test_the_repetition_penalty_is_that_of_transformers(logits, prompt, answer, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), torch.from_numpy(logits)[None]
    )
    found = penalised(logits, prompt, answer, repetition_penalty=penalty)
    np.testing.assert_array_equal(found, expected[0].numpy())


@given(LOGITS, TOKENS, TOKENS, st.sampled_from([-2.0, 0.0, 0.5]), st.sampled_from([-1.0, 0.0, 0.25, 2.0]))
def test_presence_and_frequency_penalty_are_openais_formula(logits, prompt, answer, presence, frequency):
    found = penalised(logits, prompt, answer, presence_penalty=presence, frequency_penalty=frequency)
    for token, logit in enumerate(logits):
        count = answer.count(token)
        assert found[token] == pytest.approx(logit - count * frequency - (count > 0) * presence, rel=1e-5, abs=1e-5)


def test_another_answer_begins_without_the_tokens_of_the_last_but_with_its_text():
    penalties = Penalties(Sampling(presence_penalty=1.0, repetition_penalty=2.0))
    penalties.answered(3)
    penalties.read([3])
    penalties.begin_answer()
    logits = np.ones(5, np.float32)
    penalties.apply(logits)
    assert logits.tolist() == [1, 1, 1, 0.5, 1]


def test_inactive_penalties_keep_no_state():
    penalties = Penalties(Sampling(temperature=1.0))
    assert not penalties.is_active
    penalties.read(range(5))
    penalties.answered(1)
    logits = np.ones(5, np.float32)
    penalties.apply(logits)
    assert logits.tolist() == [1] * 5
