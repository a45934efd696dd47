"""The log of a task on PostgreSQL, among those of others: what streams of any daemon are told from. (Contract 17.)"""

from __future__ import annotations

from typing import Any

from covenant import Mailbox, Result
from covenant.model.query import GetPlace
from tests.conformance.support import DONE, plain, take, uid
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
