"""How often rules are gone over on a shared store: a few times, however much a command or a question touches.

What a rule lacks is loaded, and the rule begins anew: asked for one by one, each record would have all before it
decided again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant import Mailbox, Result
from covenant.model import command as c
from covenant.model.push import PushConfig
from covenant.store.postgres.lane import Lane
from tests.conformance.support import keyed, plain, soon, uid
from tests.postgres import store_url

_COUNT = 60


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a command was decided, in vain or not."""
    gone_over: list[None] = []
    decide = Lane.decide

    def noted(lane: Lane, *args: Any, **how: Any) -> Any:
        gone_over.append(None)
        return decide(lane, *args, **how)

    monkeypatch.setattr(Lane, "decide", noted)
    return gone_over


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a lane asked the database for what was lacking."""
    asked: list[None] = []
    load = Lane._load

    async def noted(lane: Lane, *args: Any) -> Any:
        asked.append(None)
        return await load(lane, *args)

    monkeypatch.setattr(Lane, "_load", noted)
    return asked


async def test_commands_that_each_see_what_is_committed_are_not_decided_for_one_another(decided: list[None]) -> None:
    """Each has a transaction of its own, in which those behind it ask for nothing."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
        config = PushConfig(id="hook", url="https://example.com/hook")
        decided.clear()
        await soon(asyncio.gather(*(box._engine.run(c.SetPush(alice.agent, uid(n), config)) for n in range(_COUNT))))
        assert len(decided) <= 8 * _COUNT


async def test_what_many_commands_touch_beside_what_they_read_is_loaded_at_once(loads: list[None]) -> None:
    """The slots of results, and who follows in them."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([keyed(bob, f"k{n}") for n in range(_COUNT)])
        deliveries = await bob.recv_tasks(_COUNT)
        loads.clear()
        await soon(asyncio.gather(*(bob.send_result(Result.ok(delivery)) for delivery in deliveries)))
        assert len(loads) <= 12
