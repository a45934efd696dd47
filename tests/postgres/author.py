"""Random programs over every command of the decider.

Few agents, keys, kinds and ids, so that they collide all the time. The author looks into the state of one engine, so
that most of what it writes makes sense; the rest is what anybody might try. The same seed writes the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from covenant import AgentId, ForceError, Idempotency, RepairRequest, Requeue, Result, RetryPolicy, Task, Text
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part
from covenant.model.peer import Caller, Capability, Grant, Peer, Role, Scope, peer_key
from covenant.model.push import Push, PushConfig, pushed_task
from covenant.model.record import Asks, Slot, TaskRecord
from covenant.model.run import EFFECT, EntryDraft, EntryRole, Memo, Run, RunCommit, Signal, Wait, run_key
from covenant.store.state import State

T = TypeVar("T")

AGENTS: Final = tuple(AgentId.named(name) for name in ("ada", "bob", "cyd"))
IDS: Final = tuple(f"22222222-2222-4222-8222-{number:012x}" for number in range(8))
NOWHERE: Final = "33333333-3333-4333-8333-333333333333"
NO_LEASE: Final = "44444444-4444-4444-8444-444444444444"
LAST_CURSOR: Final = "last"  # where the engine's own last pass stopped
_WORKERS: Final = ("one", "two")
_NAMES: Final = ("go", "go.on", "stop")
_PATTERNS: Final = ("go", "go.*", "**", "message")
_WORDS: Final = ("red", "green", "")
_SEEN: Final = 120  # of the newest records
_ACTIONS: Final = (
    *("a2a.send.*", "a2a.send.bob@local", "a2a.respond.*", "a2a.cancel.*", "a2a.*") * 2,
    *(
        "a2a.repair.requeue",
        "a2a.repair.*",
        "a2a.cache.forget",
        "store.compact",
        "peers.*",
        "agents.publish",
        "peers.fly",
    ),
)


class Pause(Struct, frozen=True):
    """Time passes."""

    by_ms: int


Line: TypeAlias = c.Command | c.Call | Pause | tuple[c.Command | c.Call, ...]


class Author:
    def __init__(self, seed: int, state: State, now: Callable[[], int]) -> None:
        self._random = Random(seed)
        self._state = state
        self._now = now
        self._made = 0
        self._tokens = {agent.pubkey: f"token of {agent}" for agent in AGENTS}
        self._lines: list[Callable[[], c.Command]] = []
        for often, kinds in _OFTEN.items():
            self._lines += [getattr(self, kind) for kind in kinds] * often

    # --- choosing -----------------------------------------------------------------------------------------

    def _one(self, *choices: T) -> T:
        return self._random.choice(choices)

    def _of(self, found: Sequence[T], *others: T) -> T:
        """One of those that were found, and now and then another."""
        return self._one(*found, *others) if self._rarely() or not found else self._one(*found)

    def _rarely(self) -> bool:
        return self._random.random() < 0.1

    def _maybe(self, value: T, part: float = 0.3) -> T | None:
        return value if self._random.random() < part else None

    def _newest(self, kind: type[T]) -> list[tuple[str, T]]:
        records = self._state.records
        newest = islice(reversed(records), _SEEN)
        return [(key, record) for key in newest if isinstance(record := records[key], kind)]

    def _tasks(self, holds: Callable[[TaskRecord], bool] = lambda _: True) -> list[TaskRecord]:
        return [record for _, record in self._newest(TaskRecord) if holds(record)]

    def _task(self) -> str:
        return self._of([record.task.id for record in self._tasks()], NOWHERE, "no id")

    def _lease(self) -> tuple[str, TaskRecord | None]:
        """Mostly one that holds a task, or one that did. Of what has ended, an archive does not tell whose it was."""
        going_on = self._tasks(lambda record: record.outcome is None)
        held = [(record.lease.lease_id, record) for record in going_on if record.lease is not None]
        past = [(lease, record) for record in going_on for lease in record.lease_history]
        return self._of(held, *past[:10], (NO_LEASE, None), ("no id", None))

    def _by(self, *usual: AgentId | None) -> AgentId | None:
        return self._one(*AGENTS, None) if self._rarely() else self._one(*usual)

    def _holder(self, record: TaskRecord | None) -> AgentId | None:
        return self._by(None, AGENTS[1] if record is None else record.task.recipient)

    def _later(self) -> int:
        return self._now() + self._one(-1, 0, 1, 400, 400, 5_000, 30_000)

    def _fresh(self) -> str:
        self._made += 1
        return f"55555555-5555-4555-8555-{self._made:012x}"

    # --- a line -------------------------------------------------------------------------------------------

    def line(self) -> Line:
        chance = self._random.random()
        if chance < 0.08:
            return Pause(self._one(1, 1, 400, 999, 1_000, 5_000, 16_000, 20_001, 60_001))
        if chance < 0.14:
            return tuple(self._calm() for _ in range(self._one(2, 3, 8)))
        return self._spoken(self._one(*self._lines)())

    def _calm(self) -> c.Command:
        """One that leaves no steps to be done, so that a batch is the same as one after the other."""
        return self._one(self.send, self.send, self.lease, self.lease, self.drain, self.beat, self.add, self.update)()

    def _spoken(self, command: c.Command) -> c.Command | c.Call:
        """By somebody who came through the door, now and then."""
        by = command.by
        if by is None or self._random.random() < 0.5 or isinstance(command, (c.GiveBack, c.SweepRun)):
            return command
        peer = self._state.get(peer_key(by.pubkey))
        role = peer.role if isinstance(peer, Peer) else Role.PEER
        return c.Call(Caller(by, role, self._tokens[by.pubkey]), command)

    # --- tasks --------------------------------------------------------------------------------------------

    def _envelope(self, sender: AgentId | None, recipient: AgentId | None = None) -> Task:
        safety = self._one("idempotent", "idempotent", None, "unsafe")
        declared = None if safety is None else Idempotency(safety, self._one("k1", "k2", "k1", "k2", "k3", " "))  # type: ignore[arg-type]
        return Task(
            id=self._one("", "", "", *IDS),
            sender=sender,
            recipient=recipient or self._one(AGENTS[1], AGENTS[1], *AGENTS),
            intent_text=self._one("draft", "draft", "draft", "check", " "),
            task_kind=self._one("work", None),
            parent=self._one(None, None, *IDS[:3], NOWHERE),
            deadline_ms=self._maybe(self._later(), 0.2),
            not_before_ms=self._maybe(self._later(), 0.1),
            idempotency=declared,
            content=self._content(),
        )

    def _content(self) -> tuple[Text, ...]:
        return self._one((), (Text("x"),), (Text("y"),))

    def _says(self) -> Message:
        metadata = self._maybe({"signal": self._one(*_NAMES)})
        return Message(
            message_id="m", role="ROLE_USER", parts=(Part(text=self._one(*_WORDS, "blue")),), metadata=metadata
        )

    def _push(self) -> PushConfig:
        return PushConfig(id=self._one("a", "b", "c"), url=self._one("https://example.org/a", "https://example.org/b"))

    def send(self) -> c.Command:
        sender = self._one(AGENTS[0], AGENTS[0], *AGENTS)
        named = self._one(sender, sender, None)
        by = self._by(None, sender) if named else sender
        return c.SendTask(by, self._envelope(named), key=self._maybe(self._one("s1", "s2"), 0.1))

    def talk(self) -> c.Command:
        sender = self._one(AGENTS[0], AGENTS[2])
        task = Task(
            recipient=AGENTS[1], intent_text="talk", message=self._says(), context_id=self._one("here", "there")
        )
        key, push = self._maybe(self._one("s1", "s2", "s3")), self._maybe(self._push(), 0.15)
        return c.SendTask(sender, task, protocol=True, shown=self._one(True, False), push=push, key=key)

    def show(self) -> c.Command:
        return c.ShowTask(self._by(*AGENTS), self._task())

    def add(self) -> c.Command:
        talks = self._tasks(lambda record: record.protocol)
        if not talks:
            return self.talk()
        record = self._of(talks, *self._tasks())
        off = self._one(None, None, 0, 0, 1)
        guard = None if off is None else record.generation + off
        push, key = self._maybe(self._push(), 0.1), self._maybe(self._one("a1", "a2"))
        return c.AddMessage(self._by(record.task.sender), record.task.id, self._says(), guard, push, key)

    def lease(self) -> c.Command:
        recipient = self._one(AGENTS[1], AGENTS[1], *AGENTS, None)
        return c.LeaseTasks(recipient, recipient, self._one(*_WORKERS), self._one(1, 1, 1, 2, 5))

    def drain(self) -> c.Command:
        peer = self._one(AGENTS[0], AGENTS[0], *AGENTS, None)
        return c.DrainResults(peer, peer, self._one(1, 1, 2, 5))

    def give_back(self) -> c.Command:
        lease, record = self._lease()
        drained = [found.task.id for found in self._tasks(lambda found: found.answer_order > 0)]
        results = ((self._of(drained, NOWHERE), self._one(0, 0, 0, 1)),) if self._one(True, False) else ()
        return c.GiveBack(None if record is None else record.task.recipient, (lease,), results)

    def beat(self) -> c.Command:
        lease, record = self._lease()
        return c.BeatLease(self._holder(record), lease)

    def release(self) -> c.Command:
        lease, record = self._lease()
        return c.ReleaseLease(self._holder(record), lease, "later", self._maybe(self._later()))

    def update(self) -> c.Command:
        lease, record = self._lease()
        asks = self._one(None, Asks.INPUT, Asks.AUTH)
        after = self._maybe(self._one(0, 1, 2))
        receipt = self._maybe(self._one("r1", "r2"))
        return c.UpdateTask(self._holder(record), lease, self._maybe(self._says(), 0.8), asks, after, receipt)

    def piece(self) -> c.Command:
        lease, record = self._lease()
        artifact = Artifact(artifact_id=self._one("a", "b", "c"), parts=(Part(text=self._one("red", "green")),))
        receipt = self._maybe(self._one("p1", "p2"))
        return c.AddArtifact(self._holder(record), lease, artifact, self._one(True, False), self._rarely(), receipt)

    def reject(self) -> c.Command:
        lease, record = self._lease()
        return c.RejectTask(self._holder(record), lease, self._says())

    def reply(self) -> c.Command:
        lease, record = self._lease()
        return c.ReplyDirectly(self._holder(record), lease, self._says())

    def _result(self, task_id: str, lease: str | None) -> Result:
        status = self._one("ok", "ok", "error", "partial")
        error = self._one("boom", "bust") if status == "error" else None
        sequence = self._maybe(self._one(1, 2, 3)) if status == "partial" else None
        return Result(task_id, status, self._content(), error, lease, sequence)  # type: ignore[arg-type]

    def post(self) -> c.Command:
        lease, record = self._lease()
        task_id = self._task() if record is None or self._rarely() else record.task.id
        result = self._result(task_id, None if self._rarely() else lease)
        return c.PostResult(self._holder(record), result, self._one(*_WORKERS))

    def post_again(self) -> c.Command:
        ended = self._tasks(lambda record: record.result is not None)
        if not ended:
            return self.post()
        record = self._one(*ended)
        result = record.result if self._one(True, False) else self._result(record.task.id, None)
        assert result is not None
        return c.PostResult(self._holder(record), result, "one")

    def cancel(self) -> c.Command:
        record = self._one(None, *self._tasks())
        by = None if record is None else self._one(record.task.sender, record.task.recipient)
        task_id = NOWHERE if record is None else record.task.id
        graceful, cascade = self._one(True, False), self._one(True, False)
        return c.CancelTask(self._by(None, by), task_id, self._one("because", "", "later"), graceful, cascade)

    # --- repair -------------------------------------------------------------------------------------------

    def repair(self) -> c.Command:
        held = self._tasks(lambda record: record.lease is not None)
        task_id = self._one(*held).task.id if held else self._task()
        lease = self._maybe(self._lease()[0])
        risk = self._one("idempotent", "operator_accepted")
        what: Any = self._one(ForceError("given up", lease), Requeue(risk, lease))  # type: ignore[arg-type]
        reason = self._one("it is stuck", "stuck", "")
        return c.RepairTask(self._by(None, *AGENTS), RepairRequest(task_id, what, reason))

    def retry(self) -> c.Command:
        policy = RetryPolicy(
            enabled=self._one(True, False),
            min_lease_age_ms=self._one(0, 1_000, 5_000),
            max_attempts=self._one(9, 2, 1),
            max_requeues=self._one(3, 1, 0),
            scan_limit=self._one(100, 2, 1),
        )
        cursor = self._maybe(LAST_CURSOR)
        return c.RetryStale(self._by(None, None, *AGENTS), policy, cursor, self._one(True, False))

    def forget(self) -> c.Command:
        slots = [key for key, _ in self._newest(Slot)]
        return c.ForgetCached(self._by(None), self._of(slots, "slot:none"), "it is wrong")

    def compact(self) -> c.Command:
        return c.CompactHistory(self._by(None), self._one(None, 0, 1_000, 10_000))

    # --- runs ---------------------------------------------------------------------------------------------

    def step(self) -> c.Command:
        lease, record = self._lease()
        task_id = NOWHERE if record is None else record.task.id
        run = self._state.get(run_key(task_id))
        number, entries = (run.step + 1, run.entries) if isinstance(run, Run) else (1, 0)
        if self._rarely():
            number += self._one(-1, 1)
        agent = AGENTS[1] if record is None else record.task.recipient
        tasks = [self._part(agent) for _ in range(self._one(0, 0, 1, 2))]
        mine = self._tasks(lambda found: found.run == task_id)
        drafts = [self._draft(entries + at) for at in range(self._one(0, 0, 1, 2))]
        signals = [s.id for key, s in self._newest(Signal) if key.split(":")[1] == task_id and not s.taken]
        checkpoint: Any = self._one(UNSET, UNSET, Raw(b'{"a":1}'))
        ends = self._one("goes on", "waits", "waits", "waits", "ends")
        commit = RunCommit(
            number=number,
            entries=drafts,
            memos=[Memo(self._fresh(), task=task.id) for task in tasks],
            tasks=tasks,
            begins=[task.id for task in tasks if task.recipient == agent and self._one(True, False)],
            answers=[
                Result(child.task.id, "ok", self._content(), None, child.lease.lease_id)
                for child in mine[:1]
                if child.lease is not None and child.task.recipient == agent
            ],
            cancels=[child.task.id for child in mine[-1:] if self._rarely()],
            takes=signals[: self._one(0, 1, 2)],
            checkpoint=checkpoint,
            leaf=entries + len(drafts),
            wait=self._wait([*tasks, *(child.task for child in mine)]) if ends == "waits" else None,
            result=self._result(task_id, None) if ends == "ends" else None,
            is_told=self._rarely(),
        )
        return c.CommitRun(self._by(agent), lease, commit, self._one(*_WORKERS))

    def _part(self, agent: AgentId) -> Task:
        declared = self._one(None, Idempotency("idempotent", self._fresh()))
        to = self._one(agent, AGENTS[1], AGENTS[2])
        return Task(id=self._fresh(), recipient=to, intent_text="part", idempotency=declared)

    def _draft(self, before: int) -> EntryDraft:
        role = self._one(EntryRole.ASSISTANT, EntryRole.USER)
        says = self._maybe(self._says(), 0.2)
        return EntryDraft(
            id=self._fresh(),
            role=role,
            content=Raw(msgspec.json.encode(self._one(*_WORDS))),
            parent=self._one(before, before, 0),
            says=says,
            key=self._maybe(self._one("e1", "e2", self._fresh()), 0.2),
        )

    def _wait(self, tasks: Sequence[Task]) -> Wait:
        kind = self._one("tasks", "signals", "time", "doubt")
        until = self._maybe(self._later())
        if kind == "tasks" and tasks:
            some = frozenset(task.id for task in self._random.sample(list(tasks), min(len(tasks), 2)))
            return Wait(tasks=some, first=self._one(True, False), fail_fast=self._one(True, False), until_ms=until)
        if kind == "doubt":
            return Wait(signals=(f"{EFFECT}pay",), doubt="pay")
        if kind == "time":
            return Wait(until_ms=self._later())
        return Wait(signals=(self._one(*_PATTERNS),), until_ms=until)

    def _run(self) -> TaskRecord | None:
        runs = self._tasks(lambda record: record.is_run)
        return self._of(runs, *self._tasks()) if runs or self._tasks() else None

    def resume(self) -> c.Command:
        record = self._run()
        task_id, agent = (NOWHERE, AGENTS[1]) if record is None else (record.task.id, record.task.recipient)
        dead = self._one("one", "two") if record is None or record.lease is None else record.lease.incarnation
        taken = self._one("one", "two", "three", None)
        evidence = self._one("lapsed", "attested")
        return c.ResumeRun(self._by(agent, None), task_id, taken, dead or "one", evidence, "it is dead")  # type: ignore[arg-type]

    def wake(self) -> c.Command:
        record = self._run()
        agent = None if record is None else record.task.recipient
        return c.WakeRun(self._by(agent, None), NOWHERE if record is None else record.task.id)

    def signal(self) -> c.Command:
        record = self._run()
        sender = None if record is None else record.task.sender
        start = self._maybe(self._envelope(AGENTS[0]), 0.2)
        task_id = self._one(*IDS) if start is not None or record is None else record.task.id
        by = AGENTS[0] if start is not None else self._by(sender, None)
        key = self._maybe(self._one("g1", "g2"))
        return c.SignalRun(by, task_id, self._one(*_NAMES), Raw(b"[1]"), key, start)

    def judge(self) -> c.Command:
        record = self._run()
        agent = None if record is None else record.task.recipient
        verdict: Any = self._one("done", "failed", "retry")
        task_id = NOWHERE if record is None else record.task.id
        effect = self._one("pay", "pay", "go")
        return c.JudgeEffect(self._by(agent, None), task_id, effect, verdict, "looked", Raw(b"1"))

    # --- trust --------------------------------------------------------------------------------------------

    def _grant(self, subject: AgentId, by: AgentId | None) -> Grant:
        grants = [found.capability for _, found in self._newest(Grant)]
        parent = None if by is None or not grants else self._one(*grants)
        scope = Scope(
            peer_pubkey_b58=self._maybe(self._one(*AGENTS).pubkey, 0.1),
            task_id=self._maybe(self._one(*IDS), 0.1),
            max_uses=self._maybe(self._one(1, 2, 3), 0.4),
        )
        return Grant(
            Capability(
                id=self._fresh(),
                subject=subject,
                action=self._one(*_ACTIONS) if parent is None else parent.action,
                granted_by=by or AGENTS[0],
                granted_ms=self._now(),
                scope=scope if parent is None or self._one(True, False) else parent.scope,
                expires_ms=self._maybe(self._later(), 0.2),
                delegable=self._one(True, False),
                parent=None if parent is None else parent.id,
            ),
            "signed",
        )

    def enroll(self) -> c.Command:
        agent = self._one(*AGENTS)
        grants = tuple(self._grant(agent, None) for _ in range(self._one(0, 1, 3)))
        role = self._one(Role.PEER, Role.PEER, Role.PEER, Role.OPERATOR)
        return c.EnrollPeer(self._by(None), agent, role, self._tokens[agent.pubkey], grants)

    def rotate(self) -> c.Command:
        agent = self._one(*AGENTS)
        token = self._fresh()
        peer = self._state.get(peer_key(agent.pubkey))
        if isinstance(peer, Peer) and peer.revoked_ms is None:
            self._tokens[agent.pubkey] = token
        return c.RotateToken(None, agent.pubkey, token)

    def revoke_peer(self) -> c.Command:
        return c.RevokePeer(self._by(None), self._one(*AGENTS).pubkey, "gone")

    def grant(self) -> c.Command:
        by = self._one(None, None, *AGENTS)
        return c.GrantCapability(by, self._grant(self._one(*AGENTS), by))

    def revoke(self) -> c.Command:
        grants = [found.capability.id for _, found in self._newest(Grant)]
        return c.RevokeCapability(self._by(None, *AGENTS), self._of(grants, NOWHERE), "enough")

    def use_right(self) -> c.Command:
        return c.UseRight(self._one(*AGENTS), self._one("audit.read", "peers.list", "capabilities.list"))

    def publish(self) -> c.Command:
        agent = self._one(*AGENTS)
        return c.PublishCard(self._by(agent, None), agent, {"name": agent.display, "description": self._one(*_WORDS)})

    def withdraw(self) -> c.Command:
        agent = self._one(*AGENTS)
        return c.WithdrawCard(self._by(agent, None), agent)

    def note(self) -> c.Command:
        return c.NoteRefusal(None, "rejected", "unknown", "somebody", self._one(0, 3))

    def sign(self) -> c.Command:
        return c.SignHead(None, 1, "hash", "signature", "key")

    # --- webhooks -----------------------------------------------------------------------------------------

    def set_push(self) -> c.Command:
        talks = self._tasks(lambda record: record.protocol)
        if not talks:
            return self.talk()
        record = self._of(talks, *self._tasks())
        return c.SetPush(self._by(record.task.sender), record.task.id, self._push(), self._one(True, False))

    def drop_push(self) -> c.Command:
        found = [(pushed_task(key), push.config.id) for key, push in self._newest(Push)]
        task_id, name = self._of(found, (self._task(), "a"))
        record = self._state.get(task_id)
        sender = record.task.sender if isinstance(record, TaskRecord) else None
        return c.DropPush(self._by(sender), task_id, name)

    def note_push(self) -> c.Command:
        """`since` is 1 for the webhook as it stands: each engine numbers its own events."""
        found = [(pushed_task(key), push) for key, push in self._newest(Push)]
        if not found:
            return self.set_push()
        task_id, push = self._one(*found)
        told, is_last = push.delivered + self._one(0, 1, 2), self._rarely()
        since = 0 if self._rarely() else 1
        return c.NotePush(None, task_id, push.config.id, since, told, is_last, self._maybe("given up", 0.1))

    # --- steps --------------------------------------------------------------------------------------------

    def settle(self) -> c.Command:
        return c.SettleSlot(None, self._of([key for key, _ in self._newest(Slot)], "slot:none"))

    def cancel_children(self) -> c.Command:
        return c.CancelChildren(None, self._of([r.task.id for r in self._tasks()], NOWHERE))

    def sweep(self) -> c.Command:
        record = self._run()
        return c.SweepRun(None, NOWHERE if record is None else record.task.id)

    def end_grants(self) -> c.Command:
        revoked = [peer.agent.pubkey for _, peer in self._newest(Peer) if peer.revoked_ms is not None]
        return c.EndGrants(None, self._of(revoked, "nobody"))

    def expire(self) -> c.Command:
        return c.Expire(None)


_OFTEN: Final = {
    10: ("send", "lease", "post", "step"),
    5: ("talk", "add", "drain", "update", "cancel", "signal"),
    3: ("beat", "release", "piece", "reply", "reject", "post_again", "repair", "retry", "resume", "wake", "grant"),
    2: (
        "give_back",
        "show",
        "judge",
        "enroll",
        "set_push",
        "drop_push",
        "note_push",
        "use_right",
        "publish",
        "sweep",
        "forget",
    ),
    1: (
        *("compact", "rotate", "revoke_peer", "revoke", "withdraw", "note", "sign", "settle", "cancel_children"),
        *("end_grants", "expire"),
    ),
}
