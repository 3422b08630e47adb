"""Models whose engines are in other processes; the gateway finds them by the cards that workers write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from typing_extensions import override

from kvc_trt.serving.dynamo.model_card import CARD, read_card
from kvc_trt.serving.dynamo.remote import RemoteEngine
from kvc_trt.serving.exposition import merged
from kvc_trt.serving.models import Models, Served
from kvc_trt.serving.protocol.model import ServedModel

_SECONDS = 5
"""The time limit of a request that needs no engine."""


class RemoteModels(Models):
    """The models whose cards lie in folders of `directory`, behind Dynamo's frontend at the URL `upstream`.

    Each of `names` must answer for the server to be healthy. `status` returns the URLs of the workers' own status,
    whose figures are shown beside the frontend's.
    """

    def __init__(
        self, upstream: str, directory: Path, names: Sequence[str] = (), status: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._upstream, self._directory, self._names, self._status = upstream, directory, tuple(names), status
        self._client: ClientSession | None = None
        self._read: dict[Path, tuple[int, ServedModel]] = {}
        """The models of the cards read so far, each with the time at which its card was written."""

    async def open(self) -> None:
        """Open the HTTP client, which belongs to the running loop."""
        # No limit of connections: the workers limit the requests that wait, and refuse the others.
        self._client = ClientSession(
            timeout=ClientTimeout(total=None, sock_connect=10), connector=TCPConnector(limit=0)
        )

    async def close_connections(self) -> None:
        """Close the HTTP client."""
        if self._client is not None:
            await self._client.close()

    @property
    @override
    def served(self) -> Mapping[str, tuple[ServedModel, Served]]:
        """Each model that has or had a worker, by name."""
        models = [self._model(card) for card in sorted(self._directory.glob(f"*/{CARD}"))]
        return {one.name: (one, RemoteEngine(self._asked, self._upstream, one.name)) for one in models}

    @override
    async def ready(self) -> list[str]:
        try:
            async with self._asked.get(f"{self._upstream}/v1/models", timeout=ClientTimeout(_SECONDS)) as answer:
                known = {model["id"] for model in (await answer.json())["data"]}
        except (ClientError, asyncio.TimeoutError, ValueError, LookupError, TypeError):
            return []
        return [name for name in self.served if name in known]

    @override
    async def health(self) -> dict[str, bool]:
        """Return by name whether each model answers; false for one of `names` that has no worker."""
        return {**dict.fromkeys(self._names, False), **await super().health()}

    async def answers(self, name: str) -> bool:
        """Return whether a model has a worker and answers (`RemoteEngine.answers`)."""
        found = self.served.get(name)
        return found is not None and await found[1].answers()

    @override
    async def figures(self) -> str:
        """Return the figures of the frontend and of each worker on this machine that answers."""
        return merged(await asyncio.gather(*(self._figures(url) for url in (self._upstream, *self._status()))))

    @property
    def _asked(self) -> ClientSession:
        assert self._client is not None, "it is open"
        return self._client

    def _model(self, card: Path) -> ServedModel:
        written = os.stat(card).st_mtime_ns
        found = self._read.get(card)
        if found is None or found[0] != written:
            found = self._read[card] = written, read_card(card.parent)
        return found[1]

    async def _figures(self, url: str) -> str:
        try:
            async with self._asked.get(f"{url}/metrics", timeout=ClientTimeout(_SECONDS)) as answer:
                return await answer.text() if answer.status == 200 else ""
        except (ClientError, asyncio.TimeoutError):
            return ""
