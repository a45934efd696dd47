"""Random programs against a mailbox and against the contract written down in `contract.py`: every reply, and after
every step everything that can be seen, must be the same.

Few agents, keys, kinds and ids, so that they collide all the time; short retention, small steps and tiny files, so that
a program of fifty calls goes through all that a busy month would.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.model.contract import (
    Answer,
    Beat,
    Body,
    Cached,
    CacheKey,
    Contract,
    Delivered,
    Entry,
    Envelope,
    Moved,
    Node,
    Posted,
    Refused,
    Scan,
    Sent,
)
from tests.model.machine import Machine, counted, run
from tests.postgres import misplaced, settle, store_for

from covenant import (
    AgentId,
    CovenantError,
    ForceError,
    Idempotency,
    Limits,
    Mailbox,
    QueueEntry,
    RepairRequest,
    Requeue,
    Result,
    RetryPolicy,
    Task,
    TaskState,
    Text,
    TreeNode,
)
from covenant import Answer as RealAnswer
from covenant.model.record import Part, TaskRecord
from covenant.store.postgres import ahead
from covenant.store.postgres.engine import Postgres
from covenant.store.state import Counts, State

T = TypeVar("T")

LIMITS = Limits(
    retention_ms=20_000,
    dedup_ms=60_000,
    error_ttl_ms=1_000,
    step_records_max=2,
    segment_bytes=4096,
    snapshot_every_bytes=16384,
    finished_tail_max=4,
    archive_batch=4,
)

NAMES = ("ada", "bob", "cyd")
AGENTS = {name: AgentId.named(name) for name in NAMES}
LABELS = {agent.pubkey: name for name, agent in AGENTS.items()}
IDS = tuple(f"22222222-2222-4222-8222-{number:012x}" for number in range(6))
NOWHERE = "33333333-3333-4333-8333-333333333333"
NO_LEASE = "44444444-4444-4444-8444-444444444444"


def mostly(usual: T, *others: T) -> st.SearchStrategy[T]:
    """The usual value three times out of four."""
    return st.sampled_from((usual,) * (3 * len(others)) + others)


callers = mostly(None, *NAMES)
everyone_or_one = st.sampled_from((None, *NAMES))
texts = st.sampled_from(("x", "y", ""))
reasons = st.sampled_from(("because", "later"))
counts = st.sampled_from((1, 2, 5))
moments = mostly(None, 400, -1, 0, 1, 5_000)  # from now
spans = st.sampled_from((1, 400, 1, 999, 1_000, 5_000, 19_999, 20_001, 60_001))
bodies = st.one_of(
    st.builds(Body, st.just("ok"), texts, st.none()),
    st.builds(Body, st.just("error"), texts, st.sampled_from(("boom", "bust"))),
)
envelopes = st.builds(
    Envelope,
    id=mostly("", *IDS),
    sender=mostly("ada", *NAMES),
    recipient=mostly("bob", *NAMES),
    intent=mostly("draft", "draft", "draft", "check"),
    kind=mostly("work", "work", None),
    content=mostly("", "", "", "x"),
    parent=st.sampled_from((None, *IDS[:3], NOWHERE)),
    deadline_ms=moments,
    not_before_ms=moments,
    safety=st.sampled_from(("idempotent", "idempotent", None, "unsafe")),
    key=st.sampled_from((*("k1", "k2") * 8, " ")),
)


class Refusal:
    """The code of a refusal, told apart from any other reply; on the contract's side it may leave a choice."""

    def __init__(self, code: str) -> None:
        self.codes = set(code.split(" or "))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and bool(self.codes & other.codes)

    def __repr__(self) -> str:
        return f"Refusal({' or '.join(sorted(self.codes))})"


