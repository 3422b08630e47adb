"""Models by their names in requests, each with the engine that answers for it, in this process or another."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from kvc_trt.errors import describe
from kvc_trt.runtime.request import Event, Request
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.exposition import exposition, merged
from kvc_trt.serving.protocol.errors import NO_MODEL, ApiError
from kvc_trt.serving.protocol.model import ServedModel


class PendingAnswer(Protocol):
    """The answer to one request: a scheduler's ticket, or an answer of another process."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the answer's events as they come."""

    def finish(self) -> None:
        """End the answer soon and normally, with the tokens that it has."""

    def cancel(self) -> None:
        """End the answer without a result."""


class Served(Protocol):
    """An engine, here or remote, that answers requests for one model."""

    @property
    def most_answers(self) -> int | None:
        """The largest number of answers that may run and wait at once; None if it is not known here."""

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt may reuse the cached prefix of another request's prompt."""

    def take(self, request: Request, *, priority: int = 0) -> PendingAnswer:
        """Take a request whose prompt is token ids; higher priorities join first. ServingError if it is refused."""

    async def begin(self, answers: Sequence[Any]) -> None:
        """Wait until the engine has accepted these answers for good; ServingError if it refuses one."""

    async def answers(self) -> bool:
        """Return whether a one-token request succeeds or is refused only because the server is busy."""


class Models(ABC):
    """A set of models, each with the engine that answers for it."""

    @property
    @abstractmethod
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        """Each model with its engine, by the model's name in requests."""

    @abstractmethod
    async def figures(self) -> str:
        """Return the figures of all engines as Prometheus text."""

    def find(self, name: str) -> tuple[ServedModel, Served]:
        """Return the model of this name with its engine; ApiError with status 404 if there is none."""
        served = self.served
        if name not in served:
            known = ", ".join(sorted(served)) or "none"
            raise ApiError(
                404, f"there is no model {describe(name)} here, expected {known}", param="model", code=NO_MODEL
            )
        return served[name]

    def named_in(self, body: Mapping[str, object]) -> ServedModel:
        """Return the model that a body names; without a name, the only one. ApiError if there is no such model."""
        name, served = body.get("model"), self.served
        if name is None and len(served) == 1:
            return next(model for model, _ in served.values())
        return self.find(name if isinstance(name, str) else describe(name))[0]

    async def ready(self) -> list[str]:
        """Return the names of the models that have an engine now."""
        return list(self.served)

    async def health(self) -> dict[str, bool]:
        """Return for each model that is ready, by name, whether a one-token request succeeds or the engine is busy."""
        served, names = self.served, await self.ready()
        answers = await asyncio.gather(*(served[name][1].answers() for name in names))
        return dict(zip(names, answers, strict=True))

    async def as_list(self) -> dict[str, Any]:
        """Return the answer of `/v1/models`."""
        served, names = self.served, await self.ready()
        return {"object": "list", "data": [served[name][0].document for name in names]}


class OneModel(Models):
    """A set of one model, whose figures are shown elsewhere."""

    def __init__(self, model: ServedModel, engine: Served) -> None:
        self._served = {model.name: (model, engine)}

    @property
    @override
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        return self._served

    @override
    async def figures(self) -> str:
        """Return no text."""
        return ""


class OwnModels(Models):
    """Models whose engines are in this process."""

    def __init__(self, served: Sequence[tuple[ServedModel, ServedEngine]]) -> None:
        self._served = {model.name: (model, engine) for model, engine in served}

    def __iter__(self) -> Iterator[ServedModel]:
        return (model for model, _ in self._served.values())

    @property
    @override
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        return self._served

    @override
    async def figures(self) -> str:
        return merged(exposition(engine.metrics(), {"model": name}) for name, (_, engine) in self._served.items())

    def close(self) -> None:
        """Close all engines; requests that they still answer are cancelled."""
        for _, engine in self._served.values():
            engine.close()
