"""Mistral 7B (Jiang et al., arXiv 2310.06825): Llama's parts, in early versions with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.family import BesideImages, DecoderFields, Family, GgufArchitecture
from kvc_trt.models.fields.rotary import Length
from kvc_trt.models.gguf.keys import WINDOW


class _Fields(DecoderFields):
    sliding_window: Length | None = None


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    # An absent field means 4096 to transformers; only an explicit null switches the window off.
    return {"sliding_window": fields.sliding_window if "sliding_window" in given else 4096}


MISTRAL = Family(
    architecture="MistralForCausalLM",
    fields=_Fields,
    describe=_describe,
    absent_kv_heads=8,
    beside_images=BesideImages("Mistral3ForConditionalGeneration", "mistral"),
    gguf=GgufArchitecture(("mistral", "mistral3"), interleaved=True, keys={"sliding_window": WINDOW}),
)
