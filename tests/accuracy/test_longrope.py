"""Models with LongRoPE are measured at every length: rooms within the original length rotate by the short factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.questions import Question
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import open_model
from tests.oracles.family_models import ORIGINAL_LENGTH, SHAPE, written

NEW = 8
LENGTHS = ORIGINAL_LENGTH - NEW, ORIGINAL_LENGTH + 60


def prompt(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator)


def answer(model: Any, length: int) -> list[int]:
    asked = prompt(length)[None]
    more: dict[str, Any] = {"attention_mask": torch.ones_like(asked), "eos_token_id": -1, "do_sample": False}
    return model.generate(asked, max_new_tokens=NEW, **more)[0, length:].tolist()


@pytest.mark.parametrize("variant", [Variant("full", None), Variant("exact-topk", 256)], ids=["engine", "reference"])
def test_answers_of_every_length_are_those_of_transformers(variant: Variant, tmp_path: Path) -> None:
    model = written("phi3-longrope", tmp_path, eos_token_id=SHAPE["vocab_size"] - 1)
    expected = [answer(model, length) for length in LENGTHS]
    with open_model(str(tmp_path)) as opened:
        for length, theirs in [*zip(LENGTHS, expected, strict=True)] * 2:  # back to what was opened before
            room = Room(length, NEW)
            opened.announce([variant], room)
            question = Question(tuple(prompt(length).tolist()), ())
            (found,) = opened.open(variant, room).answer([question], NEW)
            assert list(found) == theirs[: len(found)]
            assert len(found) == NEW or theirs[len(found)] == SHAPE["vocab_size"] - 1
