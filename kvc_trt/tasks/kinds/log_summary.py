"""The summary of a log: purchases scattered over a long text, then all of them again, in other words.

Nothing is generated. The score is the likelihood of the true summary, token by token, after the (compressed) log:
tokens that a policy drops make names, prices and places harder to predict. It shows small differences that right and
wrong answers hide, and the model need not follow instructions.

The log is prose in which up to six purchases are stated, as many as the summary has room for, one in each equal part of
the text. The prose names the same people and things, so the words that occur do not give the summary away. The task is
our own: there are no published numbers. SmolLM2-135M-Instruct, asked for six after 1,920 tokens, has 1.58 nats with the
whole prompt, 1.88 with its last 1,024 tokens, 2.09 with 512, and 2.52 with 128, which tell at most one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import FirstItems, fit_units, insert_needles
from kvc_trt.tasks.task import Encode, Task, TaskSample, sample_rng
from kvc_trt.tasks.words import ADJECTIVES, NOUNS, PEOPLE, PLACES, prose

NAME = "log-summary"
MAX_NEW_TOKENS = 128
PURCHASES = 6
"""The most purchases in a log; three fit in 64 tokens of SmolLM2's."""
PRICES = (100, 999)

INTRODUCTION = (
    "This is the log of a small town. It tells who bought what, for how many coins, and where it was left.\n\n"
)
QUESTION = "\n\nSum up all purchases in the order of the log.\nSummary:"


@dataclass(frozen=True)
class _Purchase:
    buyer: str
    thing: str
    price: int
    place: str

    def stated(self) -> str:
        """Return the sale as a sentence of the log."""
        return f"{_capital(self.buyer)} bought the {self.thing} for {self.price} coins and left it {self.place}."

    def summed_up(self) -> str:
        """Return the sale as a sentence of the summary."""
        return f" {_capital(self.buyer)} paid {self.price} coins for the {self.thing}, which is now {self.place}."


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> TaskSample:
    """Sample `index`; its one answer is the summary, of all purchases: as many as `max_new_tokens` has room for."""
    rng = sample_rng(NAME, seed, index)
    purchases, summary = _that_fit(_draw(rng), encode, max_new_tokens)
    count = len(purchases)
    depths = [float(depth) for depth in (np.arange(count) + rng.random(count)) / count]
    log = FirstItems(prose(sample_rng(f"{NAME}/prose", seed, index)))

    def context(sentences: int) -> str:
        stated = [purchase.stated() for purchase in purchases]
        return INTRODUCTION + " ".join(insert_needles(log.first(sentences), stated, depths))

    sentences = fit_units(
        lambda count: context(count) + QUESTION,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
    )
    meta = {"sentences": sentences, "depths": depths}
    return TaskSample(NAME, seed, index, context(sentences), QUESTION, (summary,), meta)


def _draw(rng: np.random.Generator) -> list[_Purchase]:
    """Purchases of which no two share a buyer, a thing, a price or a place."""
    buyers, places = (rng.choice(words, PURCHASES, replace=False).tolist() for words in (PEOPLE, PLACES))
    nouns, adjectives = (rng.choice(words, PURCHASES, replace=False).tolist() for words in (NOUNS, ADJECTIVES))
    first, last = PRICES
    prices = (first + rng.choice(last - first + 1, PURCHASES, replace=False)).tolist()
    things = [f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
    return [_Purchase(*one) for one in zip(buyers, things, prices, places, strict=True)]


def _that_fit(purchases: Sequence[_Purchase], encode: Encode, room: int) -> tuple[Sequence[_Purchase], str]:
    """The first purchases whose summary `room` tokens hold, counted as the tokens that it adds to the question's."""
    before = len(encode(QUESTION))
    for count in range(len(purchases), 0, -1):
        text = "".join(purchase.summed_up() for purchase in purchases[:count])
        if len(encode(QUESTION + text)) - before <= room:
            return purchases[:count], text
    raise InputError(f"{NAME}: the summary of one purchase needs more than {room} tokens", hint="leave more room")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


TASKS = (
    Task(
        NAME,
        "likelihood",
        "the summary of a log, of which up to six purchases are to be remembered",
        MAX_NEW_TOKENS,
        generate,
        None,
        "mean negative log-likelihood of the summary's tokens, in nats; lower is better",
    ),
)
