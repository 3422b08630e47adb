"""The engines of the light server, by the names under which requests ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvc_trt.errors import describe
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import ServingError
from kvc_trt.serving.exposition import exposition, merged
from kvc_trt.serving.protocol.errors import NO_MODEL, ApiError
from kvc_trt.serving.protocol.model import ServedModel


class Models:
    """Models and their engines."""

    def __init__(self, served: Sequence[tuple[ServedModel, ServedEngine]]) -> None:
        self._served = {model.name: (model, engine) for model, engine in served}

    def __iter__(self) -> Iterator[ServedModel]:
        return (model for model, _ in self._served.values())

    def find(self, name: str) -> tuple[ServedModel, ServedEngine]:
        """Return the model of this name and its engine; ApiError, with status 404, where there is none."""
        if name not in self._served:
            known = ", ".join(self._served)
            raise ApiError(
                404, f"there is no model {describe(name)} here, expected {known}", param="model", code=NO_MODEL
            )
        return self._served[name]

    def named_in(self, body: Mapping[str, object]) -> ServedModel:
        """Return the model that a body names; without a name, the only one. ApiError for any other."""
        name = body.get("model")
        if name is None and len(self._served) == 1:
            return next(iter(self))
        return self.find(name if isinstance(name, str) else describe(name))[0]

    async def health(self) -> dict[str, bool]:
        """Return whether each model answers a request of one token, by its name."""
        answers = await asyncio.gather(*(asyncio.to_thread(_answers, engine) for _, engine in self._served.values()))
        return dict(zip(self._served, answers, strict=True))

    def figures(self) -> str:
        """Return the figures of all engines as Prometheus text."""
        return merged(exposition(engine.metrics(), {"model": name}) for name, (_, engine) in self._served.items())

    def close(self) -> None:
        """End what the engines still answer."""
        for _, engine in self._served.values():
            engine.close()

    def as_list(self) -> dict[str, Any]:
        """Return the answer of `/v1/models`."""
        return {"object": "list", "data": [model.document for model in self]}


def _answers(engine: ServedEngine) -> bool:
    try:
        engine.answer_once()
    except ServingError as error:
        return error.reason == "busy"  # it is too busy to be asked, because it answers others
    return True
