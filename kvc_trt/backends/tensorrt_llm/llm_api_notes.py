"""What a reader of an exported configuration must know: changed numbers, limits, other mathematics, likely trouble."""

from __future__ import annotations

from kvc_trt.backends.tensorrt_llm.llm_api_schema import AttentionBackend, RocketSparseAttention
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig


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


def differences(
    parameters: PolicyParameters, rocket: RocketSparseAttention, attention: AttentionBackend
) -> tuple[str, ...]:
    """Where TensorRT-LLM computes something else than the policy."""
    shared = (
        f"a row of at most {parameters.dense_limit} cached tokens is attended densely by the policy, sparsely here",
        "no rule for equal scores: which of several equal tokens stays may differ from kvc-trt and between runs",
    )
    if attention == "VANILLA":
        return (*shared, "its reference implementation of the method, not its fast path")
    eviction = (
        "eviction: the softmax of the observation window runs over the tokens before the window alone, without a "
        "causal mask (policy: over all tokens, the window's included, causal)",
    )
    bounds = "bfloat16" if rocket.kt_cache_dtype == "bfloat16" else "8-bit floating point (e5m2)"
    return (
        *(eviction if parameters.eviction.evicts else ()),
        "selection: whole pages, then every cache block that they touch is attended whole (policy: single tokens)",
        "selection: temperature sqrt(head size) (policy: sqrt(head size x share of the query in the chosen channels))",
        f"selection: query and page bounds are rounded to {bounds} (policy: the cache's type, scores in fp32)",
        "selection: a partial last page of a prompt is padded with 0 (policy: infinities), so its bounds are wider",
        *shared,
    )


_HEAD_SIZES = (64, 80, 128, 256)
_TESTED_PAGE_SIZE = 4


def warnings(model: ModelConfig, rocket: RocketSparseAttention, attention: AttentionBackend) -> tuple[str, ...]:
    """What is likely to go wrong with this model and these numbers."""
    found = []
    if attention == "TRTLLM" and model.head_size not in _HEAD_SIZES:
        known = ", ".join(map(str, _HEAD_SIZES))
        found.append(f"head size {model.head_size}: its page-sparse kernels are documented for {known}")
    if rocket.page_size > _TESTED_PAGE_SIZE:
        found.append(f"page size {rocket.page_size}: upstream calls accuracy fine up to {_TESTED_PAGE_SIZE}")
    if model.dtype == "float32":
        found.append("the checkpoint is float32: TensorRT-LLM's RocketKV takes float16, bfloat16 and FP8 (dtype)")
    return tuple(found)
