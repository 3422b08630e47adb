"""Pass key: seven digits appear once, at a chosen depth of a text that repeats itself. What are they?

The needle in a haystack in RocketKV's form [1]: lengths x depths, independent digits, the
instruction before the text and the question after it. Differences: lengths are tokens, not words, so that a sample is
as long as asked; the needle is between two sentences; wording and background are our own.

[1] P. Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
    arXiv:2502.14051.
"""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import FirstItems, fit_units, insert_needles, repeated
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all

NAME = "passkey"
MAX_NEW_TOKENS = 128
DEPTHS = 10
DIGITS = 7

INSTRUCTION = "One sentence of the following text gives a pass key. Find it: you will be asked for it at the end.\n\n"
QUESTION = "\n\nWhat is the pass key that the text gives? The pass key is"
BACKGROUND = (
    "The market opens when the first boats come in.",
    "Baskets are carried up the steps and set down in rows.",
    "A woman with a blue scarf calls out what she has to sell.",
    "Between the stalls two boys chase a yellow dog.",
    "Somebody has left a ladder against the wall of the bakery.",
    "The clock of the church is slow, and nobody minds.",
    "At noon the sun reaches the far corner of the square.",
    "Then the awnings are let down and the talk grows quiet.",
    "An old man folds his newspaper and falls asleep.",
    "Later the wind turns and smells of salt and rope.",
    "The last cart leaves by the gate near the river.",
    "In the evening the stones are washed, and it all begins again.",
)


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
    depth: float | None = None,
) -> TaskSample:
    """Sample `index`; its depth is `depth`, or else the next of ten even steps from 0 to 1 in turn."""
    where = (index % DEPTHS) / (DEPTHS - 1) if depth is None else depth
    if not 0 <= where <= 1:
        raise InputError(f"{NAME}: the depth is {where}, expected 0 (start) to 1 (end)")
    digits = "".join(map(str, sample_rng(NAME, seed, index).integers(10, size=DIGITS)))
    background = FirstItems(repeated(BACKGROUND))

    def context(sentences: int) -> str:
        units = insert_needles(background.first(sentences), [f"The pass key is {digits}."], [where])
        return INSTRUCTION + " ".join(units)

    sentences = fit_units(
        lambda count: context(count) + QUESTION,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
    )
    meta = {"depth": where, "sentences": sentences}
    return TaskSample(NAME, seed, index, context(sentences), QUESTION, (digits,), meta)


TASKS = (
    Task(
        NAME,
        "needles",
        "seven digits at a depth of a text that repeats itself",
        MAX_NEW_TOKENS,
        generate,
        string_match_all,
        MATCH_ALL,
        options={"depth": float},
    ),
)
