"""What the journal keeps of conversations, webhooks and cards: over crashes, lost files, the archive and retention.
(Contract 1, 9, 17.)"""

from __future__ import annotations

import asyncio
import errno
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant import CovenantError, Limits, Result, Text
from covenant.a2a import wire as a
from covenant.exchange.token import digest_of
from covenant.exchange.waits import Waits
from covenant.model import command as c
from covenant.model import event as e
from covenant.model import query as q
from covenant.model.audit import Logged
from covenant.model.protocol import RESTARTED
from covenant.model.push import PushConfig, push_key
from covenant.model.record import CHUNK_PREFIX, PART_PREFIX, SAID_PREFIX, SEND_KEY_PREFIX
from covenant.model.task import Task
from covenant.store.clock import ManualClock
from covenant.store.journal.archive import FILE
from covenant.store.journal.engine import Journal
from covenant.store.journal.files import AppendFile
from covenant.store.memory import Memory
from covenant.store.tail import Tail
from tests.a2a.conftest import Town, piece, says
from tests.a2a.stage import seen
from tests.a2a.towns import Place, place
from tests.journal.support import dump_state

SMALL = Limits(
    segment_bytes=4_000,
    snapshot_every_bytes=6_000,
    finished_tail_max=3,
    archive_batch=3,
    retention_ms=10_000,
    dedup_ms=20_000,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def here(tmp_path: Path, clock: ManualClock) -> Place:
    return place("file", tmp_path, SMALL, clock)


def journal(town: Town) -> Journal:
    engine: Any = town.exchange.store
    assert isinstance(engine, Journal)
    return engine


async def tidy(town: Town) -> None:
    keeper = journal(town)._keeper
    assert keeper is not None
    await keeper.finish()


async def converse(town: Town, pieces: int = 6) -> tuple[str, str]:
    """A task with messages, pieces and a webhook, still open."""
    task_id = (await town.send(key=str(uuid.uuid4()))).id
    delivery = await town.lease()
    hook = PushConfig(id="hook", url="http://hook")
    await town.exchange.run(town.alice, c.SetPush(town.alice.agent, task_id, hook))
    for n in range(pieces):
        await town.send(says(f"message {n}", task_id=task_id), key=f"message {n}")
        await town.work(c.UpdateTask(None, delivery.lease_id, says(f"note {n}")))
        await town.work(c.AddArtifact(None, delivery.lease_id, piece(f"{n}"), append=True))
    await town.finish(delivery, Result(task_id, "partial", [Text("half")], None, delivery.lease_id))
    return task_id, delivery.lease_id


async def finish(town: Town, task_id: str, lease_id: str) -> None:
    result = Result(task_id, "ok", (Text("whole"),), None, lease_id)
    await town.work(town.exchange.post(town.writer, result, "worker-1"))


def lose(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


LOSSES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda folder: None,
    "the archive": lambda folder: lose(folder, f"{FILE}*"),
    "the snapshots": lambda folder: lose(folder, "snapshot-*"),
    "both": lambda folder: lose(folder, f"{FILE}*", "snapshot-*"),
}


@pytest.mark.parametrize("lost", LOSSES)
async def test_a_conversation_is_the_same_after_a_restart_whatever_was_lost(
    here: Place, tmp_path: Path, clock: ManualClock, lost: str
) -> None:
    async with here.opened() as town:
        open_one, _ = await converse(town)
        done, lease = await converse(town)
        await finish(town, done, lease)
        for n in range(12):  # so that there are segments, snapshots, and most of it lies in the archive
            await town.send(says(f"{n}" * 100))
        await tidy(town)
        before = dump_state(journal(town).state)
        shown = [await town.get(task_id) for task_id in (open_one, done)]
        told = [await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())]
        assert journal(town).stats.archived > 10
        assert journal(town).stats.snapshots > 0
    LOSSES[lost](tmp_path / "data")
    async with here.opened() as town:
        after = dump_state(journal(town).state)
        signed = {key for key in before | after if key == "head"}  # signed again at close
        assert {k: v for k, v in after.items() if k not in signed} == {
            k: v for k, v in before.items() if k not in signed
        }
        assert [await town.get(task_id) for task_id in (open_one, done)] == shown
        assert [await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())] == told
        assert [event.generation for event in await town.events(done, 1)] == list(
            range(2, int(shown[1].generation) + 1)
        )


