"""What a peer may learn: its own, and of anything else not even that it is there. (Contract 5, 26, 27.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from covenant import Idempotency, Limits, Mailbox, OpenMailbox, Result, RetryPolicy, Task
from covenant.client.engine import RemoteEngine
from covenant.client.unix import UnixTransport
from covenant.model.audit import AuditRow
from covenant.model.limits import DEDUP_MS
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon
from covenant.store.clock import CountingIds, ManualClock
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon

STORES: Final = ("memory:", "file:{folder}")
HIDDEN: Final = "aaaaaaaa-0000-4000-8000-000000000000"


class Town:
    """A daemon with alice, bob and carol, on a clock that the test owns."""

    def __init__(self, daemon: Daemon, realm: Realmful, clock: ManualClock) -> None:
        self.daemon = daemon
        self.tokens = realm.tokens
        self.clock = clock
        self.box: OpenMailbox = realm.open(daemon, "unix")
        self.transport = UnixTransport(str(daemon.settings.ipc))

    def of(self, name: str) -> Mailbox:
        return self.box.of(f"{name}@lab")

    async def call(self, name: str, request: w.Request, reply: type[Any]) -> Any:
        token = OPERATOR_TOKEN if name == "operator" else self.tokens[f"{name}@lab"]
        return await RemoteEngine(self.transport, token).call(request, reply)

    async def story(self, name: str, task_id: str) -> list[AuditRow]:
        rows: list[AuditRow] = (await self.call(name, w.Story(task_id=task_id), w.StoryReply)).rows
        return rows


@pytest.fixture(params=STORES, ids=["memory", "file"])
async def town(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[Town]:
    clock = ManualClock()
    daemon = await start_daemon(request.param.format(folder=tmp_path / "data"), Limits(), clock, CountingIds())
    realm = Realmful()
    await realm.enroll(daemon)
    town = Town(daemon, realm, clock)
    async with town.box:
        yield town
    await town.transport.close()
    await daemon.stop()


async def test_a_story_tells_a_peer_nothing_of_the_operators_passes(town: Town) -> None:
    """Contract 27: a pass of the retry gate counts the leases of all; its row is the operator's."""
    carol = town.of("carol")
    safe = Idempotency("idempotent", "k")
    sent = await carol.send_task(Task(recipient=carol.agent, intent_text="mine", idempotency=safe))
    await carol.recv_task()
    town.clock.advance(1_000_000)
    await town.call("operator", w.RetryStale(policy=RetryPolicy(enabled=True), scheduled=True), w.AutoRetried)
    told = await town.story("carol", sent.task_id)
    assert [(row.kind, row.action) for row in told] == [
        ("capability_check", "a2a.send.carol@lab"),
        ("sent", None),
        ("leased", None),
        ("repair", "auto_requeue"),
        ("requeued", None),
    ]
    assert all(row.task_id == sent.task_id or row.actor == "carol@lab" for row in told)
    kinds = [row.kind for row in await town.story("operator", sent.task_id)]
    assert "a2a_auto_retry_scheduler_scan" in kinds


async def test_the_story_of_an_id_that_is_used_anew_begins_anew(town: Town) -> None:
    """Contract 27: those who had the id before are strangers."""
    alice, bob, carol = town.of("alice"), town.of("bob"), town.of("carol")
    await alice.send_task(Task(id=HIDDEN, recipient=bob.agent, intent_text="secret"))
    await bob.send_result(Result.ok(await bob.recv_task(), []))
    await alice.recv_result()
    town.clock.advance(DEDUP_MS + 1)
    await carol.send_task(Task(id=HIDDEN, recipient=carol.agent, intent_text="mine"))
    for who in ("carol", "operator"):
        reply = await town.call(who, w.Story(task_id=HIDDEN), w.StoryReply)
        assert {row.actor for row in reply.rows} == {"carol@lab"}
        assert reply.complete
