"""`capabilities check` says what calls are told: the same verdict, code and grant. (Contract 26, 34.)

Random grants, passed on and revoked, used up and expired, and random calls; before each call the check is asked with
what the call will say, and afterwards compared with the row that the call left in the audit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from covenant import AgentId, CovenantError, ForceError, Idempotency, Limits, RepairRequest, Requeue, Result, Task
from covenant.exchange.bounds import Bounds
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model.audit import AuditRow
from covenant.model.peer import Caller, GrantedView, Scope
from covenant.serve import wire as w
from covenant.serve.verbs.table import handled
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.memory import Memory

NAMES: Final = ("ada@lab", "bob@lab", "cyd@lab")
KEYS: Final = {name: AgentId.named(name).pubkey for name in NAMES}
FRESH: Final = tuple(f"22222222-2222-4222-8222-{number:012x}" for number in range(4))  # ids for sends
QUEUED, HELD, OTHER, DONE = (f"33333333-3333-4333-8333-{number:012x}" for number in range(4))
LEASES: Final = {HELD: 0, OTHER: 1}
RISKS: Final = ("idempotent", "operator_accepted")
EXAMPLES: Final = 80
FLOORS: Final = {
    "let in": 300,
    "missing_capability": 1000,
    "scope_mismatch": 100,
    "under a scoped grant": 50,
    "under a delegated grant": 10,
}
_REALM: Final = Realm.throwaway()


class Scene:
    """An exchange with three peers, and a task of each sort."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        ids = CountingIds()
        bounds = Bounds(refusals_per_min=1_000_000)  # every refusal is written
        self.x = Exchange(Memory(Limits(), self.clock, ids), _REALM, self.clock, ids, bounds)
        self.callers: dict[str, Caller] = {}
        self.grants: list[GrantedView] = []
        self.leases: list[str] = []
        self.slot = ""
        self.said: set[str | None] = set()

    async def open(self) -> None:
        x = self.x
        await x.open("cov_operator")
        for name in NAMES:
            _, token = await x.enroll(x.operator(), name, KEYS[name], ())
            self.callers[name] = x.authenticate(token)
        ada, bob, cyd = (self.callers[name].agent for name in NAMES)
        run = x.store.run
        sends = ((DONE, ada, bob), (HELD, ada, bob), (QUEUED, ada, bob), (OTHER, bob, cyd))
        for task_id, sender, recipient in sends:
            keyed = Idempotency("idempotent", task_id)
            task = Task(id=task_id, sender=sender, recipient=recipient, intent_text="x", idempotency=keyed)
            await run(structs.replace(x.send(x.operator(), task), by=None))
        operator = x.operator()
        (done,) = await x.take(operator, x.lease(operator, "bob@lab", "w1"), 0)
        await run(structs.replace(x.post(operator, Result(DONE, "ok", (), None, done.lease_id), "w1"), by=None))
        for name in ("bob@lab", "cyd@lab"):
            (held,) = await x.take(operator, x.lease(operator, name, "w1"), 0)
            self.leases.append(held.lease_id)
        (cached,) = (await self.ask(operator, w.ListCache())).entries
        self.slot = cached.id

    async def ask(self, caller: Caller, request: w.Request) -> Any:
        return await handled(self.x, caller, request)

    def unused(self, task_id: str | None) -> str | None:
        """This id, or another one if it was said before: a call that is repeated is not checked again."""
        if task_id is not None and task_id in self.said:
            return self.x.new_id()
        self.said.add(task_id)
        return task_id

    def lease_of(self, task_id: str) -> str | None:
        """The lease under which a task is held now: a call before may have ended it."""
        record = self.x.store.state.get(task_id)  # type: ignore[attr-defined]  # of the engine in memory
        return None if record is None or record.lease is None else record.lease.lease_id

    async def rows(self, actor: str) -> list[AuditRow]:
        request = w.RecentAudit(row="capability_check", actor=actor, limit=5)
        rows: list[AuditRow] = (await self.ask(self.x.operator(), request)).rows
        return rows


