"""Who may do what: every verb, every role, the expected answer. (Contract 25, 26, 27.)"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import pytest

from covenant import (
    AgentId,
    Delivery,
    ForceError,
    Idempotency,
    Mailbox,
    RepairRequest,
    Requeue,
    Result,
    RetryPolicy,
    Task,
    Text,
)
from covenant.client.engine import RemoteEngine
from covenant.client.unix import UnixTransport
from covenant.exchange.realm import Realm
from covenant.model.audit import AuditRow
from covenant.model.error import CovenantError, StoreUnavailable
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Part
from covenant.model.peer import Capability, Scope
from covenant.model.query import CheckGrant
from covenant.model.run import RunCommit, Wait
from covenant.serve import wire as w
from covenant.serve.places import PLACE_OF, PLACES
from tests.daemons import OPERATOR_TOKEN, Realmful, enrolled, start_daemon, url_of

OK: Final = "ok"
ABSENT: Final = "00000000-0000-4000-8000-000000000000"
ROLES: Final = ("operator", "sender", "worker", "stranger", "bare")
"""sender and worker may send, respond and cancel; stranger too, but has no part in the task; bare is the worker's
colleague with no grant at all."""


class World(NamedTuple):
    """One task of each sort, and everybody's connection."""

    engines: dict[str, RemoteEngine]
    agents: dict[str, AgentId]
    queued: str
    held: Delivery
    cached: str
    grant: str
    parked: str  # a run of the worker's, which does not know what became of an effect
    running: Delivery
    incarnation: str = "w1"  # that holds it
    store: Any = None  # below all this


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
    box = realm.open(daemon, "unix")
    async with box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab", incarnation="w1")
        key = Idempotency("idempotent", "k")
        await alice.send_task(Task(recipient=bob.agent, intent_text="done before", idempotency=key))
        await bob.send_result(Result.ok(await bob.recv_task(), [Text("yes")]))
        await alice.recv_result()
        await alice.send_task(Task(recipient=bob.agent, intent_text="held"))
        held = await bob.recv_task()
        runs = []
        for wait in (Wait(signals=("effect:charge",), doubt="charge"), None):
            await alice.send_task(Task(recipient=bob.agent, intent_text="a run"))
            runs.append(await bob.recv_task())
            await bob.commit_run(runs[-1], RunCommit(number=1, wait=wait))
        queued = await alice.send_task(Task(recipient=bob.agent, intent_text="queued"))
        cached = (await box.cached_results()).entries[0].id
        agents = {"sender": alice.agent, "worker": bob.agent}
        grants = (await engines["operator"].call(w.ListGrants(limit=100), w.Grants)).capabilities
        mine = next(grant.id for grant in grants if grant.subject == alice.agent)
        yield World(engines, agents, queued.task_id, held, cached, mine, runs[0].task.id, runs[1], store=daemon.store)
    await transport.close()
    await daemon.stop()


Make = Callable[[World], w.Request]

NO = "missing_capability"
OVER = "scope_mismatch"
UNKNOWN = "unknown_task"

_PARTIES: Final = dict(zip(ROLES, (OK, OK, OK, UNKNOWN, UNKNOWN), strict=True))
_HOLDER: Final = dict(zip(ROLES, (OK, "unknown_lease", OK, "unknown_lease", "unknown_lease"), strict=True))
PIECE: Final = Artifact(artifact_id="a", parts=(Part(text="one"),))

