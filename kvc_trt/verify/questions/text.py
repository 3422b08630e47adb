"""Needles as text, for any model with a tokenizer: through its chat template where it has one, else plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.tasks import framing
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.key_value import Placement
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer, load_task_tokenizer
from kvc_trt.verify.questions.question import Question, QuestionSet

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

NEEDLES = "niah-single-1"
PROMPTS = ("log-summary", NEEDLES)
"""Where prompts to be continued come from: the first that the tokenizer can spell."""
_FIRST_TARGET = 2048
"""Tokens of text from which a shorter prompt is the end."""
_SLACK = 256
"""Tokens by which a text may be shorter than its target, its answer included."""
_BESIDE_THE_ANSWER = 4
"""Tokens that an answer may have beside what is asked for."""


@dataclass(frozen=True)
class TextWording:
    """One needle in filler, asked for in a sentence; an answer is right if it contains what the needle says."""

    framing: Framing
    needles: Task
    text: Task
    end_token_ids: tuple[int, ...]
    is_text: bool = True

    @property
    def name(self) -> str:
        """The task, and whether it is asked through the template."""
        return f"{self.needles.name}, {'through the chat template' if self.framing.name == 'chat' else 'plain prompts'}"

    @property
    def prompt_text(self) -> str:
        """The task that prompts to be continued come from."""
        return f"text ({self.text.name})"

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """The last tokens of texts, which end with a question, of each length."""
        prompts = []
        for index, length in enumerate(lengths):
            sample = self._draw(self.text, seed, index, max(length, _FIRST_TARGET) + _SLACK, None)
            prompts.append(list(self.framing.ids(sample, query_aware=True).context[-length:]))
        return prompts

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> QuestionSet:
        """Needles at random depths. InputError where the shortest question is longer than `context`."""
        drawn = [self._draw(self.needles, seed, index, context, 0) for index in range(samples)]
        framed = [self.framing.ids(sample, query_aware=placement == "in_prompt") for sample in drawn]
        said = max(len(self.framing.continuation(sample)) for sample in drawn)
        depths = ", ".join(f"{sample.meta['depths'][0]:.2f}" for sample in drawn)
        return QuestionSet(
            [Question(ids.context, ids.question) for ids in framed],
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
    """Text as the engine's tokenizer spells it, or why it cannot."""
    assert engine.tokenizer_path is not None
    tokenizer = load_task_tokenizer(str(engine.tokenizer_path))
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
