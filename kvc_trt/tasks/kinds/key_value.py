"""Key-value retrieval in filler: which four words belong to this key?

A prompt is `<bos>`, filler words, and records `<record> key v1 v2 v3 v4` at random gaps; the query is `<query> key`.
It is LongEval's line retrieval [1] in the vocabulary of `retrieval-tiny`, and like MQAR [2] it needs exact recall of
text anywhere in the context. An answer is right only if all four words are.

A record is one key and one word from each value alphabet. All lists are disjoint, so the role of a token is known from
its id alone, and a policy that drops a token of a record cannot hide the loss behind a word that happens to fit.

[1] D. Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", LMSYS, 2023.
[2] S. Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv:2312.04927, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.tasks.task import sample_rng

Ids = NDArray[np.int64]
Placement = Literal["in_prompt", "after_compaction"]


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIALS = ("<pad>", "<bos>", "<end>", "<unk>", "<record>", "<query>")

KEYS = _split(
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
    _split(
        """
        amber auburn azure beige black blue bronze brown cobalt copper coral crimson cyan emerald golden gray
        green indigo ivory lilac magenta maroon navy orange pink purple red scarlet silver turquoise white yellow
        """
    ),
    _split(
        """
        badger bear beaver bison camel cheetah cobra crane deer dolphin eagle falcon ferret fox gecko goose
        heron horse koala lemur leopard lynx moose otter owl panda puffin rabbit salmon tiger walrus zebra
        """
    ),
    _split(
        """
        athens berlin boston bristol cairo chicago dakar delhi denver dublin geneva hanoi havana helsinki kyoto lagos
        lima lisbon london madrid milan montreal nairobi oslo paris prague quito rome seoul tokyo vienna warsaw
        """
    ),
    _split(
        """
        one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
        seventeen eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six
        twenty-seven twenty-eight twenty-nine thirty thirty-one thirty-two
        """
    ),
)

FILLER = _split(
    """
    the of and to in that it was for on with as at by from they
    we she he had have were which there been when who will more out up about
    into them then some could other than time only its now over did many after before
    through where much your way well down should because each those people still long here again
    """
)

WORDS = SPECIALS + KEYS + tuple(word for alphabet in VALUES for word in alphabet) + FILLER

PAD, BOS, END, UNKNOWN, RECORD, QUERY = range(len(SPECIALS))


def is_vocabulary(vocabulary: Mapping[str, int]) -> bool:
    """True if a tokenizer's words are this task's words and no others."""
    return len(vocabulary) == len(WORDS) and all(vocabulary.get(word) == i for i, word in enumerate(WORDS))


def _id_ranges() -> list[range]:
    """Ids of each word list, in the order in which WORDS concatenates them."""
    sizes = [len(words) for words in (SPECIALS, KEYS, *VALUES, FILLER)]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


_, KEY_IDS, *VALUE_IDS, FILLER_IDS = _id_ranges()

VALUES_PER_RECORD = len(VALUE_IDS)
RECORD_TOKENS = 2 + VALUES_PER_RECORD
QUERY_TOKENS = 2


@dataclass(frozen=True)
class KeyValueSample:
    """One question and its answer, as token ids and as words."""

    prompt_ids: tuple[int, ...]
    query_ids: tuple[int, ...]  # fed through decode after the prompt; empty where the prompt ends with the query
    answer_ids: tuple[int, ...]

    @property
    def prompt_text(self) -> str:
        """The prompt in words, without `<bos>`, which the tokenizer adds."""
        return text_of(self.prompt_ids[1:])

    @property
    def query_text(self) -> str:
        """The late question in words, to be encoded without special tokens: it continues a prompt."""
        return text_of(self.query_ids)

    @property
    def answer_text(self) -> str:
        """The four values, without the `<end>` that the model adds."""
        return text_of(self.answer_ids)


def generate(
    *, seed: int, index: int, context_tokens: int, pairs: int, placement: Placement = "in_prompt"
) -> KeyValueSample:
    """Sample `index` of the data set that `seed` names; the prompt has exactly `context_tokens` tokens.

    `in_prompt` ends the prompt with the query, so an observation window sees the question. `after_compaction` keeps the
    query out of the prompt: a policy then chooses the tokens to evict without knowing the question. Records and
    question of a sample are the same in both.
    """
    if placement not in ("in_prompt", "after_compaction"):
        raise InputError(f"placement is {placement!r}, expected 'in_prompt' or 'after_compaction'")
    query_room = QUERY_TOKENS if placement == "in_prompt" else 0
    _require_fit(context_tokens, pairs, query_room)

    rng = sample_rng("key_value", seed, index)
    asked = int(rng.integers(pairs))  # before the haystack, whose draws depend on its length
    haystack, keys, values = draw_haystack(rng, context_tokens - query_room, pairs)
    prompt = tuple(haystack.tolist())
    query = (QUERY, int(keys[asked]))
    answer = tuple(values[asked].tolist())
    if placement == "in_prompt":
        return KeyValueSample(prompt + query, (), answer)
    return KeyValueSample(prompt, query, answer)


def draw_haystack(rng: np.random.Generator, length: int, pairs: int) -> tuple[Ids, Ids, Ids]:
    """`<bos>`, filler and records: ids [length], the distinct keys in record order [pairs], their values [pairs, 4]."""
    keys = rng.choice(KEY_IDS, size=pairs, replace=False)
    values = np.stack([rng.choice(alphabet, size=pairs) for alphabet in VALUE_IDS], axis=1)

    # Records and filler words are the items of one line; a uniform choice of items to be records makes the gaps random.
    fillers = length - 1 - RECORD_TOKENS * pairs
    items = np.sort(rng.choice(fillers + pairs, size=pairs, replace=False))
    starts = 1 + items + (RECORD_TOKENS - 1) * np.arange(pairs)

    ids = rng.choice(FILLER_IDS, size=length)
    ids[0] = BOS
    records = np.column_stack([np.full(pairs, RECORD), keys, values])
    ids[starts[:, None] + np.arange(RECORD_TOKENS)] = records
    return ids, keys, values


def _require_fit(context_tokens: int, pairs: int, query_room: int) -> None:
    if not 1 <= pairs <= len(KEY_IDS):
        raise InputError(f"key-value retrieval: pairs is {pairs}, expected 1 to {len(KEY_IDS)} (keys are distinct)")
    needed = 1 + RECORD_TOKENS * pairs + query_room
    if context_tokens < needed:
        raise InputError(
            f"key-value retrieval: {pairs} pairs need {needed} tokens, the context has {context_tokens}",
            hint=f"use at most {max(0, context_tokens - query_room - 1) // RECORD_TOKENS} pairs, or a longer context",
        )


def text_of(ids: tuple[int, ...]) -> str:
    """The words of `ids`, joined as the tokenizer's decoder joins them."""
    return " ".join(WORDS[i] for i in ids)
