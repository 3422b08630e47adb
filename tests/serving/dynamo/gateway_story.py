"""The gateway before a frontend of this script; `test_gateway.py` runs it where Dynamo, and so aiohttp, is there."""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from kvc_trt.serving.dynamo.gateway import Gateway

KEY = "of mine"
MANY = 130
"""More than a session of aiohttp connects by default."""


class Frontend:
    """Answers at once, or begins an answer and never ends it."""

    def __init__(self) -> None:
        self.asked = 0

    async def listen(self) -> str:
        application = web.Application()
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "well"}], "asked": body})
        begun = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await begun.prepare(request)
        await begun.write(b'data: {"choices": []}\n\n')
        await asyncio.sleep(60)
        return begun

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}]})


async def many_wait(url: str, session: ClientSession, frontend: Frontend) -> None:
    """However many answers are under way, the next request reaches the frontend, and so does the look at its health."""
    before = frontend.asked
    body = {"model": "one", "prompt": "?", "stream": True}
    streams = await asyncio.gather(*(session.post(f"{url}/v1/completions", json=body) for _ in range(MANY)))
    assert frontend.asked == before + MANY, frontend.asked
    async with session.get(f"{url}/health", timeout=ClientTimeout(5)) as answer:
        assert answer.status == 200, await answer.text()
    async with session.post(
        f"{url}/v1/completions", json={**body, "stream": False}, timeout=ClientTimeout(5)
    ) as answer:
        assert (await answer.json())["choices"][0]["text"] == "well"
    for stream in streams:
        stream.close()


async def every_refusal_has_one_form(url: str, session: ClientSession, frontend: Frontend) -> None:
    """Covers refusals of this project, and of the library below."""
    before = frontend.asked
    asked = [
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b" " * ((64 << 20) + 1), 413),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/v1/completions", None, 405),
    ]
    for method, path, content, status in asked:
        async with session.request(method, f"{url}{path}", data=content) as answer:
            assert answer.status == status, (path, answer.status)
            error = (await answer.json())["error"]
            assert (error["code"], error["type"]) == (status, "invalid_request_error")
            assert error["message"]
    assert frontend.asked == before
    for depth in range(900, 1000, 3):  # what can be read may still be too deep to be written
        deep = b'{"model": "one", "prompt": "?", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
        async with session.post(f"{url}/v1/completions", data=deep) as answer:
            assert answer.status in (200, 400), (depth, answer.status)


async def keys_are_bytes(url: str, frontend: Frontend) -> None:
    """A key that is no text is a wrong key, and no failure of the server."""
    host, _, port = url.removeprefix("http://").partition(":")
    for header, status in ((b"Bearer \xff\xfe", b"401"), (b"Bearer of mine", b"200"), (b"", b"401")):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + header + b"\r\n\r\n"
        )
        line = await reader.readline()
        assert line.split()[1] == status, (header, line)
        writer.close()


async def story() -> None:
    frontend = Frontend()
    gateway = Gateway(await frontend.listen(), KEY, models=["one"])
    url = f"http://127.0.0.1:{await gateway.listen('127.0.0.1', 0)}"
    async with ClientSession(
        connector=TCPConnector(limit=0), headers={"Authorization": f"Bearer {KEY}"}, timeout=ClientTimeout(30)
    ) as session:
        await many_wait(url, session, frontend)
        await every_refusal_has_one_form(url, session, frontend)
    await keys_are_bytes(url, frontend)
    print(json.dumps("all is well"))
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(story(), 60))
