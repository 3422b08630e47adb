"""The lengths at which stage 2 pays: bytes kept and read as functions of a prompt's length. Arithmetic, no measurement.

Stage 2 reads a part of the tokens that stage 1 keeps, and its bounds take room from it. At equal bytes in memory it can
save bytes of a step, not keep more. So it pays from the length on at which the reads that it saves are a share of a
step's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.page import paragraph, table
from benchmarks.studies.two_stages.cells import OUTPUT
from kvc_trt import policies
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import count_parameters

SHARE = 0.1
"""Share of a step's bytes from which on a saving counts here."""
PROMPTS = (2048, 4096, 8064, 16384, 32768, 65536, 130_944)
BUDGETS = (256, 512, 1024)
BATCHES = (1, 8, 32)
CACHE_BYTES = 2
"""Bytes of one number in the cache: 16-bit floats."""
WEIGHT_BYTES = {"smollm2-135m-instruct": 0.73, "llama3.1-8b": 2.0}
"""Bytes of one parameter: the 98.4 MB of SmolLM2's file, and 16-bit floats."""


@dataclass(frozen=True)
class Step:
    """Pairs of one KV head of one layer."""

    stored: int
    read: int

    def saved(self, weights: float, batch: int) -> float:
        """Return the share of a step's bytes that stage 2 saves beside stage 1 alone in the same memory.

        `weights` are the model's, in pairs of one KV head; a batch shares them.
        """
        return (self.stored - self.read) / (weights / batch + self.stored)


def step_of(config: ModelConfig, length: int, budget: int) -> Step:
    """Return what RocketKV keeps of a prompt, bounds included, and reads."""
    rule = policies.resolve(
        "rocketkv", model=config, token_budget=budget, max_input_len=length, max_output_len=OUTPUT, by_length=False
    )
    kept = min(length, rule.prompt_budget)
    return Step(kept + -(-kept // rule.page_size), min(kept, budget))


def weights_in_pairs(name: str, config: ModelConfig) -> float:
    """Return a model's weights in pairs of one KV head of one layer."""
    pairs = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_size * CACHE_BYTES
    return count_parameters(config) * WEIGHT_BYTES[name] / pairs


def first_length(steps: dict[int, Step], weights: float, batch: int) -> str:
    """Name the first prompt for which the saving counts, or the most that is saved."""
    saved = {length: step.saved(weights, batch) for length, step in steps.items()}
    first = next((length for length, share in saved.items() if share >= SHARE), None)
    return f"{first:,}" if first else f"none, at most {100 * max(saved.values()):.0f} %"


def section() -> str:
    """Write the part of the page."""
    rows = list(_rows())
    heads = ("model", "budget", *(f"{length:,}" for length in PROMPTS), *(f"batch {batch}" for batch in BATCHES))
    return "\n\n".join([
        "## From which length on",
        paragraph(
            "Arithmetic, not measured. In a memory of M pairs, pages of p tokens leave M p/(p+1) for tokens, and a "
            "step reads a part of these. So both stages cannot keep more than the first alone; they read less. The "
            "middle columns are the pairs that `rocketkv` stores of a prompt, bounds included; it reads its "
            "budget. The last "
            f"ones are the shortest of these prompts for which stage 2 saves {100 * SHARE:.0f} % of a step's bytes, "
            "those of the weights and of all caches, beside a stage 1 that reads the same memory whole. Caches have 16 "
            "bits; weights are those of SmolLM2's file, and of 16 bits for Llama. From about 32,000 tokens on the "
            "adaptive division stores little more, so what stage 2 saves then depends on the batch and not on the "
            "length. SmolLM2 itself reads at most 8,192 tokens."
        ),
        table(heads, rows),
    ])  # fmt: skip


def _rows() -> Iterator[tuple[str, ...]]:
    for name in WEIGHT_BYTES:
        config = choose_model(name, None).config
        weights = weights_in_pairs(name, config)
        for budget in BUDGETS:
            steps = {
                length: step_of(config, length, budget) for length in PROMPTS if length < config.max_position_embeddings
            }
            stored = [f"{steps[length].stored:,}" if length in steps else "-" for length in PROMPTS]
            yield name, str(budget), *stored, *(first_length(steps, weights, batch) for batch in BATCHES)
