from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvc_trt.engine.resolution.head_pattern import read_head_pattern
from kvc_trt.errors import InputError
from kvc_trt.methods.duo_attention import best_heads
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

LLAMA = load_preset("llama3.1-8b").config
PATTERN = tuple(tuple((layer * 8 + head) % 97 / 97 for head in range(8)) for layer in range(32))


def resolved(budget: int, sequence: int = 32768, **overrides: Any) -> PolicyParameters:
    return resolve(
        "duo-attention", model=LLAMA, token_budget=budget, max_input_len=sequence - 128, max_output_len=128,
        head_scores=PATTERN, **overrides,
    )  # fmt: skip


def retrieval_heads(parameters: PolicyParameters) -> int:
    return sum(map(sum, parameters.retrieval_heads or ()))


@pytest.mark.parametrize(
    ("budget", "heads", "mean", "streaming"),
    [
        (1024, 3, 1016.5, (128, 512)),
        (4096, 27, 4028.5, (128, 512)),
        (256, 0, 256, (51, 205)),
        (640, 0, 640, (128, 512)),
    ],
)
def test_heads_and_slots_match_the_golden_values(
    budget: int, heads: int, mean: float, streaming: tuple[int, int]
) -> None:
    """256 KV heads, a sequence of 32,768 tokens."""
    parameters = resolved(budget)
    assert retrieval_heads(parameters) == heads
    assert (parameters.sinks, parameters.recent) == streaming
    slots = heads * 32768 + (256 - heads) * parameters.capacity
    assert slots / 256 == pytest.approx(mean, abs=0.05)


def test_heads_of_a_layer_are_in_at_most_two_groups() -> None:
    table = [[True] * 8, [True, False] * 4, *[[False] * 8] * 30]
    scores = tuple(tuple(map(float, row)) for row in table)
    parameters = resolve(
        "duo-attention", model=LLAMA, token_budget=3000, max_input_len=32640, max_output_len=128, head_scores=scores
    )
    count = retrieval_heads(parameters)
    assert count == int((3000 - 640) / (32768 - 640) * 256) == 18
    sizes = [[group.kv_heads for group in parameters.groups(layer)] for layer in range(3)]
    assert sizes[:2] == [[None], [None]]  # heads of score 0 follow by layer and head
    assert sizes[2] == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert [group.parameters.capacity for group in parameters.groups(2)] == [32768, 640]
    assert [group.parameters.capacity for group in parameters.groups(3)] == [640]


def test_ties_go_to_the_lower_layer_and_head() -> None:
    assert best_heads([[0.5, 0.7], [0.7, 0.5]], 2) == ((False, True), (True, False))
    assert best_heads([[0.5, 0.5], [0.5, 0.5]], 3) == ((True, True), (True, False))


def test_a_sequence_within_the_budget_keeps_everything() -> None:
    assert retrieval_heads(resolved(1024, sequence=1000)) == 256


def test_heads_that_all_keep_everything_need_no_pattern() -> None:
    parameters = resolve("duo-attention", model=LLAMA, token_budget=1024, max_input_len=900, max_output_len=100)
    assert retrieval_heads(parameters) == 256
    assert {parameters.layer_capacity(layer) for layer in range(32)} == {1000}


def test_streaming_heads_may_not_hold_more_than_the_budget() -> None:
    with pytest.raises(InputError, match="the token budget is 256; expected at least 640: 128 sinks and 512 recent"):
        resolved(256, sinks=128, recent=512)


def test_recent_tokens_are_what_other_sinks_leave() -> None:
    assert resolved(512, sinks=200).recent == 312


def test_a_pattern_file_is_read_and_clipped_to_0_and_1(tmp_path: Path) -> None:
    path = tmp_path / "pattern.tsv"
    path.write_text("0.5\t1.02\n-0.01\t1e-3\n")
    assert read_head_pattern(path) == ((0.5, 1.0), (0.0, 0.001))


@pytest.mark.parametrize(
    ("content", "message"),
    [("0.1\tx\n", "line 1: 'x'; expected a number"), ("nan\n", "line 1: 'nan'"), (None, "cannot read")],
)
def test_an_invalid_pattern_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "pattern.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_head_pattern(path)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "3 heads the whole cache"),
        (PATTERN[:2], "2 rows of .8. scores; expected 32 layers of 8 KV heads"),
        ((*PATTERN[:-1], (0.5,) * 7), "expected 32 layers"),
        ((*PATTERN[:-1], (2.0,) * 8), "a score is 2.0"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(scores: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(
            "duo-attention", model=LLAMA, token_budget=1024, max_input_len=32640, max_output_len=128, head_scores=scores
        )


def test_a_pattern_for_another_policy_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(InputError, match="policy rocketkv has no head_pattern"):
        resolve("rocketkv", model=LLAMA, token_budget=512, max_input_len=4096, max_output_len=128, head_scores=PATTERN)
