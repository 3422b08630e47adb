from __future__ import annotations

import pytest

from kvc_trt.errors import InputError
from kvc_trt.models import check_length, longest_compressible

WINDOWED = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}


def test_a_window_of_every_layer_ends_what_policies_act_on_and_not_the_sequence(tiny_config):
    config = tiny_config(**WINDOWED)
    assert longest_compressible(config) == 64
    check_length(config, 256, 14)
    assert config.windows(64) is None
    assert config.windows(65) == (64,) * config.num_hidden_layers


def test_one_layer_that_attends_to_everything_leaves_a_policy_the_whole_sequence(tiny_config):
    config = tiny_config(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=64, max_window_layers=1
    )
    assert longest_compressible(config) == 256
    assert config.windows(65) == (0, 64)


def test_positions_limit_the_prompt_and_the_answer_may_run_past(tiny_config):
    config = tiny_config()
    assert longest_compressible(config) == 256
    check_length(config, 256)
    check_length(config, 300, 44)
    with pytest.raises(InputError, match="max_position_embeddings is 256") as caught:
        check_length(config, 300, 43)
    assert caught.value.hint == "--max-input-len 256"


def test_a_window_wider_than_the_positions_does_not_lengthen_them(tiny_config):
    config = tiny_config(architectures=["MistralForCausalLM"], sliding_window=4096)
    assert longest_compressible(config) == 256
    with pytest.raises(InputError, match="max_position_embeddings"):
        check_length(config, 257)