async def _age(town: Town, clock: ManualClock) -> None:
    """Past retention, with later segments, and compacted."""
    clock.advance(SMALL.retention_ms + 1)
    for n in range(30):
        await town.send(says(f"{n}" * 200))
    await town.exchange.store.compact(c.CompactHistory(None))


@pytest.mark.parametrize("kept_in", ["memory", "file"])
async def test_what_belongs_to_a_buried_task_goes_with_it(tmp_path: Path, clock: ManualClock, kept_in: str) -> None:
    """And nothing of an open one does, nor a card."""
    here = place(kept_in, tmp_path, SMALL, clock)
    async with here.opened() as town:
        open_one, _ = await converse(town)
        done, lease = await converse(town)
        await finish(town, done, lease)
        kept = await town.get(open_one)
        await _age(town, clock)
        state = town.exchange.store.state  # type: ignore[attr-defined]
        keys = set(dump_state(state)) if kept_in == "file" else set(state.records)
        for prefix in (SAID_PREFIX, CHUNK_PREFIX, PART_PREFIX, "push:"):
            assert not [key for key in keys if key.startswith(f"{prefix}{done}")], prefix
            assert [key for key in keys if key.startswith(f"{prefix}{open_one}")], prefix
        assert state.pushed_tasks() == [open_one]
        assert {state.get(key).task_id for key in keys if key.startswith(SEND_KEY_PREFIX)} == {open_one}
        assert seen(await town.get(open_one)) == seen(kept)
        assert (await town.exchange.store.ask(q.GetCard(None, town.writer.agent.pubkey))) is not None


@pytest.mark.parametrize("lost", LOSSES)
async def test_nothing_of_a_buried_task_comes_back(here: Place, tmp_path: Path, clock: ManualClock, lost: str) -> None:
    """Neither from the segments that still tell of it, nor when all is made anew from a history."""
    async with here.opened() as town:
        open_one, _ = await converse(town)
        done, lease = await converse(town, pieces=30)
        await finish(town, done, lease)
        shown = await town.get(open_one)
        await _age(town, clock)
        assert journal(town)._files.names("history-", ".jsonl")
    LOSSES[lost](tmp_path / "data")
    async with here.opened() as town:
        await town.exchange.store.compact(c.CompactHistory(None))
        kept = dump_state(journal(town).state)
        assert not [key for key, record in kept.items() if key != done and (done in key or done.encode() in record)]
        assert journal(town).state.pushed_tasks() == [open_one]
        assert seen(await town.get(open_one)) == seen(shown)
    clock.advance(SMALL.dedup_ms)
    LOSSES[lost](tmp_path / "data")
    async with here.opened() as town:
        await town.exchange.store.compact(c.CompactHistory(None))
        kept = dump_state(journal(town).state)
        assert not [key for key, record in kept.items() if done in key or done.encode() in record]


@pytest.mark.parametrize("is_compacted", [True, False])
@pytest.mark.parametrize("kept_in", ["memory", "file"])
async def test_a_key_lives_as_long_as_its_task(
    tmp_path: Path, clock: ManualClock, kept_in: str, is_compacted: bool
) -> None:
    """Contract 9: it is as new after retention, whoever has the old id by then."""
    async with place(kept_in, tmp_path, SMALL, clock).opened() as town:

        async def pass_by(ms: int) -> None:
            clock.advance(ms)
            if is_compacted:
                await town.exchange.store.compact(c.CompactHistory(None))

        old = await town.send(key="k-1")
        await town.send(key="k-2")
        await pass_by(SMALL.dedup_ms)
        assert (await town.send(key="k-1")).id == old.id
        for _ in range(2):
            await town.finish(other := await town.lease())
        await pass_by(SMALL.retention_ms)
        assert (await town.send(key="k-1")).id == old.id
        await pass_by(1)
        new = await town.send(says("other"), key="k-1")
        assert new.id != old.id
        await pass_by(SMALL.dedup_ms)
        for taken in (old.id, other.task.id):
            taker = Task(id=taken, recipient=town.writer.agent, intent_text="mine")
            await town.exchange.run(town.writer, c.SendTask(town.writer.agent, taker))
        assert (await town.send(says("other"), key="k-1")).id == new.id
        assert (await town.send(key="k-2")).id != other.task.id


