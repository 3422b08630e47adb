"""Material for the text tasks: words, keys and values, and prose.

Words are distinct and never end: plain ones, and invented ones where the lists are too short. Keys and values are of
several kinds, and distinct within a sample. Prose stands in for the essays that RULER downloads: its sentences are
grammatical and mean little, hold no digits and no codes, and are seldom repeated, so that a haystack is neither an
answer nor compressible by having been seen before.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Literal, get_args

import numpy as np

from kvc_trt.errors import InputError

Kind = Literal["words", "numbers", "codes", "uuids"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEVEN_DIGITS = (1_000_000, 9_999_999)
FIVE_DIGITS = (10_000, 50_000)
_CODE_LETTERS = 6


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


ADJECTIVES = _split(
    """
    ancient bitter brave bright broad calm careful cheerful clever coarse crooked curious damp dusty eager early
    faint famous fancy fierce formal fragile frozen gentle glad grand grateful hasty hidden hollow honest huge humble
    idle jolly keen lazy lonely loud loyal lucky mellow mild modern modest narrow neat noble patient playful polite
    proud quiet rapid rare restless rough royal rural rustic secret serious shallow sharp shiny silent simple sleepy
    slender smooth sober solemn spare steady stern stiff stout strange sturdy subtle sudden sunny sweet tender thirsty
    tidy timid tough tranquil upright useful vague vivid warm weary wicked willing wise wooden young
    """
)

NOUNS = _split(
    """
    acorn almond anvil apple artist autumn bakery balcony bamboo barn basil beetle berry blanket blossom boulder
    branch bread brick brush bubble butter cactus camera candy canyon cedar cellar cherry chorus cinema cliff clover
    coffee comet copper corner cotton cousin cricket cupboard daisy dancer desert dinner doctor dragon eagle echo
    elbow engine evening fabric farmer feather ferry festival finger flame flower forest fossil fountain garlic
    glacier grape hammer harvest hedge helmet hill honey horizon hotel iceberg island ivory jungle kettle kitchen
    ladder lagoon lantern lemon letter lobster lumber magnet maple marble market meadow melody mirror mountain muffin
    mustard nephew notebook oasis ocean olive onion orchard oyster paddle palace parrot pebble pepper picnic pigeon
    pillow planet pocket pond poster potato prairie puddle pumpkin puzzle quarry rabbit radish rainbow ribbon river
    rocket saddle sailor salad scarf school shadow shelter shovel sparrow spider spoon stable statue street sugar
    summit sunset tailor teacher temple theatre thunder ticket timber tomato trumpet tulip turtle valley velvet
    village violin waffle walnut weather whistle willow window winter wizard yogurt zipper
    """
)

_ONSETS = _split("b d f g k l m n p r s t v z br dr fl gr kl pl sk sl st tr")
_SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in "aeiou")
_INVENTED = len(_SYLLABLES) ** 3

PEOPLE = _split(
    "a baker|a clerk|a fisher|a gardener|a guest|a nurse|a painter|a pilot|a potter|a singer|a weaver|an old friend|"
    "her brother|his aunt|my uncle|our guide|the captain|the children|the cook|the neighbours|the twins",
    "|",
)
_VERBS = _split(
    "admired|borrowed|bought|carried|cleaned|described|drew|dropped|examined|found|gave away|hid|kept|lost|mended|"
    "missed|moved|noticed|painted|praised|remembered|repaired|returned|sold|sorted|traded|washed|watched",
    "|",
)
PLACES = _split(
    "behind the mill|by the harbour|close to the bridge|in the attic|in the garden|near the station|next to the church|"
    "on the hill|on the terrace|outside the town hall|under the old oak|within the walls",
    "|",
)
_TIMES = _split(
    "after the rain|all afternoon|at dawn|before supper|during the fair|every spring|in late autumn|last week|"
    "late in the evening|once a year|that morning|when the bells rang",
    "|",
)
_OPENINGS = _split(
    "As a rule|By chance|For once|In the end|It is said that|Meanwhile|More than once|Of course|Perhaps|Some say that|"
    "To everyone's surprise|Without a word",
    "|",
)
_CONNECTIONS = _split("and|but|so|while|because|although|until|for", "|")


def word_stream(rng: np.random.Generator) -> Iterator[str]:
    """The nouns and adjectives in random order, then words of three syllables; about 1.7 million in all."""
    known = NOUNS + ADJECTIVES
    yield from (known[i] for i in rng.permutation(len(known)))
    step = 30 * int(rng.integers(_INVENTED // 30)) + 7  # shares no factor with _INVENTED: each word comes once
    for i in range(_INVENTED):
        word = _invented(i * step % _INVENTED)
        if word not in known:
            yield word


def _invented(number: int) -> str:
    """The word that `number` in [0, _INVENTED) stands for."""
    rest, last = divmod(number, len(_SYLLABLES))
    first, middle = divmod(rest, len(_SYLLABLES))
    return _SYLLABLES[first] + _SYLLABLES[middle] + _SYLLABLES[last]


def spelled(number: int, letters: int, alphabet: str = ascii_lowercase) -> str:
    """Return `number` as a word of `letters` letters, in the alphabet's digits, the last digit first."""
    return "".join(alphabet[number // len(alphabet) ** i % len(alphabet)] for i in range(letters))


def available(kind: Kind, numbers: tuple[int, int] = SEVEN_DIGITS) -> int:
    """Return the number of different strings of a kind; InputError for an unknown kind."""
    if kind not in KINDS:
        raise InputError(f"kind of key is {kind!r}, expected one of {', '.join(KINDS)}")
    first, last = numbers
    counts: dict[Kind, int] = {
        "words": len(ADJECTIVES) * len(NOUNS),
        "numbers": last - first + 1,
        "codes": 26**_CODE_LETTERS,
        "uuids": 2**122,
    }
    return counts[kind]


def draw_distinct(
    rng: np.random.Generator, kind: Kind, count: int, numbers: tuple[int, int] = SEVEN_DIGITS
) -> list[str]:
    """`count` distinct strings, or all there are if they are fewer.

    `words` are adjective-noun, `numbers` of an inclusive range, `codes` of six letters, `uuids` of version 4.
    """
    count = min(count, available(kind, numbers))
    if kind == "uuids":  # 122 random bits each: distinct for all purposes
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    chosen = rng.choice(available(kind, numbers), size=count, replace=False).tolist()
    if kind == "words":
        return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in chosen]
    if kind == "numbers":
        return [str(numbers[0] + i) for i in chosen]
    return [spelled(i, _CODE_LETTERS) for i in chosen]


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
        text = f"{_one(rng, _OPENINGS)} {clause} {_one(rng, PLACES)}"
    elif shape == 2:
        text = f"{clause} {_one(rng, PLACES)}, {_one(rng, _CONNECTIONS)} {_clause(rng)}"
    else:
        text = f"{_one(rng, _TIMES)} {clause}, {_one(rng, _CONNECTIONS)} {_clause(rng)} {_one(rng, PLACES)}"
    return text[0].upper() + text[1:] + "."


def _clause(rng: np.random.Generator) -> str:
    return f"{_one(rng, PEOPLE)} {_one(rng, _VERBS)} the {_one(rng, ADJECTIVES)} {_one(rng, NOUNS)}"


def _one(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[rng.integers(len(words))]
