"""Middleware before every handler: check the API key and the browser's origin, and give all errors one form."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from kvc_trt.serving.errors import ServingError, logged
from kvc_trt.serving.protocol.body import LARGEST_BODY
from kvc_trt.serving.protocol.errors import WRONG_KEY, ApiError, api_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = "/live"
"""The path that needs no key; its answer only says that the process runs."""
_OF_THE_LIBRARY = {413: f"the body has more than {LARGEST_BODY >> 20} MiB"}
_AGAIN = {503: {"Retry-After": "1"}}
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "86400",
}


class Door:
    """The middleware of the light server. `origins` may send requests from a browser; `*` stands for any origin."""

    def __init__(self, api_key: str | None = None, origins: Sequence[str] = ()) -> None:
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()
        self._origins = frozenset(origins)

    def of(self, application: web.Application) -> None:
        """Add this middleware to an application."""

        @web.middleware  # type: ignore[untyped-decorator]
        async def keep(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._passed(request, handler)

        application.middlewares.append(keep)
        application.on_response_prepare.append(self._add_headers)

    async def _passed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._asks_for_leave(request):
                return web.Response(status=204, headers=_PREFLIGHT)
            self._check_key(request)
            return await handler(request)
        except ServingError as error:
            return refusal(api_error(error))
        except ApiError as error:
            return refusal(error)
        except web.RequestPayloadError:
            return refusal(ApiError(400, "the body is not as its headers say: its length or its compression is wrong"))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return refusal(ApiError(error.status, _OF_THE_LIBRARY.get(error.status, error.reason)))
        except Exception as error:
            return refusal(ApiError(500, logged(error)))

    def _check_key(self, request: web.Request) -> None:
        if self._wanted is None or request.path == OPEN:
            return
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._wanted):
            raise ApiError(401, "this server requires its API key: Authorization: Bearer KEY", code=WRONG_KEY)

    def _asks_for_leave(self, request: web.Request) -> bool:
        """Return whether this is a browser's preflight request for a page of an allowed origin."""
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._allowed(request) is not None
        )

    def _allowed(self, request: web.Request) -> str | None:
        """Return the request's origin if it is allowed; otherwise None."""
        origin = request.headers.get("Origin")
        return origin if origin is not None and self._origins & {"*", origin} else None

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-request-id"] = uuid.uuid4().hex
        origin = self._allowed(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = "x-request-id"
            response.headers["Vary"] = "Origin"


def refusal(error: ApiError) -> web.Response:
    """Return the HTTP response of an error."""
    return web.json_response(error.document, status=error.status, headers=_AGAIN.get(error.status))
