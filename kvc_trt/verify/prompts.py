"""The prompts that an engine is verified on: the key-value task's where the model knows it, else random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.models.config import ModelConfig
from kvc_trt.policies import PolicyParameters
from kvc_trt.tasks.key_value import QUERY_TOKENS, RECORD_TOKENS, WORDS, generate

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

MOST_PAIRS = 32
"""Most records of a key-value prompt."""


def random_prompts(config: ModelConfig, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of seeded random tokens: they exercise every operator, whatever the model has learnt."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(config.vocab_size, size=length).tolist() for length in lengths]


def prompt_lengths(parameters: PolicyParameters, longest: int) -> list[int]:
    """Lengths that reach every regime of a policy within `longest` tokens; the longest first."""
    longest = min(longest, parameters.max_input_len)
    wanted = [longest, parameters.prompt_budget + 1, parameters.dense_limit, parameters.window // 2]
    return sorted({max(1, min(longest, length)) for length in wanted}, reverse=True)


def why_not_asked(engine: EngineDirectory) -> str | None:
    """Why the key-value task says nothing about this engine; None if it does."""
    from kvc_trt.runtime import load_tokenizer

    path = engine.tokenizer_path
    if path is None:
        return "the engine has no tokenizer; the key-value task needs retrieval-tiny's vocabulary"
    vocabulary = load_tokenizer(path).get_vocab()
    if engine.model.vocab_size != len(WORDS) or any(vocabulary.get(w) != i for i, w in enumerate(WORDS)):
        return "the tokenizer's vocabulary is not the key-value task's (retrieval-tiny)"
    return None


def task_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Haystacks with a question, where a length has room for one record; filler and the question's token otherwise."""
    prompts = []
    for index, length in enumerate(lengths):
        pairs = min(MOST_PAIRS, (length - 1 - QUERY_TOKENS) // RECORD_TOKENS)
        haystack = generate(seed=seed, index=index, context_tokens=max(length, 9), pairs=max(1, pairs))
        prompts.append(list(haystack.prompt_ids[-length:]))
    return prompts