# --- calls, and what each says of itself -------------------------------------------------------------------


class Call(Struct, frozen=True):
    verb: str
    caller: str
    peer: str  # to whom something is sent, or who is looked after
    fresh: str | None  # the id of what is sent
    task: str
    names_lease: bool
    risk: Any


class Grant(Struct, frozen=True):
    subject: str
    action: str
    scope: str  # what it is narrowed to, in words; see _scope
    lives_ms: int | None
    delegable: bool


class PassOn(Struct, frozen=True):
    """Its holder passes a grant on, as it is or narrower."""

    index: int
    subject: str
    action: str | None
    uses: int | None


class Revoke(Struct, frozen=True):
    index: int


class Pause(Struct, frozen=True):
    by_ms: int


_PARTIES: Final = {QUEUED: NAMES[:2], HELD: NAMES[:2], DONE: NAMES[:2], OTHER: NAMES[1:]}
_PLAIN: Final[dict[str, tuple[w.Request, str]]] = {
    "compact": (w.Compact(), "store.compact"),
    "list peers": (w.ListPeers(), "peers.list"),
    "list grants": (w.ListGrants(subject="operator"), "capabilities.list"),
    "publish": (w.PublishAgent(), "agents.publish"),
    "daemons": (w.ListDaemons(), "audit.read"),
    "enroll": (w.EnrollPeer(display="new@lab"), "peers.enroll"),
    "revoke a peer": (w.RevokePeer(peer="new@lab"), "peers.revoke"),
}


def said(scene: Scene, call: Call) -> tuple[w.Request, w.Check]:
    """The request, and the check that says the same."""
    if call.verb in _PLAIN:
        request, action = _PLAIN[call.verb]
        return request, w.Check(action=action)
    task, to = call.task, call.peer
    sender, recipient = _PARTIES[task]
    other = recipient if call.caller == sender else sender
    held = scene.leases[LEASES[task]] if task in LEASES else None
    lease = held if call.names_lease else None
    new = scene.unused(call.fresh)
    sent = Task(id=new or "", recipient=AgentId.named(to), intent_text="x")
    sending = w.Check(action=f"a2a.send.{to}", task_id=new)
    adding = w.Check(action=f"a2a.send.{recipient}", task_id=task)
    answering = w.Check(action=f"a2a.respond.{sender}", task_id=task, lease_id=lease)
    ending = w.Check(action="a2a.repair.force_error", counterparty=other, task_id=task, lease_id=lease)
    now_held = scene.lease_of(task)  # which calls that name none are about
    taking = structs.replace(ending, action="a2a.repair.requeue", lease_id=now_held, duplicate_risk="operator_accepted")
    match call.verb:
        case "send":
            return w.SendTask(task=sent), sending
        case "start":
            new = new or scene.x.new_id()
            return w.SignalRun(task_id=new, name="go", start=sent), structs.replace(sending, task_id=new)
        case "message":
            return w.AddMessage(task_id=task, text="x"), adding
        case "signal":
            return w.SignalRun(task_id=task, name="go"), adding
        case "post":
            return w.PostResult(result=Result(task, "ok", (), None, lease), incarnation="w1"), answering
        case "update":
            about = structs.replace(answering, lease_id=held)
            return w.Update(lease_id=held or FRESH[0], text="x"), about
        case "cancel":
            about = w.Check(action=f"a2a.cancel.{other}", task_id=task, lease_id=now_held)
            return w.Cancel(task_id=task, graceful=True), about
        case "requeue":
            repair = RepairRequest(task, Requeue(call.risk, lease), "stuck")
            return w.Repair(request=repair), structs.replace(taking, lease_id=lease, duplicate_risk=call.risk)
        case "force":
            return w.Repair(request=RepairRequest(task, ForceError("x", lease), "stuck")), ending
        case "resume":
            return w.ResumeRun(task_id=task, dead="w1", reason="crash", evidence="attested"), taking
        case "judge":
            return w.JudgeEffect(task_id=task, effect="x", verdict="failed", reason="I looked"), taking
        case _:
            assert call.verb == "forget"
            return w.ForgetCached(entry_id=scene.slot, reason="old"), w.Check(action="a2a.cache.forget")


