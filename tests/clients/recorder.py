"""A proxy between the clients and the daemon, which records the requests and the outline of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp import web

from tests.clients.recording import KEPT, STREAM, Events, Names, is_poll, outline, reply_outline

PLAY: Final = "X-Play"
_END_S: Final = 10  # for a stream whose client has gone to end by itself
_NOT_PASSED: Final = ("host", "connection", "content-length", "transfer-encoding", PLAY.lower())


class Recorder:
    def __init__(self) -> None:
        self.token = ""  # of the clients
        self._session: aiohttp.ClientSession
        self._names: dict[str, Names] = {}
        self._open: dict[str, dict[int, Events]] = {}  # streams that are under way, by play and place
        self.target = ""
        self.url = ""
        self.plays: dict[str, list[dict[str, Any]]] = {}

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        play = request.headers.get(PLAY, "")
        names = self._names.setdefault(play, Names(self.token))
        exchanges = self.plays.setdefault(play, [])
        open_streams = self._open.setdefault(play, {})
        body = await request.read()
        noted = self._note(request, body, names)
        if not any(_is_cancel(earlier) for earlier in exchanges):  # which ends the stream, sooner or later
            for place, events in open_streams.items():
                noted["during"] = {"exchange": place, "events": len(events.told)}
        if exchanges and is_poll(noted) and all(noted[part] == exchanges[-1][part] for part in noted):
            exchanges.pop()  # the same question again: how often is a matter of time
        place = len(exchanges)
        exchanges.append(noted)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
        async with self._session.request(
            request.method, f"{self.target}{request.raw_path}", data=body or None, headers=headers
        ) as answer:
            noted["answer"] = {"status": answer.status, "type": answer.content_type}
            if answer.content_type != STREAM:
                data = await answer.read()
                told = json.loads(data)
                names.hear(told)
                noted["answer"]["shows"] = reply_outline(told)
                return web.Response(status=answer.status, body=data, content_type=answer.content_type)
            events = open_streams[place] = Events()
            try:
                return await self._stream(request, answer, events, names)
            finally:
                del open_streams[place]
                noted["answer"]["events"] = [outline(told) for told in events.told]

    def _note(self, request: web.Request, body: bytes, names: Names) -> dict[str, Any]:
        said = {name: request.headers[name] for name in KEPT if name in request.headers}
        noted: dict[str, Any] = {
            "method": request.method,
            "path": names.written(request.raw_path),
            "headers": {name: names.written(value) for name, value in said.items()},
        }
        if body:
            noted["body"] = _without_call(json.loads(body))
            noted["body"] = json.loads(names.written(json.dumps(noted["body"])))
        return noted

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, events: Events, names: Names
    ) -> web.StreamResponse:
        """Pass a stream on, and read it to its end also when its client has gone: the daemon decides where it ends."""
        response = web.StreamResponse(headers={"Content-Type": STREAM})
        await response.prepare(request)
        is_there = True
        async with asyncio.timeout(_END_S):
            async for chunk in answer.content.iter_any():
                events.feed(chunk)
                for told in events.told:
                    names.hear(told)
                try:
                    if is_there:
                        await response.write(chunk)
                except ConnectionError:
                    is_there = False
        return response


def _without_call(body: Any) -> Any:
    """The number of a call says nothing, and a client that polls makes up more of them in one run than in another."""
    return {**body, "id": "call"} if "jsonrpc" in body else body


def _is_cancel(noted: dict[str, Any]) -> bool:
    return bool(noted.get("body", {}).get("method") == "CancelTask" or noted["path"].endswith(":cancel"))


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    """Serve a recorder. Its `target`, the daemon's URL, and the clients' `token` are set before the first request."""
    recorder = Recorder()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.pass_on)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as recorder._session:
            yield recorder
    finally:
        await runner.cleanup()