class MailboxMachine(Machine):
    """One mailbox, and the contract beside it."""

    limits = LIMITS
    drops_by_itself: ClassVar[bool] = (
        False  # what is past retention, so that a compaction may find less or other things
    )

    def __init__(self) -> None:
        super().__init__()
        self.model = Contract(self.clock.now_ms(), LIMITS.retention_ms, LIMITS.dedup_ms, LIMITS.error_ttl_ms)
        self.cursors: list[tuple[str, int]] = []

    # --- doing the same thing twice -----------------------------------------------------------------------

    def wait(self, call: Awaitable[T]) -> T:
        async def settled() -> T:
            try:
                return await call
            finally:
                await self.settle()

        return self.loop.run_until_complete(settled())

    async def settle(self) -> None:
        """Let timers fire, and let the steps that a command left behind be done."""
        self.clock.advance(0)
        for _ in range(20):
            await asyncio.sleep(0)

    def ask(self, call: Awaitable[T], shape: Callable[[T], Any]) -> Any:
        try:
            return shape(self.wait(call))
        except CovenantError as refusal:
            return Refusal(refusal.code)

    def expect(self, call: Callable[[], T]) -> T | Refusal:
        try:
            return call()
        except Refused as refusal:
            return Refusal(refusal.code)
        finally:
            self.model.pass_time()

    def of(self, name: str | None) -> Mailbox:
        return self.box if name is None else self.box.of(AGENTS[name])

    def some_task(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from((*self.model.tasks, *self.model.tasks, NOWHERE)), label="task")

    def some_lease(self, data: st.DataObject) -> str:
        """Mostly one that holds a task, or one that did."""
        held = [task.lease.id for task in self.model.held() if task.lease is not None]
        past = tuple(self.model.leases)[-4:]
        return data.draw(st.sampled_from((*held * 4, *past, NO_LEASE)), label="lease")

    # --- sending ------------------------------------------------------------------------------------------

    def timed(self, envelope: Envelope) -> Envelope:
        """Moments are drawn as distances from now."""
        now = self.clock.now_ms()
        deadline, start = envelope.deadline_ms, envelope.not_before_ms
        return envelope._replace(
            deadline_ms=None if deadline is None else now + deadline,
            not_before_ms=None if start is None else now + start,
        )

    def check_sent(self, by: str | None, envelope: Envelope, got: Any) -> None:
        if not envelope.id:
            envelope = envelope._replace(id=got.task_id if isinstance(got, Sent) else NOWHERE)
        assert got == self.expect(lambda: self.model.send(by, envelope))

    @initialize(batch=st.lists(envelopes, min_size=4, max_size=12), done=counts, held=counts)
    @counted
    def begin(self, batch: list[Envelope], done: int, held: int) -> None:
        """With something done and something held: a program may have no step that leases."""
        self.send_many(batch)
        self.work_off(done, Body("ok", "x", None), drains=False)
        self.lease_many(None, held)

    @rule(envelope=envelopes, by=mostly("the sender", None, *NAMES))
    @counted
    def send(self, envelope: Envelope, by: str | None) -> None:
        envelope = self.timed(envelope)
        by = envelope.sender if by == "the sender" else by
        got = self.ask(self.of(by).send_task(task_of(envelope)), sent)
        self.check_sent(by, envelope, got)

    @rule(data=st.data(), other=mostly(False, True), parent=st.sampled_from((None, *IDS[:3])), deadline=moments)
    @precondition(lambda self: self.model.tasks)
    @counted
    def send_again(self, data: st.DataObject, other: bool, parent: str | None, deadline: int | None) -> None:
        """The same id, now or much later; the same content but for what does not count, or other content."""
        self.let_time_pass(data.draw(mostly(0, 20_001, 60_001), label="later"))
        known = self.model.tasks[data.draw(st.sampled_from(tuple(self.model.tasks)), label="task")].envelope
        envelope = self.timed(known._replace(parent=parent, deadline_ms=deadline, not_before_ms=None))
        if other:
            envelope = envelope._replace(intent="another thing")
        self.check_sent(None, envelope, self.ask(self.box.send_task(task_of(envelope)), sent))

    @rule(data=st.data(), fresh=st.sampled_from(("", *IDS)), deadline=moments, start=moments)
    @precondition(lambda self: self.model.slots)
    @counted
    def send_same_key(self, data: st.DataObject, fresh: str, deadline: int | None, start: int | None) -> None:
        """A follower, or a hit in the cache."""
        key = data.draw(st.sampled_from(tuple(self.model.slots)), label="slot")
        sender, recipient, intent, kind, content = self.model.slots[key].substance
        envelope = Envelope(
            fresh, sender, recipient, intent, kind, content, IDS[0], deadline, start, "idempotent", key.key
        )
        envelope = self.timed(envelope)
        self.check_sent(sender, envelope, self.ask(self.of(sender).send_task(task_of(envelope)), sent))

    @rule(batch=st.lists(envelopes, min_size=2, max_size=8))
    @counted
    def send_many(self, batch: list[Envelope]) -> None:
        batch = [self.timed(envelope) for envelope in batch]
        replies = self.wait(self.box.send_tasks([task_of(envelope) for envelope in batch]))
        for envelope, reply in zip(batch, replies, strict=True):
            got = Refusal(reply.code) if isinstance(reply, CovenantError) else sent(reply)
            self.check_sent(None, envelope, got)

    # --- leasing ------------------------------------------------------------------------------------------

    def check_leased(self, recipient: str | None, limit: int, got: list[Delivered]) -> None:
        taken = [(delivered.task_id, delivered.lease_id) for delivered in got]
        assert got == self.expect(lambda: self.model.take(recipient, limit, taken))

    @rule(recipient=everyone_or_one, bound=st.booleans())
    @precondition(lambda self: self.model.ready)
    @counted
    def lease(self, recipient: str | None, bound: bool) -> None:
        box = self.of(recipient) if bound else self.box
        got = self.wait(box.try_recv_task_for(None if recipient is None else AGENTS[recipient]))
        self.check_leased(recipient, 1, [] if got is None else [delivered(got)])

    @rule(recipient=everyone_or_one, limit=counts)
    @counted
    def lease_many(self, recipient: str | None, limit: int) -> None:
        got = self.wait(self.of(recipient).recv_tasks(limit, wait_ms=0))
        self.check_leased(recipient, limit, [delivered(one) for one in got])

    @rule(data=st.data(), by=callers)
    @precondition(lambda self: self.model.leases)
    @counted
    def heartbeat(self, data: st.DataObject, by: str | None) -> None:
        lease = self.some_lease(data)
        got = self.ask(self.of(by).heartbeat(lease), lambda beat: Beat(beat.task_id, beat.attempt, beat.cancel_reason))
        assert got == self.expect(lambda: self.model.heartbeat(by, lease))

    @rule(data=st.data(), by=callers, delay=moments, reason=reasons)
    @precondition(lambda self: self.model.leases)
    @counted
    def release(self, data: st.DataObject, by: str | None, delay: int | None, reason: str) -> None:
        lease = self.some_lease(data)
        not_before = None if delay is None else self.clock.now_ms() + delay
        got = self.ask(
            self.of(by).release(lease, reason=reason, not_before_ms=not_before),
            lambda released: (released.task_id, released.attempt, released.generation),
        )
        expected = self.expect(lambda: self.model.release(by, lease, not_before))
        assert got == (expected if isinstance(expected, Refusal) else expected[:1] + expected[2:])

    # --- results ------------------------------------------------------------------------------------------

    def check_posted(
        self, by: str | None, task_id: str, body: Body, lease: str | None, sequence: int | None = None
    ) -> None:
        result = Result(task_id, body.status, blocks(body.content), body.error, lease, sequence)  # type: ignore[arg-type]
        got = self.ask(
            self.of(by).send_result(result),
            lambda posted: Posted(posted.task_id, posted.generation, posted.duplicate, posted.sequence),
        )
        assert got == self.expect(lambda: self.model.post(by, task_id, body, lease, sequence))

    @rule(data=st.data(), body=bodies, bare=mostly(False, True), bound=st.booleans())
    @precondition(lambda self: self.model.held())
    @counted
    def answer(self, data: st.DataObject, body: Body, bare: bool, bound: bool) -> None:
        """As the holder should; `bare` leaves out the lease, as the oldest clients do."""
        task = data.draw(st.sampled_from([task.id for task in self.model.held()]), label="task")
        held = self.model.tasks[task]
        assert held.lease is not None
        self.check_posted(held.envelope.recipient if bound else None, task, body, None if bare else held.lease.id)

    @rule(limit=st.integers(1, 5), body=bodies, drains=mostly(True, False))
    @precondition(lambda self: self.model.ready)
    @counted
    def work_off(self, limit: int, body: Body, drains: bool) -> None:
        """The short way through for the next few: lease, answer, drain."""
        self.lease_many(None, limit)
        for task in self.model.held()[-limit:]:
            assert task.lease is not None
            self.check_posted(task.envelope.recipient, task.id, body, task.lease.id)
        if drains:
            self.drain_many(None, 5)

    @rule(data=st.data(), by=callers, body=bodies)
    @precondition(lambda self: self.model.leases)
    @counted
    def answer_with_any_lease(self, data: st.DataObject, by: str | None, body: Body) -> None:
        task_id = self.some_task(data)
        task = self.model.tasks.get(task_id)
        mine = [lease for lease, owner in self.model.leases.items() if owner == task_id]
        others = tuple(self.model.leases)[-2:]
        lease = data.draw(st.sampled_from((None, *mine * 3, *others, NO_LEASE)), label="lease")
        if by is not None and task is not None and data.draw(st.booleans(), label="as the recipient"):
            by = task.envelope.recipient
        self.check_posted(by, task_id, body, lease)

    @rule(data=st.data(), other=st.booleans(), bare=st.booleans())
    @precondition(lambda self: any(task.answered_by for task in self.model.tasks.values()))
    @counted
    def answer_again(self, data: st.DataObject, other: bool, bare: bool) -> None:
        ended = [task.id for task in self.model.tasks.values() if task.answered_by is not None]
        task = self.model.tasks[data.draw(st.sampled_from(ended), label="task")]
        assert task.body is not None
        body = task.body._replace(content="something else") if other else task.body
        self.check_posted(task.envelope.recipient, task.id, body, None if bare else task.answered_by)

    @rule(data=st.data(), text=texts, sequence=st.sampled_from((None, None, 1, 2, 3)), bare=st.booleans())
    @precondition(lambda self: self.model.leases)
    @counted
    def progress(self, data: st.DataObject, text: str, sequence: int | None, bare: bool) -> None:
        lease = self.some_lease(data)
        task_id = self.model.leases.get(lease, NOWHERE)
        self.check_posted(None, task_id, Body("partial", text), None if bare else lease, sequence)

    @rule(peer=everyone_or_one, bound=st.booleans())
    @precondition(lambda self: self.model.pending)
    @counted
    def drain(self, peer: str | None, bound: bool) -> None:
        box = self.of(peer) if bound else self.box
        got = self.wait(box.try_recv_result_for(None if peer is None else AGENTS[peer]))
        self.expect(lambda: self.model.drain(peer, 1, [] if got is None else [answer(got)]))

    @rule(peer=everyone_or_one, limit=counts)
    @counted
    def drain_many(self, peer: str | None, limit: int) -> None:
        got = self.wait(self.of(peer).recv_results(limit, wait_ms=0))
        self.expect(lambda: self.model.drain(peer, limit, [answer(one) for one in got]))

    # --- endings and repair -------------------------------------------------------------------------------

    @rule(data=st.data(), by=callers, graceful=st.booleans(), cascade=st.booleans(), reason=reasons)
    @precondition(lambda self: self.model.tasks)
    @counted
    def cancel(self, data: st.DataObject, by: str | None, graceful: bool, cascade: bool, reason: str) -> None:
        task_id = self.some_task(data)
        got = self.ask(
            self.of(by).cancel_task(task_id, reason=reason, graceful=graceful, cascade=cascade),
            lambda canceled: (canceled.task_id, str(canceled.state), canceled.generation),
        )
        expected = self.expect(lambda: self.model.cancel(by, task_id, reason, graceful, cascade))
        assert got == (expected if isinstance(expected, Refusal) else (*expected[:2], expected[3]))

    @rule(data=st.data(), by=callers, force=st.booleans(), guarded=st.booleans())
    @precondition(lambda self: self.model.tasks)
    @counted
    def repair(self, data: st.DataObject, by: str | None, force: bool, guarded: bool) -> None:
        held = [task.id for task in self.model.held()]
        task_id = data.draw(st.sampled_from(held), label="task") if held else self.some_task(data)
        lease = self.some_lease(data) if guarded else None
        command = ForceError("given up", lease) if force else Requeue("operator_accepted", lease)
        got = self.ask(
            self.of(by).repair_task(RepairRequest(task_id, command, "it is stuck")),
            lambda done: Moved(done.task_id, str(done.state), done.attempt, done.generation),
        )
        action = "force_error" if force else "requeue"
        assert got == self.expect(lambda: self.model.repair(by, task_id, action, lease, "given up"))

    @rule(
        data=st.data(),
        enabled=st.booleans(),
        age=mostly(0, 1_000, 5_000),
        attempts=st.sampled_from((9, 2, 1)),
        requeues=st.sampled_from((2, 1, 0)),
        scan=st.sampled_from((100, 2, 1, 0)),
    )
    @precondition(lambda self: self.model.held())
    @counted
    def retry_stale(
        self, data: st.DataObject, enabled: bool, age: int, attempts: int, requeues: int, scan: int
    ) -> None:
        cursor, after = data.draw(st.sampled_from(((None, 0), *self.cursors[-2:])), label="cursor")
        policy = RetryPolicy(
            enabled=enabled, min_lease_age_ms=age, max_attempts=attempts, max_requeues=requeues, scan_limit=scan
        )
        report = self.wait(self.box.retry_stale(policy, cursor=cursor))
        got = Scan(
            report.considered,
            tuple(candidate.task_id for candidate in report.requeued),
            tuple(candidate.task_id for candidate in report.would_requeue),
            tuple((skip.task_id, str(skip.reason), skip.attempt, skip.lease_age_ms) for skip in report.skipped),
            tuple(report.exhausted),
            report.cursor is not None,
        )
        expected, last = self.model.retry_stale(enabled, age, attempts, requeues, scan, after)
        self.model.pass_time()
        assert got == expected
        if report.cursor is not None:
            self.cursors.append((report.cursor, last))

    @rule(data=st.data(), by=callers)
    @precondition(lambda self: self.model.cached())
    @counted
    def forget_cached(self, data: st.DataObject, by: str | None) -> None:
        entries = self.wait(self.box.cached_results(100)).entries
        entry = data.draw(st.sampled_from(entries), label="entry")
        got = self.ask(self.of(by).forget_cached(entry.id, reason="it is wrong"), lambda reply: reply)
        key = cache_key(entry.cache_key)
        assert got == self.expect(lambda: self.model.forget_cached(by, key))

    @rule(older_than=st.sampled_from((None, 0, 1_000, 10_000)))
    @precondition(lambda self: any(task.state == "resolved" for task in self.model.tasks.values()))
    @counted
    def compact(self, older_than: int | None) -> None:
        got = self.wait(self.box.compact(older_than_ms=older_than))
        dropped = self.model.compact(older_than)
        self.model.pass_time()
        assert self.drops_by_itself or got.tasks_dropped == dropped

    @rule(by_ms=spans)
    @counted
    def let_time_pass(self, by_ms: int) -> None:
        async def advance() -> None:
            self.clock.advance(by_ms)

        self.wait(advance())
        self.model.now_ms = self.clock.now_ms()
        self.model.pass_time()

    # --- what everybody can see ---------------------------------------------------------------------------

    @invariant()
    def everything_visible_is_the_same(self) -> None:
        self.loop.run_until_complete(self.compare())

    @invariant()
    def every_number_is_that_of_a_full_count(self) -> None:
        """What is counted along the way, also across snapshots, replays and what was archived."""
        state: State = self.box._engine.state  # type: ignore[attr-defined]
        records = list(state.records.values())
        tasks = [record for record in records if type(record) is TaskRecord]
        states = Counter(task.state for task in tasks)
        assert state.counts() == Counts(
            queued=states[TaskState.QUEUED],
            ready=sum(task.ready_for is not None for task in tasks),
            following=sum(task.waits_on is not None for task in tasks),
            in_flight=states[TaskState.IN_FLIGHT],
            result_pending=states[TaskState.RESULT_PENDING],
            answers=sum(isinstance(record, (TaskRecord, Part)) and record.answer_for is not None for record in records),
        )

    async def compare(self) -> None:
        """All at once: nothing changes meanwhile."""
        await asyncio.gather(
            *(self.compare_task(task_id) for task_id in (*self.model.tasks, NOWHERE)),
            *(self.compare_tree(root, None) for root in (*IDS, NOWHERE)),
            self.compare_tree(IDS[0], "ada"),
            *(self.compare_listings(by) for by in (None, *NAMES)),
        )

    async def compare_task(self, task_id: str) -> None:
        model = self.model
        got = await reply(self.box.get_task(task_id), entry)
        assert got == told(lambda: model.entry(model.find(task_id, None), None))
        got = await reply(self.box.get_result(task_id), lambda found: None if found is None else answer(found))
        assert got == told(lambda: model.result(None, task_id))

    async def compare_tree(self, root: str, by: str | None) -> None:
        got = await reply(self.of(by).task_tree(root), lambda tree: node(tree.root))
        assert got == told(lambda: self.model.tree(root, by))

    async def compare_listings(self, by: str | None) -> None:
        model, box = self.model, self.of(by)
        page = await box.task_queue(1000)
        assert page.cursor is None
        open_tasks = model.open_tasks(by)
        assert [one.task.id for one in page.tasks] == [task.id for task in open_tasks]
        assert [entry(one) for one in page.tasks] == [model.entry(task, by, late=False) for task in open_tasks]
        assert_same_order([answer(one) for one in page.results], model.waiting(by))
        leases = (await box.task_queue(1000, state="in_flight")).tasks
        assert [one.task.id for one in leases] == [task.id for task in model.held() if task in open_tasks]
        newest = [task.id for task in model.visible(by)][::-1]
        assert [task.id for task in await box.recent_tasks(3)] == newest[:3]
        assert [task.id for task in await box.recent_tasks(1000)] == newest
        cached = (await box.cached_results(1000)).entries
        assert [
            Cached(cache_key(one.cache_key), body(one.result), one.source_task_id, one.cached_ms, one.expires_ms)
            for one in cached
        ] == model.cached(by)
        ended = [model.result(by, task.id) for task in model.visible(by) if task.outcome is not None][::-1]
        assert [answer(one) for one in await box.recent_results(3)] == ended[:3]
        assert [answer(one) for one in await box.recent_results(1000)] == ended


