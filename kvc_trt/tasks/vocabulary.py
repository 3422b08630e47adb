"""The words of the retrieval task, and the ids they have in the tokenizer of `retrieval-tiny`.

A record is one key and one word from each value alphabet. All lists are disjoint, so the role of a token is known from
its id alone, and a policy that drops a token of a record cannot hide the loss behind a word that happens to fit.
"""

from __future__ import annotations

from itertools import accumulate, pairwise


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIALS = ("<pad>", "<bos>", "<end>", "<unk>", "<record>", "<query>")

KEYS = _words(
    """
    anchor apron arrow atlas banjo banner barrel basket beacon bell bench bottle bowl bridge broom bucket
    button cabin cable candle canoe canvas carpet castle chain chalk chimney circle clock cloak coin compass
    cottage cradle crown curtain dagger desk diary dome door drawer drum engine fence fiddle flag flask
    flute fountain furnace gate glove goblet guitar hammer harbor harp helmet hinge hook hourglass jacket jar
    kettle key kite ladder lamp lantern lever library lock loom magnet mantle map marble mask medal
    mirror mitten motor needle net oar organ oven paddle parcel pencil pendulum piano pillow pipe plough
    pocket pulley puzzle quilt raft ribbon ring rope rudder saddle sail scarf shovel spade spoon statue
    stove sword table tablet teapot tent thimble torch tower trumpet tunnel umbrella vase violin wagon wheel
    """
)

VALUES = (
    _words(
        """
        amber auburn azure beige black blue bronze brown cobalt copper coral crimson cyan emerald golden gray
        green indigo ivory lilac magenta maroon navy orange pink purple red scarlet silver turquoise white yellow
        """
    ),
    _words(
        """
        badger bear beaver bison camel cheetah cobra crane deer dolphin eagle falcon ferret fox gecko goose
        heron horse koala lemur leopard lynx moose otter owl panda puffin rabbit salmon tiger walrus zebra
        """
    ),
    _words(
        """
        athens berlin boston bristol cairo chicago dakar delhi denver dublin geneva hanoi havana helsinki kyoto lagos
        lima lisbon london madrid milan montreal nairobi oslo paris prague quito rome seoul tokyo vienna warsaw
        """
    ),
    _words(
        """
        one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
        seventeen eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six
        twenty-seven twenty-eight twenty-nine thirty thirty-one thirty-two
        """
    ),
)

FILLER = _words(
    """
    the of and to in that it was for on with as at by from they
    we she he had have were which there been when who will more out up about
    into them then some could other than time only its now over did many after before
    through where much your way well down should because each those people still long here again
    """
)

WORDS = SPECIALS + KEYS + tuple(word for alphabet in VALUES for word in alphabet) + FILLER

PAD, BOS, END, UNKNOWN, RECORD, QUERY = range(len(SPECIALS))


def _id_ranges() -> list[range]:
    """Ids of each word list, in the order in which WORDS concatenates them."""
    sizes = [len(words) for words in (SPECIALS, KEYS, *VALUES, FILLER)]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


_, KEY_IDS, *VALUE_IDS, FILLER_IDS = _id_ranges()


def text_of(ids: tuple[int, ...]) -> str:
    """The words of `ids`, joined as the tokenizer's decoder joins them."""
    return " ".join(WORDS[i] for i in ids)
