"""Word questions so that an engine's tokenizer can spell them: as key-value records, or as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.tasks import framing
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.kinds.key_value import (
    KEYS,
    QUERY_TOKENS,
    RECORD_TOKENS,
    VALUES_PER_RECORD,
    WORDS,
    Placement,
    generate,
    is_vocabulary,
)
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer, task_tokenizer_of
from kvc_trt.verify.questions.question import PlacedQuestions, TokenQuestion, Wording

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

_MOST_PAIRS = 32
"""The most records in a prompt."""
NEEDLES = "niah-single-1"
PROMPTS = ("log-summary", NEEDLES)
"""The tasks for prompts that are to be continued; the first that the tokenizer can spell is taken."""
_FIRST_TARGET = 2048
"""The shortest text in tokens that is generated; a shorter prompt is the end of such a text."""
_SLACK = 256
"""The number of tokens by which a text may be shorter than its target, its answer included."""
_BESIDE_THE_ANSWER = 4
"""The number of tokens that an answer may have beyond those that are asked for."""


def is_task_vocabulary(engine: EngineDirectory) -> bool:
    """Return whether the model knows the words of the key-value task and no others."""
    tokenizer = engine.tokenizer
    return tokenizer is not None and engine.model.vocab_size == len(WORDS) and is_vocabulary(tokenizer.get_vocab())


@dataclass(frozen=True)
class KeyValueWording:
    """Questions about records of words in filler; an answer is right if all its tokens are."""

    name: str = "key-value records"
    prompt_text: str = "key-value records"
    is_text: bool = False

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Return records in filler with a question; for a length without room for a record, the end of the shortest."""
        prompts = []
        for index, length in enumerate(lengths):
            pairs = min(_MOST_PAIRS, (length - 1 - QUERY_TOKENS) // RECORD_TOKENS)
            haystack = generate(seed=seed, index=index, context_tokens=max(length, 9), pairs=max(1, pairs))
            prompts.append(list(haystack.prompt_ids[-length:]))
        return prompts

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> PlacedQuestions:
        """Return questions about as many records as there are keys and room for."""
        pairs = max(1, min(_MOST_PAIRS, len(KEYS), (context - 3) // RECORD_TOKENS))
        drawn = [
            generate(seed=seed, index=i, context_tokens=context, pairs=pairs, placement=placement)
            for i in range(samples)
        ]
        return PlacedQuestions(
            [TokenQuestion(sample.prompt_ids, sample.query_ids) for sample in drawn],
            VALUES_PER_RECORD,
            lambda number, answer: tuple(answer) == drawn[number].answer_ids,
            f"{pairs} pairs in {context} tokens, seed {seed}",
        )


@dataclass(frozen=True)
class TextWording:
    """Questions about one needle in filler text; an answer is right if it contains the needle's value."""

    framing: Framing
    needles: Task
    text: Task
    end_token_ids: tuple[int, ...]
    is_text: bool = True

    @property
    def name(self) -> str:
        """The task, and whether its prompts use the chat template."""
        return f"{self.needles.name}, {'through the chat template' if self.framing.name == 'chat' else 'plain prompts'}"

    @property
    def prompt_text(self) -> str:
        """The task that makes the prompts for the model to continue."""
        return f"text ({self.text.name})"

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Return for each length the last tokens of a text that ends with a question."""
        prompts = []
        for index, length in enumerate(lengths):
            sample = self._draw(self.text, seed, index, max(length, _FIRST_TARGET) + _SLACK, None)
            prompts.append(list(self.framing.ids(sample, query_aware=True).context[-length:]))
        return prompts

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> PlacedQuestions:
        """Return questions for needles at random depths; InputError if the shortest is longer than `context`."""
        drawn = [self._draw(self.needles, seed, index, context, 0) for index in range(samples)]
        framed = [self.framing.ids(sample, query_aware=placement == "in_prompt") for sample in drawn]
        said = max(len(self.framing.continuation(sample)) for sample in drawn)
        depths = ", ".join(f"{sample.meta['depths'][0]:.2f}" for sample in drawn)
        return PlacedQuestions(
            [TokenQuestion(ids.context, ids.question) for ids in framed],
            said + _BESIDE_THE_ANSWER,
            lambda number, answer: self._is_right(drawn[number], answer),
            f"{self.name}, {context} tokens, seed {seed}, depths {depths}",
        )

    def _draw(self, chosen: Task, seed: int, index: int, target_tokens: int, room: int | None) -> TaskSample:
        encode = self.framing.encode
        return chosen.sample(seed=seed, index=index, target_tokens=target_tokens, encode=encode, max_new_tokens=room)

    def _is_right(self, sample: TaskSample, answer: Sequence[int]) -> bool:
        assert self.needles.score is not None
        ends = [place for place, token in enumerate(answer) if token in self.end_token_ids]
        said = self.framing.tokenizer.decode(list(answer[: ends[0]] if ends else answer))
        return self.needles.score(said, sample.answers) == 1


def text_wording(engine: EngineDirectory) -> TextWording | str:
    """Return the wording as text, or the reason why the engine's tokenizer cannot spell it."""
    assert engine.tokenizer_file is not None
    tokenizer = task_tokenizer_of(engine.tokenizer_file)
    template = engine.chat_template
    try:
        framed = framing.plain(tokenizer.tokenizer)
        if template is not None:
            framed = framing.chat(tokenizer.tokenizer, template)
        spelled = [name for name in PROMPTS if _can_spell(tokenizer, framed, task(name))]
        _check_spelling(tokenizer, framed, task(NEEDLES))
    except InputError as error:
        return error.message
    return TextWording(framed, task(NEEDLES), task(spelled[0]), tuple(engine.model.eos_token_ids))


def _can_spell(tokenizer: TaskTokenizer, framed: Framing, chosen: Task) -> bool:
    try:
        _check_spelling(tokenizer, framed, chosen)
    except InputError:
        return False
    return True


def _check_spelling(tokenizer: TaskTokenizer, framed: Framing, chosen: Task) -> None:
    tokenizer.check_spelling(chosen.sample(seed=0, index=0, target_tokens=_FIRST_TARGET + _SLACK, encode=framed.encode))


def wording_for(engine: EngineDirectory) -> Wording | str:
    """Return the wording that the engine's tokenizer can spell, or the reason why there is none."""
    if engine.tokenizer is None:
        return "the engine has no tokenizer: nothing can be asked of it in words"
    if is_task_vocabulary(engine):
        return KeyValueWording()
    return text_wording(engine)
