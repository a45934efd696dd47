"""What the tests of going ahead do and ask for again and again."""

from __future__ import annotations

import asyncio
from collections import Counter

from covenant import AgentId, Mailbox, OpenMailbox
from covenant.model.audit import Logged
from covenant.model.error import CovenantError
from covenant.model.event import Leased, Sent
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.rows import decoded
from tests.conformance.support import finish, plain, turn
from tests.postgres.support import engine_of, sql

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")


async def go_ahead(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> Postgres:
    """Until a whole cycle was decided ahead of the tables: by then it is known what is on these shelves."""
    engine = engine_of(box)
    for _ in range(20):
        was = engine.ahead.stretch
        await finish(alice, bob, plain(bob))
        await turn()
        if was is not None and engine.ahead.stretch is was:
            return engine
    raise AssertionError("it never went ahead")


async def send_many(sender: Mailbox, worker: Mailbox, count: int) -> list[str]:
    """In one call."""
    sent = await sender.send_tasks([plain(worker, intent=str(number)) for number in range(count)])
    return [one.task_id for one in sent if not isinstance(one, CovenantError)]


async def in_tables(url: str, task_id: str) -> bool:
    async with sql(url) as server:
        return bool(await server.fetchval("select exists (select from record where key = $1)", task_id))


async def every_record_is_what_the_log_tells(engine: Postgres) -> bool:
    """A lease in the log for each attempt, and no task that the log does not know."""
    sent: set[str] = set()
    leases: Counter[str] = Counter()
    for logged in await whole_log(engine):
        sent.update(event.key for event in logged.events if type(event) is Sent)
        leases.update(event.key for event in logged.events if type(event) is Leased)
    rows = await engine._reader.fetch("select key, kind, body from record where kind = 't'")
    attempts = {row["key"]: decoded(row["kind"], row["body"]).attempt for row in rows}
    return attempts.keys() == sent and all(leases[key] >= attempt for key, attempt in attempts.items())


async def whole_log(engine: Postgres) -> list[Logged]:
    """The newest first."""
    found: list[Logged] = []
    while more := await engine.log_back(found[-1].seq if found else None, 1000):
        found += more
    return found


async def die(box: OpenMailbox) -> None:
    """As a process does: nothing is said, and nothing is written any more."""
    engine = engine_of(box)
    running = engine.ahead.stretch
    engine.ahead.stretch = None
    if running is not None:
        running._idling.cancel()
        for task in (running._writing, running._settling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    for job in engine._jobs:
        job.cancel()
    await asyncio.gather(*engine._jobs, return_exceptions=True)
    engine._jobs = []
    await engine._let_go()
