"""The gateway for clients: the light server, with the engines behind Dynamo's frontend.

It checks API keys, which the frontend cannot, and reads requests and writes answers as it does without Dynamo. The
frontend routes token ids to workers, and hands over from prefill to decode (`wire.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from kvc_trt.serving.dynamo.remote_models import RemoteModels
from kvc_trt.serving.http.door import Door
from kvc_trt.serving.http.server import LightServer


class Gateway:
    """A light server for `models`, with its API key and origins, from `listen` to `close`."""

    def __init__(self, models: RemoteModels, api_key: str | None = None, origins: Sequence[str] = ()) -> None:
        self.models = models
        self._server = LightServer(models, Door(api_key, origins))
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen, and return the port; OSError if the address is taken."""
        await self.models.open()
        # If a client leaves, its handler is cancelled; that closes the connection to the frontend and ends the request.
        self._runner = web.AppRunner(
            self._server.application, handler_cancellation=True, access_log=None, shutdown_timeout=1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        listening: int = self._runner.addresses[0][1]
        return listening

    async def refuse_newcomers(self) -> None:
        """Refuse new requests; answers that have begun go on."""
        self._server.ending = True
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()

    async def close(self) -> None:
        """Cancel the answers that are left, and close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self.models.close_connections()
