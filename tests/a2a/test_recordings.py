"""Sends again what google-adk and ag2 have sent to a daemon of ours (`make clients`), and compares the answers.

A recording has for each play the requests of the client, and of each answer the status, the media type, and the kinds
and states that it brought. A stream that ends later or earlier than the recorded one, or brings other events, fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.types import SendMessageResponse, StreamResponse, Task
from google.protobuf.json_format import ParseDict

from covenant import Mailbox, Worker
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.serve.daemon import Daemon, Settings
from tests.clients.recording import STREAM, Events, Names, inner, is_poll, outline, reply_outline
from tests.clients.worker import HEARTBEAT_MS, work
from tests.daemons import OPERATOR_TOKEN

PINNED: Final = Path(__file__).parents[2] / "constraints-clients.txt"
RECORDINGS: Final = Path(__file__).parent / "recordings"
PLAYS: Final = {"adk": 8, "ag2": 20}
PATIENCE_S: Final = 20
READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "card": parse_agent_card,
    "state": lambda told: ParseDict(told, Task()),
    "task": lambda told: ParseDict(told, SendMessageResponse()),
}


class Place:
    def __init__(self, client: httpx.AsyncClient, token: str) -> None:
        self.client = client
        self.token = token


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    daemon = Daemon(Settings(store="memory:", http="127.0.0.1:0"), Realm.throwaway(), OPERATOR_TOKEN)
    await daemon.start()
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    _, writer = await daemon.exchange.enroll(operator, "writer", None, ["a2a.respond.*"])
    _, alice = await daemon.exchange.enroll(operator, "alice", None, ["a2a.send.*", "a2a.cancel.*"])
    await daemon.exchange.run(operator, c.PublishCard(None, daemon.exchange.agent("writer"), {"name": "writer"}))
    async with (
        httpx.AsyncClient(base_url=str(daemon.url), timeout=PATIENCE_S) as client,
        Mailbox.open(str(daemon.url), token=writer) as box,
        Worker(box, work, concurrency=4, heartbeat_ms=HEARTBEAT_MS),
    ):
        yield Place(client, alice)
    await daemon.stop()


class Exchange:
    """One request of a recording, and what it is answered now."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.recorded = recorded
        self.answer: dict[str, Any] = {}
        self._events = Events()
        self._more = asyncio.Condition()
        self._doing: asyncio.Task[None] | None = None

    @property
    def is_as_recorded(self) -> bool:
        return bool(self.answer == self.recorded["answer"])

    def start(self, place: Place, names: Names, own: str) -> None:
        self._doing = asyncio.create_task(self._do(place, names, own))

    async def told(self, count: int) -> None:
        """Until its stream has told so many events."""
        async with self._more:
            await self._more.wait_for(lambda: len(self._events.told) >= count)

    async def end(self) -> None:
        assert self._doing is not None
        await self._doing

    async def _do(self, place: Place, names: Names, own: str) -> None:
        await self._ask(place, names, own)
        while is_poll(self.recorded) and not self.is_as_recorded:  # the test's patience bounds it
            await self._ask(place, names, own)

    async def _ask(self, place: Place, names: Names, own: str) -> None:
        sent = self.recorded
        body = names.said(json.dumps(sent["body"]), own) if "body" in sent else None
        headers = {name: names.said(value, own) for name, value in sent["headers"].items()}
        path = names.said(sent["path"], own)
        async with place.client.stream(sent["method"], path, content=body, headers=headers) as answer:
            kind = answer.headers["content-type"]
            self.answer = {"status": answer.status_code, "type": kind}
            if kind != STREAM:
                told = json.loads(await answer.aread())
                names.hear(told)
                self.answer["shows"] = shown = reply_outline(told)
                READERS[next(iter(shown))](inner(told))
                return
            async for chunk in answer.aiter_bytes():
                self._events.feed(chunk)
                for told in self._events.told:
                    names.hear(told)
                async with self._more:
                    self._more.notify_all()
        for told in self._events.told:
            ParseDict(inner(told), StreamResponse())
        self.answer["events"] = [outline(told) for told in self._events.told]


async def replay(place: Place, recorded: list[dict[str, Any]], own: str) -> list[dict[str, Any]]:
    """The answers to the requests of one play, which come one after the other, or while a stream is open."""
    names = Names(place.token)
    exchanges = [Exchange(one) for one in recorded]
    for number, exchange in enumerate(exchanges):
        during = exchange.recorded.get("during")
        for other, earlier in enumerate(exchanges[:number]):
            if during is None or other != during["exchange"]:
                await earlier.end()
        if during is not None:
            await exchanges[during["exchange"]].told(during["events"])
        exchange.start(place, names, own)
    for exchange in exchanges:
        await exchange.end()
    return [exchange.answer for exchange in exchanges]


@pytest.mark.parametrize("client", PLAYS)
async def test_a_recorded_client_is_answered_as_it_needs(place: Place, client: str) -> None:
    recording = json.loads((RECORDINGS / f"{client}.json").read_text())
    assert len(recording["plays"]) == PLAYS[client]
    assert recording["client"].replace(" ", "==") in PINNED.read_text().splitlines()  # the version that `make` installs
    for number, (name, play) in enumerate(recording["plays"].items()):
        async with asyncio.timeout(PATIENCE_S):
            answers = await replay(place, play["exchanges"], f"own-{number}")
        assert answers == [one["answer"] for one in play["exchanges"]], name
