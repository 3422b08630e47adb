"""llama.cpp through the C functions of its Python package: the decode calls that its own llama-bench makes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.stopwatch import Answer, Stopwatch

BLOCK = 512
"""Prompt tokens of one call: its default of a physical batch."""
_FLASH_ATTENTION = {"off": 0, "on": 1}


class Model:
    """A GGUF file."""

    def __init__(self, request: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_DROP, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(
            request["artefact"].encode(), llama_cpp.llama_model_default_params()
        )
        rows = request["batch"]
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = rows * (request["context"] + request["new_tokens"] + BLOCK)
        settings.n_batch = settings.n_ubatch = BLOCK
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = request["threads"]
        settings.flash_attn_type = _FLASH_ATTENTION[request["options"]["flash_attention"]]
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise SystemExit(f"error: llama.cpp cannot load {request['artefact']}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.versions = {"llama_cpp_python": llama_cpp.__version__}

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Decode the prompts in blocks, one after the other, then a step of all rows at a time."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        length = len(prompts[0])
        watch = Stopwatch()
        tokens = []
        for row, prompt in enumerate(prompts):
            for start in range(0, length, BLOCK):
                block = prompt[start : start + BLOCK]
                self._decode([(token, start + place, row) for place, token in enumerate(block)], last_only=True)
            tokens.append(self._best(-1))
        watch.token()
        for step in range(new_tokens - 1):
            self._decode([(token, length + step, row) for row, token in enumerate(tokens)], last_only=False)
            tokens = [self._best(row) for row in range(len(prompts))]
            watch.token()
        return watch.answer()

    def _decode(self, entries: Sequence[tuple[int, int, int]], *, last_only: bool) -> None:
        """Run (token, position, row) entries; logits of the last entry, or of all."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for place, (token, position, row) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = not last_only or place == len(entries) - 1
        failed = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"error: llama_decode returned {failed}")

    def _best(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocabulary,))))


def _drop(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop the output of llama.cpp while it loads."""


_DROP = llama_cpp.llama_log_callback(_drop)
"""Must live as long as llama.cpp may call it."""
