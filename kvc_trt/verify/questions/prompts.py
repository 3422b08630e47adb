"""Prompts of random tokens, and the lengths of the prompts with which an engine is verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvc_trt.models.config import ModelConfig
from kvc_trt.policies import PolicyParameters


def random_prompts(config: ModelConfig, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return prompts of seeded random tokens, which exercise every operator of any model, trained or not."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(config.vocab_size, size=length).tolist() for length in lengths]


def prompt_lengths(parameters: PolicyParameters, longest: int) -> list[int]:
    """Return lengths up to `longest` tokens that reach every regime of a policy, the longest first."""
    longest = min(longest, parameters.max_input_len)
    wanted = [longest, parameters.longest_whole + 1, parameters.dense_limit, parameters.window // 2]
    return sorted({max(1, min(longest, length)) for length in wanted}, reverse=True)
