"""A daemon on a real socket with one published agent, its worker in the test's hands, and a client of URLs and JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from covenant import Limits
from covenant.exchange.bounds import Bounds
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part
from covenant.model.view import Delivery
from covenant.serve.a2a import sse
from covenant.serve.a2a.surface import Surface
from covenant.serve.daemon import Daemon, Settings
from tests.a2a.workplace import Workplace
from tests.daemons import OPERATOR_TOKEN, WORKING

VERSION = {"A2A-Version": "1.0"}
NEWER = {"A2A-Version": "1.1"}


def message(text: str = "draft the brief", **more: Any) -> dict[str, Any]:
    return {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}], **more}


def agent_says(text: str) -> Message:
    return Message(message_id="a-1", role="ROLE_AGENT", parts=(Part(text=text),))


class Site(Workplace):
    """alice asks, the writer works, carol is somebody else."""

    def __init__(self, daemon: Daemon, tokens: dict[str, str], client: httpx.AsyncClient) -> None:
        super().__init__(daemon.exchange, daemon.exchange.authenticate(tokens["writer"]))
        self.daemon = daemon
        self.tokens = tokens
        self.client = client

    @property
    def url(self) -> str:
        return str(self.daemon.url)

    def auth(self, who: str | None) -> dict[str, str]:
        return {} if who is None else {"Authorization": f"Bearer {self.tokens.get(who, who)}"}

    async def post(self, content: bytes, path: str = "/", who: str | None = "alice", **headers: str) -> httpx.Response:
        told = {"Content-Type": "application/json", **VERSION, **self.auth(who), **headers}
        return await self.client.post(f"{self.url}{path}", content=content, headers=told)

    async def rpc(
        self, method: str, params: Any = None, path: str = "/", who: str | None = "alice", **headers: str
    ) -> dict[str, Any]:
        """The answer without its envelope: the result, or the error."""
        call = {"jsonrpc": "2.0", "id": "c-1", "method": method, "params": params if params is not None else {}}
        response = await self.post(json.dumps(call).encode(), path, who, **headers)
        answer: dict[str, Any] = response.json()
        assert (answer["jsonrpc"], answer["id"]) == ("2.0", None if "error" in answer and not who else "c-1")
        found: dict[str, Any] = answer["error"] if "error" in answer else answer["result"]
        return found

    async def rest(
        self, method: str, path: str, body: Any = None, who: str | None = "alice", **headers: str
    ) -> httpx.Response:
        told = {**VERSION, **self.auth(who), **headers}
        if body is not None:
            told.setdefault("Content-Type", "application/a2a+json")
        content = None if body is None else json.dumps(body).encode()
        return await self.client.request(method, f"{self.url}{path}", content=content, headers=told)

    async def start(self, text: str = "draft the brief", **more: Any) -> dict[str, Any]:
        """A task that nobody has taken yet."""
        params = {"message": message(text, **more), "configuration": {"returnImmediately": True}}
        task: dict[str, Any] = (await self.rpc("SendMessage", params))["task"]
        return task

    # --- the worker's ---------------------------------------------------------------------------------

    async def chunk(self, delivery: Delivery, text: str, append: bool = False) -> Any:
        artifact = Artifact(artifact_id="draft", parts=(Part(text=text),))
        return await self.work(c.AddArtifact(None, delivery.lease_id, artifact, append=append))


async def start_site(
    client: httpx.AsyncClient,
    card: dict[str, Any] | None = None,
    store: str = "memory:",
    bounds: Bounds | None = None,
    keep_awake_s: float | None = None,
    limits: Limits | None = None,
    **more: Any,
) -> Site:
    settings = Settings(store=store, http="127.0.0.1:0", limits=limits or Limits(), bounds=bounds or Bounds(), **more)
    daemon = Daemon(settings, Realm.throwaway(), OPERATOR_TOKEN)
    if keep_awake_s is not None:
        daemon.http.door = Surface(daemon.http, daemon.operations, daemon.directory, keep_awake_s)
    await daemon.start()
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    tokens = {"operator": OPERATOR_TOKEN}
    for name in ("alice", "writer", "carol", "editor"):
        _, tokens[name] = await daemon.exchange.enroll(operator, f"{name}@lab", None, WORKING)
    for name, said in (("writer", card or {"name": "writer"}), ("editor", {"name": "editor"})):
        who = daemon.exchange.agent(f"{name}@lab")
        await daemon.exchange.run(operator, c.PublishCard(None, who, said))
    return Site(daemon, tokens, client)


def hesitate(site: Site, monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]) -> None:
    """Whatever is asked for is done once a stream has begun."""
    tell = sse.Sse.tell
    begun = asyncio.Event()

    async def told(self: sse.Sse, say: Any) -> None:
        begun.set()
        await tell(self, say)

    async def run(*asked: Any) -> Any:
        await begun.wait()
        return await does(*asked)

    monkeypatch.setattr(sse, "_REFUSED_BY_S", 0)
    monkeypatch.setattr(sse.Sse, "tell", told)
    monkeypatch.setattr(site.exchange, "run", run)


async def events_of(lines: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its id."""
    found, last = [], ""
    async for line in lines:
        if line.startswith("id: "):
            last = line[4:]
        elif line.startswith("data: "):
            found.append((last, json.loads(line[6:])))
    return found
