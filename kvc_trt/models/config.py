"""The architecture of a decoder, independent of where its description was read, and the longest sequence it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvc_trt.errors import InputError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the original context length.

    `linear` divides every position by `factor`; `llama3` interpolates per frequency (Llama 3.1, section 3.4).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one Llama-like decoder; everything a graph or a reference needs besides weights."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads


def longest_sequence(config: ModelConfig) -> int:
    """Return the longest sequence over which the model attends to every token.

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