async def test_a_key_is_free_however_late_its_task_is_buried(tmp_path: Path, clock: ManualClock) -> None:
    """And the old task does not take along the key of the new one."""
    async with place("file", tmp_path, SMALL, clock).opened() as town:
        await town.send(key="k-1")
        await town.finish(await town.lease())
        clock.advance(SMALL.retention_ms + 1)
        new = await town.send(key="k-1")
        await town.exchange.store.compact(c.CompactHistory(None))
        assert (await town.send(key="k-1")).id == new.id
        clock.advance(SMALL.dedup_ms)
        await town.finish(await town.lease())
        clock.advance(SMALL.dedup_ms + 1)
        await town.exchange.store.compact(c.CompactHistory(None))
        assert not [key for key in dump_state(journal(town).state) if key.startswith(SEND_KEY_PREFIX)]


async def test_a_cursor_older_than_the_segments_gets_the_task_and_is_told_so(here: Place, clock: ManualClock) -> None:
    async with here.opened() as town:
        task_id, lease = await converse(town)
        await _age(town, clock)
        await town.work(c.UpdateTask(None, lease, says("still here")))
        now = int((await town.get(task_id)).generation)
        await finish(town, task_id, lease)
    for _ in range(2):
        async with here.opened() as town:
            events = await town.events(task_id, after=2)
            assert len(events) == 1
            first = events[0].response.task
            assert first is not None
            assert first.metadata == {RESTARTED: True}
            assert seen(first) == seen(await town.get(task_id))
            assert [event.generation for event in await town.events(task_id, after=now - 1)] == [now, now + 1, now + 2]


async def test_a_stream_that_begins_anew_goes_on_with_what_happens(here: Place, clock: ManualClock) -> None:
    async with here.opened() as town:
        task_id, lease = await converse(town)
        await _age(town, clock)
        stream = town.operations.subscribe(town.alice, town.agent, a.SubscribeToTask(id=task_id), 2)
        first = await anext(stream)
        assert first.response.task is not None and first.response.task.metadata == {RESTARTED: True}
        await finish(town, task_id, lease)
        rest = [event.generation async for event in stream]
        assert rest == [first.generation + 1, first.generation + 2]


async def test_a_webhook_of_a_task_that_has_ended_stays_until_it_is_told(here: Place, clock: ManualClock) -> None:
    """The end is what it wants to hear of."""
    async with here.opened() as town:
        task_id, lease = await converse(town)
        await finish(town, task_id, lease)
        await tidy(town)
        for n in range(20):
            await town.send(says(f"{n}" * 200))
        await tidy(town)
        assert journal(town).state.pushed_tasks() == [task_id]
    async with here.opened() as town:
        assert journal(town).state.get(push_key(task_id, "hook")) is not None
        assert journal(town).state.pushed_tasks() == [task_id]


async def test_cards_survive_and_a_withdrawn_one_stays_withdrawn(here: Place, tmp_path: Path) -> None:
    for loss in LOSSES.values():
        async with here.opened() as town:
            operator = town.exchange.authenticate("token")
            who = town.writer.agent
            await town.exchange.run(operator, c.PublishCard(None, who, {"name": "first"}))
            await town.exchange.run(operator, c.PublishCard(None, who, {"name": "second"}))
        loss(tmp_path / "data")
        async with here.opened() as town:
            page = await town.exchange.store.ask(q.ListCards(None, 10))
            assert [card.card["name"] for card in page.cards] == ["second"]
            await town.exchange.run(town.exchange.authenticate("token"), c.WithdrawCard(None, town.writer.agent))
        loss(tmp_path / "data")
        async with here.opened() as town:
            assert (await town.exchange.store.ask(q.ListCards(None, 10))).cards == []


async def test_the_card_of_a_revoked_agent_is_not_listed(here: Place) -> None:
    async with here.opened() as town:
        operator = town.exchange.authenticate("token")
        await town.exchange.run(operator, c.RevokePeer(None, town.writer.agent.pubkey, "gone"))
        assert (await town.exchange.store.ask(q.ListCards(None, 10))).cards == []
        assert await town.exchange.store.ask(q.GetCard(None, town.writer.agent.pubkey)) is None


