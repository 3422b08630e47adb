"""The Python model of an exported repository, which takes Triton's requests and sends its responses.

`execute` returns at once. The scheduler's thread answers all requests together; one thread with an event loop sends the
answers, and checks whether clients have gone. Triton does not promise to answer calls of a model that it is unloading,
so the event loop calls it only before it sends a request's last response.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvc_trt.errors import InputError
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import LOG, ServingError, invalid, serving_error
from kvc_trt.serving.request import ServedRequest
from kvc_trt.serving.served_answer import Answer
from kvc_trt.serving.triton.errors import triton_error
from kvc_trt.serving.triton.metrics import ModelMetrics
from kvc_trt.serving.triton.tensors import WriteOutputs, response

_LOOK_SECONDS = 0.05
"""The interval between checks for clients that have gone."""
_METRICS_SECONDS = 0.5


ReadRequest = Callable[[Any], tuple[ServedRequest, WriteOutputs]]
"""Read Triton's request, and return it with a function that writes its answer's tensors; InputError if it is wrong."""


class Cancellable(Protocol):
    """An answer that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the answer."""


class TritonEngine:
    """One engine that answers Triton's requests.

    `pb_utils` is Triton's module `triton_python_backend_utils`, `args` are the arguments of `initialize`, and `read`
    reads requests.
    """

    def __init__(self, pb_utils: Any, args: Mapping[str, str], engine: ServedEngine, read: ReadRequest) -> None:
        self._pb_utils, self._served, self._read = pb_utils, engine, read
        # Triton's own warm-up asks once more, through tensors; where it fails, Triton 2.51 itself may crash.
        self._served.answer_once()
        self._metrics = ModelMetrics(pb_utils, {"model": args["model_name"], "version": args["model_version"]})
        self._metrics.show(self._served.metrics())
        self._unanswered = 0
        """The number of requests whose last response was not sent yet; used by the event loop's thread alone."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-trt answers", daemon=True)
        self._thread.start()
        self._counting = asyncio.run_coroutine_threadsafe(self._count(), self._loop)

    def execute(self, requests: Iterable[Any]) -> None:
        """Submit requests to the engine; an error in one goes to its client alone."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked, write, answer = self._take(request)
            except ServingError as error:
                self._refuse(sender, error)
            else:
                asyncio.run_coroutine_threadsafe(self._reply(asked, write, answer, sender), self._loop)

    def close(self) -> None:
        """Answer all accepted requests, then end; blocks until then."""
        self._served.close(drain=True)
        self._counting.cancel()
        asyncio.run_coroutine_threadsafe(_all_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _take(self, request: Any) -> tuple[ServedRequest, WriteOutputs, Answer]:
        try:
            asked, write = self._read(request)
            microseconds = request.timeout()
            return asked, write, self._served.submit(asked, seconds=microseconds / 1e6 if microseconds else None)
        except InputError as error:
            raise invalid(error) from error
        except Exception as error:
            raise serving_error(error) from error

    async def _reply(self, asked: ServedRequest, write: WriteOutputs, answer: Answer, sender: Any) -> None:
        self._unanswered += 1
        watching = asyncio.create_task(cancel_when_gone(sender, answer))
        failed: ServingError | None = None
        begun = False
        try:
            if asked.stream:
                async for piece in answer.pieces():
                    if piece.end is None:
                        sender.send(response(self._pb_utils, write(piece, answer.input_tokens)))
                        begun = True
            else:
                piece = await answer.whole()
            last = response(self._pb_utils, write(piece, answer.input_tokens))
        except Exception as error:  # an error must not reach other requests
            failed = serving_error(error)
        watching.cancel()
        if self._unanswered == 1:
            self._show()
        self._unanswered -= 1
        if failed is not None:
            await self._fail(sender, failed, begun)
        else:
            sender.send(last, flags=self._final)

    def _show(self) -> None:
        """Update the metrics; a failure is logged, so that it cannot keep an answer from ending."""
        try:
            self._metrics.show(self._served.metrics())
        except Exception:
            LOG.exception("the metrics cannot be shown")

    async def _fail(self, sender: Any, error: ServingError, begun: bool) -> None:
        """Send the error of an answer that could not be completed; `begun` says whether a part of it was sent."""
        self._refuse(sender, error)

    @property
    def _final(self) -> int:
        return int(self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _refuse(self, sender: Any, error: ServingError) -> None:
        found = triton_error(self._pb_utils, error)
        sender.send(self._pb_utils.InferenceResponse(error=found), flags=self._final)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_METRICS_SECONDS)
            if self._unanswered:
                self._show()


async def cancel_when_gone(sender: Any, answer: Cancellable) -> None:
    """Wait until a client has gone, then cancel its answer; the caller cancels this task once the answer is over."""
    while not sender.is_cancelled():
        await asyncio.sleep(_LOOK_SECONDS)
    answer.cancel()


async def _all_others() -> None:
    """Wait for every other task of this loop."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
