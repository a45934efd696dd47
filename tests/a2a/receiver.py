"""A real HTTP server that webhooks lead to, which answers as the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from msgspec import Struct

from covenant.model.push import PushConfig

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Post(Struct):
    """What came, and when by the clock of the test."""

    name: str
    generation: int
    body: dict[str, Any]
    headers: dict[str, str]
    at_ms: int


def generation_of(body: dict[str, Any]) -> int:
    (shown,) = body.values()
    return int(shown.get("generation", 0))


class Receiver:
    """`answers` has, for the name of a webhook, what it answers in turn; when those are used up, 204."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.posts: list[Post] = []
        self.answers: dict[str, list[Answer]] = {}
        self.on_post: Callable[[Post], None] = lambda post: None
        self._now_ms = now_ms
        self._came = asyncio.Condition()
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/{name}", self._take)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        self.port = 0

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{name}"

    def hook(self, name: str, **more: Any) -> PushConfig:
        return PushConfig(id=name, url=self.url(name), **more)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        body = json.loads(await request.read())
        post = Post(name, generation_of(body), body, dict(request.headers), self._now_ms())
        self.posts.append(post)
        self.on_post(post)
        async with self._came:
            self._came.notify_all()
        answers = self.answers.get(name)
        return await answers.pop(0)(request) if answers else web.Response(status=204)

    def told(self, name: str) -> list[int]:
        """The generations that a webhook got, repeats and all."""
        return [post.generation for post in self.posts if post.name == name]

    async def until(self, name: str, generations: list[int]) -> None:
        """No others have come before these."""
        await self.until_told(name, lambda told: told == generations)

    async def until_told(self, name: str, is_enough: Callable[[list[int]], bool]) -> None:
        async with asyncio.timeout(30), self._came:
            await self._came.wait_for(lambda: is_enough(self.told(name)))


def status(number: int, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=number, headers=headers)

    return answer


def never() -> Answer:
    """The connection stays open, and nothing comes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return answer


def once(event: asyncio.Event) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        await event.wait()
        return web.Response()

    return answer


class Endless:
    """A body without an end, as fast as it is taken."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            self.sent += 65536
