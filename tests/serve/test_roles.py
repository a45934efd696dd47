"""How grants live: used, used up, passed on, revoked, given again, as a daemon's clients see it. (Contract 25-28.)

Who may do what, by which grant, is proven in `tests/authorization`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import pytest

from covenant import AgentId, Mailbox, Result, Task
from covenant.client.engine import RemoteEngine
from covenant.client.unix import UnixTransport
from covenant.exchange.realm import Realm
from covenant.model.audit import AuditRow
from covenant.model.error import CovenantError, StoreUnavailable
from covenant.model.limits import Limits
from covenant.model.peer import Capability, Scope
from covenant.model.query import CheckGrant
from covenant.model.run import RunCommit
from covenant.serve import wire as w
from covenant.serve.places import PLACE_OF
from tests.daemons import OPERATOR_TOKEN, Realmful, enrolled, start_daemon, url_of

OK: Final = "ok"
ABSENT: Final = "00000000-0000-4000-8000-000000000000"
NO: Final = "missing_capability"
OVER: Final = "scope_mismatch"
UNKNOWN: Final = "unknown_task"


class World(NamedTuple):
    """Everybody's connection. sender, worker and stranger may send, respond and cancel; bare has no grant at all."""

    engines: dict[str, RemoteEngine]
    agents: dict[str, AgentId]
    store: Any  # below all this


@pytest.fixture
async def world() -> AsyncIterator[World]:
    daemon = await start_daemon("memory:", Limits())
    realm = Realmful()
    await realm.enroll(daemon)
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    _, bare = await daemon.exchange.enroll(operator, "bare@lab", None, ())
    transport = UnixTransport(str(daemon.settings.ipc))
    tokens = {
        "operator": OPERATOR_TOKEN,
        "sender": realm.tokens["alice@lab"],
        "worker": realm.tokens["bob@lab"],
        "stranger": realm.tokens["carol@lab"],
        "bare": bare,
    }
    engines = {role: RemoteEngine(transport, token) for role, token in tokens.items()}
    for engine in engines.values():
        await engine.open()
    agents = {"sender": AgentId.named("alice@lab"), "worker": AgentId.named("bob@lab")}
    yield World(engines, agents, daemon.store)
    await transport.close()
    await daemon.stop()


async def told(world: World, role: str, request: w.Request) -> str:
    try:
        await world.engines[role].call(request, PLACE_OF[type(request)].reply)
    except CovenantError as refusal:
        return refusal.code
    return OK


async def test_a_bounded_grant_is_used_up_by_what_succeeds_only(world: World) -> None:
    """Contract 26: max_uses counts calls that succeed."""
    operator, bare = world.engines["operator"], world.engines["bare"]
    await operator.call(w.Grant(subject="bare@lab", action="a2a.send.bob@lab", scope=Scope(max_uses=2)), w.Granted)
    blank = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text=" "))
    good = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="work"))
    assert await told(world, "bare", blank) == "blank_text"
    assert [await told(world, "bare", good) for _ in range(3)] == [OK, OK, OVER]
    assert (await bare.call(w.ListGrants(), w.Grants)).capabilities == []  # used up, it is over


async def test_a_call_that_is_repeated_costs_no_use_and_is_answered_again(world: World) -> None:
    """Contract 5, 26: whose first answer was lost asks again, also when the first call used the grant up."""
    operator = world.engines["operator"]
    await operator.call(w.Grant(subject="bare@lab", action="a2a.send.bob@lab", scope=Scope(max_uses=2)), w.Granted)
    first, second = (
        w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="work", id=f"{number:08}{ABSENT[8:]}"))
        for number in (1, 2)
    )
    assert [await told(world, "bare", send) for send in (first, first, second, second, first)] == [OK] * 5
    third = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="more"))
    assert await told(world, "bare", third) == OVER
    other = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="other", id=first.task.id))
    assert await told(world, "bare", other) == OVER
    assert await told(world, "stranger", w.GetTask(task_id=str(first.task.id))) == UNKNOWN


