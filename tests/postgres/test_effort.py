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
from covenant.rules import query as rules
from covenant.store.postgres import reader
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
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a question was gone over."""
    gone_over: list[None] = []
    answer = rules.answer

    def noted(*args: Any) -> Any:
        gone_over.append(None)
        return answer(*args)

    monkeypatch.setattr(reader, "answer", noted)
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


async def test_what_was_taken_is_given_back_in_a_few_looks(decided: list[None]) -> None:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(2 * _COUNT)])
        deliveries = await bob.recv_tasks(2 * _COUNT)
        done, held = deliveries[:_COUNT], deliveries[_COUNT:]
        await asyncio.gather(*(bob.send_result(Result.ok(delivery)) for delivery in done))
        assert len(await alice.recv_results(_COUNT)) == _COUNT
        for delivery in held[::2]:
            await alice.cancel_task(delivery.task.id, graceful=True)
        leases, results = tuple(one.lease_id for one in held), tuple((one.task.id, 0) for one in done)
        decided.clear()
        await soon(box._engine.run(c.GiveBack(None, leases, results)))
        assert len(decided) <= 6
        assert len(await alice.recv_results(1000)) == _COUNT + len(held[::2])
        assert [one.task.id for one in await bob.recv_tasks(1000)] == [one.task.id for one in held[1::2]]
