"""What a peer may learn: its own, and of anything else not even that it is there. (Contract 5, 26, 27.)"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from msgspec import structs

from covenant import AgentId, CovenantError, Idempotency, Limits, Mailbox, OpenMailbox, Result, RetryPolicy, Task
from covenant.client.engine import RemoteEngine
from covenant.client.unix import UnixTransport
from covenant.model.audit import AuditRow
from covenant.model.error import UnknownPeer
from covenant.model.limits import DEDUP_MS
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon
from covenant.serve.places import PLACE_OF
from covenant.serve.status import HTTP_STATUS
from covenant.store.clock import CountingIds, ManualClock
from tests.daemons import OPERATOR_TOKEN, Realmful, enrolled, start_daemon

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


# --- who is enrolled ---------------------------------------------------------------------------------------

BOB: Final = AgentId.named("bob@lab")
ABSENT: Final = AgentId("nil@lab", AgentId.named("unknown@lab").pubkey)

Asking = Callable[[AgentId], w.Request]
NAMING: Final[dict[str, Asking]] = {
    # verbs that name a peer, by its label or by its key
    "send": lambda peer: w.SendTask(task=Task(recipient=peer, intent_text="x")),
    "send to a label": lambda peer: w.SendTask(task=Task(recipient=AgentId.named(peer.display), intent_text="x")),
    "send under a false label": lambda peer: w.SendTask(
        task=Task(recipient=AgentId("some@lab", peer.pubkey), intent_text="x")
    ),
    "send under another's label": lambda peer: w.SendTask(
        task=Task(recipient=AgentId(BOB.display, peer.pubkey), intent_text="x")
    ),
    "send batch": lambda peer: w.SendTasks(tasks=[Task(recipient=peer, intent_text="x")]),
    "next task": lambda peer: w.RecvTask(recipient=peer.display),
    "next tasks": lambda peer: w.RecvTasks(limit=1, recipient=peer.pubkey),
    "next result": lambda peer: w.RecvResult(peer=peer.display),
    "next results": lambda peer: w.RecvResults(limit=1, peer=peer.pubkey),
    "rotate": lambda peer: w.RotateToken(peer=peer.display),
    "revoke": lambda peer: w.RevokePeer(peer=peer.display),
    "grant": lambda peer: w.Grant(subject=peer.display, action="a2a.send.*"),
    "pass on": lambda peer: w.Grant(subject=peer.display, action="a2a.send.*", parent=HIDDEN),
    "grants": lambda peer: w.ListGrants(subject=peer.display),
    "grants by key": lambda peer: w.ListGrants(subject=peer.pubkey),
    "check another": lambda peer: w.Check(action="a2a.compact", subject=peer.display),
    "check a send": lambda peer: w.Check(action="a2a.send.x", counterparty=peer.display),
    "check a send by key": lambda peer: w.Check(action="a2a.send.x", counterparty=peer.pubkey),
}


@pytest.mark.parametrize("grants", [(), ("a2a.send.bob@lab",)], ids=["no grant", "a grant for another"])
@pytest.mark.parametrize("verb", NAMING)
async def test_a_refusal_does_not_tell_who_is_enrolled(town: Town, verb: str, grants: tuple[str, ...]) -> None:
    """Contract 27: who may not reach a peer cannot tell it from one that was never there, nor read it in the audit."""
    zoe = await enrolled(town.box, "zoe@lab")
    told = []
    for number, peer in enumerate((AgentId("zoe@lab", zoe.pubkey), ABSENT)):
        asking = await enrolled(town.box, f"asking{number}@lab", *grants)
        engine = RemoteEngine(town.transport, asking.token)
        request = NAMING[verb](peer)
        try:
            answer: Any = await engine.call(request, PLACE_OF[type(request)].reply)
        except CovenantError as refusal:
            answer = (HTTP_STATUS[refusal.code], refusal.to_wire())
        rows = (await engine.call(w.RecentAudit(), w.AuditReply)).rows
        shown = str((answer, [structs.replace(row, seq=0) for row in rows]))
        for name in (peer.display, peer.pubkey):
            shown = shown.replace(name, "PEER")
        told.append(shown.replace(f"asking{number}", "ASKING"))
    assert told[0] == told[1]


async def test_whose_grant_covers_a_name_learns_that_nobody_has_it(town: Town) -> None:
    """Contract 27: it sees the name, and is told the truth."""
    asking = await enrolled(town.box, "asking@lab", "a2a.send.nil@lab")
    engine = RemoteEngine(town.transport, asking.token)
    for request in (
        w.SendTask(task=Task(recipient=ABSENT, intent_text="x")),
        w.Check(action="a2a.send.nil@lab", counterparty="nil@lab"),
    ):
        with pytest.raises(UnknownPeer):
            await engine.call(request, PLACE_OF[type(request)].reply)
    with pytest.raises(UnknownPeer):
        await town.call("operator", w.ListGrants(subject="nil@lab"), w.Grants)
    with pytest.raises(UnknownPeer):
        await town.call("operator", w.Grant(subject="nil@lab", action="a2a.send.*"), w.Granted)
    for forbidden in (w.RevokePeer(peer="nil@lab"), w.RotateToken(peer="nil@lab"), w.RecvTask(recipient="nil@lab")):
        with pytest.raises(UnknownPeer):
            await town.call("operator", forbidden, PLACE_OF[type(forbidden)].reply)
