"""Distinct words without end: plain words, and invented ones where the lists are too short."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    ancient bitter brave bright broad calm careful cheerful clever coarse crooked curious damp dusty eager early
    faint famous fancy fierce formal fragile frozen gentle glad grand grateful hasty hidden hollow honest huge humble
    idle jolly keen lazy lonely loud loyal lucky mellow mild modern modest narrow neat noble patient playful polite
    proud quiet rapid rare restless rough royal rural rustic secret serious shallow sharp shiny silent simple sleepy
    slender smooth sober solemn spare steady stern stiff stout strange sturdy subtle sudden sunny sweet tender thirsty
    tidy timid tough tranquil upright useful vague vivid warm weary wicked willing wise wooden young
    """
)

NOUNS = _words(
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

_ONSETS = _words("b d f g k l m n p r s t v z br dr fl gr kl pl sk sl st tr")
_SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in "aeiou")
_INVENTED = len(_SYLLABLES) ** 3


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
