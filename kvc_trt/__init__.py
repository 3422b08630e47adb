"""kvc-trt: a deployment compiler for long-context LLMs with a compressed KV cache."""

__version__ = "0.1.0"
