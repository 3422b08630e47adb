"""Multi-instruction: several facts in prose, each asked for by a separate instruction in one prompt.

Retrieval by one query can succeed because the few tokens it attends to are kept; several separate instructions compete
for the same budget. The form follows the multi-instruction argument of SnapKV [1] (what matters depends on the
instruction); the task is our own and has no published numbers.

[1] Y. Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
"""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import FirstItems, fit_units, insert_needles
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all
from kvc_trt.tasks.words import available, draw_distinct, prose

NAME = "multi-instruction"
MAX_NEW_TOKENS = 128
FACTS = 8
INSTRUCTIONS = 3

OPENING = "Every locker has a number. Remember the numbers: instructions to give them follow the text.\n\n"


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
    facts: int = FACTS,
    instructions: int = INSTRUCTIONS,
) -> TaskSample:
    """Sample `index`: `facts` needles at random depths, `instructions` of which are asked for, in random order."""
    if not 1 <= instructions <= facts <= available("words"):
        raise InputError(
            f"{NAME}: {instructions} instructions and {facts} facts, expected 1 <= instructions <= facts <= "
            f"{available('words')}"
        )
    rng = sample_rng(NAME, seed, index)
    keys = draw_distinct(rng, "words", facts)
    numbers = draw_distinct(rng, "numbers", facts)
    depths = [float(depth) for depth in rng.random(facts)]
    asked = [int(fact) for fact in rng.permutation(facts)[:instructions]]
    needles = [f"Locker {key} has number {number}." for key, number in zip(keys, numbers, strict=True)]
    haystack = FirstItems(prose(sample_rng(f"{NAME}/prose", seed, index)))

    def context(sentences: int) -> str:
        return OPENING + " ".join(insert_needles(haystack.first(sentences), needles, depths))

    orders = [f"{i}. Give {keys[fact]}." for i, fact in enumerate(asked, start=1)]
    question = "\n\n" + "\n".join(orders) + "\nNumbers:"
    sentences = fit_units(
        lambda count: context(count) + question,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        minimum=0,
    )
    answers = tuple(numbers[fact] for fact in asked)
    meta = {"sentences": sentences, "depths": [depths[fact] for fact in asked], "asked": [keys[fact] for fact in asked]}
    return TaskSample(NAME, seed, index, context(sentences), question, answers, meta)


TASKS = (
    Task(
        NAME,
        "needles",
        "several numbers in prose, each asked for by an instruction of its own",
        MAX_NEW_TOKENS,
        generate,
        string_match_all,
        MATCH_ALL,
        options={"facts": int, "instructions": int},
    ),
)
