"""Every kind of policy has one line about the tokens that stay and the tokens that are read."""

from __future__ import annotations

from typing import Any

import pytest

from kvc_trt.cli.text.policy import describe_parameters
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import available, resolve

LLAMA = load_preset("llama3.1-8b").config
FALLING = tuple(tuple(1 - (8 * layer + head) / 256 for head in range(8)) for layer in range(32))
BUDGETS = [1000] * 8 + [100] * 24


def described(policy: str, budget: int | str = 512, **overrides: Any) -> str:
    resolved = resolve(policy, model=LLAMA, token_budget=budget, max_input_len=32640, max_output_len=128, **overrides)
    return describe_parameters(resolved)


@pytest.mark.parametrize(
    ("policy", "overrides", "expected"),
    [
        ("full", {}, "the cache keeps everything (32,768 slots); a step reads all of them"),
        ("snapkv-gqa", {}, "384 prompt tokens kept of each KV head, 512 slots (window 32, pool kernel 7); a step"),
        ("snapkv", {}, "96 prompt tokens kept of each query head, 224 slots"),
        ("snapkv-gqa", {"budget": "20%"}, "kept, the window and 20% of the others, of each KV head"),
        ("pyramidkv", {}, "68 to 719 prompt tokens kept by layer of each KV head, 196 to 847 slots"),
        ("rocketkv", {}, "a step reads 256 tokens (page size 3, 61 channels; dense up to 512 tokens)"),
        ("quest", {}, "a step reads 512 tokens (whole pages of 16, each query head its own; dense up to 512 tokens); "
                      "the first 2 layers are not compressed"),
        ("sparq", {}, "and the current one, scored by 2 of each key's channels, the mean value in place of the others"),
        ("sparq", {"reallocate": False}, "scored by 2 of each key's channels; dense"),
        ("exact-topk", {}, "a step reads 512 tokens (the best, found by reading all of them, each query head its own"),
        ("exact-topk-group", {}, "one list per KV head"),
        ("streaming-llm", {}, "512 tokens kept of each KV head while it answers (4 first, 508 last), 512 slots"),
        ("streaming-llm", {"positions": "cache"}, "512 slots, positions counted in the cache"),
        ("sliding-window", {}, "512 tokens kept of each KV head while it answers (512 last), 512 slots"),
        ("h2o", {}, "512 tokens kept of each KV head while it answers (256 last, 256 most attended), 513 slots"),
        ("duo-attention", {}, "512 tokens kept of each KV head while it answers (128 first, 384 last), 512 slots"),
    ],
)  # fmt: skip
def test_kept_and_read_tokens_of_each_policy_are_described_in_words(
    policy: str, overrides: dict[str, Any], expected: str
) -> None:
    assert expected in described(policy, **overrides)


@pytest.mark.parametrize(
    ("policy", "overrides", "expected"),
    [
        ("rocketkv", {"layer_budget": "squeeze", "layer_budgets": BUDGETS},
         "100 to 1,000 prompt tokens kept by layer of each KV head, 228 to 1,128 slots"),
        ("rocketkv", {"layer_budget": "squeeze", "layer_budgets": BUDGETS, "skip_layers": 8},
         "100 prompt tokens kept by layer of each KV head, 228 slots"),
        ("snapkv-gqa", {"layer_budget": "squeeze-online"},
         "32 to 768 prompt tokens (384 on average) kept by layer of each KV head, 896 slots"),
        ("streaming-llm", {"layer_budget": "squeeze", "layer_budgets": BUDGETS},
         "100 to 1,000 tokens kept by layer of each KV head while it answers (4 first, last), 100 to 1,000 slots"),
        ("h2o", {"layer_budget": "squeeze", "layer_budgets": BUDGETS},
         "100 to 1,000 tokens kept by layer of each KV head while it answers (last, most attended), "
         "101 to 1,001 slots"),
    ],
)  # fmt: skip
def test_budgets_by_layer_are_described_in_words(policy: str, overrides: dict[str, Any], expected: str) -> None:
    assert expected in described(policy, **overrides)


def test_retrieval_and_streaming_heads_are_described_in_words() -> None:
    text = described("duo-attention", budget=4096, head_scores=FALLING)
    assert "27 of 256 KV heads keep everything (32,768 slots); 640 tokens kept of each other KV head while" in text


def test_every_policy_has_a_line() -> None:
    for name, *_ in available():
        text = described(name)
        assert text.startswith("prompts to 32,640, answers to 128 tokens; ")
        assert "  " not in text
