"""Answers of transformers to prompts of three lengths: past windows, and past the lengths that scaling begins at."""

from __future__ import annotations

from typing import Any

import torch

from kvc_trt import policies
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import WeightSource
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.oracles.family_models import SHAPE

LENGTHS = (5, 90, 700)
STEPS = 8


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def answer_of(model: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of transformers' greedy answer, and the logits [steps,vocab] before each of them."""
    found = model.generate(
        prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=STEPS, eos_token_id=-1, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


def reference_logits(config: ModelConfig, weights: WeightSource, prompt: torch.Tensor, answer: list[int]) -> Any:
    """Return the reference's logits [steps,vocab] before each token of an answer."""
    lengths: dict[str, Any] = {"max_input_len": len(prompt), "max_output_len": STEPS}
    parameters = policies.resolve("full", model=config, token_budget=None, **lengths)
    decoder = ReferenceDecoder(config, weights, method=policies.method(parameters), parameters=parameters)
    first, stored = decoder.prefill(prompt[None], torch.tensor([len(prompt)]))
    return torch.cat([first, *(decoder.decode(torch.tensor([token]), stored) for token in answer[:-1])])
