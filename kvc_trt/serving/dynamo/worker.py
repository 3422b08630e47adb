"""One engine as a worker of NVIDIA Dynamo: `python -m kvc_trt.serving.dynamo.worker ENGINE --model DIRECTORY ...`.

`kvc-trt serve` starts it. This module is the only one that knows Dynamo's interface to engines.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import HttpError, InvalidArgument

from kvc_trt.api.engine import Engine
from kvc_trt.contexts.packing import fingerprint_of, packing_of
from kvc_trt.engine import EngineDirectory
from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, HandoffRefused, InputError, KvcError
from kvc_trt.files.lost import report_lost_files
from kvc_trt.runtime import Scheduler
from kvc_trt.serving.dynamo.chunks import CANCELLED, Chunk, refusal
from kvc_trt.serving.dynamo.handoff.handing_over import Decode, Prefill
from kvc_trt.serving.dynamo.handoff.transfer import NixlTransfers
from kvc_trt.serving.dynamo.model_card import model_of, write_card
from kvc_trt.serving.dynamo.model_directory import start_tokens, write_model_directory
from kvc_trt.serving.dynamo.records import write_record
from kvc_trt.serving.dynamo.whole_engine import WholeEngine
from kvc_trt.serving.dynamo.wire import is_ours
from kvc_trt.serving.errors import ServingError, invalid, serving_error
from kvc_trt.serving.exposition import exposition

log = logging.getLogger("kvc_trt.serving")


class Worker(LLMEngine):  # type: ignore[misc]
    """One engine with the interface that Dynamo expects."""

    failed: KvcError | None = None
    """The error with which loading the engine failed; Dynamo raises an error of its own instead."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self._engine = Engine.open(
            settings.engine,
            backend=settings.backend,
            threads=settings.threads,
            proofs=settings.kv_proofs,
            sealed=settings.sealed,
        )
        settings.model.mkdir(parents=True, exist_ok=True)
        write_model_directory(self._engine.directory, settings.model)
        write_card(model_of(self._engine.directory, settings.name, settings.tool_parser), settings.model)
        self._answering: WholeEngine | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answers = 0
        self._all_answered = asyncio.Event()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Check the engine, and return its worker with the configuration that registers it."""
        worker = cls(_parser().parse_args(argv))
        return worker, worker.registration()

    def registration(self) -> WorkerConfig:
        """Return the configuration by which other processes find this worker."""
        settings, engine = self.settings, self._engine
        return WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE") or namespace_of(engine.directory),
            component=component_of(settings.role, settings.name),
            model_name=str(settings.model),
            served_model_name=settings.name,
            endpoint_types="completions" if engine.directory.chat_template is None else "chat,completions",
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE"),
            enable_kv_routing=False,  # a compacted cache depends on the whole prompt, so it has no prefix to announce
            disaggregation_mode=DisaggregationMode[settings.role.upper()],
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the engine and begin to answer; Dynamo calls this once, with the worker's number."""
        write_record(self.settings.record, worker_id, os.environ.get("DYN_SYSTEM_PORT"))
        try:
            scheduler, start = await asyncio.to_thread(self._load)
        except KvcError as error:
            type(self).failed = error
            raise
        self._answering = self._role(scheduler, start, worker_id)
        self._watching = asyncio.create_task(self._answering.watch())
        return EngineConfig(
            model=str(self.settings.model),
            served_model_name=self.settings.name,
            llm=LlmRegistration(
                context_length=self._engine.parameters.max_input_len + 1,  # with the answer's first token
                max_num_seqs=self._answering.scheduler.session.max_batch_size,
            ),
        )

    def _load(self) -> tuple[Scheduler, tuple[int, ...]]:
        settings = self.settings
        scheduler = self._engine.scheduler(
            settings.rows, queue_limit=settings.queue_limit, prefill_slice_ms=settings.prefill_slice_ms
        )
        scheduler.start()
        return scheduler, start_tokens(self._engine.directory)

    def _role(self, scheduler: Scheduler, start: tuple[int, ...], worker_id: int) -> WholeEngine:
        if self.settings.role == "aggregated":
            return WholeEngine(scheduler, start)
        role = {"prefill": Prefill, "decode": Decode}[self.settings.role]
        name = f"kvc-{self.settings.role}-{worker_id}"
        return role(scheduler, start, packing_of(self._engine.directory), lambda arena: NixlTransfers(name, arena))

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """Answer one request; our errors become Dynamo's exceptions, whose messages hold no path and no prompt."""
        assert self._answering is not None, "it has been started"
        self._answers += 1
        answering = self._answering
        # A probe checks this worker alone, so a prefill or decode worker answers it whole.
        answer = answering.answer_whole if is_probe(request) else answering.answer
        for_gateway = self.settings.role != "prefill" and is_ours(request)
        try:
            async with aclosing(answer(request, context.id())) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Cancelled as error:
            yield refusal(_refused(error)) if for_gateway else CANCELLED
        except (InputError, Busy, DeadlineMissed, HandoffRefused) as error:
            if is_probe(request) or isinstance(error, HandoffRefused):
                log.warning("request %s: %s", context.id(), error.message)
            if for_gateway:
                yield refusal(_refused(error))
            elif isinstance(error, InputError):
                raise InvalidArgument(error.message) from None
            else:
                raise HttpError(503, error.message) from None
        except (HttpError, InvalidArgument, GeneratorExit, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request %s failed", context.id())
            raise HttpError(500, "the engine failed at this request") from None
        finally:
            self._answers -= 1
            if self._answers == 0:
                self._all_answered.set()

    async def abort(self, context: Any) -> None:
        """Cancel a request whose client has left, or whose answer the frontend has ended at a stop string."""
        if self._answering is not None:
            self._answering.cancel(context.id())

    async def is_quiescent(self) -> bool:
        """Return whether the worker can end: no request runs, and no other process still reads its memory."""
        return self._answering is None or self._answering.is_quiescent

    async def cleanup(self) -> None:
        """Wait until all accepted requests are answered and sent; Dynamo cuts every stream when this returns."""
        if self._answering is None:
            return
        await asyncio.to_thread(self._answering.close)
        while self._answers:
            self._all_answered.clear()
            await self._all_answered.wait()
        if self._watching is not None:
            self._watching.cancel()

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a one-token request, with which Dynamo probes this worker through `generate`."""
        begin = self._engine.model.bos_token_id
        payload: dict[str, Any] = build_health_check_payload(0 if begin is None else begin)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """Show our figures beside Dynamo's on the worker's status port."""
        labels = {**dict(metrics.auto_labels or {}), "model": self.settings.name}

        def text() -> str:
            return "" if self._answering is None else exposition(self._answering.figures(), labels)

        metrics.register_prometheus_expfmt_callback(text)


def _refused(error: KvcError) -> ServingError:
    """Return the error that our gateway gets for a request that this worker cannot answer, or not now."""
    if isinstance(error, HandoffRefused):
        return ServingError("busy", error.message)
    return invalid(error) if isinstance(error, InputError) else serving_error(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvc_trt.serving.dynamo.worker", description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="Directory for the frontend's files.")
    parser.add_argument("--record", type=Path, required=True, help="File for the worker's number and port.")
    parser.add_argument("--name", required=True, help="The model's name in requests.")
    parser.add_argument("--role", choices=("aggregated", "prefill", "decode"), default="aggregated")
    parser.add_argument("--rows", type=int, help="Requests answered at once.")
    parser.add_argument("--queue-limit", type=int, help="Most requests that may wait in the queue.")
    parser.add_argument("--prefill-slice-ms", type=float, help="The longest slice of a prompt between two steps.")
    parser.add_argument("--backend")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tool-parser", help="Format of the model's tool calls.")
    parser.add_argument("--kv-proofs", action="store_true", help="Whether requests may ask for proofs.")
    parser.add_argument("--sealed", action="store_true", help="Whether to read the engine from sealed memory.")
    return parser


def namespace_of(engine: EngineDirectory) -> str:
    """Return Dynamo's namespace for an engine, so that workers of different engines never exchange caches."""
    return f"kvc-{fingerprint_of(engine).compatibility[:16]}"


def component_of(role: str, name: str) -> str:
    """Return Dynamo's component for a role and a model's name, because one engine may be served under two names."""
    return f"{role}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def main() -> None:
    """Run a worker until it is asked to end; an error goes to stderr in the form of `kvc-trt`'s errors."""
    report_lost_files()
    try:
        run(Worker)
    except Exception as raised:
        error = raised if isinstance(raised, KvcError) else Worker.failed
        if error is None:
            raise
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint is not None:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
