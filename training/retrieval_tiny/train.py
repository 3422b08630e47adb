"""Train `retrieval-tiny` and write its checkpoint: `python -m training.retrieval_tiny.train --output DIR`.

One CPU thread, fixed seeds, schedules in steps: the same machine and torch version give the same bytes again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch.nn.functional as F

from kvc_trt.tasks.kinds.key_value import WORDS
from training.retrieval_tiny.checkpoint import build_tokenizer, save_checkpoint
from training.retrieval_tiny.course import Course, Stage
from training.retrieval_tiny.data import BatchShape, draw_batch
from training.retrieval_tiny.initialise import initialise
from training.retrieval_tiny.model import ModelShape, SmallLlama
from training.retrieval_tiny.optimiser import Updates, make_deterministic

# Matching by key forms fast in short sequences and not at all in long ones, so the context doubles stage by stage.
CURRICULUM = (
    Stage(BatchShape(context=32, pairs=(2, 4), queries=4, rows=32), 0.90),
    Stage(BatchShape(context=64, pairs=(4, 10), queries=8, rows=64), 0.95),
    Stage(BatchShape(context=128, pairs=(6, 20), queries=12, rows=40), 0.97),
    Stage(BatchShape(context=256, pairs=(8, 40), queries=16, rows=24), 0.98),
    Stage(BatchShape(context=512, pairs=(8, 64), queries=24, rows=12), 0.985),
)

# The rest of the run mixes lengths, so that short ones are not forgotten.
FINAL_SHAPES = (
    (0.05, BatchShape(context=128, pairs=(8, 20), queries=16, rows=40)),
    (0.30, BatchShape(context=256, pairs=(8, 40), queries=24, rows=20)),
    (0.30, BatchShape(context=512, pairs=(8, 64), queries=32, rows=10)),
    (0.25, BatchShape(context=1024, pairs=(8, 96), queries=32, rows=5)),
    (0.10, BatchShape(context=2048, pairs=(8, 96), queries=32, rows=3)),
)


def train(*, seed: int, steps: int, log_every: int = 50) -> SmallLlama:
    """The trained model. Sets torch's thread count, random seed and deterministic mode for the whole process."""
    make_deterministic(seed)
    model = SmallLlama(ModelShape(vocab_size=len(WORDS)))
    initialise(model)
    updates = Updates(model, steps)
    course = Course("retrieval-tiny lengths", seed, CURRICULUM, FINAL_SHAPES)
    start = time.process_time()
    for step in range(steps):
        shape = course.shape(step)
        batch = draw_batch(shape, seed, step)
        logits = model(batch.ids, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        updates.apply(loss)
        course.observe((logits.argmax(dim=-1) == batch.targets).float().mean().item())
        if step % log_every == 0 or step == steps - 1:
            seconds = time.process_time() - start
            print(
                f"step {step:5}  context {shape.context:4}  loss {loss.item():.4f}"
                f"  accuracy {course.accuracy:.4f}  CPU {seconds:.0f} s",
                flush=True,
            )
    return model


def main() -> None:
    """Train, save, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    wall, cpu = time.perf_counter(), time.process_time()
    model = train(seed=arguments.seed, steps=arguments.steps)
    save_checkpoint(model, build_tokenizer(), arguments.output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{arguments.output}: {arguments.steps} steps, {wall:.0f} s wall, {cpu:.0f} s CPU")


if __name__ == "__main__":
    main()
