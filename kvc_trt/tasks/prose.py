"""Prose without end, generated: what stands in for the essays that RULER downloads.

Sentences are grammatical and mean little. There are no digits and no codes in them, and few are ever repeated, so that
a haystack is neither an answer nor compressible by having been seen before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvc_trt.tasks.word_stream import ADJECTIVES, NOUNS


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


_PEOPLE = _phrases(
    "a baker|a clerk|a fisher|a gardener|a guest|a nurse|a painter|a pilot|a potter|a singer|a weaver|an old friend|"
    "her brother|his aunt|my uncle|our guide|the captain|the children|the cook|the neighbours|the twins"
)
_VERBS = _phrases(
    "admired|borrowed|bought|carried|cleaned|described|drew|dropped|examined|found|gave away|hid|kept|lost|mended|"
    "missed|moved|noticed|painted|praised|remembered|repaired|returned|sold|sorted|traded|washed|watched"
)
_PLACES = _phrases(
    "behind the mill|by the harbour|close to the bridge|in the attic|in the garden|near the station|next to the church|"
    "on the hill|on the terrace|outside the town hall|under the old oak|within the walls"
)
_TIMES = _phrases(
    "after the rain|all afternoon|at dawn|before supper|during the fair|every spring|in late autumn|last week|"
    "late in the evening|once a year|that morning|when the bells rang"
)
_OPENINGS = _phrases(
    "As a rule|By chance|For once|In the end|It is said that|Meanwhile|More than once|Of course|Perhaps|Some say that|"
    "To everyone's surprise|Without a word"
)
_CONNECTIONS = _phrases("and|but|so|while|because|although|until|for")


def prose(rng: np.random.Generator) -> Iterator[str]:
    """Sentences drawn from `rng`, one after the other."""
    while True:
        yield _sentence(rng)


def _sentence(rng: np.random.Generator) -> str:
    shape = rng.integers(4)
    clause = _clause(rng)
    if shape == 0:
        text = f"{clause} {_one(rng, _TIMES)}"
    elif shape == 1:
        text = f"{_one(rng, _OPENINGS)} {clause} {_one(rng, _PLACES)}"
    elif shape == 2:
        text = f"{clause} {_one(rng, _PLACES)}, {_one(rng, _CONNECTIONS)} {_clause(rng)}"
    else:
        text = f"{_one(rng, _TIMES)} {clause}, {_one(rng, _CONNECTIONS)} {_clause(rng)} {_one(rng, _PLACES)}"
    return text[0].upper() + text[1:] + "."


def _clause(rng: np.random.Generator) -> str:
    return f"{_one(rng, _PEOPLE)} {_one(rng, _VERBS)} the {_one(rng, ADJECTIVES)} {_one(rng, NOUNS)}"


def _one(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[rng.integers(len(words))]