_ABOUT_TASKS: Final = ("message", "signal", "post", "update", "cancel", "requeue", "force", "resume", "judge", "forget")
VERBS: Final = (*("send", "start") * 3, *_ABOUT_TASKS, *_PLAIN)

ACTIONS: Final = (
    *("a2a.*", "a2a.send.*", "a2a.respond.*", "a2a.cancel.*", "a2a.repair.*", "a2a.repair.requeue"),
    *(f"{start}{name}" for start in ("a2a.send.", "a2a.respond.", "a2a.cancel.") for name in NAMES),
    *(f"a2a.send.{key}" for key in KEYS.values()),
    *("a2a.repair.force_error", "a2a.cache.forget", "store.*", "peers.*", "peers.list", "audit.read", "agents.publish"),
    *("peers.*", "audit.*", "capabilities.*", "agents.*"),
    *("capabilities.list", "store.compact", "peers.enroll"),
)
SCOPES: Final = ("none", "uses", "peer", "task", "new task", "peer and task", "lease", "risk")
FITTING: Final = {  # what calls of these have; anything now and then
    "a2a.send.": ("none", "none", *SCOPES[1:6]),
    "a2a.repair.requeue": SCOPES,
    "a2a.": ("none", "none", *SCOPES[1:7]),
    "": SCOPES[:2],
}


def _scope(word: str, number: int, scene: Scene) -> Scope:
    task, fresh = (HELD, OTHER, QUEUED)[number % 3], FRESH[number % len(FRESH)]
    key = KEYS[NAMES[number % 3]]
    match word:
        case "task":
            return Scope(task_id=task)
        case "new task":
            return Scope(task_id=fresh)
        case "lease":
            return Scope(lease_id=scene.leases[number % 2])
        case "peer":
            return Scope(peer_pubkey_b58=key)
        case "risk":
            return Scope(duplicate_risk="operator_accepted")
        case "peer and task":
            return Scope(peer_pubkey_b58=key, task_id=(task, fresh)[number % 2])
        case "uses":
            return Scope(max_uses=1 + number % 2)
        case _:
            return Scope()


def a_grant(random: Random) -> Grant:
    action = random.choice(ACTIONS)
    words = next(words for start, words in FITTING.items() if action.startswith(start))
    return Grant(
        subject=random.choice(NAMES),
        action=action,
        scope=random.choice(SCOPES if random.random() < 0.1 else words),
        lives_ms=random.choice((None, None, None, 1000)),
        delegable=random.random() < 0.7,
    )


def a_call(random: Random) -> Call:
    return Call(
        verb=random.choice(VERBS),
        caller=random.choice((*NAMES, *NAMES, "operator")),
        peer=random.choice(NAMES),
        fresh=random.choice((None, *FRESH)),
        task=random.choice((QUEUED, HELD, HELD, OTHER, DONE)),
        names_lease=random.random() < 0.5,
        risk=random.choice(RISKS),
    )


def a_passing(random: Random) -> PassOn:
    action = None if random.random() < 0.8 else random.choice(ACTIONS)
    return PassOn(random.randrange(12), random.choice(NAMES), action, random.choice((None, None, 1)))


def a_program(random: Random) -> list[Any]:
    """First some grants, then calls, and between them whatever changes what they may."""
    steps: list[Any] = [a_grant(random) for _ in range(6)] + [a_passing(random) for _ in range(3)]
    for _ in range(15):
        steps += [a_call(random) for _ in range(3)]
        steps.append(random.choice((a_grant(random), a_passing(random), Revoke(random.randrange(12)), Pause(700))))
    return steps