class DurableMachine(MailboxMachine):
    """The same on the journal, which is closed and opened again at any time."""

    url = "file:{folder}/box"
    drops_by_itself = True

    @rule(away_ms=mostly(0, 1_000, 20_001, 60_001), lost=mostly((), ("archive*",), ("snapshot-*",)))
    @counted
    def reopen(self, away_ms: int, lost: tuple[str, ...]) -> None:
        """What the journal derives from its segments may be lost meanwhile."""
        self.wait(self.box.close())
        for pattern in lost:
            for file in Path(self.folder.name, "box").glob(pattern):
                file.unlink()
        self.clock.advance(away_ms)
        self.wait(self.open())
        self.model.now_ms = self.clock.now_ms()
        self.model.incarnation += 1
        self.model.pass_time()


class PostgresMachine(MailboxMachine):
    """The same on PostgreSQL, which is left and come back to at any time, and ahead of its tables whenever it can."""

    drops_by_itself = True

    @property
    def engine(self) -> Postgres:
        engine: Any = self.box._engine
        assert isinstance(engine, Postgres)
        return engine

    async def address(self) -> str:
        return await store_for(self.folder.name)

    async def settle(self) -> None:
        self.clock.advance(0)
        await settle(self.engine)

    @rule(away_ms=mostly(0, 1_000, 20_001, 60_001))
    @counted
    def reopen(self, away_ms: int) -> None:
        self.wait(self.box.close())
        self.clock.advance(away_ms)
        self.wait(self.open())
        self.model.now_ms = self.clock.now_ms()
        self.model.incarnation += 1
        self.model.pass_time()

    @invariant()
    def every_number_is_that_of_a_full_count(self) -> None:
        """The rows of the listings are those that the records call for, no more and no less."""
        assert self.loop.run_until_complete(misplaced(self.engine)) == ([], [])