async def test_a_look_at_what_a_grant_shows_is_a_use_of_it(world: World) -> None:
    """Contract 26: max_uses holds for reading too, and each look leaves its check."""
    operator = world.engines["operator"]
    await operator.call(w.Grant(subject="bare@lab", action="peers.list", scope=Scope(max_uses=2)), w.Granted)
    assert [await told(world, "bare", w.ListPeers()) for _ in range(3)] == [OK, OK, OVER]
    assert [row.passed for row in await rows_by(world, "bare@lab")] == [False, True, True]


LOOKS: Final[dict[str, tuple[str, w.Request]]] = {
    "list peers": ("peers.list", w.ListPeers()),
    "list grants": ("capabilities.list", w.ListGrants(subject="alice@lab")),
    "list all grants": ("capabilities.list", w.ListGrants()),
    "check another": ("capabilities.list", w.Check(subject="alice@lab", action="a2a.repair.requeue")),
    "read the audit": ("audit.read", w.RecentAudit()),
    "list daemons": ("audit.read", w.ListDaemons()),
}


@pytest.mark.parametrize("look", LOOKS)
async def test_a_look_that_fails_is_no_use(world: World, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 26: a use counts only if its call succeeds, also where the store goes away in the middle of it."""
    action, request = LOOKS[look]
    operator, store = world.engines["operator"], world.store
    await operator.call(w.Grant(subject="bare@lab", action=action, scope=Scope(max_uses=1)), w.Granted)
    ask = store.ask

    async def away(*args: Any) -> Any:
        raise StoreUnavailable("it is away", outcome="not_stored")

    async def ask_in_vain(query: Any, *by: Any) -> Any:
        return await ask(query, *by) if is_about_the_right(query) else await away()

    def is_about_the_right(query: Any) -> bool:
        return isinstance(query, CheckGrant) and query.demand.action == action

    with monkeypatch.context() as fault:
        fault.setattr(store, "ask", ask_in_vain)
        fault.setattr(store, "log_back", away)
        fault.setattr(store, "daemons", away)
        assert await told(world, "bare", request) == "store_unavailable"
    held = w.ListGrants(subject="bare@lab")
    assert [grant.uses for grant in (await operator.call(held, w.Grants)).capabilities] == [0]
    assert await told(world, "bare", request) == OK
    assert (await operator.call(held, w.Grants)).capabilities == []  # used up, it is over


@pytest.mark.parametrize("request_", [w.ListPeers(limit=-1), w.ListPeers(cursor="nowhere")], ids=["limit", "cursor"])
async def test_a_look_that_is_malformed_is_no_use(world: World, request_: w.Request) -> None:
    operator = world.engines["operator"]
    await operator.call(w.Grant(subject="bare@lab", action="peers.list", scope=Scope(max_uses=1)), w.Granted)
    assert await told(world, "bare", request_) not in (OK, NO)
    assert [await told(world, "bare", w.ListPeers()) for _ in range(2)] == [OK, OVER]


async def test_the_last_look_is_a_whole_one(world: World) -> None:
    """Contract 26: the use that it is does not take from it what it shows."""
    operator, bare = world.engines["operator"], world.engines["bare"]
    scope = Scope(max_uses=1)
    await operator.call(w.Grant(subject="bare@lab", action="capabilities.list", scope=scope), w.Granted)
    shown = (await bare.call(w.ListGrants(), w.Grants)).capabilities
    assert {grant.subject.display for grant in shown} >= {"operator@local", "alice@lab"}


async def test_a_peer_that_is_revoked_and_enrolled_again_begins_with_nothing(world: World) -> None:
    """Contract 26: a revocation is for good; a label that comes back brings no grant along."""
    operator = world.engines["operator"]
    enrolled = await operator.call(w.EnrollPeer(display="zoe@lab", grants=["a2a.send.*", "audit.read"]), w.PeerEnrolled)
    await operator.call(w.Grant(subject="bare@lab", action="peers.enroll"), w.Granted)
    await operator.call(w.RevokePeer(peer="zoe@lab"), w.PeerRevoked)
    again = w.EnrollPeer(display="zoe@lab", pubkey=enrolled.pubkey)
    assert await told(world, "bare", again) == "not_permitted"
    await operator.call(again, w.PeerEnrolled)
    assert (await operator.call(w.ListGrants(subject="zoe@lab"), w.Grants)).capabilities == []
    ended = await operator.call(w.RecentAudit(limit=50, row="capability_revoked"), w.AuditReply)
    assert [row.reason for row in ended.rows] == ["peer_revoked"] * 2


async def rows_by(world: World, actor: str) -> list[AuditRow]:
    audit = w.RecentAudit(limit=500, actor=actor)
    reply: w.AuditReply = await world.engines["operator"].call(audit, w.AuditReply)
    return list(reply.rows)


async def test_a_revoked_grant_is_worth_nothing_at_the_next_call(world: World) -> None:
    """Contract 26: the revocation holds at the next commit."""
    operator = world.engines["operator"]
    granted = (await operator.call(w.Grant(subject="bare@lab", action="a2a.send.*"), w.Granted)).capability
    good = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="work"))
    assert await told(world, "bare", good) == OK
    await operator.call(w.Revoke(grant_id=granted.id), w.Revoked)
    assert await told(world, "bare", good) == NO


async def test_a_way_that_was_open_closes_with_its_recipient(world: World) -> None:
    send = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="more"))
    assert [await told(world, "sender", send) for _ in range(2)] == [OK, OK]
    assert await told(world, "operator", w.RevokePeer(peer="bob@lab")) == OK
    assert await told(world, "sender", send) == "unknown_peer"


async def test_who_may_list_grants_sees_those_of_others(world: World) -> None:
    """Contract 26: capabilities.list, for one subject or for all, in listings and in checks."""
    operator, bare = world.engines["operator"], world.engines["bare"]
    others = (w.ListGrants(subject="alice@lab"), w.Check(action="store.compact", subject="alice@lab"))
    assert [await told(world, "bare", request) for request in others] == [NO, NO]
    assert (await bare.call(w.ListGrants(), w.Grants)).capabilities == []
    await operator.call(w.Grant(subject="bare@lab", action="capabilities.list"), w.Granted)
    assert [await told(world, "bare", request) for request in others] == [OK, OK]
    for listing in (w.ListGrants(limit=100), w.ListGrants(subject="alice@lab"), w.ListGrants(subject="bare@lab")):
        seen = await bare.call(listing, w.Grants)
        assert seen.capabilities
        assert seen == await operator.call(listing, w.Grants)


async def test_the_grants_of_one_peer_are_paged_by_themselves(world: World) -> None:
    """Contract 26: those of others neither cost it anything nor move where its pages end."""
    operator, sender = world.engines["operator"], world.engines["sender"]

    async def pages() -> list[Any]:
        return [await sender.call(w.ListGrants(limit=limit), w.Grants) for limit in (1, 2, 3, 10)]

    before = await pages()
    for _ in range(5):
        await operator.call(w.Grant(subject="bare@lab", action="a2a.send.*"), w.Granted)
    assert await pages() == before
    assert [len(page.capabilities) for page in before] == [1, 2, 3, 3]


async def test_a_grant_that_was_used_and_revoked_and_given_again_counts_each_time_as_it_is(world: World) -> None:
    """Contract 26: what is remembered of a check holds until somebody touches a grant or a peer."""
    operator = world.engines["operator"]
    good = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="work"))
    for _ in range(3):
        granted = (await operator.call(w.Grant(subject="bare@lab", action="a2a.send.*"), w.Granted)).capability
        assert [await told(world, "bare", good) for _ in range(2)] == [OK, OK]
        await operator.call(w.Revoke(grant_id=granted.id), w.Revoked)
        assert await told(world, "bare", good) == NO


async def test_a_grant_is_passed_on_never_wider(world: World) -> None:
    """Contract 26: delegation."""
    operator, worker = world.engines["operator"], world.engines["worker"]
    mine = (
        await operator.call(
            w.Grant(subject="bob@lab", action="a2a.repair.requeue", scope=Scope(max_uses=5), delegable=True), w.Granted
        )
    ).capability
    wider = w.Grant(subject="bare@lab", action="a2a.repair.*", parent=mine.id)
    unbounded = w.Grant(subject="bare@lab", action="a2a.repair.requeue", parent=mine.id)
    narrower = w.Grant(subject="bare@lab", action="a2a.repair.requeue", scope=Scope(max_uses=1), parent=mine.id)
    assert await told(world, "worker", wider) == "not_permitted"
    assert await told(world, "worker", unbounded) == "not_permitted"
    assert await told(world, "stranger", narrower) == "unknown_grant"
    passed_on = (await worker.call(narrower, w.Granted)).capability
    check = w.Check(action="a2a.repair.requeue")
    assert (await world.engines["bare"].call(check, w.Checked)).grant == passed_on.id
    await operator.call(w.Revoke(grant_id=mine.id), w.Revoked)
    assert (await world.engines["bare"].call(check, w.Checked)).passed is False


async def test_a_spoofed_label_does_not_open_a_door(world: World) -> None:
    """Contract 25: the key says who is meant; a grant for bob is none for whoever is called bob."""
    operator = world.engines["operator"]
    await operator.call(w.Grant(subject="bare@lab", action="a2a.send.bob@lab"), w.Granted)
    spoofed = AgentId("bob@lab", world.agents["sender"].pubkey)
    assert await told(world, "bare", w.SendTask(task=Task(recipient=spoofed, intent_text="x"))) == "unknown_peer"


async def test_a_forged_grant_in_the_store_is_worth_nothing(world: World) -> None:
    """Contract 26: tokens are signed by the realm's key."""
    real, other = Realm.throwaway(), Realm.throwaway()
    capability = Capability(ABSENT, AgentId.named("a@b"), "store.compact", real.operator, 1)
    assert real.is_genuine(real.sign_grant(capability))
    assert not real.is_genuine(other.sign_grant(capability))


async def test_the_right_to_look_after_peers_does_not_reach_the_operator(world: World) -> None:
    """Contract 26: nobody becomes the operator by way of a grant."""
    operator = world.engines["operator"]
    for action in ("peers.*", "peers.revoke", "peers.enroll"):
        await operator.call(w.Grant(subject="bare@lab", action=action), w.Granted)
    assert await told(world, "bare", w.RotateToken(peer="operator@local")) == "not_permitted"
    assert await told(world, "bare", w.RevokePeer(peer="operator@local")) == "not_permitted"
    assert await told(world, "bare", w.EnrollPeer(display="x@lab", grants=["a2a.*"])) == "not_permitted"
    assert await told(world, "bare", w.EnrollPeer(display="operator@local")) == "peer_conflict"
    assert await told(world, "operator", w.Whoami()) == OK


async def test_a_flood_of_refusals_is_counted_and_not_written(world: World) -> None:
    """Contract 28: rows up to a number in a minute, then a count."""
    send = w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="x"))
    for _ in range(100):
        assert await told(world, "bare", send) == NO
    batch = w.SendTasks(tasks=[Task(recipient=world.agents["worker"], intent_text="x")] * 50)
    assert await told(world, "bare", batch) == OK
    rows = await rows_by(world, "bare@lab")
    assert 59 <= len(rows) <= 61
    assert not any(row.passed for row in rows)


