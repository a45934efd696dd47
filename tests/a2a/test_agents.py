"""Publishing agents: by the operator, or by themselves if they may; over either way to a daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant import Limits, Mailbox, OpenMailbox
from covenant.model.card import CardPage
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon
from tests.conformance.support import refused
from tests.daemons import Realmful, start_daemon

CARD = {"name": "Bob", "description": "paints", "skills": [{"id": "door", "tags": ["paint"]}]}


class Site:
    """A daemon that can be started again, and the operator's box at it."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self.daemon: Daemon
        self.box: OpenMailbox
        self._store = f"file:{folder}/data"
        self._scheme = scheme
        self._realm = Realmful()

    async def open(self) -> None:
        self.daemon = await start_daemon(self._store, Limits(page_max=100))
        await self._realm.enroll(self.daemon)
        self.box = await self._realm.open(self.daemon, self._scheme)

    async def close(self) -> None:
        await self.box.close()
        await self.daemon.stop()

    async def call(self, request: w.Request, reply: type[w.Reply]) -> None:
        await self.box._engine.call(request, reply)  # type: ignore[attr-defined]


@pytest.fixture(params=["http", "unix"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    there = Site(tmp_path, request.param)
    await there.open()
    yield there
    await there.close()


def names(page: CardPage) -> list[str]:
    return [card.agent.display for card in page.cards]


async def test_the_operator_publishes_anybody(site: Site) -> None:
    bob, carol = site.box.of("bob@lab"), site.box.of("carol@lab")
    published = await site.box.publish_agent(CARD, bob.agent)
    assert (published.agent, published.card) == (bob.agent, CARD)
    made = await site.box.publish_agent(agent=carol.agent)
    assert made.card == {"name": "carol", "description": "carol@lab, an agent of this realm"}
    assert names(await bob.list_agents()) == ["bob@lab", "carol@lab"]
    assert await carol.get_agent(bob.agent) == published
    await site.box.withdraw_agent(bob.agent)
    assert await carol.get_agent(bob.agent) is None
    assert names(await carol.list_agents()) == ["carol@lab"]
    rows = [(row.kind, row.subject) for row in await site.box.recent_audit(100) if row.kind.startswith("card")]
    assert rows == [
        ("card_published", "bob@lab"),
        ("card_published", "carol@lab"),
        ("card_withdrawn", "bob@lab"),
    ]


async def test_a_peer_publishes_itself_if_it_may_and_nobody_else(site: Site) -> None:
    """Contract 26."""
    bob, carol = site.box.of("bob@lab"), site.box.of("carol@lab")
    with refused("missing_capability"):
        await bob.publish_agent(CARD)
    await site.call(w.Grant(subject="bob@lab", action="agents.publish"), w.Granted)
    assert (await bob.publish_agent(CARD)).card == CARD
    with refused("not_permitted"):
        await bob.publish_agent(CARD, carol.agent)
    with refused("not_permitted"):
        await bob.withdraw_agent(carol.agent)
    with refused("missing_capability"):
        await carol.withdraw_agent(bob.agent)
    await bob.withdraw_agent()
    await bob.withdraw_agent()
    assert names(await bob.list_agents()) == []


async def test_a_card_outlives_the_daemon_and_ends_with_its_agent(site: Site) -> None:
    bob, carol = site.box.of("bob@lab").agent, site.box.of("carol@lab").agent
    await site.box.publish_agent(CARD, bob)
    await site.box.publish_agent(None, carol)
    await site.close()
    await site.open()
    assert names(await site.box.list_agents()) == ["bob@lab", "carol@lab"]
    await site.call(w.RevokePeer(peer="bob@lab"), w.PeerRevoked)
    assert await site.box.get_agent(bob) is None
    assert names(await site.box.list_agents(1)) == ["carol@lab"]


async def test_pages_are_complete_and_in_order(site: Site) -> None:
    for name in ("alice@lab", "bob@lab", "carol@lab"):
        await site.box.publish_agent(None, site.box.of(name).agent)
    found: list[str] = []
    cursor: str | None = None
    for _ in range(4):
        page = await site.box.list_agents(1, cursor=cursor)
        found += names(page)
        cursor = page.cursor
        if cursor is None:
            break
    assert found == ["alice@lab", "bob@lab", "carol@lab"]
    assert (await site.box.list_agents(0)).cursor is None
    with refused("bad_cursor"):
        await site.box.list_agents(cursor="lease:1")


@pytest.mark.parametrize(
    ("card", "code"),
    [
        ({}, "blank_text"),
        ({"name": " "}, "blank_text"),
        ({"name": 7}, "malformed"),
        ({"name": "x", "description": "y" * 300_000}, "too_large"),
        ({"name": "x", "version": 1}, "malformed"),
        ({"name": "x", "iconUrl": 1.5}, "malformed"),
        ({"name": "x", "provider": "me"}, "malformed"),
        ({"name": "x", "skills": "many"}, "malformed"),
        ({"name": "x", "skills": [{"id": 5}]}, "malformed"),
        ({"name": "x", "skills": [{"id": "s", "securityRequirements": [{"schemes": {"b": ["x"]}}]}]}, "malformed"),
        ({"name": "x", "skills": [{"id": "s", "input_modes": ["text/plain"]}]}, "malformed"),
        ({"name": "x", "extended": {"skills": [{"id": "s"}, {"security_requirements": []}]}}, "malformed"),
        ({"name": "x", "defaultInputModes": ["text/plain", None]}, "malformed"),
        ({"name": "x", "default_input_modes": ["text/plain"]}, "malformed"),
        ({"name": "x", "capabilities": ["streaming"]}, "malformed"),
        ({"name": "x", "capabilities": {"streaming": "no"}}, "malformed"),
        ({"name": "x", "capabilities": {"push_notifications": False}}, "malformed"),
        ({"name": "x", "capabilities": {"extensions": [5]}}, "malformed"),
        ({"name": "x", "capabilities": {"extensions": [{"uri": "urn:x", "params": {"n": 2**60}}]}}, "malformed"),
        ({"name": "x", "x-house": 2**60}, "malformed"),
        ({"name": "x", "extended": 5}, "malformed"),
        ({"name": "x", "extended": {"skills": "many"}}, "malformed"),
        ({"name": "x", "extended": {"icon_url": "https://example.com"}}, "malformed"),
        ({"name": "x", "signatures": [{"protected": "a", "signature": "b"}]}, "malformed"),
        ({"name": "x", "securitySchemes": {"key": {}}}, "malformed"),
        ({"name": "x", "url": "https://example.com"}, "malformed"),
        ({"name": "x", "skills": []}, "malformed"),
        ({"name": "x", "supportedInterfaces": [{"protocolBinding": "GRPC", "url": "example.com:443"}]}, "malformed"),
    ],
)
async def test_what_is_no_card_is_refused(site: Site, card: dict[str, object], code: str) -> None:
    with refused(code):
        await site.box.publish_agent(card, site.box.of("bob@lab").agent)
    assert names(await site.box.list_agents()) == []


async def test_a_box_without_peers_has_nobody_to_publish() -> None:
    async with Mailbox.open("memory:") as box:
        with refused("unknown_peer"):
            await box.of("bob@lab").publish_agent(CARD)
        assert (await box.list_agents()).cards == []
