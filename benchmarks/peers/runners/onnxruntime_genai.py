"""onnxruntime-genai: a dense cache, one token at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai

from benchmarks.peers.stopwatch import Answer, Stopwatch


class Model:
    """A folder of its model builder."""

    def __init__(self, request: dict[str, Any]) -> None:
        config = onnxruntime_genai.Config(request["artefact"])
        session = {"intra_op_num_threads": request["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)
        self.versions = {"onnxruntime_genai": onnxruntime_genai.__version__}

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Append the prompts, then generate greedily."""
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        parameters.set_search_options(
            max_length=len(prompts[0]) + new_tokens + 1, batch_size=len(prompts), do_sample=False
        )
        generator = onnxruntime_genai.Generator(self._model, parameters)
        watch = Stopwatch()
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
            watch.token()
        return watch.answer()