async def test_a_forged_label_of_the_sender_is_replaced_by_the_true_one(world: World) -> None:
    """Contract 25: beside the caller's own key stands the caller's own label."""
    stranger = AgentId.named("carol@lab")
    forged = AgentId("alice@lab", stranger.pubkey)
    task = Task(sender=forged, recipient=world.agents["worker"], intent_text="from alice, honestly")
    sent = await world.engines["stranger"].call(w.SendTask(task=task), w.TaskQueued)
    entry = (await world.engines["operator"].call(w.GetTask(task_id=sent.task_id), w.TaskReply)).entry
    assert entry.task.sender is not None
    assert entry.task.sender.display == "carol@lab"


async def test_a_task_for_a_label_reaches_whoever_has_the_label(world: World) -> None:
    """Contract 25: enrolling with the key that stands for somebody's label does not draw that label's tasks."""
    operator = world.engines["operator"]
    await operator.call(w.EnrollPeer(display="zoe@lab"), w.PeerEnrolled)
    await operator.call(w.EnrollPeer(display="mallory@lab", pubkey=AgentId.named("zoe@lab").pubkey), w.PeerEnrolled)
    task = Task(recipient=AgentId.named("zoe@lab"), intent_text="for zoe")
    sent = await operator.call(w.SendTask(task=task), w.TaskQueued)
    entry = (await operator.call(w.GetTask(task_id=sent.task_id), w.TaskReply)).entry
    assert entry.task.recipient.display == "zoe@lab"


