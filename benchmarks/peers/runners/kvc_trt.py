"""kvc-trt through its Python API, as a user's program would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.stopwatch import Answer, Stopwatch
from kvc_trt import Engine
from kvc_trt.backends.opening import open_engine, session_of
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.runtime import Request


class Model:
    """An engine directory."""

    def __init__(self, request: dict[str, Any]) -> None:
        directory, options = open_engine(request["artefact"]), dict(request["options"])
        backend = options.pop("backend", "onnxruntime")
        self._session = session_of(
            directory, RunOptions(backend, request["threads"], **options), max_batch_size=request["batch"]
        )
        kernels = Engine(directory, RunOptions(backend)).kernels
        self.versions = {} if kernels is None else {"kvc_trt operators": kernels}

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Prefill all prompts in one batch, then decode greedily."""
        watch = Stopwatch()
        rows = self._session.add([Request(prompt, new_tokens + 1, ignore_eos=True) for prompt in prompts])
        self._session.sample()
        watch.token()
        for _ in range(new_tokens - 1):
            self._session.advance()
            self._session.sample()
            watch.token()
        for row in rows:
            self._session.remove(row)
        return watch.answer()
