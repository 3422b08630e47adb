"""Our RocketKV in the units of TensorRT-LLM's: the `sparse_attention_config` of its LLM API.

Three of its fields have other units than ours. Its page sizes are powers of two, so ours are rounded to the nearest one
(by ratio: 3 becomes 4, 5 becomes 4). Channels are scaled accordingly, which keeps the bytes read for scoring: half the
pages allow twice the channels. And `topk` counts pages in its TRTLLM attention, tokens in its VANILLA attention; ours
are always tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.rocketkv_budget import traffic
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT

AttentionBackend = Literal["TRTLLM", "VANILLA"]
KtCacheDtype = Literal["bfloat16", "float8_e5m2"]
Positive = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RocketSparseAttention(_Strict):
    """Fields of TensorRT-LLM's RocketSparseAttentionConfig, which refuses others."""

    algorithm: Literal["rocket"] = "rocket"
    window_size: Positive
    kernel_size: Positive
    prompt_budget: Positive
    page_size: Positive
    topk: Positive
    topr: Positive
    kt_cache_dtype: KtCacheDtype

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("expected a power of two")
        return value

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("expected an odd number")
        return value


class KvCache(_Strict):
    """Cache settings that RocketKV requires: blocks of an evicted prompt cannot be reused by another request."""

    enable_block_reuse: Literal[False] = False


class LlmApiConfiguration(_Strict):
    """The arguments of `LLM(...)` that an export sets."""

    backend: Literal["pytorch"] = "pytorch"
    attn_backend: AttentionBackend
    sparse_attention_config: RocketSparseAttention
    kv_cache_config: KvCache = KvCache()
    enable_chunked_prefill: Literal[False] = False
    max_batch_size: Positive
    max_seq_len: Positive
    max_num_tokens: Positive
    """Without chunking a prompt is one forward pass, so this must be at least its length."""


def changes(
    parameters: PolicyParameters, rocket: RocketSparseAttention, attention: AttentionBackend
) -> tuple[str, ...]:
    """Numbers that differ from the policy's own, and why."""
    found = []
    if rocket.page_size != parameters.page_size:
        found.append(
            f"page_size {parameters.page_size} -> {rocket.page_size} (a power of two), "
            f"topr {parameters.top_r} -> {rocket.topr} with it, so that scoring reads as much"
        )
    if attention == "TRTLLM":
        tokens = rocket.topk * rocket.page_size
        found.append(f"topk counts pages: {parameters.top_k} tokens -> {rocket.topk} pages ({tokens} tokens)")
    if not parameters.eviction.evicts:
        found.append(f"prompt_budget {rocket.prompt_budget} is longer than any prompt: nothing is evicted")
    return tuple(found)


LIMITS = (
    "GPUs of compute capability 10.0 and newer only (its page-sparse kernels: SM100, SM103); no H100, no H200",
    "its PyTorch backend only; a prototype interface that may change between its releases",
    "no block reuse between requests (kv_cache_config.enable_block_reuse: false is asserted)",
    "no chunked prefill, so max_num_tokens must hold the longest prompt; no disaggregated serving",
    "prompts are written to the cache twice: peak memory of prefill does not fall",
)


ALIKE = "eviction: one prompt budget and one pool kernel for every prompt (policy: those of the prompt's own length)"


def differences(
    parameters: PolicyParameters, rocket: RocketSparseAttention, attention: AttentionBackend
) -> tuple[str, ...]:
    """Differences between TensorRT-LLM's computation and the policy."""
    shared = (
        f"a row of at most {parameters.dense_limit} cached tokens is attended densely by the policy, sparsely here",
        "no rule for equal scores: which of several equal tokens stays may differ from kvc-trt and between runs",
        *((ALIKE,) if parameters.by_length else ()),
    )
    if attention == "VANILLA":
        return (*shared, "its reference implementation of the method, not its fast path")
    eviction = (
        "eviction: the softmax of the observation window runs over the tokens before the window alone, without a "
        "causal mask (policy: over all tokens, the window's included, causal)",
    )
    bounds = "bfloat16" if rocket.kt_cache_dtype == "bfloat16" else "8-bit floating point (e5m2)"
    own = "the cache's type, bounds in e5m2, rounded up" if parameters.fp8_bounds else "the cache's type"
    return (
        *(eviction if parameters.eviction.evicts else ()),
        "selection: whole pages, then every cache block that they touch is attended whole (policy: single tokens)",
        "selection: temperature sqrt(head size) (policy: sqrt(head size x share of the query in the chosen channels))",
        f"selection: query and page bounds are rounded to {bounds} (policy: {own}, scores in fp32)",
        "selection: a partial last page of a prompt is padded with 0 (policy: infinities), so its bounds are wider",
        *shared,
    )


