"""The architecture of a decoder, independent of where its description was read, and the longest sequence it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from kvc_trt.errors import InputError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the original context length.

    `linear` divides every position by `factor`; `llama3` interpolates per frequency (Llama 3.1, section 3.4).
    `dynamic` (NTK-aware, by the sequence's length) changes nothing up to `max_position_embeddings`, where engines end.
    """

    kind: Literal["linear", "llama3", "dynamic"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): frequencies between two numbers of rotations are interpolated."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Cosines and sines are multiplied by it: attention is sharper by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """True: the two ends of the interpolation are whole channels."""
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al., arXiv 2402.13753): each frequency is divided by a factor of its own.

    There is a list for sequences within the original length and one for longer ones. Keys are stored rotated, so an
    engine has one of them: that of its longest sequence.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    """Cosines and sines are multiplied by it, as YaRN's are."""
    kind: Literal["longrope"] = "longrope"

    def factors(self, longest: int) -> tuple[float, ...]:
        """Return the list of an engine whose longest sequence has `longest` tokens."""
        return self.long_factors if longest > self.original_max_position_embeddings else self.short_factors


RotaryScaling: TypeAlias = RopeScaling | Yarn | LongRope


@dataclass(frozen=True)
class Linear:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464): a layer whose state does not grow with the tokens it has seen.

    A causal convolution over the last `kernel` tokens, channel by channel, makes queries, keys and values; the state
    of a head maps keys to values. Consecutive value heads share a key head.
    """

    LENGTH_EPSILON: ClassVar[float] = 1e-6
    """Added to the squared length of a query or key before it is divided by its length."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, over the tokens up to its own."""

    window: int | None = None
    """The number of tokens that a sliding layer attends to, its own included; None: all."""
    rotary: bool = True
    """False: queries and keys do not depend on positions (NoPE, Kazemnejad et al., arXiv 2305.19466)."""
    rotary_base: float | None = None
    """The base of a sliding layer whose positions are not scaled; None: base and scaling are the model's."""
    gated: bool = False
    """True: the result of attention is multiplied by the sigmoid of a product of its input, channel by channel."""
    linear: Linear | None = None
    """In place of attention over tokens; the other fields then mean nothing."""


@dataclass(frozen=True)
class Norms:
    """The norms of a decoder. `ModelConfig.norm_epsilon` is the constant of all of them."""

    kind: Literal["rms", "layer"] = "rms"
    """Root mean square (arXiv 1910.07467), or LayerNorm (arXiv 1607.06450)."""
    weight: bool = True
    """False: nothing is multiplied by (OLMo, arXiv 2402.00838)."""
    bias: bool = False
    place: Literal["before", "after", "both", "parallel", "shared"] = "before"
    """Attention and feed-forward read a norm of the residual stream (before), add a norm of their result to it (after),
    or both. In parallel, both read the same residual stream: each a norm of its own, or a shared one."""
    heads: Literal["each", "together", "apart"] = "each"
    """The span of a norm of queries or keys (`ModelConfig.qk_norm`): one head, or all of them; apart, it is LayerNorm
    of one head, and each head has weights of its own. The others are root-mean-square norms."""

    @property
    def reads_norm(self) -> bool:
        """True if attention and feed-forward read a norm of the residual stream."""
        return self.place != "after"

    @property
    def adds_norm(self) -> bool:
        """True if norms of their results are added to the stream."""
        return self.place in ("after", "both")

    @property
    def side_by_side(self) -> bool:
        """True if the feed-forward block reads the residual stream that attention reads."""
        return self.place in ("parallel", "shared")


Activation: TypeAlias = Literal["silu", "gelu", "gelu-tanh", "relu"]


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward block: down(activation(gate(x)) * up(x)) if it is gated, else down(activation(up(x)))."""

    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """Gated feed-forward blocks of which a router chooses some for each token (Shazeer et al., arXiv 1701.06538).

    A token's router logits rank the experts, equal ones the lowest index first. The weights of the chosen ones are
    their parts of the softmax over all logits. The activation is `FeedForward.activation`, which must be "silu".
    """

    count: int
    chosen: int
    """Experts that compute one token."""
    size: int
    """Inner channels of each expert."""
    normalised: bool = True
    """True: the weights of a token's experts are divided by their sum, as if the softmax were over those alone."""
    shared_size: int = 0
    """Inner channels of an expert that reads every token, times the sigmoid of a product; 0 if there is none."""
    dense_layers: tuple[int, ...] = ()
    """The layers, in order, whose feed-forward block is that of `ModelDescription.feed_forward`."""


@dataclass(frozen=True)
class ClampedGate:
    """The gate of experts that have biases: down(g sigmoid(gain g) (u + 1)), g and u being gate(x) and up(x) clamped.

    The router has a bias too, and all three matrices of every expert (gpt-oss)."""

    limit: float
    """g is at most so large, and the magnitude of u."""
    gain: float


