"""The Python model in an exported repository: requests in, answers out, on Triton's terms.

`execute` returns at once. The scheduler's thread answers all requests together; one thread with an event loop sends
what it answers, and looks whether clients have gone. Nothing promises that Triton still answers calls of a model that
it is unloading: the event loop makes them only before it sends a request's last response.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, KvcError
from kvc_trt.serving.answer import Answer, Piece
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import LOG, ServingError, invalid, serving_error
from kvc_trt.serving.request import ServedRequest, parse_request
from kvc_trt.serving.triton.metrics import ModelMetrics
from kvc_trt.serving.triton.settings import ENGINE, read_settings
from kvc_trt.serving.triton.tensors import read_request, written

_LOOK_SECONDS = 0.05
"""How often it is looked whether a client has gone."""
_METRICS_SECONDS = 0.5


class ServedModel:
    """One loaded model. `pb_utils` is Triton's `triton_python_backend_utils`, `args` what it gives to `initialize`."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        self._pb_utils = pb_utils
        _log_to(pb_utils.Logger)
        directory = Path(pb_utils.get_model_dir())
        try:
            settings = read_settings(json.loads(args["model_config"]))
            self._served = ServedEngine.open(directory / ENGINE, settings.serving, digest=settings.digest)
            # Triton's own warm-up asks once more, through tensors; where it fails, Triton 2.51 itself may crash.
            self._served.answer_once()
        except (KvcError, ServingError) as error:
            hint = getattr(error, "hint", None)
            message = f"{error.message}; {hint}" if hint else error.message
            # Triton shows this to whoever may ask for the index of its models.
            raise pb_utils.TritonModelException(message.replace(f"{directory}/", "")) from None
        self._metrics = ModelMetrics(pb_utils, {"model": args["model_name"], "version": args["model_version"]})
        self._metrics.show(self._served.metrics())
        self._unanswered = 0
        """Requests whose last response was not sent; of the event loop's thread."""
        self._codes = {
            "invalid": pb_utils.TritonError.INVALID_ARG,
            "busy": pb_utils.TritonError.UNAVAILABLE,
            "too late": pb_utils.TritonError.UNAVAILABLE,
            "cancelled": pb_utils.TritonError.CANCELLED,
            "failed": pb_utils.TritonError.INTERNAL,
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-trt answers", daemon=True)
        self._thread.start()
        self._counting = asyncio.run_coroutine_threadsafe(self._count(), self._loop)

    def execute(self, requests: Iterable[Any]) -> None:
        """Take requests; what is wrong with one is told to its client alone."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked, answer = self._take(request)
            except ServingError as error:
                self._refuse(sender, error)
            else:
                asyncio.run_coroutine_threadsafe(self._reply(asked, answer, sender), self._loop)

    def close(self) -> None:
        """Answer what has been asked, and end."""
        self._served.close(drain=True)
        self._counting.cancel()
        asyncio.run_coroutine_threadsafe(_all_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _take(self, request: Any) -> tuple[ServedRequest, Answer]:
        try:
            asked = parse_request(read_request(request))
            microseconds = request.timeout()
            return asked, self._served.submit(asked, seconds=microseconds / 1e6 if microseconds else None)
        except InputError as error:
            raise invalid(error) from error
        except Exception as error:
            raise serving_error(error) from error

    async def _reply(self, asked: ServedRequest, answer: Answer, sender: Any) -> None:
        self._unanswered += 1
        watching = asyncio.create_task(_cancel_when_gone(sender, answer))
        last: Piece | ServingError
        try:
            if asked.stream:
                async for last in answer.pieces():
                    if last.end is None:
                        sender.send(written(self._pb_utils, last, asked, answer.input_tokens))
            else:
                last = await answer.whole()
        except Exception as error:  # of its own request only
            last = serving_error(error)
        watching.cancel()
        if self._unanswered == 1:
            self._metrics.show(self._served.metrics())
        self._unanswered -= 1
        if isinstance(last, ServingError):
            self._refuse(sender, last)
        else:
            sender.send(written(self._pb_utils, last, asked, answer.input_tokens), flags=self._final)

    @property
    def _final(self) -> int:
        return int(self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _refuse(self, sender: Any, error: ServingError) -> None:
        found = self._pb_utils.TritonError(error.message, self._codes[error.reason])
        sender.send(self._pb_utils.InferenceResponse(error=found), flags=self._final)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_METRICS_SECONDS)
            if self._unanswered:
                self._metrics.show(self._served.metrics())


async def _cancel_when_gone(sender: Any, answer: Answer) -> None:
    while not sender.is_cancelled():
        await asyncio.sleep(_LOOK_SECONDS)
    answer.cancel()


async def _all_others() -> None:
    """Wait for what else this loop is at."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


class _ServersLog(logging.Handler):
    """Writes to Triton's log, which takes any text; the standard streams of its process take ASCII alone."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log_error(self.format(record))


def _log_to(logger: Any) -> None:
    LOG.handlers = [_ServersLog(logger)]
    LOG.propagate = False
