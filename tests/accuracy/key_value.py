"""Key-value retrieval as a task of the suite: the task that `retrieval-tiny` was trained for, in its own words.

It is not one of RULER's families: only a model that knows `<record>` and `<query>` can answer it.
"""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.key_value import QUERY_TOKENS, RECORD_TOKENS, generate
from kvc_trt.tasks.task import Encode, TaskSample

NAME = "key-value"
MAX_NEW_TOKENS = 5
"""Four words and the end."""
_MOST_PAIRS = 32
_PROBE = "<record> <query>"


def generate_key_value(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
    pairs: int | None = None,
) -> TaskSample:
    """Sample `index`: `pairs` records in filler (None: 32, or as many as fit), one key asked.

    InputError where the target has no room for a record, or the tokenizer does not know the marks as one token each.
    """
    if len(encode(_PROBE)) != 1 + QUERY_TOKENS:
        raise InputError(f"{NAME}: the tokenizer does not know <record> and <query>; only retrieval-tiny's does")
    length = target_tokens - max_new_tokens
    if pairs is None:
        pairs = max(1, min(_MOST_PAIRS, (length - 1 - QUERY_TOKENS) // RECORD_TOKENS))
    haystack = length - QUERY_TOKENS
    sample = generate(seed=seed, index=index, context_tokens=haystack, pairs=pairs, placement="after_compaction")
    return TaskSample(
        NAME,
        seed,
        index,
        sample.prompt_text,
        f" {sample.query_text}",
        (sample.answer_text,),
        {"pairs": pairs},
    )