LONG: Final = "x" * 9000
MADE_UP: Final[dict[str, Callable[[w.Delivered], w.Request]]] = {
    "receipt of a lease": lambda held: w.RecvTask(receipt=LONG),
    "receipt to give back": lambda held: w.GiveBack(receipt=LONG),
    "worker that leases": lambda held: w.RecvTask(incarnation=LONG),
    "worker that answers": lambda held: w.PostResult(result=Result(held.task.id, "ok"), incarnation=LONG),
    "worker that commits": lambda held: w.CommitRun(
        lease_id=held.lease_id, commit=RunCommit(number=2), incarnation=LONG
    ),
    "worker that resumes": lambda held: w.ResumeRun(
        task_id=held.task.id, dead="first", evidence="attested", reason="crash", incarnation=LONG
    ),
}


@pytest.mark.parametrize("made_up", MADE_UP)
async def test_names_that_a_caller_makes_up_have_a_bound(world: World, made_up: str) -> None:
    sender, worker = world.engines["sender"], world.engines["worker"]
    await sender.call(w.SendTask(task=Task(recipient=world.agents["worker"], intent_text="work")), w.TaskQueued)
    held = (await worker.call(w.RecvTasks(limit=1, incarnation="first"), w.Deliveries)).deliveries[0]
    begin = w.CommitRun(lease_id=held.lease_id, commit=RunCommit(number=1), incarnation="first")
    await worker.call(begin, PLACE_OF[w.CommitRun].reply)
    assert await told(world, "worker", MADE_UP[made_up](held)) == "too_large"


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_short_label_in_a_grant_counts_over_each_surface(scheme: str) -> None:
    """Contract 34: `bob` is `bob@local`, at enrolment and in a grant."""
    daemon = await start_daemon("memory:", Limits())
    async with Mailbox.open(url_of(daemon, scheme), token=OPERATOR_TOKEN) as box:
        await enrolled(box, "bob")
        told = [await enrolled(box, "ann", "a2a.send.bob"), await enrolled(box, "cid")]
        await box._engine.call(w.Grant(subject="cid", action="a2a.send.bob"), w.Granted)  # type: ignore[attr-defined]
        for peer in told:
            async with Mailbox.open(url_of(daemon, scheme), token=peer.token) as own:
                await own.send_task(Task(recipient=AgentId.named("bob"), intent_text="x"))
    await daemon.stop()
