"""The points of the kernels' sweep: one layer of Llama-3.1-8B under a policy, as `kvc_trt.policies` resolves it.

Nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt import policies
from kvc_trt.config import parse_settings
from kvc_trt.methods.base.parameters import DEFAULT, PolicyParameters
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, CacheFormat
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.presets import load_preset
from kvc_trt.profile.traffic import entries_cached

MODEL = load_preset("llama3.1-8b").config
HEADS, KV_HEADS, HEAD_SIZE = MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.head_size
NEW_TOKENS = 128
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPERATIONS = ("compact", "hybrid", "dense")
FP8 = f"{DEFAULT}:fp8_bounds=true"
"""The default policy with bounds of pages in fp8."""
IN_FORMAT = {name: f"{DEFAULT}:kv_cache={name}" for name in CACHE_FORMATS if name != AUTO}
"""The default policy over caches in each format by its name; bounds of pages are in fp8."""


@dataclass(frozen=True)
class Case:
    """One point of the sweep: every row is half-way through its answer to a prompt that fills the context."""

    batch: int
    context: int
    """Prompt and answer together."""
    budget: int
    dtype: str = "bfloat16"
    policy: str = DEFAULT
    """Its name, and a setting behind a colon (`FP8`)."""
    kv_heads: int = KV_HEADS
    """Fewer than the model's where heads are alike and one stands for all."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * (HEADS // KV_HEADS)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the cache."""
        return ITEM_BYTES[self.dtype]

    @property
    def prompt(self) -> int:
        """n: tokens of the prompt."""
        return self.context - NEW_TOKENS

    @property
    def parameters(self) -> PolicyParameters:
        """The policy's constants for prompts of this length and this token budget."""
        return resolved(self.policy, MODEL, self.budget, self.prompt)

    @property
    def cache_format(self) -> CacheFormat:
        """The format in which the cache stores keys and values."""
        return self.parameters.cache_format

    @property
    def is_in_format(self) -> bool:
        """True if the cache holds codes, which other kernels read."""
        return self.cache_format.keys is not None

    @property
    def pair_bytes(self) -> int:
        """Bytes of the key and the value of one token and KV head in the cache."""
        return self.cache_format.bytes_per_token(HEAD_SIZE, self.item_bytes)

    @property
    def bound_bytes(self) -> int:
        """Bytes of one page bound."""
        return 1 if self.parameters.fp8_bounds else self.item_bytes

    @property
    def entries(self) -> int:
        """m: entries of a compressed row after the step's append."""
        layer = MODEL.num_hidden_layers - 1
        return entries_cached(self.parameters, layer, self.prompt, NEW_TOKENS // 2)

    @property
    def is_compacted(self) -> bool:
        """True if the prompt is longer than its budget, so that tokens are scored."""
        return self.prompt > self.parameters.kept_of(self.prompt)

    @property
    def is_sparse(self) -> bool:
        """True if a step selects pages instead of reading every entry."""
        return self.entries > self.parameters.dense_limit

    @property
    def tokens_read(self) -> int:
        """k_eff: all entries where they fit the budget, else top_k."""
        return min(self.parameters.top_k, self.entries) if self.is_sparse else self.entries

    @property
    def dense_entries(self) -> int:
        """Entries of a row whose cache was never compressed."""
        return self.prompt + NEW_TOKENS // 2


def resolved(policy: str, model: ModelConfig, budget: int, prompt: int) -> PolicyParameters:
    """Return the constants of a policy, with a setting behind a colon if any, for answers of NEW_TOKENS tokens."""
    name, _, setting = policy.partition(":")
    return policies.resolve(
        name, model=model, token_budget=budget, max_input_len=prompt, max_output_len=NEW_TOKENS,
        **parse_settings([setting] if setting else []),
    )  # fmt: skip


def tensor_bytes(operation: str, case: Case) -> int:
    """Return the bytes of the keys and values that one call is given: the bytes that a benchmark has to rotate over, or
    flush."""
    tokens = {"compact": case.prompt, "hybrid": case.parameters.capacity, "dense": case.context}[operation]
    pair = 2 * HEAD_SIZE * case.item_bytes if operation == "compact" else case.pair_bytes
    return case.batch * KV_HEADS * tokens * pair
