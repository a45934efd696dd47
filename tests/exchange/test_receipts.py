"""Receipts: a receive whose answer may have been lost is asked again, or given back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from covenant import AgentId, Delivery, Mailbox, Result, TaskState, Text
from covenant.model.command import BeatLease
from covenant.model.peer import Caller
from covenant.store.clock import ManualClock
from tests.conformance.support import plain, refused, uid
from tests.daemons import NAMES, WORKING
from tests.exchange import Site, site


class House:
    """A daemon without surfaces, and its peers as they come through the door."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.exchange = site.exchange
        self.callers: dict[str, Caller] = {}

    async def enroll(self) -> None:
        for name in NAMES:
            key = AgentId.named(name).pubkey
            _, token = await self.exchange.enroll(self.site.operator, name, key, WORKING)
            self.callers[name] = self.exchange.authenticate(token)

    async def send(self, to: Mailbox, number: int, **more: Any) -> str:
        sent = await self.site.alice.send_task(plain(to, id=uid(number), **more))
        return sent.task_id

    async def lease(self, who: str, receipt: str, limit: int = 1) -> list[Delivery]:
        caller = self.callers[who]
        return await self.exchange.take(caller, self.exchange.lease(caller, None, None, limit), 0, receipt)

    async def give_back(self, who: str, receipt: str) -> int:
        return await self.exchange.give_back(self.callers[who], receipt)


@pytest.fixture
async def house(clock: ManualClock) -> AsyncIterator[House]:
    async with site(clock) as there:
        house = House(there)
        await house.enroll()
        yield house


# --- giving back -------------------------------------------------------------------------------------------


async def test_a_lease_that_nobody_heard_of_is_as_if_it_had_not_been(house: House) -> None:
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    assert await house.give_back("bob@lab", "r") == 1
    entry = await house.site.box.get_task(task_id)
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)
    (second,) = await house.lease("bob@lab", "s")
    assert (second.attempt, second.generation) == (1, first.generation + 2)


@pytest.mark.parametrize("sign", ["heartbeat", "partial"])
async def test_a_lease_that_its_holder_acted_under_is_released_and_not_undone(house: House, sign: str) -> None:
    """Contract 2, 4: the next holder has another attempt, and its progress numbers of its own."""
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    if sign == "heartbeat":
        await house.exchange.run(house.callers["bob@lab"], BeatLease(bob.agent, first.lease_id))
    else:
        await bob.send_result(Result.partial(first, [Text("half")]))
    before = await house.site.box.get_task(task_id)

    assert await house.give_back("bob@lab", "r") == 1
    entry = await house.site.box.get_task(task_id)
    assert (entry.state, entry.attempt, entry.generation) == (TaskState.QUEUED, 1, before.generation + 1)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(first))
    (second,) = await house.lease("bob@lab", "s")
    assert second.attempt == 2
    assert (await bob.send_result(Result.partial(second, [Text("half")]))).sequence == 1
    assert [row.reason for row in await house.site.rows("requeued")] == ["given back"]


async def test_a_lease_that_was_acted_under_ends_when_a_cancel_was_asked_for(house: House) -> None:
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    await bob.heartbeat(first)
    await house.site.alice.cancel_task(task_id, graceful=True)
    await house.give_back("bob@lab", "r")
    assert (await house.site.box.get_task(task_id)).outcome == "canceled"