# --- what is kept at hand ------------------------------------------------------------------------------------


async def test_the_log_of_a_store_without_a_disk_is_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.store.memory.LOG_BYTES_MAX", 100_000)
    async with place("memory", tmp_path).opened() as town:
        await town.send()
        lease = (await town.lease()).lease_id
        for _ in range(100):
            await town.work(c.AddArtifact(None, lease, piece("x" * 10_000)))
        engine: Any = town.exchange.store
        assert isinstance(engine, Memory)
        assert 1 < len(await engine.log(0, 1000)) < 12
        assert engine._tail._bytes <= 100_000


def test_a_tail_holds_the_newest_commit_however_long_it_is() -> None:
    tail = Tail(commits_max=3, bytes_max=100)
    for number in range(1, 6):
        tail.add(Logged(number, 0, "x", (e.Heartbeat("key"),), (number - 1,)), 10)
    assert [logged.seq for logged in tail] == [3, 4, 5]
    assert [logged.seq for logged in tail.trail(5, "key", 10)] == [5, 4, 3]
    tail.add(Logged(6, 0, "x", (e.Heartbeat("key"),), (5,)), 1000)
    assert [logged.seq for logged in tail] == [6]
    tail.add(Logged(7, 0, "x", (e.Heartbeat("key"),), (6,)), 10)
    assert [logged.seq for logged in reversed(tail)] == [7]
    assert tail.trail(6, "key", 10) == []


def test_a_tail_forgets_every_event_of_what_it_lets_go() -> None:
    tail, seq = Tail(commits_max=2), 1
    for count in (1, 2, 3, 1, 2):
        tail.add(Logged(seq, 0, "x", (e.Heartbeat("key"),) * count, (0,) * count), 10)
        seq += count
    assert [logged.seq for logged in tail] == [7, 8]
    assert [len(tail.trail(number, "key", 10)) for number in range(1, seq)] == [0] * 6 + [1] * 3


async def test_who_waits_for_the_end_of_a_send_that_is_not_durable_is_told_that_nobody_knows(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 1: the wait for the end stands for the wait for the disk, also when the disk says no."""

    def fail(file: AppendFile) -> None:
        raise OSError(errno.EIO, "no disk")

    async with here.opened() as town:
        monkeypatch.setattr(AppendFile, "sync", fail)
        with pytest.raises(CovenantError) as refused:
            await town.send(return_immediately=False)
        assert (refused.value.code, refused.value.details["outcome"]) == ("store_unavailable", "unknown")
        assert town.exchange.waits.total == 0


async def test_a_send_that_may_not_wait_is_durable_when_it_is_answered(here: Place) -> None:
    async with here.opened() as town:
        town.exchange.waits = Waits(0, wait_ms_max=20_000)
        task = await town.send(return_immediately=False)
        assert await town.exchange.store.order_of(task.id) <= journal(town)._writer.position.seq


async def test_sends_that_wait_for_the_end_of_their_tasks_do_not_run_ahead_of_the_disk(tmp_path: Path) -> None:
    """So much may wait to be written; who comes with more waits for that first."""
    async with place("file", tmp_path, Limits(unsynced_bytes_max=1)).opened() as town:
        town.exchange.waits = Waits(0, wait_ms_max=20_000)
        before = journal(town).stats.syncs
        await asyncio.gather(*(town.send(return_immediately=False) for _ in range(3)))
        assert journal(town).stats.syncs - before >= 2


async def test_a_send_is_not_refused_for_what_is_not_durable(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 1: that a token is worth nothing any more is told when a crash cannot take it back."""

    def fail(file: AppendFile) -> None:
        raise OSError(errno.EIO, "no disk")

    async with here.opened() as town:
        monkeypatch.setattr(AppendFile, "sync", fail)
        rotating = town.exchange.store.run(c.RotateToken(None, town.alice.agent.pubkey, digest_of("another")))
        sending = town.send(return_immediately=False)
        told = await asyncio.gather(rotating, sending, return_exceptions=True)
        assert [getattr(refused, "code", None) for refused in told] == ["store_unavailable"] * 2
