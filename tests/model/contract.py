"""The contract of the mailbox (DESIGN.md, points 1 to 13) a second time: lists and dicts, no speed, no disk.

It shares no code with the package. An agent is a label, a refusal is its code, a reply is a tuple of plain values. A
test does a thing here and in a real mailbox, and compares what both say.

An order is a rank. What one command ends or makes ready in bulk (a cascade, a deadline pass) has one rank: within it
the mailbox may choose. So `take` and `drain` are told what the mailbox handed out, and say whether it was its turn.

Where the contract leaves a choice, this is the one made here:
- Refusals are looked for in this order: the form of the call, what the caller may see, what it may do, the state.
- A cascade goes down only through tasks that it ends itself; asking to cancel what was canceled before is no refusal.
- A release after a graceful cancel ends the task as canceled, and takes the children along if that was asked for.
- After an answer, an old lease is still `lease_superseded`; after any other end everything is `task_terminal`.
- Of the late results of one lease the first is kept.
- A task past retention is known by its id only: `unknown_task`, and generation 0 in a repeated send.
- The leases of a resolved task may be forgotten at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Refused(Exception):
    """The contract says no, with this code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class CacheKey(NamedTuple):
    sender: str
    recipient: str
    kind: str
    key: str


class Envelope(NamedTuple):
    id: str
    sender: str
    recipient: str
    intent: str
    kind: str | None = None
    content: str = ""
    parent: str | None = None
    deadline_ms: int | None = None
    not_before_ms: int | None = None
    safety: str | None = None
    key: str = ""

    @property
    def substance(self) -> tuple[str, str, str, str | None, str]:
        """What makes two sends the same."""
        return self.sender, self.recipient, self.intent, self.kind, self.content

    @property
    def cache_key(self) -> CacheKey:
        return CacheKey(self.sender, self.recipient, self.intent if self.kind is None else self.kind, self.key)


class Body(NamedTuple):
    """What a result says; content is one text, or none when it is empty."""

    status: str
    content: str = ""
    error: str | None = None


class Sent(NamedTuple):
    task_id: str
    generation: int
    duplicate: bool = False
    replayed: bool = False
    follows: str | None = None


class Delivered(NamedTuple):
    task_id: str
    lease_id: str
    attempt: int
    generation: int


class Posted(NamedTuple):
    task_id: str
    generation: int
    duplicate: bool = False
    sequence: int | None = None


class Answer(NamedTuple):
    task_id: str
    body: Body
    generation: int
    attempt: int
    replayed: bool = False
    sequence: int | None = None


class Entry(NamedTuple):
    state: str
    attempt: int
    generation: int
    outcome: str | None
    replayed: bool
    follows: str | None
    lease_id: str | None
    seen_ms: int | None
    overdue: bool
    cancel_requested: bool
    late: tuple[Body, ...] = ()


class Beat(NamedTuple):
    task_id: str
    attempt: int
    cancel_reason: str | None


class Moved(NamedTuple):
    """The reply to a release, a cancel or a repair."""

    task_id: str
    state: str
    attempt: int
    generation: int


class Scan(NamedTuple):
    considered: int
    requeued: tuple[str, ...]
    would_requeue: tuple[str, ...]
    skipped: tuple[tuple[str, str, int, int], ...]
    exhausted: tuple[str, ...]
    more: bool


class Cached(NamedTuple):
    cache_key: CacheKey
    body: Body
    source: str
    cached_ms: int
    expires_ms: int | None


class Node(NamedTuple):
    id: str
    entry: Entry | None
    children: tuple[Node, ...]


@dataclass
class Lease:
    id: str
    incarnation: int
    seen_ms: int
    seen: int  # rank of the last sign of life


@dataclass
class Task:
    envelope: Envelope
    sent: int
    state: str = "queued"
    generation: int = 1
    attempt: int = 0
    known: int | None = None  # rank of its first lease
    follows: CacheKey | None = None
    slot: CacheKey | None = None
    not_before_ms: int | None = None
    lease: Lease | None = None
    old_leases: list[str] = field(default_factory=list)
    parts: list[tuple[Body, int]] = field(default_factory=list)  # of the current lease, with their generations
    late: dict[str, Body] = field(default_factory=dict)
    cancel_reason: str | None = None
    incarnation: int = 0  # of the last holder
    cascaded: bool = False  # a cancel went down through it
    cancel_cascades: bool = False
    outcome: str | None = None
    body: Body | None = None
    answered_by: str | None = None  # a lease
    replayed: bool = False
    finished: int = 0
    resolved_ms: int = 0

    @property
    def id(self) -> str:
        return self.envelope.id


