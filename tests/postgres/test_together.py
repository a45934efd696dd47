"""Several engines on one store: what one does reaches who waits at another, and nobody's trouble is everybody's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from covenant import (
    AgentId,
    CovenantError,
    Idempotency,
    Limits,
    Mailbox,
    OpenMailbox,
    Result,
    RetryPolicy,
    Task,
    TaskState,
)
from covenant.exchange.alerts import Alerts, Thresholds
from covenant.exchange.bounds import Refusals
from covenant.model import command as c
from covenant.model.error import TooManyWaiters
from covenant.model.peer import Caller, Role
from covenant.store.clock import ManualClock, SystemClock
from covenant.store.directory import Directory
from covenant.store.postgres import rounds
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.entry import Entry, Group
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.replies import Replies
from tests.conformance.runs import entry, step
from tests.conformance.support import DONE, drain, plain, soon, take, turn, uid
from tests.postgres import store_url
from tests.postgres.support import engine_of, until

ALICE = AgentId.named("alice@lab")
PATIENCE_S = 60  # no slow look comes to help, however long a machine takes


@pytest.fixture(autouse=True)
def _no_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter is woken by a notification, not by the slow poll behind it."""
    monkeypatch.setattr(rounds, "POLL_S", 3600.0)


async def test_a_ring_for_many_tasks_wakes_as_many_who_wait() -> None:
    url = store_url()
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        bob = there.of("bob@lab")
        waiting = [asyncio.create_task(bob.recv_task()) for _ in range(10)]
        await bob.recent_tasks(1)  # asked behind them, and answered
        await here.of(ALICE).send_tasks([plain(bob) for _ in waiting])
        async with asyncio.timeout(PATIENCE_S):
            taken = await asyncio.gather(*waiting)
        assert len({delivery.task.id for delivery in taken}) == 10


async def test_a_ring_wakes_who_waits_for_that_kind() -> None:
    """A ring does not say of what kind: whoever waited first may have no use for it."""
    url = store_url()
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        bob = there.of("bob@lab")
        waiting = [asyncio.create_task(bob.recv_tasks(1, kinds=[kind])) for kind in ("dig", "saw")]
        await bob.recent_tasks(1)  # asked behind them, and answered
        await here.of(ALICE).send_task(plain(bob, task_kind="saw"))
        async with asyncio.timeout(PATIENCE_S):
            assert len(await waiting[1]) == 1
        waiting[0].cancel()


