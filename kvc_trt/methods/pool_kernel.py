"""Width of stage 1's max-pooling when nobody fixes it: the table of RocketKV's first version (arXiv 2502.14051v1)."""

from __future__ import annotations

from kvc_trt.models.config import ModelConfig

SHORT, LONG = 63, 511
LLAMA_3_1_THRESHOLD = 48_000
LONGCHAT_THRESHOLD = 12_000


def auto_pool_kernel(model: ModelConfig, max_input_len: int) -> int:
    """511 for long prompts of the two families the paper names, 63 for everything else.

    A model is known by its rotary scaling: `llama3` is Llama 3.1 and later; `linear` without grouped
    queries is LongChat.
    """
    scaling = model.rotary_scaling
    threshold: float = float("inf")
    if scaling is not None and scaling.kind == "llama3":
        threshold = LLAMA_3_1_THRESHOLD
    elif scaling is not None and scaling.kind == "linear" and model.group_size == 1:
        threshold = LONGCHAT_THRESHOLD
    return SHORT if max_input_len < threshold else LONG
