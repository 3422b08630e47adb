"""Train `retrieval-text` further, on contexts of up to 16,384 tokens, for studies of prompts that long:

    python -m training.retrieval_text.lengthen --output DIR

One CPU thread and fixed seeds, as in `train.py`. What is shipped stays as it is.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from kvc_trt.models.presets import load_preset
from training.retrieval_text.data import BatchShape
from training.retrieval_text.tokenizer import build_tokenizer
from training.retrieval_text.train import learn
from training.retrieval_tiny.checkpoint import load_model, save_checkpoint
from training.retrieval_tiny.course import Course, Stage
from training.retrieval_tiny.model import SmallLlama
from training.retrieval_tiny.optimiser import make_deterministic

STEPS = 240
SEED = 1
"""Not that of the first training, whose contexts the model has seen."""
LONGEST = 16_384
ROOM = 128
"""Positions for questions and answers behind the longest context."""
CURRICULUM = (
    Stage(BatchShape(context=4096, rows=1, single=16, values=4, queries=4), 0.95),
    Stage(BatchShape(context=8192, rows=1, single=16, values=4, queries=4), 0.95),
)
SHAPES = (
    (0.25, BatchShape(context=1024, rows=3, single=16, values=4, queries=4)),
    (0.30, BatchShape(context=4096, rows=1, single=16, values=4, queries=4)),
    (0.25, BatchShape(context=8192, rows=1, single=16, values=4, queries=4)),
    (0.20, BatchShape(context=LONGEST, rows=1, single=16, values=4, queries=4)),
)


def lengthened(checkpoint: Path, *, seed: int, steps: int) -> SmallLlama:
    """The model of a checkpoint, trained further. Sets torch's thread count, random seed and deterministic mode."""
    make_deterministic(seed)
    short = load_model(checkpoint)
    model = SmallLlama(replace(short.shape, max_position_embeddings=LONGEST + ROOM))
    model.load_state_dict(short.state_dict())
    learn(model, Course("retrieval-text, longer", seed, CURRICULUM, SHAPES), seed=seed, steps=steps, log_every=10)
    return model


def main() -> None:
    """Train, save, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="what it begins with; the shipped model by default")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()

    checkpoint = arguments.checkpoint or load_preset("retrieval-text").checkpoint
    wall, cpu = time.perf_counter(), time.process_time()
    model = lengthened(checkpoint, seed=arguments.seed, steps=arguments.steps)
    save_checkpoint(model, build_tokenizer(), arguments.output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{arguments.output}: {arguments.steps} steps, {wall:.0f} s wall, {cpu:.0f} s CPU")


if __name__ == "__main__":
    main()
