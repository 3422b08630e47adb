"""RULER's two tasks of question answering, from SQuAD's `squad.json` and HotpotQA's `hotpotqa.json`.

A prompt is the documents that answer the question among as many others as fit: first those of the same article, then
drawn ones, in an order that is drawn. The rule is RULER's; which documents are drawn is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import field_validator

from kvc_trt.errors import InputError
from kvc_trt.files.inputs import read_json_input
from kvc_trt.tasks.haystack import fit_units
from kvc_trt.tasks.own.published.source import Line, files_named, filled, parameters
from kvc_trt.tasks.task import Encode, sample_rng
from kvc_trt.validation import ForeignSchema, validated

LARGEST = 512 << 20
"""Bytes of a file; HotpotQA's development set has some 46 million."""


@dataclass(frozen=True)
class _Asked:
    question: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    """The documents that answer it."""
    near: tuple[str, ...] = ()
    """Others of the same article."""


class _Answer(ForeignSchema):
    text: str


class _Question(ForeignSchema):
    question: str
    answers: list[_Answer]
    is_impossible: bool = False


class _Paragraph(ForeignSchema):
    context: str
    qas: list[_Question]


class _Article(ForeignSchema):
    paragraphs: list[_Paragraph]


class _Squad(ForeignSchema):
    data: list[_Article]


class _Hotpot(ForeignSchema):
    question: str
    answer: str
    context: list[tuple[str, list[str]]]
    """Titles and sentences."""

    @field_validator("context", mode="before")
    @classmethod
    def _as_tuples(cls, pairs: Any) -> Any:
        return [tuple(one) if isinstance(one, list) else one for one in pairs] if isinstance(pairs, list) else pairs


def ruler_qa(directory: Path, *, encode: Encode, target_tokens: int, samples: int, seed: int) -> Iterator[Line]:
    """`samples` questions of each file that is there, each as long as prompt and answer may be."""
    readers: dict[str, Callable[[Path], list[_Asked]]] = {"squad": _squad, "hotpotqa": _hotpot}
    names = {"squad": "qa-1", "hotpotqa": "qa-2"}
    for name, path in files_named(directory, readers, (".json",)).items():
        asked = readers[name](path)
        if not asked:
            raise InputError(f"{path} has no question with an answer")
        documents = sorted({text for one in asked for text in (*one.own, *one.near)})
        for index, one in enumerate(asked[:samples]):
            yield _line(names[name], index, one, documents, encode, target_tokens, seed)


def _line(
    name: str, index: int, asked: _Asked, documents: list[str], encode: Encode, target_tokens: int, seed: int
) -> Line:
    rule, random = parameters("ruler_qa"), sample_rng(f"ruler-{name}", seed, index)
    far = [text for text in documents if text not in (*asked.own, *asked.near)]
    others = [*(asked.near[i] for i in random.permutation(len(asked.near)))]
    others += [far[i] for i in random.permutation(len(far))]
    order = random.permutation(len(asked.own) + len(others))

    def line(count: int) -> Line:
        chosen = [*asked.own, *others][: len(asked.own) + count]
        shuffled = [chosen[place] for place in order if place < len(chosen)]
        numbered = (
            rule["document"].replace("{number}", str(number)).replace("{text}", text)
            for number, text in enumerate(shuffled, 1)
        )
        return filled(rule["prompt"], "\n\n".join(numbered), asked.question)

    def prompt(count: int) -> str:
        found = line(count)
        return str(found["context"] + found["question"])

    room = rule["max_new_tokens"]
    count = fit_units(
        prompt,
        task=name,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=room,
        minimum=0,
        maximum=len(others),
    )
    return {
        "id": f"{name}/{index}",
        "set": name,
        **line(count),
        "answers": list(dict.fromkeys(asked.answers)),
        "score": rule["score"],
        "max_new_tokens": room,
    }


def _squad(path: Path) -> list[_Asked]:
    found = validated(_Squad, read_json_input(path, LARGEST), str(path))
    return [
        _Asked(
            question.question,
            tuple(answer.text for answer in question.answers),
            (paragraph.context,),
            tuple(other.context for other in article.paragraphs if other.context != paragraph.context),
        )
        for article in found.data
        for paragraph in article.paragraphs
        for question in paragraph.qas
        if question.answers and not question.is_impossible
    ]


def _hotpot(path: Path) -> list[_Asked]:
    found = read_json_input(path, LARGEST)
    if not isinstance(found, list):
        raise InputError(f"{path}: expected a list of questions")
    asked = (validated(_Hotpot, one, f"{path} item {place}") for place, one in enumerate(found))
    return [
        _Asked(one.question, (one.answer,), tuple(f"{title}\n{''.join(text)}" for title, text in one.context))
        for one in asked
    ]
