"""An exchange with one published agent, a client and a worker; on each engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from covenant.a2a import wire as a
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message, Part
from covenant.model.peer import Caller
from covenant.serve.a2a.directory import agent_of
from covenant.serve.a2a.operations import Agent, Event, Operations
from covenant.store.clock import ManualClock, RandomIds, SystemClock
from covenant.store.registry import engine_for
from tests.a2a.receiver import Receiver
from tests.a2a.served import Site, start_site
from tests.a2a.workplace import Workplace

WORKING = ("a2a.send.*", "a2a.respond.*", "a2a.cancel.*")


def says(text: str = "draft the brief", **more: Any) -> Message:
    return Message(message_id=more.pop("message_id", "m-1"), role="ROLE_USER", parts=(Part(text=text),), **more)


def piece(text: str, name: str = "draft") -> Artifact:
    return Artifact(artifact_id=name, parts=(Part(text=text),))


class Town(Workplace):
    """Who is here: alice asks, the writer works."""

    def __init__(self, exchange: Exchange, alice: Caller, writer: Caller, agent: Agent) -> None:
        super().__init__(exchange, writer)
        self.alice = alice
        self.agent = agent
        self.operations = Operations(exchange)

    def replies(self) -> None:
        """From now on the agent says that it may answer with a message."""
        self.agent = structs.replace(self.agent, replies=True)

    async def send(self, message: Message | None = None, key: str | None = None, **settings: Any) -> Any:
        settings.setdefault("return_immediately", True)
        request = a.SendMessage(message=message or says(), configuration=a.Configuration(**settings))
        reply = await self.operations.send_message(self.alice, self.agent, request, key)
        return reply.task or reply.message

    async def get(self, task_id: str, **more: Any) -> Any:
        return await self.operations.get_task(self.alice, self.agent, a.GetTask(id=task_id, **more))

    async def events(self, task_id: str, after: int | None = None) -> list[Event]:
        """The whole stream, to its end."""
        request = a.SubscribeToTask(id=task_id)
        return [event async for event in self.operations.subscribe(self.alice, self.agent, request, after)]


@pytest.fixture
async def receiver(clock: ManualClock) -> AsyncIterator[Receiver]:
    """Where webhooks lead to."""
    receiver = Receiver(clock.now_ms)
    await receiver.start()
    yield receiver
    await receiver.stop()


@pytest.fixture(params=["memory", "file"])
async def town(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Town]:
    url = "memory:" if request.param == "memory" else f"file:{tmp_path}/data"
    clock, ids = SystemClock(), RandomIds()
    store: Any = engine_for(url, Limits(), clock, ids)
    exchange = Exchange(store, Realm.throwaway(), clock, ids)
    await exchange.open("token")
    operator = exchange.authenticate("token")
    _, alice = await exchange.enroll(operator, "alice@lab", None, WORKING)
    _, writer = await exchange.enroll(operator, "writer@lab", None, WORKING)
    who = exchange.authenticate(writer)
    card = await exchange.run(operator, c.PublishCard(None, who.agent, {"name": "writer"}))
    yield Town(exchange, exchange.authenticate(alice), who, agent_of(card))
    await exchange.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with httpx.AsyncClient() as client:
        site = await start_site(client)
        yield site
        await site.daemon.stop()