@dataclass
class Slot:
    """Under one idempotency key: the task that does the work, then its result."""

    substance: tuple[str, str, str, str | None, str]
    leader: str | None
    source: str = ""
    body: Body | None = None
    cached: int = 0
    cached_ms: int = 0
    expires_ms: int | None = None


class Contract:
    def __init__(self, now_ms: int, retention_ms: int, dedup_ms: int, error_ttl_ms: int) -> None:
        self.now_ms = now_ms
        self.retention_ms = retention_ms
        self.dedup_ms = dedup_ms
        self.error_ttl_ms = error_ttl_ms
        self.incarnation = 1
        self.tasks: dict[str, Task] = {}  # in the order in which they were sent
        self.leases: dict[str, str] = {}  # every lease that ever was, and its task
        self.ready: list[tuple[int, str]] = []
        self.pending: list[tuple[int, Answer]] = []
        self.slots: dict[CacheKey, Slot] = {}
        self._compacted_ms = 0
        self.dropped: set[str] = set()  # counted by a compaction before
        self._rank = 0

    def _next(self) -> int:
        self._rank += 1
        return self._rank

    # --- who sees what ------------------------------------------------------------------------------------

    @property
    def horizon_ms(self) -> int:
        return max(self._compacted_ms, self.now_ms - self.retention_ms)

    def is_kept(self, task: Task) -> bool:
        return task.state != "resolved" or task.resolved_ms >= self.horizon_ms

    def is_forgotten(self, task: Task) -> bool:
        return task.state == "resolved" and task.resolved_ms < self.now_ms - self.dedup_ms

    def visible(self, by: str | None) -> Iterator[Task]:
        """What this agent sees, oldest first."""
        for task in self.tasks.values():
            if self.is_kept(task) and by in (None, task.envelope.sender, task.envelope.recipient):
                yield task

    def find(self, task_id: str, by: str | None) -> Task:
        for task in self.visible(by):
            if task.id == task_id:
                return task
        raise Refused("unknown_task")

    def _held(self, lease_id: str, by: str | None) -> Task:
        """The task that this lease holds now."""
        task = self.tasks.get(self.leases.get(lease_id, ""))
        owned = task is not None and (
            (task.lease is not None and task.lease.id == lease_id) or lease_id in task.old_leases
        )
        if task is None or not owned or by not in (None, task.envelope.recipient):
            raise Refused("unknown_lease")
        if task.state == "resolved":
            raise Refused("task_terminal or unknown_lease")
        if task.lease is None or task.lease.id != lease_id:
            raise Refused("task_terminal" if task.outcome else "lease_superseded")
        return task

    # --- sending: 1, 5, 10, 11 ----------------------------------------------------------------------------

    def send(self, by: str | None, envelope: Envelope) -> Sent:
        self.pass_time()
        if by not in (None, envelope.sender):
            raise Refused("sender_mismatch")
        if envelope.safety is not None and not envelope.key.strip():
            raise Refused("blank_text")
        known = self.tasks.get(envelope.id)
        if known is not None and not self.is_forgotten(known):
            return self._send_again(known, envelope)
        task = Task(envelope, self._next(), not_before_ms=envelope.not_before_ms)
        if envelope.safety == "idempotent":
            return self._send_keyed(task)
        self._add(task)
        self._enqueue(task, self._next())
        return Sent(task.id, 1)

    def _add(self, task: Task) -> None:
        self.tasks.pop(task.id, None)  # an id that was forgotten
        self.dropped.discard(task.id)
        self.tasks[task.id] = task

    def _send_again(self, known: Task, envelope: Envelope) -> Sent:
        if known.envelope.substance != envelope.substance:
            raise Refused("task_conflict")
        if not self.is_kept(known):
            return Sent(known.id, 0, duplicate=True)
        return Sent(known.id, known.generation, True, known.replayed, self._leader(known))

    def _send_keyed(self, task: Task) -> Sent:
        key = task.slot = task.envelope.cache_key
        slot = self.slots.get(key)
        if slot is None:
            self.slots[key] = Slot(task.envelope.substance, task.id)
            self._add(task)
            self._enqueue(task, self._next())
            return Sent(task.id, 1)
        if slot.substance != task.envelope.substance:
            raise Refused("idempotency_conflict")
        self._add(task)
        if slot.body is None:
            task.follows = key
            return Sent(task.id, 1, follows=slot.leader)
        self._finish(task, "answered", slot.body, self._next(), replayed=True)
        return Sent(task.id, task.generation, replayed=True)

    def _leader(self, task: Task) -> str | None:
        return None if task.follows is None else self.slots[task.follows].leader

    def _followers(self, key: CacheKey | None) -> list[Task]:
        return [task for task in self.tasks.values() if key is not None and task.follows == key]

    def _enqueue(self, task: Task, rank: int) -> None:
        if task.not_before_ms is None or task.not_before_ms <= self.now_ms:
            task.not_before_ms = None
            self.ready.append((rank, task.id))

    # --- leasing: 2 ---------------------------------------------------------------------------------------

    def turn(self, recipient: str | None) -> list[tuple[int, str]]:
        """What is ready for this recipient, or for anyone."""
        return [(rank, i) for rank, i in self.ready if recipient in (None, self.tasks[i].envelope.recipient)]

    def take(self, recipient: str | None, limit: int, taken: list[tuple[str, str]]) -> list[Delivered]:
        """Lease what the mailbox leased: pairs of task and lease."""
        self.pass_time()
        assert len(taken) == min(limit, len(self.turn(recipient))), "leased too many or too few"
        return [self._lease(recipient, task_id, lease_id) for task_id, lease_id in taken]

    def _lease(self, recipient: str | None, task_id: str, lease_id: str) -> Delivered:
        turn = self.turn(recipient)
        assert (turn[0][0], task_id) in turn, f"{task_id} was leased out of turn: {turn}"
        assert lease_id not in self.leases, "a lease id was used twice"
        self._unready(task_id)
        task = self.tasks[task_id]
        task.state = "in_flight"
        task.attempt += 1
        task.generation += 1
        task.lease = Lease(lease_id, self.incarnation, self.now_ms, self._next())
        task.known = task.lease.seen if task.known is None else task.known
        task.incarnation = self.incarnation
        task.parts = []
        self.leases[lease_id] = task_id
        return Delivered(task_id, lease_id, task.attempt, task.generation)

    def _unready(self, task_id: str) -> None:
        self.ready = [(rank, i) for rank, i in self.ready if i != task_id]

    def heartbeat(self, by: str | None, lease_id: str) -> Beat:
        self.pass_time()
        task = self._held(lease_id, by)
        assert task.lease is not None
        task.lease.seen_ms = self.now_ms
        task.lease.seen = self._next()
        return Beat(task.id, task.attempt, task.cancel_reason)

    def release(self, by: str | None, lease_id: str, not_before_ms: int | None) -> Moved:
        self.pass_time()
        task = self._held(lease_id, by)
        if task.cancel_reason is not None:
            self._cancel(task, task.cancel_reason, task.cancel_cascades)
        else:
            self._requeue(task, not_before_ms)
        return Moved(task.id, task.state, task.attempt, task.generation)

    def _requeue(self, task: Task, not_before_ms: int | None = None) -> None:
        self._end_lease(task)
        task.state = "queued"
        task.generation += 1
        task.not_before_ms = not_before_ms
        self._enqueue(task, self._next())

    def _end_lease(self, task: Task) -> None:
        if task.lease is not None:
            task.old_leases.append(task.lease.id)
            task.lease = None

    # --- results: 3, 4, 8 ---------------------------------------------------------------------------------

    def post(self, by: str | None, task_id: str, body: Body, lease_id: str | None, sequence: int | None) -> Posted:
        self.pass_time()
        task = self.find(task_id, by)
        if by not in (None, task.envelope.recipient):
            raise Refused("not_permitted")
        if task.outcome is not None:
            return self._post_after_the_end(task, body, lease_id)
        if lease_id in task.old_leases:
            self._keep_late(task, body, lease_id)
        if task.lease is None:
            raise Refused("not_leased")
        if lease_id is None and (task.attempt != 1 or task.lease.incarnation != self.incarnation):
            raise Refused("lease_required")
        if lease_id is not None and lease_id != task.lease.id:
            raise Refused("lease_mismatch")
        if body.status == "partial":
            return self._post_partial(task, body, sequence)
        self._finish(task, "answered", body, self._next(), lease=task.lease.id)
        if task.slot is not None:
            self._cache(task.slot, task.id, body)
        return Posted(task_id, task.generation)

    def _post_after_the_end(self, task: Task, body: Body, lease_id: str | None) -> Posted:
        if task.outcome != "answered" or task.replayed:
            raise Refused("task_terminal")
        if lease_id is None and (task.attempt != 1 or task.incarnation != self.incarnation):
            raise Refused("lease_required")
        if lease_id not in (None, task.answered_by):
            if lease_id in task.old_leases:
                self._keep_late(task, body, lease_id)
            raise Refused("lease_mismatch")
        if body.status == "partial":
            raise Refused("task_terminal")
        if body != task.body:
            raise Refused("result_conflict")
        return Posted(task.id, task.generation, duplicate=True)

    def _keep_late(self, task: Task, body: Body, lease_id: str | None) -> None:
        assert lease_id is not None
        task.late.setdefault(f"{lease_id} {body.status == 'partial'}", body)
        raise Refused("lease_superseded")

    def _post_partial(self, task: Task, body: Body, sequence: int | None) -> Posted:
        number = len(task.parts) + 1
        if sequence is not None and sequence > number:
            raise Refused("partial_gap")
        if sequence is not None and sequence < number:
            known, generation = task.parts[sequence - 1]
            if known != body:
                raise Refused("result_conflict")
            return Posted(task.id, generation, duplicate=True, sequence=sequence)
        task.generation += 1
        assert task.lease is not None
        task.lease.seen_ms = self.now_ms
        task.lease.seen = self._next()
        task.parts.append((body, task.generation))
        answer = Answer(task.id, body, task.generation, task.attempt, sequence=number)
        self.pending.append((self._next(), answer))
        return Posted(task.id, task.generation, sequence=number)

    def _finish(
        self, task: Task, outcome: str, body: Body, rank: int, *, lease: str | None = None, replayed: bool = False
    ) -> None:
        self._end_lease(task)
        self._unready(task.id)
        task.state = "result_pending"
        task.outcome = outcome
        task.body = body
        task.answered_by = lease
        task.replayed = replayed
        task.follows = None
        task.generation += 2 if body.content else 1
        task.finished = rank
        self.pending.append((rank, Answer(task.id, body, task.generation, task.attempt, replayed)))

    def _cache(self, key: CacheKey, source: str, body: Body) -> None:
        slot = self.slots[key]
        slot.leader = None
        slot.source = source
        slot.body = body
        slot.cached = self._next()
        slot.cached_ms = self.now_ms
        slot.expires_ms = None if body.status == "ok" else self.now_ms + self.error_ttl_ms
        for follower in self._followers(key):
            self._finish(follower, "answered", body, self._next(), replayed=True)

    def waiting(self, peer: str | None) -> list[tuple[int, Answer]]:
        """Results that this peer, or anyone, has not drained yet."""
        return [(r, answer) for r, answer in self.pending if peer in (None, self.tasks[answer.task_id].envelope.sender)]

    def drain(self, peer: str | None, limit: int, drained: list[Answer]) -> None:
        """Drain what the mailbox drained."""
        self.pass_time()
        assert len(drained) == min(limit, len(self.waiting(peer))), "drained too many or too few"
        for answer in drained:
            waiting = self.waiting(peer)
            turn = (waiting[0][0], answer)
            assert turn in waiting, f"drained out of turn: {answer}, of {waiting}"
            self.pending.remove(turn)
            if answer.body.status != "partial":
                self.tasks[answer.task_id].state = "resolved"
                self.tasks[answer.task_id].resolved_ms = self.now_ms

    def result(self, by: str | None, task_id: str) -> Answer | None:
        task = self.find(task_id, by)
        if task.body is None:
            return None
        return Answer(task.id, task.body, task.generation, task.attempt, task.replayed)

    # --- endings: 6, 7, 11 --------------------------------------------------------------------------------

    def _end(self, task: Task, outcome: str, message: str, rank: int) -> None:
        """An end without an answer; the oldest follower takes over what the task was leading."""
        self._finish(task, outcome, Body("error", error=message), rank)
        slot = self.slots.get(task.slot) if task.slot is not None else None
        if slot is None or task.slot is None or slot.leader != task.id:
            return
        heirs = self._followers(task.slot)
        if not heirs:
            del self.slots[task.slot]
            return
        slot.leader = heirs[0].id
        heirs[0].follows = None
        self._enqueue(heirs[0], rank)

    def cancel(self, by: str | None, task_id: str, reason: str, graceful: bool, cascade: bool) -> Moved:
        self.pass_time()
        task = self.find(task_id, by)
        if by not in (None, task.envelope.sender):
            raise Refused("not_permitted")
        if task.outcome not in (None, "canceled"):
            raise Refused("task_terminal")
        if task.outcome == "canceled":
            self._cancel_below(task, cascade)
        elif graceful and task.lease is not None:
            task.cancel_reason = task.cancel_reason or reason
            task.cancel_cascades = task.cancel_cascades or cascade
        else:
            self._cancel(task, reason, cascade)
        return Moved(task.id, task.state, task.attempt, task.generation)

    def _cancel(self, task: Task, reason: str, cascade: bool) -> None:
        self._end(task, "canceled", f"canceled: {reason}", self._next())
        self._cancel_below(task, cascade)

    def _cancel_below(self, task: Task, cascade: bool) -> None:
        rank = self._next()
        parents = [task] if cascade else []
        for parent in parents:
            parent.cascaded = True
            for child in self._children(parent):
                knew = parent.envelope.recipient if parent.known is not None and parent.known < child.sent else None
                if child.envelope.sender not in (parent.envelope.sender, knew):
                    continue
                if child.outcome is None:
                    self._end(child, "canceled", "canceled: its parent was canceled", rank)
                    parents.append(child)
                elif not child.cascaded and self._children(child):
                    parents.append(child)

    def _children(self, parent: Task) -> list[Task]:
        return [t for t in self.tasks.values() if t.envelope.parent == parent.id and t.id not in self.dropped]

    def pass_time(self) -> None:
        """All that has come due: cached errors, deadlines of what is not in flight, delayed tasks."""
        rank = self._next()
        for key, slot in list(self.slots.items()):
            if slot.expires_ms is not None and slot.expires_ms <= self.now_ms:
                del self.slots[key]
        for task in list(self.tasks.values()):
            deadline = task.envelope.deadline_ms
            if task.state == "queued" and deadline is not None and deadline <= self.now_ms:
                self._end(task, "deadline_exceeded", f"deadline_exceeded: {deadline}", rank)
        for task in self.tasks.values():
            if task.state == "queued" and task.follows is None and task.not_before_ms is not None:
                self._enqueue(task, rank)

    # --- repair: 12, 13 -----------------------------------------------------------------------------------

    def repair(self, by: str | None, task_id: str, action: str, lease_id: str | None, message: str) -> Moved:
        self.pass_time()
        task = self.find(task_id, by)
        if by is not None:
            raise Refused("not_permitted")
        if task.lease is None:
            raise Refused("not_leased")
        if lease_id not in (None, task.lease.id):
            raise Refused("lease_mismatch")
        if action == "requeue" and task.cancel_reason is not None:
            self._cancel(task, task.cancel_reason, task.cancel_cascades)
        elif action == "requeue":
            self._requeue(task)
        else:
            self._end(task, "forced", message, self._next())
        return Moved(task.id, task.state, task.attempt, task.generation)

    def held(self) -> list[Task]:
        """Tasks in flight, the stalest first."""
        return sorted(
            (task for task in self.tasks.values() if task.lease is not None),
            key=lambda task: 0 if task.lease is None else task.lease.seen,
        )

    def retry_stale(
        self, enabled: bool, min_age_ms: int, max_attempts: int, max_requeues: int, scan_limit: int, after: int = 0
    ) -> tuple[Scan, int]:
        """One pass of the gate over the leases behind `after`; also where the next pass would go on."""
        self.pass_time()
        scanned = [task for task in self.held() if task.lease is not None and task.lease.seen > after][:scan_limit]
        chosen: list[str] = []
        skipped: list[tuple[str, str, int, int]] = []
        for task in scanned:
            assert task.lease is not None
            age_ms = self.now_ms - task.lease.seen_ms
            if age_ms < min_age_ms:
                reason = "lease_too_young"
            elif task.envelope.safety is None:
                reason = "missing_idempotency"
            elif task.envelope.safety == "unsafe":
                reason = "unsafe_duplicate_safety"
            elif task.cancel_reason is not None:
                reason = "cancel_requested"
            elif task.attempt >= max_attempts:
                reason = "max_attempts_reached"
            elif len(chosen) >= max_requeues:
                reason = "limit_reached"
            else:
                chosen.append(task.id)
                continue
            skipped.append((task.id, reason, task.attempt, age_ms))
        last = scanned[-1].lease.seen if scanned and scanned[-1].lease is not None else 0
        exhausted = tuple(i for i, reason, _, _ in skipped if reason == "max_attempts_reached")
        more = 0 < len(scanned) == scan_limit
        done, would = (tuple(chosen), ()) if enabled else ((), tuple(chosen))
        for task_id in done:
            self._requeue(self.tasks[task_id])
        return Scan(len(scanned), done, would, tuple(skipped), exhausted, more), last

    def cached(self, by: str | None = None) -> list[Cached]:
        kept = sorted(self.slots.items(), key=lambda pair: pair[1].cached)
        return [
            Cached(key, slot.body, slot.source, slot.cached_ms, slot.expires_ms)
            for key, slot in kept
            if slot.body is not None and by in (None, key.sender, key.recipient)
        ]

    def forget_cached(self, by: str | None, key: CacheKey) -> None:
        self.pass_time()
        if key not in [entry.cache_key for entry in self.cached(by)]:
            raise Refused("unknown_task")
        if by is not None:
            raise Refused("not_permitted")
        del self.slots[key]

    # --- retention: 9 -------------------------------------------------------------------------------------

    def compact(self, older_than_ms: int | None) -> int:
        """How many tasks were let go of."""
        self.pass_time()
        if older_than_ms is not None:
            self._compacted_ms = max(self._compacted_ms, self.now_ms - older_than_ms)
        dropped = {task.id for task in self.tasks.values() if not self.is_kept(task)} - self.dropped
        self.dropped |= dropped
        return len(dropped)

    # --- reading ------------------------------------------------------------------------------------------

    def entry(self, task: Task, by: str | None, late: bool = True) -> Entry:
        deadline = task.envelope.deadline_ms
        return Entry(
            task.state,
            task.attempt,
            task.generation,
            task.outcome,
            task.replayed,
            self._leader(task),
            task.lease.id if task.lease else None,
            task.lease.seen_ms if task.lease else None,
            task.outcome is None and deadline is not None and deadline <= self.now_ms,
            task.outcome is None and task.cancel_reason is not None,
            tuple(task.late.values()) if late and by is None else (),
        )

    def open_tasks(self, by: str | None) -> list[Task]:
        return [task for task in self.visible(by) if task.outcome is None]

    def tree(self, root: str, by: str | None) -> Node:
        """Breadth first, so that a task stands below the first that names it when links go in circles."""
        shown = {task.id: task for task in self.visible(by)}
        below: dict[str, list[str]] = {root: []}
        level = [root]
        for parent in level:
            for task in shown.values():
                if task.envelope.parent == parent and task.id not in below:
                    below[parent].append(task.id)
                    below[task.id] = []
                    level.append(task.id)
        if root not in shown and not below[root]:
            raise Refused("unknown_task")

        def node(i: str) -> Node:
            entry = self.entry(shown[i], by, late=False) if i in shown else None
            return Node(i, entry, tuple(node(child) for child in below[i]))

        return node(root)