TABLE: Final[dict[str, tuple[Make, dict[str, str]]]] = {
    # verb: how it is called, and what each role is told, in the order of ROLES
    "send": (
        lambda x: w.SendTask(task=Task(recipient=x.agents["worker"], intent_text="more")),
        dict(zip(ROLES, (OK, OK, OK, OK, NO), strict=True)),
    ),
    "send batch": (
        lambda x: w.SendTasks(tasks=[Task(recipient=x.agents["worker"], intent_text="more")]),
        dict(zip(ROLES, (OK, OK, OK, OK, OK), strict=True)),  # each item has its own answer
    ),
    "send as another": (
        lambda x: w.SendTask(task=Task(sender=x.agents["sender"], recipient=x.agents["worker"], intent_text="more")),
        dict(zip(ROLES, ("sender_mismatch", OK, *("sender_mismatch",) * 3), strict=True)),
    ),
    "next task": (lambda x: w.RecvTask(), dict.fromkeys(ROLES, OK)),
    "next task of another": (
        lambda x: w.RecvTask(recipient="bob@lab"),
        dict(zip(ROLES, (OK, "not_permitted", OK, "not_permitted", "not_permitted"), strict=True)),
    ),
    "next task of all": (
        lambda x: w.RecvTask(recipient="*"),
        dict(zip(ROLES, (OK, *("not_permitted",) * 4), strict=True)),
    ),
    "next tasks": (lambda x: w.RecvTasks(limit=2), dict.fromkeys(ROLES, OK)),
    "next result": (lambda x: w.RecvResult(), dict.fromkeys(ROLES, OK)),
    "next results": (lambda x: w.RecvResults(limit=2), dict.fromkeys(ROLES, OK)),
    "next result of another": (
        lambda x: w.RecvResult(peer="alice@lab"),
        dict(zip(ROLES, (OK, OK, "not_permitted", "not_permitted", "not_permitted"), strict=True)),
    ),
    "give back": (lambda x: w.GiveBack(receipt="none"), dict.fromkeys(ROLES, OK)),
    "recent tasks": (lambda x: w.RecentTasks(), dict.fromkeys(ROLES, OK)),
    "recent results": (lambda x: w.RecentResults(), dict.fromkeys(ROLES, OK)),
    "queue": (lambda x: w.Queue(), dict.fromkeys(ROLES, OK)),
    "get": (lambda x: w.GetTask(task_id=x.queued), dict(_PARTIES)),
    "tree": (lambda x: w.GetTree(task_id=x.queued), dict(_PARTIES)),
    "why": (lambda x: w.Story(task_id=x.queued), dict(_PARTIES)),
    "get result": (lambda x: w.GetResult(task_id=x.queued), dict(_PARTIES)),
    "post": (
        lambda x: w.PostResult(result=Result.ok(x.held, [Text("done")])),
        dict(zip(ROLES, (OK, NO_PART := "not_permitted", OK, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "heartbeat": (lambda x: w.Heartbeat(lease_id=x.held.lease_id), dict(_HOLDER)),
    "release": (lambda x: w.Release(lease_id=x.held.lease_id), dict(_HOLDER)),
    "add a message": (
        lambda x: w.AddMessage(task_id=x.queued, text="and more"),
        dict(zip(ROLES, (OK, OK, NO_PART, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "update": (lambda x: w.Update(lease_id=x.held.lease_id, text="half way"), dict(_HOLDER)),
    "artifact": (lambda x: w.AddArtifact(lease_id=x.held.lease_id, artifact=PIECE, append=True), dict(_HOLDER)),
    "ask": (lambda x: w.Ask(lease_id=x.held.lease_id), dict(_HOLDER)),
    "inputs": (lambda x: w.ListInputs(lease_id=x.held.lease_id), dict(_HOLDER)),
    "reject": (lambda x: w.Reject(lease_id=x.held.lease_id, text="not I"), dict(_HOLDER)),
    "reply": (
        lambda x: w.ReplyDirectly(lease_id=x.held.lease_id, text="hello"),
        {**_HOLDER, "operator": "not_permitted", "worker": "not_permitted"},  # it came by the mailbox
    ),
    "commit a run": (lambda x: w.CommitRun(lease_id=x.running.lease_id, commit=RunCommit(number=2)), dict(_HOLDER)),
    "load a run": (lambda x: w.LoadRun(lease_id=x.running.lease_id), dict(_HOLDER)),
    "look around": (lambda x: w.LookAround(lease_id=x.running.lease_id, wait=Wait(signals=("go",))), dict(_HOLDER)),
    "find an entry": (lambda x: w.FindEntry(lease_id=x.running.lease_id, key="k"), dict(_HOLDER)),
    "runs": (lambda x: w.ListRuns(), dict.fromkeys(ROLES, OK)),
    "run": (lambda x: w.GetRun(task_id=x.parked), dict(_PARTIES)),
    "entries": (lambda x: w.RunEntries(task_id=x.parked), dict(_PARTIES)),
    "signal": (lambda x: w.SignalRun(task_id=x.parked, name="go"), dict(_PARTIES)),
    "start or signal": (
        lambda x: w.SignalRun(task_id=ABSENT, name="go", start=Task(recipient=x.agents["worker"], intent_text="run")),
        dict(zip(ROLES, (OK, OK, OK, OK, NO), strict=True)),
    ),
    "start as another": (
        lambda x: w.SignalRun(
            task_id=ABSENT,
            name="go",
            start=Task(sender=x.agents["sender"], recipient=x.agents["worker"], intent_text="run"),
        ),
        dict(zip(ROLES, ("sender_mismatch", OK, *("sender_mismatch",) * 3), strict=True)),
    ),
    "start at nobody": (
        lambda x: w.SignalRun(
            task_id=ABSENT, name="go", start=Task(recipient=AgentId.named("nobody@lab"), intent_text="run")
        ),
        dict(zip(ROLES, ("unknown_peer",) * 4 + (NO,), strict=True)),
    ),
    "wake": (
        lambda x: w.WakeRun(task_id=x.parked),
        dict(zip(ROLES, (OK, NO_PART, OK, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "resume": (
        lambda x: w.ResumeRun(task_id=x.running.task.id, dead=x.incarnation, evidence="attested", reason="crash"),
        dict(zip(ROLES, (OK, NO, OK, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "judge": (
        lambda x: w.JudgeEffect(task_id=x.parked, effect="charge", verdict="retry", reason="I looked"),
        dict(zip(ROLES, (OK, NO, OK, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "cancel": (
        lambda x: w.Cancel(task_id=x.queued),
        dict(zip(ROLES, (OK, OK, NO_PART, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "requeue": (
        lambda x: w.Repair(request=RepairRequest(x.held.task.id, Requeue("operator_accepted"), "stuck")),
        dict(zip(ROLES, (OK, NO, NO, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "force error": (
        lambda x: w.Repair(request=RepairRequest(x.held.task.id, ForceError("no"), "stuck")),
        dict(zip(ROLES, (OK, NO, NO, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "retry-stale, looking": (
        lambda x: w.RetryStale(),
        dict(zip(ROLES, (OK, *("not_permitted",) * 4), strict=True)),
    ),
    "retry-stale": (
        lambda x: w.RetryStale(policy=RetryPolicy(enabled=True)),
        dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True)),
    ),
    "cache": (lambda x: w.ListCache(), dict.fromkeys(ROLES, OK)),
    "forget": (
        lambda x: w.ForgetCached(entry_id=x.cached, reason="wrong"),
        dict(zip(ROLES, (OK, NO, NO, UNKNOWN, UNKNOWN), strict=True)),
    ),
    "compact": (lambda x: w.Compact(), dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True))),
    "enroll": (
        lambda x: w.EnrollPeer(display="new@lab"),
        dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True)),
    ),
    "peers": (lambda x: w.ListPeers(), dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True))),
    "revoke a peer": (
        lambda x: w.RevokePeer(peer="carol@lab"),
        dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True)),
    ),
    "rotate another's token": (
        lambda x: w.RotateToken(peer="carol@lab"),
        dict(zip(ROLES, (OK, NO_PART, NO_PART, OK, NO_PART), strict=True)),
    ),
    "rotate one's own token": (lambda x: w.RotateToken(), dict.fromkeys(ROLES, OK)),
    "grant": (
        lambda x: w.Grant(subject="bob@lab", action="a2a.send.*"),
        dict(zip(ROLES, (OK, *("not_permitted",) * 4), strict=True)),
    ),
    "grants": (lambda x: w.ListGrants(), dict.fromkeys(ROLES, OK)),
    "revoke a grant": (
        lambda x: w.Revoke(grant_id=x.grant),
        dict(zip(ROLES, (OK, "not_permitted", *("unknown_grant",) * 3), strict=True)),
    ),
    "check": (
        lambda x: w.Check(action="a2a.send.bob@lab", counterparty="bob@lab"),
        dict.fromkeys(ROLES, OK),
    ),
    "check another": (
        lambda x: w.Check(action="store.compact", subject="bob@lab"),
        dict(zip(ROLES, (OK, NO, OK, NO, NO), strict=True)),
    ),
    "publish oneself": (lambda x: w.PublishAgent(), dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True))),
    "publish another": (
        lambda x: w.PublishAgent(name="bob@lab", card={"name": "bob"}),
        dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True)),
    ),
    "agents": (lambda x: w.ListAgents(), dict.fromkeys(ROLES, OK)),
    "an agent": (lambda x: w.GetAgent(name="bob@lab"), dict.fromkeys(ROLES, "unknown_peer")),
    "withdraw": (
        lambda x: w.WithdrawAgent(name="bob@lab"),
        dict(zip(ROLES, (OK, NO, OK, NO, NO), strict=True)),  # where there is none, the worker changes nothing
    ),
    "audit": (lambda x: w.RecentAudit(), dict.fromkeys(ROLES, OK)),
    "daemons": (lambda x: w.ListDaemons(), dict(zip(ROLES, (OK, NO, NO, NO, NO), strict=True))),
    "whoami": (lambda x: w.Whoami(), dict.fromkeys(ROLES, OK)),
    "version": (lambda x: w.Version(), dict.fromkeys(ROLES, OK)),
}


async def told(world: World, role: str, request: w.Request) -> str:
    try:
        await world.engines[role].call(request, PLACE_OF[type(request)].reply)
    except CovenantError as refusal:
        return refusal.code
    return OK


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("verb", TABLE)
async def test_each_role_is_told_what_the_table_says(world: World, verb: str, role: str) -> None:
    make, expected = TABLE[verb]
    assert await told(world, role, make(world)) == expected[role]


def test_the_table_has_every_verb() -> None:
    agents = {"sender": AgentId.named("a@b"), "worker": AgentId.named("c@d")}
    world = World({}, agents, ABSENT, _delivery(), "slot:x", ABSENT, ABSENT, _delivery())
    covered = {type(make(world)) for make, _ in TABLE.values()}
    assert covered == {place.request for place in PLACES}


def _delivery() -> Delivery:
    return Delivery(Task(recipient=AgentId.named("a@b"), intent_text="x", id=ABSENT), ABSENT, 1, 1)


HIDDEN: Final[dict[str, Callable[[str, str, str], w.Request]]] = {
    # verbs that name something: by the id of a task, of a lease, of a cached result
    "get": lambda task, lease, slot: w.GetTask(task_id=task),
    "wait": lambda task, lease, slot: w.GetTask(task_id=task, current_generation=0, wait_ms=10),
    "tree": lambda task, lease, slot: w.GetTree(task_id=task),
    "why": lambda task, lease, slot: w.Story(task_id=task),
    "result": lambda task, lease, slot: w.GetResult(task_id=task),
    "post": lambda task, lease, slot: w.PostResult(result=Result(task, "ok", (), None, lease)),
    "cancel": lambda task, lease, slot: w.Cancel(task_id=task),
    "requeue": lambda task, lease, slot: w.Repair(request=RepairRequest(task, Requeue("idempotent"), "x")),
    "force": lambda task, lease, slot: w.Repair(request=RepairRequest(task, ForceError("x"), "x")),
    "heartbeat": lambda task, lease, slot: w.Heartbeat(lease_id=lease),
    "release": lambda task, lease, slot: w.Release(lease_id=lease),
    "add a message": lambda task, lease, slot: w.AddMessage(task_id=task, text="x"),
    "update": lambda task, lease, slot: w.Update(lease_id=lease, text="x"),
    "artifact": lambda task, lease, slot: w.AddArtifact(lease_id=lease, artifact=PIECE),
    "ask": lambda task, lease, slot: w.Ask(lease_id=lease, text="x"),
    "reject": lambda task, lease, slot: w.Reject(lease_id=lease, text="x"),
    "reply": lambda task, lease, slot: w.ReplyDirectly(lease_id=lease, text="x"),
    "inputs": lambda task, lease, slot: w.ListInputs(lease_id=lease, wait_ms=10),
    "forget": lambda task, lease, slot: w.ForgetCached(entry_id=slot, reason="x"),
    "commit a run": lambda task, lease, slot: w.CommitRun(lease_id=lease, commit=RunCommit(number=1)),
    "load a run": lambda task, lease, slot: w.LoadRun(lease_id=lease),
    "look around": lambda task, lease, slot: w.LookAround(lease_id=lease, wait=Wait(until_ms=0)),
    "find an entry": lambda task, lease, slot: w.FindEntry(lease_id=lease, key="x"),
    "run": lambda task, lease, slot: w.GetRun(task_id=task),
    "entries": lambda task, lease, slot: w.RunEntries(task_id=task),
    "signal": lambda task, lease, slot: w.SignalRun(task_id=task, name="x"),
    "wake": lambda task, lease, slot: w.WakeRun(task_id=task),
    "resume": lambda task, lease, slot: w.ResumeRun(task_id=task, dead="x", reason="x"),
    "judge": lambda task, lease, slot: w.JudgeEffect(task_id=task, effect="x", verdict="done", reason="x"),
}


@pytest.mark.parametrize("role", ["stranger", "bare"])
@pytest.mark.parametrize("verb", HIDDEN)
async def test_what_is_hidden_cannot_be_told_from_what_is_absent(world: World, verb: str, role: str) -> None:
    """Contract 27: neither by the code, nor by the words, nor by what changes."""
    make = HIDDEN[verb]
    there = make(world.held.task.id, world.held.lease_id, world.cached)
    absent = make(ABSENT, ABSENT, f"slot:{'0' * 64}")
    before = await world.engines["operator"].call(w.Queue(limit=100), w.QueueReply)
    answers = []
    for request in (there, absent):
        with pytest.raises(CovenantError) as refused:
            await world.engines[role].call(request, PLACE_OF[type(request)].reply)
        answers.append((refused.value.code, _without_ids(refused.value, world)))
    assert answers[0] == answers[1]
    assert await world.engines["operator"].call(w.Queue(limit=100), w.QueueReply) == before


def _without_ids(refusal: CovenantError, world: World) -> str:
    words = str(refusal.to_wire())
    for name in (world.held.task.id, world.held.lease_id, world.cached, ABSENT, f"slot:{'0' * 64}"):
        words = words.replace(name, "…")
    return words


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


REFUSED: Final[dict[str, Callable[[World], w.Request]]] = {
    "receive for another": lambda x: w.RecvTask(recipient="bob@lab"),
    "drain for another": lambda x: w.RecvResult(peer="alice@lab"),
    "receive for somebody who is not there": lambda x: w.RecvTask(recipient="nobody@lab"),
    "grant": lambda x: w.Grant(subject="bare@lab", action="a2a.send.*"),
    "revoke": lambda x: w.Revoke(grant_id=x.grant),
    "list peers": lambda x: w.ListPeers(),
    "check another": lambda x: w.Check(subject="alice@lab", action="a2a.repair.requeue"),
    "enroll": lambda x: w.EnrollPeer(display="new@lab", grants=["a2a.send.*"]),
    "revoke a peer that is not there": lambda x: w.RevokePeer(peer="nobody@lab"),
    "rotate for somebody who is not there": lambda x: w.RotateToken(peer="nobody@lab"),
    "heartbeat of an unknown lease": lambda x: w.Heartbeat(lease_id=ABSENT),
    "release of another's lease": lambda x: w.Release(lease_id=x.held.lease_id),
    "cancel": lambda x: w.Cancel(task_id=x.queued),
    "retry": lambda x: w.RetryStale(policy=RetryPolicy(enabled=True)),
}


@pytest.mark.parametrize("verb", REFUSED)
async def test_every_refusal_has_its_row(world: World, verb: str) -> None:
    """Contract 28: a denial is written down, whatever it is that was denied."""
    assert await told(world, "bare", REFUSED[verb](world)) != OK
    assert len(await rows_by(world, "bare@lab")) == 1


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


async def test_a_scope_pins_the_task_and_the_lease(world: World) -> None:
    """Contract 26: scopes pin the counterparty, the task, the lease and the posture."""
    operator, held = world.engines["operator"], world.held
    scope = Scope(task_id=held.task.id, lease_id=held.lease_id, duplicate_risk="operator_accepted")
    await operator.call(w.Grant(subject="bob@lab", action="a2a.repair.requeue", scope=scope), w.Granted)

    def requeue(risk: Any, lease_id: str | None, task_id: str = held.task.id) -> w.Repair:
        return w.Repair(request=RepairRequest(task_id, Requeue(risk, lease_id), "stuck"))

    assert await told(world, "worker", requeue("operator_accepted", None)) == "scope_mismatch"
    assert await told(world, "worker", requeue("idempotent", held.lease_id)) == "scope_mismatch"
    assert await told(world, "worker", requeue("operator_accepted", held.lease_id, world.queued)) == "scope_mismatch"
    assert await told(world, "worker", requeue("operator_accepted", held.lease_id)) == OK


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


@pytest.mark.parametrize(
    "request_", [w.RecvTask(receipt="r" * 9000), w.RecvTask(incarnation="i" * 9000), w.GiveBack(receipt="r" * 9000)]
)
async def test_names_that_a_caller_makes_up_have_a_bound(world: World, request_: w.Request) -> None:
    assert await told(world, "worker", request_) == "too_large"


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
