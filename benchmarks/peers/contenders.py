"""Every configuration that takes part: which engine, with which options, on which points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvc_trt.models.cache_formats import AUTO

TOKEN_BUDGET = 512
"""RocketKV reads at most this much per step; the other engines' eviction stores as many tokens."""
NEW_TOKENS = 33
"""Tokens of one answer: the first from the prompt, then 32 timed steps."""
OURS = "kvc_trt"


@dataclass(frozen=True)
class Contender:
    """One configuration of one engine."""

    name: str
    runner: str
    weights: tuple[str, ...]
    """Formats of weights that it runs."""
    cache_bytes: float
    """Bytes of one cached number, as its floor counts them."""
    reads: str
    """The part of the cache that a step reads: `rocketkv`, `all`, or `stored` (as many tokens as the budget)."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    policy: str | None = None
    """Policy of kvc-trt's engines."""
    cache: str = AUTO
    """Format of the cache of kvc-trt's engines."""
    full_precision: bool = True
    """True if it computes everything in float32 except products with quantised matrices."""
    operations_per_second: float = 150e9
    """Operations per second of its prefill on two cores, to estimate the time of a run until one is measured."""
    longest: int = 32768
    """Contexts beyond this are left out, where a prefill takes many minutes."""
    batches: tuple[int, ...] = (1, 8)
    core: bool = True
    """True if the short selections have it at every point; they have others only where a measurement takes seconds."""

    @property
    def ours(self) -> bool:
        return self.runner == OURS


_BODIES = MappingProxyType({"KVC_TRT_CPU_KERNELS": "none"})
_BF16 = MappingProxyType({"prefill_precision": "bf16"})
_OPENVINO_BF16 = MappingProxyType({"backend": "openvino", "prefill_precision": "bf16"})
_ALL = ("fp32", "int8", "int4")


def _ours(name: str, policy: str, **changed: Any) -> Contender:
    reads = "all" if policy == "full" else "rocketkv"
    return Contender(name, OURS, _ALL, 4, reads, policy=policy, **changed)


def _openvino(name: str, stored_tokens: int | None, *, core: bool = True, **options: Any) -> Contender:
    reads = "all" if stored_tokens is None else "stored"
    given = dict(options) if stored_tokens is None else {**options, "stored_tokens": stored_tokens}
    return Contender(
        name, "openvino_genai", _ALL, 1, reads, given, full_precision=options.get("precision") == "f32",
        operations_per_second=300e9, core=core,
    )  # fmt: skip


CONTENDERS = (
    _ours("kvc-trt rocketkv, native operators", "rocketkv"),
    _openvino("OpenVINO GenAI eviction, f32", TOKEN_BUDGET, precision="f32"),
    _ours("kvc-trt rocketkv, native operators, bf16 prefill", "rocketkv", options=_BF16, full_precision=False),
    _ours("kvc-trt rocketkv, OpenVINO prefill f32", "rocketkv", options={"backend": "openvino"}),
    _openvino("OpenVINO GenAI dense, f32", None, precision="f32"),
    _ours("kvc-trt rocketkv, OpenVINO prefill bf16", "rocketkv", options=_OPENVINO_BF16, full_precision=False),
    _openvino("OpenVINO GenAI eviction, default precision", TOKEN_BUDGET),
    Contender("llama.cpp, flash attention off", "llama_cpp", _ALL, 2, "all", {"flash_attention": "off"}),
    _openvino("OpenVINO GenAI dense, default precision", None, core=False),
    _ours("kvc-trt full, native operators", "full", core=False),
    Contender("onnxruntime-genai", "onnxruntime_genai", ("fp32", "int4"), 4, "all", longest=16384, core=False),
    _ours("kvc-trt rocketkv, bodies", "rocketkv", environment=_BODIES, core=False),
    Contender("llama.cpp, flash attention on", "llama_cpp", _ALL, 2, "all", {"flash_attention": "on"}, core=False),
    Contender(
        "transformers + kvpress SnapKV", "transformers_cache", ("fp32",), 4, "stored",
        {"press": "SnapKVPress", "stored_tokens": TOKEN_BUDGET}, longest=16384, core=False,
    ),
    Contender("transformers", "transformers_cache", ("fp32",), 4, "all", longest=16384, core=False),
    Contender(
        "transformers, bf16", "transformers_cache", ("fp32",), 2, "all", {"precision": "bf16"}, longest=16384,
        full_precision=False, core=False,
    ),
)  # fmt: skip

_ROCKETKV = next(one for one in CONTENDERS if one.name == "kvc-trt rocketkv, native operators")
_WHOLE = next(one for one in CONTENDERS if one.name == "kvc-trt full, native operators")
OF_FORMATS = (
    replace(_ROCKETKV, name="kvc-trt rocketkv, int8 cache", weights=("int4", "int8"), cache="int8"),
    replace(_ROCKETKV, name="kvc-trt rocketkv, float32 cache", weights=("int4",)),
    _openvino("OpenVINO GenAI eviction, u8 cache", TOKEN_BUDGET, precision="f32", cache_precision="u8"),
    replace(_WHOLE, name="kvc-trt full, int8 cache", weights=("int4",), batches=(1,), cache="int8"),
    replace(_WHOLE, name="kvc-trt full, float32 cache", weights=("int4",), batches=(1,)),
)
"""Contenders with caches of 8 bits: rocketkv beside OpenVINO's eviction in its own 8 bits, and beside itself."""
