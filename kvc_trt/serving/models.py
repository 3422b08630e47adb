"""Models by the names under which requests ask for them, and what answers for each: an engine here or elsewhere."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvc_trt.errors import describe
from kvc_trt.runtime.request import Event, Request
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.exposition import exposition, merged
from kvc_trt.serving.protocol.errors import NO_MODEL, ApiError
from kvc_trt.serving.protocol.model import ServedModel


class Answer(Protocol):
    """The answer to one request: a scheduler's ticket, or what another process answers."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Yield its events as they come."""

    def finish(self) -> None:
        """Let it end soon, with what it has said."""

    def cancel(self) -> None:
        """End it."""


class Served(Protocol):
    """An engine, here or remote, that answers requests for one model."""

    @property
    def most_answers(self) -> int | None:
        """Answers that may run and wait at once; None where nobody here knows."""

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt may begin with what the caches hold of another one."""

    def take(self, request: Request, *, priority: int = 0) -> Answer:
        """Take a request whose prompt has been read; one of higher priority joins first. ServingError if refused."""

    async def begin(self, answers: Sequence[Any]) -> None:
        """Wait until nothing refuses these answers any more; ServingError where something does."""

    async def answers(self) -> bool:
        """Return whether a request of one token is answered, or was refused because others are."""


class Models(ABC):
    """Models, and what answers for each of them."""

    @property
    @abstractmethod
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        """Each model with what answers for it, by the name under which requests ask for it."""

    @abstractmethod
    async def figures(self) -> str:
        """Return the figures of all engines as Prometheus text."""

    def find(self, name: str) -> tuple[ServedModel, Served]:
        """Return the model of this name and what answers for it; ApiError, with status 404, where there is none."""
        served = self.served
        if name not in served:
            known = ", ".join(sorted(served)) or "none"
            raise ApiError(
                404, f"there is no model {describe(name)} here, expected {known}", param="model", code=NO_MODEL
            )
        return served[name]

    def named_in(self, body: Mapping[str, object]) -> ServedModel:
        """Return the model that a body names; without a name, the only one. ApiError for any other."""
        name, served = body.get("model"), self.served
        if name is None and len(served) == 1:
            return next(model for model, _ in served.values())
        return self.find(name if isinstance(name, str) else describe(name))[0]

    async def ready(self) -> list[str]:
        """Return the names of the models for which something answers now."""
        return list(self.served)

    async def health(self) -> dict[str, bool]:
        """Return whether each model that is ready answers a request of one token, by its name."""
        served, names = self.served, await self.ready()
        answers = await asyncio.gather(*(served[name][1].answers() for name in names))
        return dict(zip(names, answers, strict=True))

    async def as_list(self) -> dict[str, Any]:
        """Return the answer of `/v1/models`."""
        served, names = self.served, await self.ready()
        return {"object": "list", "data": [served[name][0].document for name in names]}


class OneModel(Models):
    """One model, for whoever has no other."""

    def __init__(self, model: ServedModel, engine: Served) -> None:
        self._served = {model.name: (model, engine)}

    @property
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        """The model with what answers for it, by name."""
        return self._served

    async def figures(self) -> str:
        """Return nothing: its figures are shown elsewhere."""
        return ""


class OwnModels(Models):
    """Models whose engines are in this process."""

    def __init__(self, served: Sequence[tuple[ServedModel, ServedEngine]]) -> None:
        self._served = {model.name: (model, engine) for model, engine in served}

    def __iter__(self) -> Iterator[ServedModel]:
        return (model for model, _ in self._served.values())

    @property
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        """Each model with its engine, by name."""
        return self._served

    async def figures(self) -> str:
        """Return the figures of all engines as Prometheus text."""
        return merged(exposition(engine.metrics(), {"model": name}) for name, (_, engine) in self._served.items())

    def close(self) -> None:
        """End what the engines still answer."""
        for _, engine in self._served.values():
            engine.close()