_HEAD_SIZES = (64, 80, 128, 256)
_TESTED_PAGE_SIZE = 4


def warnings(model: ModelConfig, rocket: RocketSparseAttention, attention: AttentionBackend) -> tuple[str, ...]:
    """Problems that are likely with this model and these numbers."""
    found = []
    if attention == "TRTLLM" and model.head_size not in _HEAD_SIZES:
        known = ", ".join(map(str, _HEAD_SIZES))
        found.append(f"head size {model.head_size}: its page-sparse kernels are documented for {known}")
    if rocket.page_size > _TESTED_PAGE_SIZE:
        found.append(f"page size {rocket.page_size}: upstream calls accuracy fine up to {_TESTED_PAGE_SIZE}")
    if model.dtype == "float32":
        found.append("the checkpoint is float32: TensorRT-LLM's RocketKV takes float16, bfloat16 and FP8 (dtype)")
    return tuple(found)


KT_BYTES = {"bfloat16": 2, "float8_e5m2": 1}
TOKENS_PER_BLOCK = 32
EVICTS, SELECTS = {COMPACT}, (HYBRID_ATTENTION,)
"""The operators that its RocketKV computes: eviction by the first or none at all, selection by the second."""
"""Tokens of one block of its paged cache, by default: what a selected page makes it read."""
DEFAULT_MAX_NUM_TOKENS = 8192


@dataclass(frozen=True)
class Traffic:
    """The tokens that one step reads of a full cache per layer and KV head, in 16-bit K/V pairs."""

    ours: float
    theirs: float
    """The pairs that a step reads by the exported numbers."""
    at_most: float | None
    """Count for its kernels: both bounds of every channel, and all blocks that selected pages touch.

    None for its VANILLA attention, which is a reference and has no kernels of its own.
    """


@dataclass(frozen=True)
class Export:
    """A configuration, and everything that a reader must know about it."""

    configuration: LlmApiConfiguration
    parameters: PolicyParameters
    changes: tuple[str, ...]
    """Numbers that differ from the policy's own, and why."""
    traffic: Traffic
    limits: tuple[str, ...]
    """Differences that no configuration of TensorRT-LLM's RocketKV can remove."""
    differences: tuple[str, ...]
    """The respects in which it computes something else than the policy."""
    warnings: tuple[str, ...]
    """Problems that are likely with this model and these numbers."""


def export_llm_api(
    model: ModelConfig,
    parameters: PolicyParameters,
    *,
    max_batch_size: int,
    attention: AttentionBackend = "TRTLLM",
    kt_cache_dtype: KtCacheDtype = "bfloat16",
) -> Export:
    """Express a policy as TensorRT-LLM's RocketKV.

    Raises InputError, naming an alternative, for a policy that it cannot express.
    """
    _check_expressible(parameters)
    if attention == "VANILLA" and kt_cache_dtype != "bfloat16":
        raise InputError(f"VANILLA attention keeps its page bounds in bfloat16, found {kt_cache_dtype}")
    rocket = _rocket(model, parameters, attention, kt_cache_dtype)
    configuration = LlmApiConfiguration(
        attn_backend=attention,
        sparse_attention_config=rocket,
        max_batch_size=max_batch_size,
        max_seq_len=parameters.max_sequence_len,
        max_num_tokens=max(parameters.max_input_len, DEFAULT_MAX_NUM_TOKENS),
    )
    return Export(
        configuration,
        parameters,
        changes(parameters, rocket, attention),
        _traffic(model, parameters, rocket, attention),
        LIMITS,
        differences(parameters, rocket, attention),
        warnings(model, rocket, attention),
    )


