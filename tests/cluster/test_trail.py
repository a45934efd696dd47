"""The log of a task on PostgreSQL, among those of others: what streams of any daemon are told from. (Contract 17.)"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from covenant import Mailbox, Result
from covenant.model.query import GetPlace
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.view import Working
from tests.conformance.support import DONE, keyed, plain, take, uid
from tests.postgres import store_url


async def test_a_trail_leads_from_the_last_commit_of_a_task_back_to_its_first() -> None:
    async with Mailbox.open(store_url()) as box:
        engine: Any = box._engine
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        for number in (1, 2):
            await alice.send_task(plain(bob, id=uid(number)))
        held = [await take(bob) for _ in range(2)]
        for word in ("begun", "half way", "nearly there"):
            for delivery in held:
                await bob.update(delivery, word)
        for delivery in held:
            await bob.send_result(Result.ok(delivery, DONE))
        for number in (1, 2):
            place = await engine.ask(GetPlace(None, uid(number)))
            trail = await engine.log_trail(place.order, uid(number), 100)
            kinds = [type(event).__name__ for logged in trail for event in logged.events if event.key == uid(number)]
            assert kinds == ["Answered", "Updated", "Updated", "Updated", "Leased", "Sent"]


async def test_a_transaction_that_looks_twice_leaves_a_trail_between_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does after the second look has higher numbers than what others did meanwhile."""
    url, looks = store_url(), 0
    load = Lane._load
    async with Mailbox.open(url) as box, Mailbox.open(url) as other:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")

        async def slowly(lane: Lane, work: Working, mode: int, wanted: Iterable[Any]) -> int | None:
            nonlocal looks
            if mode == 0 and lane._engine is box._engine:
                looks += 1
                await other.of("alice@lab").send_task(plain(bob, id=uid(100 + looks)))
            return await load(lane, work, mode, wanted)

        await alice.send_task(keyed(bob, id=uid(1)))
        delivery = await take(bob)
        monkeypatch.setattr(Lane, "_load", slowly)
        await asyncio.gather(alice.send_task(plain(alice, id=uid(2))), bob.send_result(Result.ok(delivery, DONE)))
        assert looks
        engine: Any = box._engine
        place = await engine.ask(GetPlace(None, uid(1)))
        trail = await engine.log_trail(place.order, uid(1), 100)
        kinds = [type(event).__name__ for logged in trail for event in logged.events if event.key == uid(1)]
        assert kinds == ["Answered", "Leased", "Sent"]
        everything = await engine.log(0, 100)
        assert {uid(1), uid(2), uid(101)} <= {event.key for logged in everything for event in logged.events}
