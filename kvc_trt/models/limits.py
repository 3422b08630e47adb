"""How long a sequence a model can take without a silent change of what it computes."""

from __future__ import annotations

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig


def longest_sequence(config: ModelConfig) -> int:
    """Tokens up to which attention over everything is what the model means.

    With a sliding window W each token sees itself and the W - 1 before it, so W tokens still see all.
    """
    window = config.sliding_window
    return config.max_position_embeddings if window is None else min(window, config.max_position_embeddings)


def check_length(config: ModelConfig, max_sequence_len: int, max_output_len: int = 0) -> None:
    """Raise `InputError` where a sequence (prompt and answer) is longer than the model was made for.

    Beyond a sliding window the whole sequence is refused: a compressed cache of every token is not what such a model
    computes. `max_position_embeddings` (after rotary scaling, as config.json states it) limits the prompt; the last
    `max_output_len` tokens may run past it, as they may in `transformers`.
    """
    longest_prompt = max_sequence_len - max_output_len
    window, positions = config.sliding_window, config.max_position_embeddings
    if window is not None and max_sequence_len > window:
        raise InputError(
            f"prompt and answer may take {max_sequence_len} tokens together; {config.architecture} attends to a "
            f"sliding window of {window} tokens, and attention over everything equals it only up to that length",
            hint=f"--max-input-len {max(1, window - max_output_len)}",
        )
    if longest_prompt > positions:
        raise InputError(
            f"max_input_len is {longest_prompt}, but the model's max_position_embeddings is {positions}",
            hint=f"--max-input-len {positions}",
        )
