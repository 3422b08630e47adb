from __future__ import annotations

import pytest

from kvc_trt.errors import InputError
from kvc_trt.models import check_length, longest_sequence

WINDOWED = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}


def test_a_sliding_window_limits_prompt_and_answer_together(tiny_config):
    config = tiny_config(**WINDOWED)
    assert longest_sequence(config) == 64
    check_length(config, 64)
    check_length(config, 64, 14)
    with pytest.raises(InputError, match="sliding window of 64") as caught:
        check_length(config, 65, 14)
    assert caught.value.hint == "--max-input-len 50"


def test_positions_limit_the_prompt_and_the_answer_may_run_past(tiny_config):
    config = tiny_config()
    assert longest_sequence(config) == 256
    check_length(config, 256)
    check_length(config, 300, 44)
    with pytest.raises(InputError, match="max_position_embeddings is 256") as caught:
        check_length(config, 300, 43)
    assert caught.value.hint == "--max-input-len 256"


def test_a_window_wider_than_the_positions_does_not_lengthen_them(tiny_config):
    config = tiny_config(architectures=["MistralForCausalLM"], sliding_window=4096)
    assert longest_sequence(config) == 256
    with pytest.raises(InputError, match="max_position_embeddings"):
        check_length(config, 257)
