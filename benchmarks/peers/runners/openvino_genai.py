"""OpenVINO GenAI: continuous batching with a paged cache, dense or with its own cache eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.stopwatch import Answer

ATTENTION_SINK, RECENT = 32, 128
"""Tokens at the start and the end of the cache that eviction never touches: its defaults."""


def scheduler(
    cache_gigabytes: int, longest_prompt: int, stored_tokens: int | None, recent: int = RECENT
) -> openvino_genai.SchedulerConfig:
    """Return the settings of its paged cache; with `stored_tokens` it evicts down to that many."""
    config = openvino_genai.SchedulerConfig()
    config.cache_size = cache_gigabytes
    config.max_num_batched_tokens = longest_prompt
    config.enable_prefix_caching = False
    if stored_tokens is not None:
        config.use_cache_eviction = True
        config.cache_eviction_config = openvino_genai.CacheEvictionConfig(
            start_size=ATTENTION_SINK, recent_size=recent, max_cache_size=stored_tokens,
            aggregation_mode=openvino_genai.AggregationMode.NORM_SUM,
        )  # fmt: skip
    return config


class Model:
    """An exported model on the CPU device."""

    def __init__(self, request: dict[str, Any]) -> None:
        options = request["options"]
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": request["threads"]}
        if "precision" in options:
            properties["INFERENCE_PRECISION_HINT"] = options["precision"]
        if "cache_precision" in options:
            properties["KV_CACHE_PRECISION"] = options["cache_precision"]
        tokens = request["batch"] * (request["context"] + 2 * request["new_tokens"])
        gigabytes = 1 + tokens * request["cache_bytes_per_token"] // 2**30
        self._pipeline = openvino_genai.LLMPipeline(
            request["artefact"],
            "CPU",
            scheduler_config=scheduler(gigabytes, tokens, options.get("stored_tokens")),
            **properties,
        )
        self.versions = {"openvino_genai": openvino_genai.__version__, "openvino": openvino.__version__}

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Generate greedily; the pipeline itself says when each token came."""
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = new_tokens, True, False
        settings.apply_chat_template = False
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        metrics = self._pipeline.generate(inputs, settings).perf_metrics
        # The metrics' own durations are per token of the batch, not per step.
        steps = 1e-3 * np.diff(metrics.raw_metrics.m_new_token_times)
        return Answer(1e-3 * metrics.get_ttft().mean, steps.tolist())