def nearest_page_size(page_size: int) -> int:
    """Return the power of two nearest to `page_size` by ratio, at most one block of the cache."""
    lower = 1 << (page_size.bit_length() - 1)
    upper = lower if lower == page_size else 2 * lower
    return min(lower if page_size * page_size <= lower * upper else upper, TOKENS_PER_BLOCK)


def _check_expressible(parameters: PolicyParameters) -> None:
    policy, engine = parameters.policy, "kvc-trt build --backend tensorrt serves it as it is"
    if not parameters.compresses:
        raise InputError(
            f"policy {policy} compresses nothing: there is no sparse attention to configure",
            hint="leave sparse_attention_config out, that is TensorRT-LLM's default; or export policy rocketkv",
        )
    if parameters.selection.operators != SELECTS:
        raise InputError(
            f"policy {policy} attends to all that it kept; TensorRT-LLM's RocketKV selects pages at every step",
            hint=f"export policy rocketkv; {engine}",
        )
    if parameters.eviction.operators is None or not set(parameters.eviction.operators) <= EVICTS:
        raise InputError(
            f"policy {policy} evicts by {parameters.eviction.name}; TensorRT-LLM's RocketKV only by snapkv++",
            hint=f"export policy rocketkv; {engine}",
        )
    if parameters.pool_kind != PolicyParameters.pool_kind:
        raise InputError(
            f"pool_kind is {parameters.pool_kind}; TensorRT-LLM's RocketKV pools by {PolicyParameters.pool_kind} alone",
            hint=f"--set pool_kind={PolicyParameters.pool_kind}",
        )
    if parameters.recent:
        raise InputError(
            f"recent is {parameters.recent}; TensorRT-LLM's RocketKV ranks the last tokens like any others",
            hint=f"--set recent=0; {engine}",
        )
    if parameters.skip_layers:
        raise InputError(
            f"the first {parameters.skip_layers} layers are not to be compressed (skip_layers); "
            "TensorRT-LLM's RocketKV compresses every layer",
            hint=f"set skip_layers: 0 in the configuration to accept that; {engine}",
        )


def _rocket(
    model: ModelConfig, parameters: PolicyParameters, attention: AttentionBackend, kt_cache_dtype: KtCacheDtype
) -> RocketSparseAttention:
    page_size = nearest_page_size(parameters.page_size)
    channels = parameters.top_r * page_size // parameters.page_size
    pages = (2 * parameters.top_k + page_size) // (2 * page_size)  # rounded, halves up
    evicts = parameters.eviction.evicts
    return RocketSparseAttention(
        window_size=parameters.window,
        kernel_size=parameters.pool_kernel,
        prompt_budget=parameters.prompt_budget if evicts else parameters.max_sequence_len,
        page_size=page_size,
        topk=max(pages, 1) if attention == "TRTLLM" else parameters.top_k,
        topr=min(max(channels, 1), model.head_size),
        kt_cache_dtype=kt_cache_dtype,
    )


def _traffic(
    model: ModelConfig, parameters: PolicyParameters, rocket: RocketSparseAttention, attention: AttentionBackend
) -> Traffic:
    capacity, size = parameters.capacity, model.head_size
    tokens = rocket.topk * (rocket.page_size if attention == "TRTLLM" else 1)
    bounds = -(-capacity // rocket.page_size) * KT_BYTES[rocket.kt_cache_dtype] / 2
    touched = min(rocket.topk * TOKENS_PER_BLOCK, capacity)
    return Traffic(
        traffic(capacity, parameters.page_size, parameters.top_r, parameters.top_k, size),
        traffic(capacity, rocket.page_size, rocket.topr, tokens, size),
        bounds + touched if attention == "TRTLLM" else None,
    )