# --- the same words for both ----------------------------------------------------------------------------------


def blocks(content: str) -> tuple[Text, ...]:
    return (Text(content),) if content else ()


def task_of(envelope: Envelope) -> Task:
    declared = None if envelope.safety is None else Idempotency(envelope.safety, envelope.key)  # type: ignore[arg-type]
    return Task(
        id=envelope.id,
        sender=AGENTS[envelope.sender],
        recipient=AGENTS[envelope.recipient],
        intent_text=envelope.intent,
        task_kind=envelope.kind,
        parent=envelope.parent,
        deadline_ms=envelope.deadline_ms,
        idempotency=declared,
        content=blocks(envelope.content),
        not_before_ms=envelope.not_before_ms,
    )


def sent(reply: Any) -> Sent:
    return Sent(reply.task_id, reply.generation, reply.duplicate, reply.replayed, reply.follows)


def delivered(got: Any) -> Delivered:
    return Delivered(got.task.id, got.lease_id, got.attempt, got.generation)


def body(result: Result) -> Body:
    text = "".join(block.text for block in result.content if isinstance(block, Text))
    return Body(result.status, text, result.error_message)


def answer(got: RealAnswer) -> Answer:
    said = body(got.result)
    return Answer(got.task_id, said, got.generation, got.attempt, got.replayed, got.result.sequence)