class Play:
    """One program. What it met is counted."""

    def __init__(self, counts: Counter[str]) -> None:
        self.scene = Scene()
        self.counts = counts
        self._number = 0

    async def play(self, program: list[Any]) -> None:
        await self.scene.open()
        for step in program:
            self._number += 1
            try:
                await self._do(step)
            except CovenantError as refusal:
                assert isinstance(step, Grant | PassOn) and refusal.code in ("malformed", "not_permitted"), refusal
                self.counts[f"{type(step).__name__} refused"] += 1
        await self.scene.x.close()

    async def _do(self, step: Any) -> None:
        scene, x = self.scene, self.scene.x
        match step:
            case Call():
                await self._call(step)
            case Pause(by_ms):
                scene.clock.advance(by_ms)
            case Revoke(index) if scene.grants:
                grant = scene.grants[index % len(scene.grants)]
                await scene.ask(x.operator(), w.Revoke(grant_id=grant.id))
            case PassOn(index, subject, action, uses) if scene.grants:
                await self._pass_on(scene.grants[index % len(scene.grants)], subject, action, uses)
            case Grant():
                scope = _scope(step.scope, self._number, scene)
                until = None if step.lives_ms is None else x.now_ms() + step.lives_ms
                request = w.Grant(
                    subject=step.subject, action=step.action, scope=scope, expires_ms=until, delegable=step.delegable
                )
                scene.grants.append((await scene.ask(x.operator(), request)).capability)

    async def _pass_on(self, source: GrantedView, subject: str, action: str | None, uses: int | None) -> None:
        scope = source.scope if uses is None else structs.replace(source.scope, max_uses=uses)
        request = w.Grant(
            subject=subject,
            action=action or source.action,
            scope=scope,
            expires_ms=source.expires_ms,
            delegable=True,
            parent=source.id,
        )
        holder = self.scene.callers[source.subject.display]
        self.scene.grants.append((await self.scene.ask(holder, request)).capability)
        self.counts["passed on"] += 1

    async def _call(self, call: Call) -> None:
        scene = self.scene
        caller = scene.x.operator() if call.caller == "operator" else scene.callers[call.caller]
        request, check = said(scene, call)
        checked: w.Checked = await scene.ask(caller, check)
        before = {row.seq for row in await scene.rows(call.caller)}
        code = "ok"
        try:
            await scene.ask(caller, request)
        except CovenantError as refusal:
            code = refusal.code
        row = next((row for row in await scene.rows(call.caller) if row.seq not in before), None)
        if row is None:  # it was refused before the check, or done before, or needs no grant
            self.counts["no check"] += 1
            assert code not in ("missing_capability", "scope_mismatch")
            return
        told = code if code in ("missing_capability", "scope_mismatch") else None
        assert (checked.passed, checked.grant, checked.reason) == (row.passed, row.grant, told), (request, code)
        self.counts[told or "let in"] += 1
        self.counts[f"{call.verb}: {'let in' if row.passed else 'refused'}"] += 1
        grant = next((one for one in scene.grants if one.id == row.grant), None)
        if grant is not None:
            self.counts["under a delegated grant"] += grant.parent is not None
            self.counts["under a scoped grant"] += grant.scope != Scope()


def test_a_check_never_differs_from_the_call() -> None:
    """Contract 34: the check that answers "may I" is the one that lets in."""
    counts: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.integers(0, 2**32))
    def never_differs(seed: int) -> None:
        asyncio.run(Play(counts).play(a_program(Random(seed))))

    never_differs()
    for verdict, floor in FLOORS.items():
        assert counts[verdict] >= floor, (verdict, counts)
    for verb in dict.fromkeys(VERBS):
        assert counts[f"{verb}: let in"] and counts[f"{verb}: refused"], (verb, counts)
