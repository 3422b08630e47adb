"""Scores with the full cache, greedy: `python -m training.retrieval_text.evaluate CHECKPOINT`.

As long as the output is the answer, its prefix is: so one teacher-forced pass over prompt and answer tells the samples
whose output is the answer, which scores 1, and only the others are decoded token by token. With the full cache the
question at the end of the prompt and the question after it are the same computation: their ids are compared instead.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvc_trt.tasks.kinds import lines, needles
from kvc_trt.tasks.kinds.key_value import END
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample
from training.retrieval_text.tokenizer import build_tokenizer
from training.retrieval_tiny.checkpoint import load_model
from training.retrieval_tiny.model import SmallLlama

TASKS = (
    "niah-single-1",
    "niah-single-2-prose",
    "niah-multikey-1-prose",
    "niah-multikey-2",
    "niah-multivalue",
    "niah-multivalue-prose",
    "niah-multiquery",
    "niah-multiquery-prose",
    "lines",
)
LENGTHS = (256, 512, 1024, 2048)
MAX_NEW_TOKENS = 48


def answer_of(sample: TaskSample) -> str:
    """The whole text that the model was trained to continue the prompt with."""
    if sample.task == lines.NAME:
        return lines.answer(int(sample.answers[0]))
    return needles.answer(sample.meta["asked"], list(sample.answers))


def scores(
    model: SmallLlama, tokenizer: Tokenizer, asked: Task, *, target_tokens: int, samples: int, seed: int
) -> list[float]:
    """The score of each sample, 0 to 1; prompt and answer have at most `target_tokens`."""
    found = []
    for index in range(samples):
        sample = asked.sample(
            seed=seed,
            index=index,
            target_tokens=target_tokens,
            encode=lambda text: tokenizer.encode(text).ids,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        prompt = tokenizer.encode(sample.prompt).ids
        question = tokenizer.encode(sample.question, add_special_tokens=False).ids
        assert prompt == tokenizer.encode(sample.context).ids + question, "asked later, the prompt would be another"
        answer = [*tokenizer.encode(answer_of(sample), add_special_tokens=False).ids, END]
        if _continues(model, prompt, answer):
            found.append(1.0)
        else:
            found.append(asked.score(tokenizer.decode(_greedy(model, prompt)), sample.answers))
    return found


@torch.no_grad()
def _continues(model: SmallLlama, prompt: list[int], answer: list[int]) -> bool:
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    predicted = model(torch.tensor([prompt + answer]), positions).argmax(dim=-1)
    continued: bool = predicted[0].tolist() == answer
    return continued


@torch.no_grad()
def _greedy(model: SmallLlama, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(MAX_NEW_TOKENS):
        following = int(model(torch.tensor([ids]), torch.tensor([len(ids) - 1])).argmax())
        if following == END:
            break
        ids.append(following)
    return ids[len(prompt) :]


def main() -> None:
    """Print score, standard error and the share of samples that are all right, by task and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model(arguments.checkpoint), build_tokenizer()
    print(f"n {arguments.samples}, seed {arguments.seed}: score ± standard error, in percent (all right)")
    for name in arguments.tasks:
        for target in arguments.lengths:
            found = scores(
                model, tokenizer, task(name), target_tokens=target, samples=arguments.samples, seed=arguments.seed
            )
            mean = sum(found) / len(found)
            error = math.sqrt(sum((one - mean) ** 2 for one in found)) / len(found)
            right = sum(one == 1 for one in found)
            print(f"{name:22} {target:5}  {100 * mean:6.2f} ± {100 * error:.2f}  ({right}/{len(found)})", flush=True)


if __name__ == "__main__":
    main()
