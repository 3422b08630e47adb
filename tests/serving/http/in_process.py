"""A light server on a loop of its own in the tests' process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aiohttp import web

from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.http.door import Door
from kvc_trt.serving.http.server import LightServer, loaded
from kvc_trt.serving.models import OwnModels
from tests.serving.dynamo.served import Client


class InProcess:
    """A running server, which ends with its `with`."""

    def __init__(
        self, engines: Mapping[str, Path], *, api_key: str | None = None, origins: Sequence[str] = (), **settings: Any
    ) -> None:
        self._undo = ExitStack()
        given = ServingSettings(threads=1, **settings)
        self.models = OwnModels([loaded(name, path, given, self._undo) for name, path in engines.items()])
        self.application = LightServer(self.models, Door(api_key, origins)).application
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> InProcess:
        self._thread.start()
        self._runner = web.AppRunner(self.application, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        self._wait(self._runner.setup())
        self._wait(web.TCPSite(self._runner, "127.0.0.1", 0).start())
        self.port = self._runner.addresses[0][1]
        return self

    def __exit__(self, *raised: object) -> None:
        self._undo.close()
        self._wait(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def client(self, key: str | None = None) -> Client:
        return Client(self.port, key)

    def _wait(self, awaited: Any) -> None:
        asyncio.run_coroutine_threadsafe(awaited, self._loop).result(60)
