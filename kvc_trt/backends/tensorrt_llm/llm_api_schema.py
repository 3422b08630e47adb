"""The fields of TensorRT-LLM's LLM API that an export sets, as strict as their readers: anything else is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

AttentionBackend = Literal["TRTLLM", "VANILLA"]
KtCacheDtype = Literal["bfloat16", "float8_e5m2"]
Positive = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RocketSparseAttention(_Strict):
    """Fields of its RocketSparseAttentionConfig; it refuses every other."""

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
    """What RocketKV forces on the cache: blocks of an evicted prompt cannot serve another request."""

    enable_block_reuse: Literal[False] = False


class LlmApiConfiguration(_Strict):
    """Arguments of `LLM(...)`, as far as an export sets them."""

    backend: Literal["pytorch"] = "pytorch"
    attn_backend: AttentionBackend
    sparse_attention_config: RocketSparseAttention
    kv_cache_config: KvCache = KvCache()
    enable_chunked_prefill: Literal[False] = False
    max_batch_size: Positive
    max_seq_len: Positive
    max_num_tokens: Positive
    """Without chunks a prompt is one forward pass, so it must fit here."""
