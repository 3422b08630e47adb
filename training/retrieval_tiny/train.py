"""Train `retrieval-tiny` and write its checkpoint: `python -m training.retrieval_tiny.train --output DIR`.

One CPU thread, fixed seeds, schedules in steps: the same machine and torch version give the same bytes again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kvc_trt.verify.tasks.randomness import sample_rng
from kvc_trt.verify.tasks.vocabulary import WORDS
from training.retrieval_tiny.checkpoint import save_checkpoint
from training.retrieval_tiny.data import BatchShape, draw_batch
from training.retrieval_tiny.initialise import initialise
from training.retrieval_tiny.model import ModelShape, RetrievalTiny
from training.retrieval_tiny.optimiser import build_optimisers

MATRIX_LR = 0.01
OTHER_LR = 1e-3
WARM_UP_STEPS = 50
CONSTANT_SHARE = 0.5  # of all steps; then linear
FINAL_LR_SHARE = 0.02
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Stage:
    """`promote_at` is the running share of right targets at which the next stage begins."""

    shape: BatchShape
    promote_at: float


# Matching by key forms fast in short sequences and not at all in long ones, so the context doubles stage by stage.
CURRICULUM = (
    Stage(BatchShape(context=32, pairs=(2, 4), queries=4, rows=32), 0.90),
    Stage(BatchShape(context=64, pairs=(4, 10), queries=8, rows=64), 0.95),
    Stage(BatchShape(context=128, pairs=(6, 20), queries=12, rows=40), 0.97),
    Stage(BatchShape(context=256, pairs=(8, 40), queries=16, rows=24), 0.98),
    Stage(BatchShape(context=512, pairs=(8, 64), queries=24, rows=12), 0.985),
)
MIN_STAGE_STEPS = 20
ACCURACY_MEMORY = 0.9

# The rest of the run mixes lengths, so that short ones are not forgotten.
FINAL_SHAPES = (
    (0.05, BatchShape(context=128, pairs=(8, 20), queries=16, rows=40)),
    (0.30, BatchShape(context=256, pairs=(8, 40), queries=24, rows=20)),
    (0.30, BatchShape(context=512, pairs=(8, 64), queries=32, rows=10)),
    (0.25, BatchShape(context=1024, pairs=(8, 96), queries=32, rows=5)),
    (0.10, BatchShape(context=2048, pairs=(8, 96), queries=32, rows=3)),
)


class Course:
    """Which batch comes next: the curriculum while the model learns to match, then the mix of lengths."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stage = 0
        self.stage_steps = 0
        self.accuracy = 0.0

    def shape(self, step: int) -> BatchShape:
        """Shape of the batch of this step."""
        if self.stage < len(CURRICULUM):
            return CURRICULUM[self.stage].shape
        rng = sample_rng("retrieval-tiny lengths", self.seed, step)
        choice = rng.choice(len(FINAL_SHAPES), p=[share for share, _ in FINAL_SHAPES])
        return FINAL_SHAPES[choice][1]

    def observe(self, accuracy: float) -> None:
        """Take the share of right targets of the batch just trained on, and perhaps promote."""
        self.stage_steps += 1
        self.accuracy = ACCURACY_MEMORY * self.accuracy + (1 - ACCURACY_MEMORY) * accuracy
        if self.stage == len(CURRICULUM) or self.stage_steps < MIN_STAGE_STEPS:
            return
        if self.accuracy > CURRICULUM[self.stage].promote_at:
            self.stage, self.stage_steps, self.accuracy = self.stage + 1, 0, 0.0


def learning_rate_share(step: int, steps: int) -> float:
    """Warm-up, constant, then linear down to FINAL_LR_SHARE at the last step."""
    warm_up = (step + 1) / WARM_UP_STEPS
    done = max(0.0, (step + 1) / steps - CONSTANT_SHARE) / (1 - CONSTANT_SHARE)
    return min(warm_up, 1 - (1 - FINAL_LR_SHARE) * done)


def train(*, seed: int, steps: int, log_every: int = 50) -> RetrievalTiny:
    """The trained model. Sets torch's thread count, random seed and deterministic mode for the whole process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    model = RetrievalTiny(ModelShape(vocab_size=len(WORDS)))
    initialise(model)
    optimisers = build_optimisers(model, matrix_lr=MATRIX_LR, other_lr=OTHER_LR)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_share(step, steps))
        for optimiser in optimisers
    ]
    course = Course(seed)
    start = time.process_time()
    for step in range(steps):
        shape = course.shape(step)
        batch = draw_batch(shape, seed, step)
        logits = model(batch.ids, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
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
    save_checkpoint(model, arguments.output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{arguments.output}: {arguments.steps} steps, {wall:.0f} s wall, {cpu:.0f} s CPU")


if __name__ == "__main__":
    main()
