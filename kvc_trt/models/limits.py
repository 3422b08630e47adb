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
    if config.sliding_window is not None and max_sequence_len > config.sliding_window:
        raise _too_long(max_sequence_len, "sliding window", config.sliding_window)
    if max_sequence_len - max_output_len > config.max_position_embeddings:
        raise _too_long(max_sequence_len - max_output_len, "max_position_embeddings", config.max_position_embeddings)


def _too_long(length: int, name: str, limit: int) -> InputError:
    what = "prompt and answer together" if name == "sliding window" else "the prompt"
    return InputError(
        f"{what} may take {length} tokens, but the model's {name} is {limit}",
        hint=f"lower --max-input-len (and --max-output-len) to at most {limit} tokens",
    )
