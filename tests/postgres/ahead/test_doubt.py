"""Going ahead where something fails, a line, a look, a store or we ourselves: everybody is told what is so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from covenant import Limits, Mailbox
from tests.conformance.support import plain
from tests.postgres.ahead.support import ALICE, BOB, die, go_ahead
from tests.postgres.support import engine_of, sql, until


async def test_one_that_was_taken_for_dead_prunes_nothing_that_the_tables_lack(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Mailbox.open(url))
        engine = engine_of(box)
        limits = Limits(retention_ms=1, dedup_ms=1)
        async with Mailbox.open(url, limits=limits) as other, sql(url) as owner:
            frozen = engine_of(other)
            monkeypatch.setattr(frozen._pulse, "_beat", lambda ears: asyncio.sleep(0))  # it gives no sign of life
            monkeypatch.setattr(frozen._pulse, "open", lambda: asyncio.sleep(0))
            await owner.execute("update daemon set seen = seen - interval '1 minute' where id = $1", frozen.member.id)
            engine._pulse._stirred.set()
            await until(lambda: engine.is_alone)
            alice, bob = box.of(ALICE), box.of(BOB)
            await go_ahead(box, alice, bob)
            sent = (await alice.send_task(plain(bob))).task_id
            assert engine.ahead.is_on
            await frozen.housekeeper.tidy()
            await die(box)
            stack.pop_all()
            assert (await other.get_task(sent)).task.id == sent