@pytest.mark.parametrize("is_heard", [True, False], ids=["rung", "looked"])
async def test_who_waits_for_all_finds_its_kind_at_once(is_heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind others for all, and beside one of that name, who are after something else."""
    url = store_url()
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        bob, engine = there.of("bob@lab"), there._engine
        assert isinstance(engine, Postgres)
        boxes = (bob, there, there, there)
        receives = (box.recv_tasks(1, kinds=[kind]) for box, kind in zip(boxes, "abcd", strict=True))
        waiting = [asyncio.create_task(receive) for receive in receives]
        await bob.recent_tasks(1)  # asked behind them, and answered
        if not is_heard:
            monkeypatch.setattr(engine, "rung", lambda *rung: None)
        await here.of(ALICE).send_task(plain(bob, task_kind="d"))
        if not is_heard:
            await engine._rounds.look()
        async with asyncio.timeout(PATIENCE_S):
            assert len(await waiting[-1]) == 1
        for receiver in waiting:
            receiver.cancel()


@pytest.mark.parametrize("url", ["memory:", "postgresql:"])
async def test_who_is_woken_and_refused_wakes_the_next(url: str) -> None:
    async with Mailbox.open(url if url == "memory:" else store_url()) as box:
        engine: Any = box._engine
        bob = box.of("bob@lab")
        await engine.run(c.EnrollPeer(None, bob.agent, Role.PEER, "old"))

        def waiting(token: str) -> asyncio.Task[list[Any]]:
            lease = c.LeaseTasks(bob.agent, bob.agent, "here")
            return asyncio.create_task(engine.take(c.Call(Caller(bob.agent, Role.PEER, token), lease)))

        first = waiting("old")
        await turn()
        await bob.recent_tasks(1)
        await engine.run(c.RotateToken(None, bob.agent.pubkey, "new"))
        second = waiting("new")
        await turn()
        await bob.recent_tasks(1)
        await box.of(ALICE).send_task(plain(bob))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(CovenantError):
                await first
            assert len(await second) == 1


async def test_who_takes_another_kind_than_it_was_woken_for_wakes_the_next() -> None:
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of(ALICE), box.of("bob@lab")
        await alice.send_task(plain(bob, task_kind="b"))
        held = await take(bob)
        waiting = [asyncio.create_task(bob.recv_tasks(1, kinds=kinds)) for kinds in (["a", "b"], ["a"])]
        await bob.recent_tasks(1)  # asked behind them, and answered
        engine: Any = box._engine
        newer = plain(bob, task_kind="a")
        await engine.run_all([c.SendTask(ALICE, newer), c.GiveBack(bob.agent, (held.lease_id,), ())])
        async with asyncio.timeout(PATIENCE_S):
            taken = await asyncio.gather(*waiting)
        assert [delivery.task.task_kind for one in taken for delivery in one] == ["b", "a"]


async def test_who_is_woken_while_it_takes_something_else_wakes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Mailbox.open(store_url()) as box:
        alice, bob, engine = box.of(ALICE), box.of("bob@lab"), box._engine
        await alice.send_task(plain(bob, id=uid(1)))
        took, goes_on, replied = asyncio.Event(), asyncio.Event(), Replies.to

        async def slow(replies: Replies, entry: Any) -> Any:
            reply = await replied(replies, entry)
            if isinstance(entry.command, c.LeaseTasks) and not took.is_set():
                took.set()
                await goes_on.wait()
            return reply

        assert isinstance(engine, Postgres)
        monkeypatch.setattr(Replies, "to", slow)
        first = asyncio.create_task(bob.recv_task())
        await took.wait()
        second = asyncio.create_task(bob.recv_task())
        await bob.recent_tasks(1)  # asked behind it, and answered
        await alice.send_task(plain(bob, id=uid(2)))
        goes_on.set()
        async with asyncio.timeout(PATIENCE_S):
            assert [(await first).task.id, (await second).task.id] == [uid(1), uid(2)]


@pytest.mark.parametrize("url", ["memory:", "postgresql:"])
async def test_who_finds_work_is_not_refused_because_many_wait(url: str) -> None:
    where = url if url == "memory:" else store_url()
    async with Mailbox.open(where, limits=Limits(waiters_max=1)) as box:
        alice, bob = box.of(ALICE), box.of("bob@lab")
        waiting = asyncio.create_task(alice.recv_task())
        await turn()
        await alice.recent_tasks(1)  # asked behind it, and answered
        await alice.send_tasks([plain(bob), plain(bob)])
        assert len(await bob.recv_tasks(1)) == len(await bob.recv_tasks(1, wait_ms=0)) == 1
        assert await bob.recv_tasks(1, wait_ms=0) == []
        with pytest.raises(TooManyWaiters):
            await bob.recv_tasks(1)
        waiting.cancel()


@pytest.mark.parametrize("how", ["take", "run", "refused"])
async def test_a_caller_that_leaves_in_the_turn_of_its_answer_waits_for_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit answers the call after it was cancelled, and before its task learns so. Counted in turns of the loop:
    what the call still has to do is no more than to end."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        bob, engine = box.of("bob@lab"), engine_of(box)
        await bob.recent_tasks(1)
        call: Callable[[], Any] = {
            "take": lambda: bob.recv_tasks(1, wait_ms=0),
            "run": lambda: bob.send_task(plain(bob)),
            "refused": lambda: bob.cancel_task(uid(404)),
        }[how]
        committed, has_left = engine.committed, asyncio.Event()

        def answer_who_leaves(entries: Any, *commit: Any) -> None:
            leaving.cancel()
            committed(entries, *commit)
            has_left.set()

        with monkeypatch.context() as patched:
            patched.setattr(engine, "committed", answer_who_leaves)
            leaving = asyncio.create_task(call())
            async with asyncio.timeout(PATIENCE_S):
                await has_left.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert leaving.cancelled()


async def test_who_is_no_daemon_does_not_lead() -> None:
    async with Mailbox.open(store_url()) as box:
        assert not box._engine.leads()  # type: ignore[attr-defined]


async def test_a_text_that_the_server_cannot_hold_as_text_is_nobodys_trouble() -> None:
    async with Mailbox.open(store_url()) as box:
        eve, alice, bob = box.of("eve@lab"), box.of(ALICE), box.of("bob@lab")
        await eve.send_task(Task(recipient=eve.agent, intent_text="a\0b"))
        assert (await take(eve)).task.intent_text == "a\0b"
        await alice.send_task(plain(bob))
        held = await take(bob)
        page = await alice.task_queue(state=TaskState.IN_FLIGHT)
        assert [entry.task.id for entry in page.tasks] == [held.task.id]
        assert [entry.task.id for entry in (await eve.task_queue(state=TaskState.IN_FLIGHT)).tasks] != [held.task.id]


async def test_every_denial_is_written_or_counted() -> None:
    async with Mailbox.open(store_url()) as box:
        engine = box._engine
        now_ms = 60_000
        refusals = Refusals(60, lambda: now_ms)
        engine.context.refused = refusals.draw  # type: ignore[attr-defined]
        await engine.run(c.EnrollPeer(None, ALICE, Role.PEER, "token"))
        before = len(await box.recent_audit(1000))
        for number in range(100):
            if number == 90:
                now_ms = 120_000
            try:
                await engine.run(c.Call(Caller(ALICE, Role.PEER, "token"), c.UseRight(ALICE, "audit.read")))  # type: ignore[arg-type]
            except CovenantError as refused:
                assert refused.code == "missing_capability"
        rows = (await box.recent_audit(1000))[before:]
        assert len(rows) == 70
        assert sum(row.counts.get("not_written", 0) for row in rows) == 30


async def test_one_step_that_is_refused_does_not_keep_the_others_from_being_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Mailbox.open(store_url()) as box:
        engine: Any = box._engine
        asked: list[str] = []
        submit = engine.submit

        def refuses(command: c.Command, by: str | None = None) -> Any:
            entry = submit(c.Expire(None), by)
            if isinstance(command, c.EndGrants):
                asked.append(command.pubkey)
                entry.fail(CovenantError("not today"))
            return entry

        monkeypatch.setattr(engine, "submit", refuses)
        monkeypatch.setattr(Directory, "left_grants", lambda trust: ["one", "two", "three"])
        await engine._rounds.go_on()
        assert asked == ["one", "two", "three"]


async def test_a_step_that_cannot_be_done_does_not_keep_the_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "POLL_S", 0.05)
    url = store_url()
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        engine: Any = there._engine
        monkeypatch.setattr(engine, "rung", lambda *rung: None)
        begun, submit = asyncio.Event(), engine.submit

        def never(command: c.Command, by: str | None = None) -> Any:
            if not isinstance(command, c.EndGrants):
                return submit(command, by)
            begun.set()
            return engine.entry(command, by)

        monkeypatch.setattr(engine, "submit", never)
        monkeypatch.setattr(Directory, "left_grants", lambda trust: ["one"] if trust is engine.trust else [])
        await begun.wait()
        waiting = asyncio.create_task(there.of("bob@lab").recv_task())
        await there.of("bob@lab").recent_tasks(1)  # asked behind it, and answered
        sent = await here.of(ALICE).send_task(plain(there.of("bob@lab")))
        async with asyncio.timeout(PATIENCE_S):
            assert (await waiting).task.id == sent.task_id


async def test_an_id_that_is_used_anew_has_no_former_life_at_any_engine() -> None:
    """One sends it anew while the other tidies up: nothing of the new life goes with the old one."""
    url = store_url()
    limits, clock = Limits(retention_ms=1000, dedup_ms=2000), ManualClock()
    async with (
        Mailbox.open(url, limits=limits, clock=clock) as here,
        Mailbox.open(url, limits=limits, clock=clock) as there,
    ):
        for word in ("one", "two", "three"):
            alice, bob = here.of(ALICE), there.of("bob@lab")
            sent, _ = await asyncio.gather(alice.send_task(plain(bob, word, id=uid(1))), there.compact())
            assert (sent.generation, sent.duplicate) == (1, False)
            held = await take(bob)
            assert await _heard(bob, held.lease_id) == []
            await alice.add_message(uid(1), word)
            await alice.signal_run(uid(1), "go", word, key="key")
            await here.compact()
            assert await _heard(bob, held.lease_id) == [word]
            await bob.commit_run(held, step(1, entries=[entry(1, word, key="once")], leaf=1))
            assert (await here.get_run(uid(1))).signals == ["go", "message"]
            await bob.commit_run(held, step(2, result=Result(uid(1), "ok", DONE)))
            await drain(alice)
            clock.advance(limits.dedup_ms + 1)
            here, there = there, here


async def _heard(worker: Mailbox, lease_id: str) -> list[str | None]:
    return [entry.message.parts[0].text for entry in (await worker.inputs(lease_id)).inputs]


# --- alerts -----------------------------------------------------------------------------------------------------


async def test_who_leads_next_does_not_tell_again_of_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covenant.alerts")
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        leader = here
        alerts = {box: _alerts(box, lambda box=box: leader is box) for box in (here, there)}  # type: ignore[misc]
        bob = here.of("bob@lab")

        async def told() -> list[str]:
            caplog.clear()
            for each in alerts.values():
                await each.check()
            return [record.getMessage().split()[1] for record in caplog.records if record.name == "covenant.alerts"]

        for _ in range(3):
            await here.of("alice@lab").send_task(plain(bob))
        assert await told() == ["open:"]
        leader = there
        assert await told() == []
        assert len(await bob.recv_tasks(3, wait_ms=0)) == 3
        assert await told() == ["resolved:"]
        leader = here
        assert await told() == []


def _alerts(box: OpenMailbox, leads: Callable[[], bool]) -> Alerts:
    engine: Any = box._engine
    engine.leads = leads
    thresholds = Thresholds(queue_depth=2)
    return Alerts(engine, SystemClock(), thresholds, RetryPolicy(), lambda entry: None, None, engine.notes())


async def test_what_a_commit_left_to_be_done_comes_before_the_clock_and_nothing_else_does() -> None:
    clock = ManualClock()
    async with Mailbox.open(f"{store_url()}&lanes=1", clock=clock) as box:
        engine: Any = box._engine
        alice, bob = box.of(ALICE), box.of("bob@lab")
        await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
        clock._now_ms += 2000  # and no timer has fired yet
        step = engine.submit(c.SendTask(ALICE, plain(bob, id=uid(2))))
        step.is_step = True
        last = engine.submit(c.SendTask(ALICE, plain(bob, id=uid(3))))
        await soon(asyncio.gather(step.future, last.future))
        newest = await engine.log_back(None, 3)
        assert [logged.events[0].key for logged in newest] == [uid(3), uid(1), uid(2)]


async def test_the_tasks_of_one_call_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one lane takes at once; they are of no kind that is decided on what is remembered."""
    at_work: list[object] = []
    together: list[object] = []
    transact = Lane.transact

    async def noted(lane: Lane, batch: list[Entry], tried: Any) -> int:
        groups = {id(entry.group) for entry in batch if entry.group is not None}
        together.extend(groups.intersection(at_work))
        at_work.extend(groups)
        try:
            return await transact(lane, batch, tried)
        finally:
            for group in groups:
                at_work.remove(group)

    monkeypatch.setattr(Lane, "transact", noted)
    async with Mailbox.open(f"{store_url()}&lanes=4") as box:
        alice, bob = box.of(ALICE), box.of("bob@lab")
        calls = [[keyed(bob, n) for n in range(first, first + 400)] for first in (0, 1000, 2000)]
        alone = [alice.send_task(keyed(bob, 3000 + n)) for n in range(20)]
        sent = await soon(asyncio.gather(*map(alice.send_tasks, calls), *alone))
        assert [[one.task_id for one in answers] for answers in sent[:3]] == [
            [one.id for one in call] for call in calls
        ]
        assert not together
        taken = []
        while more := await bob.recv_tasks(1000, wait_ms=0):
            taken += [delivery.task.id for delivery in more]
        for call in calls:
            ids = [task.id for task in call]
            assert [task_id for task_id in taken if task_id in ids] == ids
        assert len(taken) == 1220


async def test_who_leaves_a_call_of_many_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the tasks that wait for those before them, nor of another call."""
    url = f"{store_url()}&lanes=2"
    async with Mailbox.open(url) as box:
        alice, bob = box.of(ALICE), box.of("bob@lab")
        leaving = asyncio.create_task(alice.send_tasks([keyed(bob, n) for n in range(900)]))
        await turn()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert len(await soon(alice.send_tasks([keyed(bob, 1000 + n) for n in range(300)]))) == 300
        closing = asyncio.create_task(alice.send_tasks([keyed(bob, 2000 + n) for n in range(900)]))
        await turn()
    answers = await soon(closing)
    outcomes = [getattr(answer, "code", "sent") for answer in answers]
    assert set(outcomes) <= {"sent", "store_closed"}
    assert outcomes == sorted(outcomes)


def keyed(bob: Mailbox, number: int) -> Task:
    return plain(bob, id=uid(number), idempotency=Idempotency("idempotent", key=f"k{number}"))


async def test_no_lane_keeps_a_transaction_open_for_what_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun with the commit before, for the rest of a call of which another lane takes the beginning."""
    async with Mailbox.open(f"{store_url()}&lanes=2") as box:
        bob, engine = box.of("bob@lab"), engine_of(box)
        entries: list[Entry] = []
        goes_on, transact, goes_on_loading = asyncio.Event(), Lane.transact, Lane._goes_on_loading

        async def held_up(lane: Lane, batch: list[Entry], tried: Any) -> int:
            if batch[0] in entries:
                await goes_on.wait()
            return await transact(lane, batch, tried)

        def more_comes(lane: Lane) -> bool:
            if not entries:
                group = Group()
                entries.extend(engine.submit(c.SendTask(ALICE, keyed(bob, number))) for number in range(1, 300))
                for entry in entries:
                    entry.group = group
            return goes_on_loading(lane)

        monkeypatch.setattr(Lane, "transact", held_up)
        monkeypatch.setattr(Lane, "_goes_on_loading", more_comes)
        await soon(box.of(ALICE).send_task(keyed(bob, 0)))
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: engine.queue.free == 1 and not any(map(is_in_transaction, engine._lanes)))
        goes_on.set()
        await soon(asyncio.gather(*(entry.future for entry in entries)))


def is_in_transaction(lane: Lane) -> bool:
    return lane._connection is not None and lane._connection.is_in_transaction()
