"""Ask a whole cache and a compressed one the same questions about a document; print both answers and their bytes.

    python docs/demo/both_caches.py WHOLE COMPRESSED DOCUMENT QUESTIONS

WHOLE and COMPRESSED are engines of one chat model. A line of QUESTIONS is a question, a bar, and words that a right
answer contains. The whole cache is asked all of them, and the compressed one every question that the whole one answers
right, whatever it makes of it.
"""

from __future__ import annotations

import sys
import textwrap
import warnings
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvc_trt import Engine, Output, errors
from kvc_trt.api.side import Side
from kvc_trt.cli.text.run_report import stored_bytes
from kvc_trt.runtime import Request
from kvc_trt.sizes import readable_size

LONGEST_ANSWER = 32
"""In tokens."""


class Question(NamedTuple):
    """What is asked, and words that a right answer contains."""

    text: str
    words: str

    def after(self, document: str) -> str:
        """The prompt."""
        return f"{document}\n\nAnswer from the text above: {self.text}"


class Answer(NamedTuple):
    """What one cache answers, and how likely the whole cache's answer is to it."""

    output: Output
    right: bool
    size: str
    log_probabilities: np.ndarray
    """[tokens of the whole cache's answer, vocabulary]: of each of these tokens, after those before it."""

    @property
    def text(self) -> str:
        """The answer on one line."""
        return " ".join(self.output.text.split())


class Comparison(NamedTuple):
    """What compression did to one answer."""

    equal: bool
    right: bool
    nats: float


def read_questions(path: Path) -> list[Question]:
    """Read one question per line."""
    lines = [line.partition("|") for line in path.read_text(encoding="utf-8").splitlines()]
    return [Question(text.strip(), words.strip()) for text, _, words in lines]


def ask(engine: Engine, document: str, question: Question, whole: Answer | None = None) -> Answer:
    """Ask one question; then follow the whole cache's answer (None: the one just given), a decode step per token."""
    context = engine.context(engine.chat_prompt(question.after(document)))
    output = engine.generate("", context=context, max_new_tokens=LONGEST_ANSWER)
    followed = output if whole is None else whole.output
    session = engine.session()
    (row,) = session.add([Request((), context=context, keep_logits=True)])
    logits = []
    for token in followed.token_ids:
        logits.append(session.take(row).logits)
        session.extend(row, [token])
        session.advance()
    session.remove(row)
    right = question.words.lower() in output.text.lower()
    return Answer(output, right, readable_size(stored_bytes(Side.of(engine), output)), log_softmax(np.asarray(logits)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities that logits stand for, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(whole: np.ndarray, compressed: np.ndarray) -> float:
    """KL(whole || compressed), mean over the tokens of the whole cache's answer, in nats."""
    return float((np.exp(whole) * (whole - compressed)).sum(axis=-1).mean())


def ask_whole(engine: Engine, document: str, questions: list[Question]) -> list[Answer]:
    """Ask the whole cache everything; it keeps every token, so the document may be read once for all questions."""
    prompts = [engine.chat_prompt(question.after(document)) for question in questions]
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    engine.share(engine.context(prompts[0][:shared]))
    return [ask(engine, document, question) for question in questions]


def compare(engine: Engine, document: str, question: Question, whole: Answer) -> Comparison:
    """Ask the compressed cache, and print both answers."""
    compressed = ask(engine, document, question, whole)
    equal = compressed.output.token_ids == whole.output.token_ids
    nats = divergence(whole.log_probabilities, compressed.log_probabilities)
    print(f"\n{question.text} ({question.words})")
    for name, answer in (("whole", whole), ("compressed", compressed)):
        print(wrapped(f"  {name:10}  {answer.size}  {'right' if answer.right else 'WRONG'}  ", answer.text))
    print(f"  {'equal' if equal else 'not equal'}, KL {nats:.3f} nats per token", flush=True)
    return Comparison(equal, compressed.right, nats)


def wrapped(first: str, text: str) -> str:
    """`text` behind `first`, in lines of at most 118 columns."""
    return textwrap.fill(text, 118, initial_indent=first, subsequent_indent=" " * len(first))


def main(whole_engine: str, compressed_engine: str, document_file: str, questions_file: str) -> None:
    """Ask both caches, and say what compression cost."""
    warnings.simplefilter("ignore", errors.BarePromptWarning)  # an empty text goes on with a chat prompt
    document = Path(document_file).read_text(encoding="utf-8").rstrip()
    questions = read_questions(Path(questions_file))
    with Engine.open(whole_engine, prefix_bytes=1 << 30) as engine:
        answers = list(zip(questions, ask_whole(engine, document, questions), strict=True))
    asked = [(question, answer) for question, answer in answers if answer.right]
    print(f"The whole cache answers {len(asked)} of {len(questions)} questions right. Both caches on these:")
    with Engine.open(compressed_engine) as engine:
        compared = [compare(engine, document, question, answer) for question, answer in asked]
    print("\nThe whole cache is wrong on the others, and the compressed one is not asked:")
    for question, answer in answers:
        if not answer.right:
            print(wrapped(f"  {question.text} ({question.words})  ", answer.text))
    equal, right = sum(one.equal for one in compared), sum(one.right for one in compared)
    nats = [one.nats for one in compared]
    print(f"\nOf {len(asked)} answers of the compressed cache {equal} equal the whole cache's, and {right} are right.")
    print(f"KL(whole || compressed): {np.mean(nats):.3f} nats per token; {min(nats):.3f} to {max(nats):.3f} by answer.")


if __name__ == "__main__":
    main(*sys.argv[1:])
