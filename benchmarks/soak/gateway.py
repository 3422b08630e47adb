"""The gateway alone, asked as fast as it answers: its memory over a hundred thousand requests.

    build/dynamo/bin/python -m benchmarks.soak.gateway --minutes 10    # writes benchmarks/results/soak-gateway.json

It runs in a process of its own between clients and a frontend that answers at once. A process that keeps something of
each request needs more memory in use with each; one whose heap is merely in pieces has more of it free. The C library
tells the two apart (mallinfo2), its resident size does not.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import multiprocessing
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks import machine, store
from benchmarks.idle import Others
from benchmarks.soak.page import GATEWAY
from kvc_trt.models.sources.tokenizer import read_tokenizer
from kvc_trt.runtime import Event, Output
from kvc_trt.runtime.executor import Limits
from kvc_trt.serving.dynamo.gateway import Gateway
from kvc_trt.serving.dynamo.model_card import write_card
from kvc_trt.serving.dynamo.remote_models import RemoteModels
from kvc_trt.serving.dynamo.wire import OUR_DATA, OURS, document_of_event
from kvc_trt.serving.protocol.model import ServedModel

CLIENTS, LOOKS = 8, 30
KINDS = ("document", "stream", "client that leaves", "malformed", "refused", "long prompt")
_PATH = "/v1/completions"
MODEL, _TOKENS = "one", 30_000
_REFUSED = 3
"""The `max_tokens` of a request that the frontend refuses."""
_MIB = 2**20


_COUNTED = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTED]


def memory() -> dict[str, float]:
    """Return the memory of this process in MiB, and how many blocks Python's own allocator has given out."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    gc.collect()
    heap = mallinfo2()
    return {
        "resident_mib": psutil.Process().memory_info().rss / _MIB,
        "in_use_mib": (heap.uordblks + heap.hblkhd) / _MIB,
        "free_mib": heap.fordblks / _MIB,
        "python_blocks": sys.getallocatedblocks(),
    }


class Server:
    """A process that serves on a port of its own, and tells its memory when it is asked."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._asking, answering = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(answering, *arguments), daemon=True)
        self._process.start()
        answering.close()  # the process has its own: if it ends, so does this wait
        self.port = int(self._asking.recv())

    def memory(self) -> dict[str, float]:
        self._asking.send(None)
        found: dict[str, float] = self._asking.recv()
        return found

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def serve_frontend(asking: Connection) -> None:
    """Answer as Dynamo's frontend does when it passes on a worker's reply, at once, or with status 400."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if f'"max_new_tokens":{_REFUSED}' in body["nvext"]["annotations"][0]:
            return web.json_response({"message": "no", "type": "Bad Request", "code": 400}, status=400)
        last = Output(tuple(body["prompt"]), (5,), "word", "length", len(body["prompt"]), (1,))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            for left in reversed(range(random.randrange(2, 40))):
                event = Event(0, 5, "word ", None if left else last)
                chunk = {"choices": [], "nvext": {OUR_DATA: {OURS: document_of_event(event)}}}
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionResetError:  # its client left
            pass
        return response

    async def listen(port: int) -> int:
        application = web.Application(client_max_size=64 << 20)
        application.router.add_post(_PATH, answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        listening: int = runner.addresses[0][1]
        return listening

    asyncio.run(_serve(asking, listen))


def serve_gateway(asking: Connection, upstream: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / MODEL)
        gateway = Gateway(RemoteModels(upstream, Path(folder)))
        asyncio.run(_serve(asking, lambda port: gateway.listen("127.0.0.1", port)))


def write_model(directory: Path) -> None:
    """Write a model of many tokens for the gateway, which no worker answers for."""
    directory.mkdir()
    words = Tokenizer(WordLevel({str(token): token for token in range(_TOKENS)}, unk_token="0"))
    words.save(str(directory / "tokenizer.json"))
    limits = Limits(
        vocab_size=_TOKENS,
        max_input_len=4096,
        max_output_len=64,
        max_sequence_len=8192,
        capacities=(),
        prompt_block=1,
    )
    write_card(ServedModel(MODEL, read_tokenizer(directory / "tokenizer.json"), None, limits), directory)


async def _serve(asking: Connection, listen: Callable[[int], Awaitable[int]]) -> None:
    def tell() -> None:
        asking.recv()
        asking.send(memory())

    asking.send(await listen(0))
    asyncio.get_running_loop().add_reader(asking.fileno(), tell)
    await asyncio.Event().wait()


class Clients:
    """Ask one gateway, each its next request as soon as the last one has ended."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float, look: Callable[[], None]) -> None:
        """Ask for so long, and `look` LOOKS times at equal distances."""
        ends = time.monotonic() + seconds
        asking = asyncio.gather(*(self._ask_until(ends, random.Random(self._seed + place)) for place in range(CLIENTS)))
        while not asking.done():
            await asyncio.sleep(seconds / LOOKS)
            look()
        await asking

    async def _ask_until(self, ends: float, chance: random.Random) -> None:
        async with ClientSession(timeout=ClientTimeout(total=60)) as session:
            while time.monotonic() < ends:
                kind = chance.choice(KINDS)
                self.counts[await self._ask(session, kind, chance)] += 1

    async def _ask(self, session: ClientSession, kind: str, chance: random.Random) -> str:
        """Return the kind of request, or the error that it must not give."""
        prompt = [chance.randrange(_TOKENS) for _ in range(2_000 if kind == "long prompt" else 50)]
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": _REFUSED if kind == "refused" else 8,
            "stream": kind in ("stream", "client that leaves"),
        }  # fmt: skip
        data = b'{"model": ' + chance.randbytes(20) if kind == "malformed" else json.dumps(body).encode()
        expected = 400 if kind in ("malformed", "refused") else 200
        try:
            async with session.post(self._url + _PATH, data=data) as answer:
                if kind == "client that leaves":
                    await answer.content.readany()
                    answer.close()
                else:
                    await answer.read()
                return kind if answer.status == expected else f"{kind}: status {answer.status}"
        except (ClientError, TimeoutError) as error:
            return f"{kind}: {type(error).__name__}"


def measure(minutes: float, seed: int) -> dict[str, Any]:
    """Return how many requests of each kind were answered, and the gateway's memory as their number grew."""
    frontend = Server(serve_frontend)
    gateway = Server(serve_gateway, f"http://127.0.0.1:{frontend.port}")
    clients = Clients(f"http://127.0.0.1:{gateway.port}", seed)
    looks: list[dict[str, float]] = []
    try:
        asyncio.run(
            clients.run(60 * minutes, lambda: looks.append({"requests": clients.counts.total(), **gateway.memory()}))
        )
    finally:
        gateway.end()
        frontend.end()
    return {"requests": dict(sorted(clients.counts.items())), "looks": looks}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    command = shlex.join(["build/dynamo/bin/python", "-m", "benchmarks.soak.gateway", *sys.argv[1:]])
    others, found = Others(), measure(arguments.minutes, arguments.seed)
    head = {"machine": machine.record(), "command": command, "minutes": arguments.minutes, "seed": arguments.seed}
    path = (
        store.result_path(GATEWAY, head["machine"]) if arguments.minutes >= 5 else store.UNCOMMITTED / f"{GATEWAY}.json"
    )
    print(store.write(path, {**head, "clients": CLIENTS, "others_share": others.share(), **found}))
    if wrong := {kind: count for kind, count in found["requests"].items() if kind not in KINDS}:
        raise SystemExit(f"error: not the answers that are right: {wrong}")


if __name__ == "__main__":
    main()