@dataclass(frozen=True)
class ModelDescription:
    """The parts of a decoder and how they are put together; the defaults are Llama's.

    The graphs, the reference and the torch backend compute each part in one place, and none asks for a family.
    """

    attention: tuple[Attention, ...] = (Attention(),)
    """Repeated over the layers: layer i has `attention[i % len(attention)]`."""
    norms: Norms = Norms()
    feed_forward: FeedForward = FeedForward()
    experts: Experts | None = None
    """In place of the feed-forward block, except in `Experts.dense_layers`."""
    rotary_channels: int | None = None
    """Channels of a head that rotate; None for all."""
    attention_scale: float | None = None
    """The factor of query times key; None for 1/sqrt(head_size)."""
    attention_softcap: float | None = field(default=None, repr=False)
    """A bound c on the logits of attention: l becomes c tanh(l / c) (arXiv 2408.00118); None for none."""
    attention_sinks: bool = field(default=False, repr=False)
    """True if each query head has a logit of its own in the softmax's denominator, and nothing else of it."""
    clamped_gate: ClampedGate | None = field(default=None, repr=False)
    """The gate of `experts`; None for that of `feed_forward`, without biases."""
    embedding_scale: float = 1.0
    learned_positions: bool = False
    """True: the residual stream begins with a vector of the token and one of its position."""
    residual_scale: float = 1.0
    """The factor of the updates that attention and feed-forward add to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = field(default=None, repr=False)
    """The soft cap of the logits of the vocabulary, after their scale."""

    @property
    def later_parts(self) -> dict[str, object]:
        """The parts that the first description could not have, by name; a false value where there is none."""
        names = ("attention_softcap", "attention_sinks", "clamped_gate", "logit_softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def identity(self) -> str:
        """Every part as text; of the later parts those that there are."""
        return repr(self) + "".join(f" {name}={value!r}" for name, value in self.later_parts.items() if value)


@dataclass(frozen=True)
class ModelConfig:
    """Shape, constants and parts of one decoder; everything a graph or a reference needs besides weights."""

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
    rotary_scaling: RotaryScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """The window of every layer; None if some attend to everything, and layers then have windows of their own."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    description: ModelDescription = field(default=ModelDescription(), repr=False)

    @property
    def identity(self) -> str:
        """Every field as text; that of Llama's parts does not name them, and is the same in all versions."""
        own = self.description
        return repr(self) if own == ModelDescription() else f"{self!r}{own.identity}"

    @property
    def rotary_channels(self) -> int:
        """The channels of a head that rotate, in a layer that rotates."""
        channels = self.description.rotary_channels
        return self.head_size if channels is None else channels

    def attention(self, layer: int) -> Attention:
        """Return the attention of a layer."""
        one = self.description.attention[layer % len(self.description.attention)]
        return one if self.sliding_window is None else replace(one, window=self.sliding_window)

    def experts(self, layer: int) -> Experts | None:
        """Return the experts of a layer; None if its feed-forward block is dense."""
        experts = self.description.experts
        return None if experts is None or layer in experts.dense_layers else experts

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers whose state does not grow with the sequence (`Attention.linear`), in order."""
        return tuple(i for i in range(self.num_hidden_layers) if self.attention(i).linear is not None)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that cache keys and values, in order: all but the linear ones."""
        return tuple(i for i in range(self.num_hidden_layers) if self.attention(i).linear is None)

    @property
    def rotary_bases(self) -> tuple[float, ...]:
        """The bases that layers have of their own (`Attention.rotary_base`), ascending."""
        return tuple(sorted({one.rotary_base for one in self.description.attention if one.rotary_base is not None}))

    def windows(self, longest: int) -> tuple[int, ...] | None:
        """Return the window of each layer that slides in sequences of up to `longest` tokens, 0 for the others.

        A window that covers the longest sequence hides nothing: that layer attends to everything, and is no sliding one
        unless it has a rotary base of its own, by which no policy rotates. None if no layer slides.
        """

        def window_of(one: Attention) -> int:
            slides = one.window is not None and (one.window < longest or one.rotary_base is not None)
            return min(one.window or 0, longest) if slides else 0

        windows = tuple(window_of(self.attention(layer)) for layer in range(self.num_hidden_layers))
        return windows if any(windows) else None

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads


def longest_compressible(config: ModelConfig) -> int:
    """Return the longest sequence in which some layer attends to every token: beyond it, a policy acts on none.

    With a sliding window W each token sees itself and the W - 1 before it, so W tokens still see all.
    """
    windows = [config.attention(layer).window for layer in config.cached_layers]
    positions = config.max_position_embeddings
    return min([positions, max(window or positions for window in windows)]) if windows else positions


def check_length(config: ModelConfig, max_sequence_len: int, max_output_len: int = 0) -> None:
    """Raise `InputError` where a sequence (prompt and answer) is longer than the model was made for.

    `max_position_embeddings` (after rotary scaling, as config.json states it) limits the prompt; the last
    `max_output_len` tokens may run past it, as they may in `transformers`.
    """
    longest_prompt, positions = max_sequence_len - max_output_len, config.max_position_embeddings
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind == "dynamic" and max_sequence_len > positions:
        raise InputError(
            f"prompt and answer may take {max_sequence_len} tokens together; dynamic rotary scaling would rotate all "
            f"tokens anew with each one beyond {positions}, and a cache holds them rotated",
            hint=f"--max-input-len {max(1, positions - max_output_len)}",
        )
    if config.description.learned_positions and max_sequence_len > positions:
        raise InputError(
            f"prompt and answer may take {max_sequence_len} tokens together; {config.architecture} has learned the "
            f"vectors of {positions} positions",
            hint=f"--max-input-len {max(1, positions - max_output_len)}",
        )
    if longest_prompt > positions:
        raise InputError(
            f"max_input_len is {longest_prompt}, but the model's max_position_embeddings is {positions}",
            hint=f"--max-input-len {positions}",
        )
