"""Greedy answers of the dense decoder, token by token, against transformers' own generation with its own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt import policies
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.dense_presets import dense_presets
from tests.reference.conftest import FAMILIES

SHIPPED = [name for name in list_presets() if load_preset(name).checkpoint is not None]
STEPS = 24


def greedy(decoder: ReferenceDecoder, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length in one batch: tokens [B,steps] and the logits [B,steps,vocab] after each."""
    lengths = [len(row) for row in prompts]
    logits, cache = decoder.prefill(torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), torch.tensor(lengths))
    steps = [logits]
    for _ in range(STEPS - 1):
        steps.append(decoder.decode(steps[-1].argmax(dim=-1), cache))
    table = torch.stack(steps, dim=1)
    return table.argmax(dim=-1), table


def check(decoder: ReferenceDecoder, model: Any, bar: float) -> None:
    generator = torch.Generator().manual_seed(13)
    rows = [torch.randint(3, decoder.config.vocab_size, (n,), generator=generator) for n in (60, 1, 23)]
    tokens, logits = greedy(decoder, rows)
    assert len(set(tokens[0].tolist())) > 2  # not one word for ever
    for b, row in enumerate(rows):
        answer = model.generate(
            row[None], attention_mask=torch.ones(1, len(row), dtype=torch.int64), do_sample=False,
            max_new_tokens=STEPS, eos_token_id=-1, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert answer.sequences[0, len(row) :].tolist() == tokens[b].tolist()
        torch.testing.assert_close(logits[b], torch.cat(answer.logits), rtol=bar, atol=bar)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_generates_as_transformers(name: str, family: Callable[..., Any]) -> None:
    pair = family(name)
    check(pair.decoder("full", 16, 60, STEPS), pair.hugging_face, 5e-5)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_models_agree_with_transformers(name: str) -> None:
    """transformers and kvc-trt read the same file."""
    import transformers

    path = load_preset(name).checkpoint
    assert path is not None
    checkpoint = Checkpoint(path)
    parameters = policies.resolve(
        "full", model=checkpoint.config, token_budget=None, max_input_len=60, max_output_len=STEPS
    )
    decoder = ReferenceDecoder(checkpoint.config, checkpoint, method=policies.method(parameters), parameters=parameters)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    check(decoder, model, 2e-4)


def test_the_families_cover_every_dense_preset(family: Callable[..., Any]) -> None:
    """A preset of another architecture, rotation, bias or norm needs a family in tests/reference first."""

    def features(config: Any) -> tuple[object, ...]:
        rotation = config.rotary_scaling.kind if config.rotary_scaling else "default"
        window = config.sliding_window is not None
        return config.architecture, rotation, config.qkv_bias, config.output_bias, config.qk_norm, window

    covered = {features(family(name).config) for name in FAMILIES}
    for name in dense_presets():
        assert features(load_preset(name).config) in covered, name
