"""The words of keys, `adjective-noun`; both lists are disjoint, so that the role of a word is known from itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvc_trt.verify.tasks.vocabulary import KEYS

_ADJECTIVES = """
    able agile alert amiable ample ancient awake basic bold brave brief bright broad busy calm careful
    cheerful chilly civil clean clear clever cosy crisp curious daring deep eager early earnest easy exact
    fair famous fancy fast fine firm fresh friendly gentle glad grand handy happy hardy honest humble
    idle jolly keen kind large lively local loud loyal lucky mellow merry mighty mild modest narrow
    neat nimble noble patient plain polite proud quick ready robust rustic sharp shiny silent smooth solid
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = KEYS
KEY_WORDS = len(ADJECTIVES) * len(NOUNS)

_CONSONANTS, _VOWELS = tuple("bdfgklmnprstvz"), tuple("aeiou")
_INVENTED_LETTERS = 6


def key(number: int) -> str:
    """Key `number` of the KEY_WORDS there are."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"


def key_stream(rng: np.random.Generator) -> Iterator[str]:
    """All keys once, in random order."""
    return map(key, rng.permutation(KEY_WORDS).tolist())


def word_stream(rng: np.random.Generator) -> Iterator[str]:
    """Distinct words without end: those of both lists in random order, then invented ones."""
    known = np.array(ADJECTIVES + NOUNS)
    seen = set(known.tolist())
    yield from rng.permutation(known).tolist()
    while True:
        letters = [rng.choice(_VOWELS if place % 2 else _CONSONANTS) for place in range(_INVENTED_LETTERS)]
        if (word := "".join(letters)) not in seen:
            seen.add(word)
            yield word
