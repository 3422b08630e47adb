"""The key-value task, for a model whose vocabulary is that task's own (retrieval-tiny)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.tasks.key_value import (
    KEYS,
    QUERY_TOKENS,
    RECORD_TOKENS,
    VALUES_PER_RECORD,
    WORDS,
    Placement,
    generate,
    is_vocabulary,
)
from kvc_trt.verify.questions.question import Question, QuestionSet

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

_MOST_PAIRS = 32
"""Most records of a prompt."""


def is_task_vocabulary(engine: EngineDirectory) -> bool:
    """Whether the model knows the task's words and no others."""
    tokenizer = engine.tokenizer
    return tokenizer is not None and engine.model.vocab_size == len(WORDS) and is_vocabulary(tokenizer.get_vocab())


@dataclass(frozen=True)
class KeyValueWording:
    """Records of words in filler; an answer is right if every token of it is."""

    name: str = "key-value records"
    prompt_text: str = "key-value records"
    is_text: bool = False

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Haystacks with a question, where a length has room for one record; else the end of the shortest one."""
        prompts = []
        for index, length in enumerate(lengths):
            pairs = min(_MOST_PAIRS, (length - 1 - QUERY_TOKENS) // RECORD_TOKENS)
            haystack = generate(seed=seed, index=index, context_tokens=max(length, 9), pairs=max(1, pairs))
            prompts.append(list(haystack.prompt_ids[-length:]))
        return prompts

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> QuestionSet:
        """As many records as there are keys and room for."""
        pairs = max(1, min(_MOST_PAIRS, len(KEYS), (context - 3) // RECORD_TOKENS))
        drawn = [
            generate(seed=seed, index=i, context_tokens=context, pairs=pairs, placement=placement)
            for i in range(samples)
        ]
        return QuestionSet(
            [Question(sample.prompt_ids, sample.query_ids) for sample in drawn],
            VALUES_PER_RECORD,
            lambda number, answer: tuple(answer) == drawn[number].answer_ids,
            f"{pairs} pairs in {context} tokens, seed {seed}",
        )