def cache_key(key: Any) -> CacheKey:
    return CacheKey(LABELS[key.sender], LABELS[key.recipient], key.kind, key.key)


def entry(got: QueueEntry) -> Entry:
    return Entry(
        str(got.state),
        got.attempt,
        got.generation,
        None if got.outcome is None else str(got.outcome),
        got.replayed,
        got.follows,
        got.lease_id,
        got.heartbeat_ms,
        got.overdue,
        got.cancel_requested,
        tuple(body(late) for late in got.late_results),
    )


def node(got: TreeNode) -> Node:
    shown = None if got.entry is None else entry(got.entry)
    return Node(got.id, shown, tuple(node(child) for child in got.children))


async def reply(call: Awaitable[T], shape: Callable[[T], Any]) -> Any:
    try:
        return shape(await call)
    except CovenantError as refusal:
        return Refusal(refusal.code)


def told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Refused as refusal:
        return Refusal(refusal.code)


def assert_same_order(got: Sequence[Answer], expected: Iterable[tuple[int, Answer]]) -> None:
    """The same answers, in the order of their ranks; within one rank in any order."""
    ranks = {answer: rank for rank, answer in expected}
    assert set(got) == set(ranks)
    assert len(got) == len(ranks)
    assert [ranks[one] for one in got] == sorted(ranks.values())


# --- the tests ------------------------------------------------------------------------------------------------

MACHINES = [
    pytest.param(MailboxMachine, 40, 1, id="memory"),  # enough programs for a floor: each has some of the steps only
    pytest.param(DurableMachine, 20, 0, id="journal"),
    pytest.param(PostgresMachine, 2, 0, id="postgresql"),
]


def bounds(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.mark.parametrize(("machine", "examples", "least"), MACHINES)
def test_a_mailbox_keeps_the_contract(
    machine: type[MailboxMachine], examples: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "WORTH", 1)
    run(machine, bounds(examples, steps=50), least)


@pytest.mark.soak
@pytest.mark.parametrize(("machine", "examples", "least"), MACHINES)
def test_a_mailbox_keeps_the_contract_for_long(
    machine: type[MailboxMachine], examples: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "WORTH", 1)
    run(machine, bounds(examples * 100, steps=100), least=examples * 10)
