"""Names of the files in an engine directory; a backend names those of its own."""

from __future__ import annotations

CONFIG_FILE, PREFILL_FILE, DECODE_FILE = "config.json", "prefill.onnx", "decode.onnx"
EXTEND_FILE, DRAFT_FILE = "extend.onnx", "draft.onnx"
WEIGHTS_FILE, TOKENIZER_DIRECTORY = "weights.safetensors", "tokenizer"

GRAPH_FILES = {"weights": WEIGHTS_FILE, "prefill": PREFILL_FILE, "decode": DECODE_FILE}
"""Stage -> file, for the files that every engine has."""
EVERY_GRAPH = {**GRAPH_FILES, "extend": EXTEND_FILE, "draft": DRAFT_FILE}
"""Stage -> file, for a backend that also takes turns of a conversation and checks drafts."""
OPTIONAL_GRAPHS = ("extend", "draft")
"""Some policies take no turns, drafts are checked by engines that were asked for, and older engines have neither."""


def graph_of(stage: str) -> str:
    """Return the graph that a stage makes a file of: stages of several files per graph are named GRAPH.KIND."""
    return stage.partition(".")[0]
