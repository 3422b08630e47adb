"""How long a sequence a model can take without a silent change of what it computes."""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig


def longest_sequence(config: ModelConfig) -> int:
    """Tokens of prompt and answer together up to which attention over everything is what the model means.

    With a sliding window W each token sees itself and the W - 1 before it, so W tokens still see all.
    """
    window = config.sliding_window
    return config.max_position_embeddings if window is None else min(window, config.max_position_embeddings)


def check_length(config: ModelConfig, max_sequence_len: int) -> None:
    """Raise `InputError` where max_input_len + max_output_len is more than the model was made for.

    A sliding window is refused beyond its width, because a compressed cache of every token is not what such a model
    was trained on. `max_position_embeddings` counts after rotary scaling, as config.json states it.
    """
    limit = longest_sequence(config)
    if max_sequence_len <= limit:
        return
    reason = "sliding window" if limit == config.sliding_window else "max_position_embeddings"
    raise InputError(
        f"max_input_len + max_output_len is {max_sequence_len}, but the model's {reason} is {limit}",
        hint=f"lower --max-input-len or --max-output-len to {limit} together",
    )
