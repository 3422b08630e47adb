"""transformers in eager PyTorch with scaled dot-product attention; with a press of kvpress where one is named."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.peers.stopwatch import Answer, Stopwatch


class Model:
    """A Hugging Face directory."""

    def __init__(self, request: dict[str, Any]) -> None:
        options = request["options"]
        torch.set_num_threads(request["threads"])
        dtype = torch.bfloat16 if options.get("precision") == "bf16" else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(request["artefact"], dtype=dtype).eval()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._press = None
        if "press" in options:
            import kvpress

            kept = options["stored_tokens"] / request["context"]
            self._press = getattr(kvpress, options["press"])(compression_ratio=1 - kept)

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """One forward pass over the prompts, compressed by the press, then token by token."""
        ids, cache = torch.tensor(prompts), transformers.DynamicCache()
        watch = Stopwatch()
        with self._press(self._model) if self._press is not None else contextlib.nullcontext():
            logits = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        watch.token()
        for step in range(new_tokens - 1):
            position = torch.full_like(token, ids.shape[1] + step)
            logits = self._model(token, past_key_values=cache, position_ids=position).logits
            token = logits[:, -1:].argmax(-1)
            watch.token()
        return watch.answer()
