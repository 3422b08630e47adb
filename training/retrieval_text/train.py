"""Train `retrieval-text` and write its checkpoint: `python -m training.retrieval_text.train --output DIR`.

One CPU thread, fixed seeds, schedules in steps: the same machine and torch version give the same bytes again.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch.nn.functional as F

from training.retrieval_text.contexts import Texts
from training.retrieval_text.data import IGNORED, BatchShape, draw_batch
from training.retrieval_text.initialise import initialise, shape_for
from training.retrieval_text.tokenizer import build_tokenizer
from training.retrieval_tiny.checkpoint import save_checkpoint
from training.retrieval_tiny.course import Course, Stage
from training.retrieval_tiny.model import SmallLlama
from training.retrieval_tiny.optimiser import Updates, make_deterministic

STEPS = 1200
CURRICULUM = (
    Stage(BatchShape(context=64, rows=20, single=4, values=2, queries=1), 0.85),
    Stage(BatchShape(context=128, rows=14, single=7, values=2, queries=1), 0.90),
    Stage(BatchShape(context=256, rows=9, single=8, values=3, queries=2), 0.95),
    Stage(BatchShape(context=512, rows=6, single=10, values=3, queries=2), 0.97),
)

# What is found in 256 tokens is found in 2,048 as well: long contexts cost most and are seen seldom.
FINAL_SHAPES = (
    (0.20, BatchShape(context=128, rows=14, single=7, values=2, queries=2)),
    (0.40, BatchShape(context=256, rows=9, single=8, values=3, queries=3)),
    (0.25, BatchShape(context=512, rows=6, single=10, values=3, queries=3)),
    (0.10, BatchShape(context=1024, rows=3, single=16, values=4, queries=4)),
    (0.05, BatchShape(context=2048, rows=2, single=16, values=4, queries=4)),
)


def train(*, seed: int, steps: int) -> SmallLlama:
    """The trained model. Sets torch's thread count, random seed and deterministic mode for the whole process."""
    make_deterministic(seed)
    model = SmallLlama(shape_for(build_tokenizer().get_vocab_size()))
    initialise(model)
    learn(model, Course("retrieval-text lengths", seed, CURRICULUM, FINAL_SHAPES), seed=seed, steps=steps)
    return model


def learn(model: SmallLlama, course: Course[BatchShape], *, seed: int, steps: int, log_every: int = 25) -> None:
    """Train the model on the batches of a course, in place."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = Texts(build_tokenizer())
    updates = Updates(model, steps)
    start = time.process_time()
    for step in range(steps):
        shape = course.shape(step)
        batch = draw_batch(texts, shape, seed, step)
        logits = model.of_branches(batch.ids, batch.branches)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        updates.apply(loss)
        asked = batch.targets != IGNORED
        course.observe((logits.argmax(dim=-1) == batch.targets)[asked].float().mean().item())
        if step % log_every == 0 or step == steps - 1:
            seconds = time.process_time() - start
            print(
                f"step {step:5}  context {shape.context:5}  loss {loss.item():.4f}"
                f"  accuracy {course.accuracy:.4f}  CPU {seconds:.0f} s",
                flush=True,
            )


def main() -> None:
    """Train, save, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    wall, cpu = time.perf_counter(), time.process_time()
    model = train(seed=arguments.seed, steps=arguments.steps)
    save_checkpoint(model, build_tokenizer(), arguments.output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{arguments.output}: {arguments.steps} steps, {wall:.0f} s wall, {cpu:.0f} s CPU")


if __name__ == "__main__":
    main()
