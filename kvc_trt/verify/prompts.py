"""The prompts that an engine is verified on, and how a batch of them is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.config import ModelConfig
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.policies import PolicyParameters
from kvc_trt.tasks.key_value import QUERY_TOKENS, RECORD_TOKENS, WORDS, generate

if TYPE_CHECKING:
    from kvc_trt.engine import Engine

Int64 = NDArray[np.int64]
MOST_PAIRS = 32
"""Records of a key-value prompt."""


@dataclass(frozen=True)
class Batch:
    """Prompts of one prefill: input_ids [B,S], right padded to a multiple of the prompt block; prompt_lengths [B]."""

    input_ids: Int64
    prompt_lengths: Int64

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def rows(self) -> list[list[int]]:
        """The prompts without padding."""
        return [self.input_ids[i, :n].tolist() for i, n in enumerate(self.prompt_lengths)]


def batch_of(prompts: Sequence[Sequence[int]]) -> Batch:
    """Pad `prompts` as a session does."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    ids = np.zeros((len(prompts), -(-int(lengths.max()) // PROMPT_BLOCK) * PROMPT_BLOCK), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Batch(ids, lengths)


def random_prompts(config: ModelConfig, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of seeded random tokens: they exercise every operator, whatever the model has learnt."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(config.vocab_size, size=length).tolist() for length in lengths]


def prompt_lengths(parameters: PolicyParameters, longest: int) -> list[int]:
    """Lengths that reach every regime of a policy within `longest` tokens; the longest first."""
    longest = min(longest, parameters.max_input_len)
    wanted = [longest, parameters.prompt_budget + 1, parameters.dense_limit, parameters.window // 2]
    return sorted({max(1, min(longest, length)) for length in wanted}, reverse=True)


def why_not_asked(engine: Engine) -> str | None:
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
