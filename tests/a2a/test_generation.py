"""Generations under load: no gap and no repeat for whoever follows, whoever else writes; held polls; guarded writes;
streams that are cut and taken up again, over restarts too. (Contract 14-17.)"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant import Limits, Text
from covenant.a2a import wire as a
from covenant.a2a.fault import GENERATION, kind_of
from covenant.exchange import follow
from covenant.exchange.bounds import Bounds
from covenant.model import command as c
from covenant.model.error import CovenantError
from covenant.model.message import Message
from covenant.model.protocol import RESTARTED
from covenant.model.record import Asks
from covenant.model.task import Result
from covenant.serve.a2a.operations import Event
from covenant.store import tail
from covenant.store.clock import ManualClock
from tests.a2a.conftest import Town, piece, says
from tests.a2a.stage import Client, seen
from tests.a2a.towns import place
from tests.conformance.support import soon

WRITERS = 64
SMALL = Limits(segment_bytes=60_000, snapshot_every_bytes=90_000, finished_tail_max=16, archive_batch=16)


@pytest.fixture(params=["memory", "file", "postgresql"])
def kept(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stream(town: Town, task_id: str, after: int | None = None) -> AsyncGenerator[Event, None]:
    return town.operations.subscribe(town.alice, town.agent, a.SubscribeToTask(id=task_id), after)


async def heard(town: Town, task_id: str, after: int | None = None, begun: asyncio.Event | None = None) -> Client:
    """A client that follows to the end."""
    client = Client()
    if after is not None:
        client.task = await town.get(task_id)
    async for event in stream(town, task_id, after):
        client.hear(event.response, event.generation)
        assert client.generations[-1] == event.generation
        if begun is not None:
            begun.set()
    return client


def act(town: Town, task_id: str, lease: str, rng: random.Random) -> Any:
    """Something that the sender or the holder does: one mutation."""
    match rng.randrange(5):
        case 0:
            return town.exchange.run(town.alice, c.AddMessage(town.alice.agent, task_id, says("more")))
        case 1:
            return town.work(c.UpdateTask(None, lease, says("half way")))
        case 2:
            return town.work(c.UpdateTask(None, lease, says("which?"), Asks.INPUT))
        case _:
            return town.work(c.AddArtifact(None, lease, piece("x", rng.choice("ab")), append=rng.random() < 0.8))


async def _crowd(town: Town, mutations: int, tasks: int) -> None:
    """Writers without order, followers from the start, from the middle and from behind."""
    ids = [(await town.send(says(f"task {n}"))).id for n in range(tasks)]
    followers = [asyncio.ensure_future(heard(town, task_id)) for task_id in ids]
    leases = {delivery.task.id: delivery for delivery in [await town.lease() for _ in ids]}
    left = mutations

    async def write(seed: int) -> None:
        nonlocal left
        own = random.Random(seed)
        while left > 0:
            left -= 1
            task_id = own.choice(ids)
            await act(town, task_id, leases[task_id].lease_id, own)

    await asyncio.gather(*(write(seed) for seed in range(WRITERS)))
    begun = {task_id: asyncio.Event() for task_id in ids[::7]}
    late = [asyncio.ensure_future(heard(town, task_id, begun=begins)) for task_id, begins in begun.items()]
    await soon(asyncio.gather(*(begins.wait() for begins in begun.values())))
    await asyncio.gather(*(town.finish(leases[i], Result.ok(leases[i], [Text("done")])) for i in ids))
    for client in await asyncio.gather(*followers, *late):
        first = client.generations[0]
        last = client.generations[-1]
        assert client.generations == list(range(first, last + 1))
        assert client.task is not None
        assert client.seen == seen(await town.get(client.task.id))
    for task_id in ids[::11]:
        done = await town.get(task_id)
        again = await heard(town, task_id, after=1)
        assert again.generations == list(range(2, int(done.generation) + 1))
    assert sum([int((await town.get(i)).generation) - 4 for i in ids]) == mutations


async def test_no_follower_misses_or_repeats_an_event_of_many_writers(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path, Limits(log_tail_max=50_000)).opened() as town:
        await _crowd(town, 2_000 if kept == "postgresql" else 8_000, 100)


@pytest.mark.soak
async def test_a_hundred_thousand_mutations_without_a_gap(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path, Limits(log_tail_max=200_000)).opened() as town:
        await _crowd(town, 100_000, 300)


# --- long poll -----------------------------------------------------------------------------------------------


async def test_a_poll_that_is_behind_is_answered_at_once(kept: str, tmp_path: Path) -> None:
    """Contract 15."""
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        await town.lease()
        async with asyncio.timeout(5):
            assert (await town.get(task.id, current_generation=0)).generation == "2"
            assert (await town.get(task.id, current_generation="1")).generation == "2"


async def test_many_polls_are_held_and_one_event_wakes_them_all(kept: str, tmp_path: Path) -> None:
    """Contract 15."""
    async with place(kept, tmp_path).opened() as town:
        task, other = await town.send(), await town.send()
        delivery = await town.lease()
        polls = [asyncio.ensure_future(town.get(task.id, current_generation=2)) for _ in range(50)]
        aside = asyncio.ensure_future(town.get(other.id, current_generation=1))
        done, _ = await asyncio.wait(polls, timeout=0.05)
        assert not done
        await town.work(c.AddArtifact(None, delivery.lease_id, piece("x")))
        async with asyncio.timeout(5):
            assert {(await poll).generation for poll in polls} == {"3"}
        assert not aside.done()
        await town.lease()
        assert (await aside).generation == "2"


async def test_a_poll_is_held_over_what_does_not_move_the_generation(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        delivery = await town.lease()
        poll = asyncio.ensure_future(town.get(task.id, current_generation=2))
        await asyncio.sleep(0)
        await town.work(c.BeatLease(None, delivery.lease_id))
        graceful = c.CancelTask(town.alice.agent, task.id, "why", graceful=True)
        await town.exchange.run(town.alice, graceful)
        done, _ = await asyncio.wait([poll], timeout=0.05)
        assert not done
        await town.finish(delivery)
        assert (await poll).generation == "3"


async def test_a_poll_ends_with_its_time_and_with_the_task(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 15."""
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        monkeypatch.setattr(town.exchange, "bounds", Bounds(wait_ms_max=20))
        async with asyncio.timeout(5):
            assert (await town.get(task.id, current_generation=1)).generation == "1"
            assert (await town.get(task.id, current_generation=99)).generation == "1"
        await town.finish(await town.lease())
        monkeypatch.undo()
        async with asyncio.timeout(5):
            assert (await town.get(task.id, current_generation=3)).generation == "3"


@pytest.mark.parametrize("kept", ["memory", "file"], indirect=True)
async def test_a_wait_ends_with_its_time_whatever_is_done_to_the_clock(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was set back takes hours to come to where it was: to who waits, it stands."""
    async with place(kept, tmp_path, clock=ManualClock()).replies().opened() as town:
        monkeypatch.setattr(town.exchange, "bounds", Bounds(wait_ms_max=20))
        async with asyncio.timeout(5):
            task = await town.send()  # of an agent that may reply: what it does first is waited for
            assert (await town.get(task.id, current_generation=1)).generation == "1"


# --- guards --------------------------------------------------------------------------------------------------


async def test_of_many_pairs_of_writers_one_of_each_wins(kept: str, tmp_path: Path) -> None:
    """Contract 16."""
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        for generation in range(1, 101):
            pair = [
                town.send(says(f"{generation} {who}", task_id=task.id), if_generation_match=generation)
                for who in range(2)
            ]
            outcomes = await asyncio.gather(*pair, return_exceptions=True)
            lost = [outcome for outcome in outcomes if isinstance(outcome, CovenantError)]
            assert [kind_of(one) for one in lost] == [GENERATION]
            assert (lost[0].details["expected"], lost[0].details["current"]) == (generation, generation + 1)
        done = await town.get(task.id, history_length=1000)
        assert done.generation == "101"
        assert len(done.history) == 101


async def test_a_guard_is_refused_after_any_other_mutation_too(kept: str, tmp_path: Path) -> None:
    """Contract 16."""
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        delivery = await town.lease()
        for command in (
            c.UpdateTask(None, delivery.lease_id, says("half way")),
            c.AddArtifact(None, delivery.lease_id, piece("x")),
            c.UpdateTask(None, delivery.lease_id, None, Asks.INPUT),
        ):
            known = int((await town.get(task.id)).generation)
            await town.work(command)
            with pytest.raises(CovenantError) as refusal:
                await town.send(says(task_id=task.id), if_generation_match=known)
            assert kind_of(refusal.value) is GENERATION
        await town.work(c.BeatLease(None, delivery.lease_id))
        await town.send(says(task_id=task.id), if_generation_match=5)


# --- streams that are cut ------------------------------------------------------------------------------------


def raw(event: Event) -> tuple[int, bytes]:
    return event.generation, msgspec.json.encode(event.response)


@pytest.mark.parametrize("stored", ["file", "postgresql"])
async def test_a_stream_cut_at_random_is_put_together_again_over_restarts(tmp_path: Path, stored: str) -> None:
    """Byte for byte what an uncut one brings, with archive, snapshots and new segments in between."""
    rng = random.Random(17)
    here = place(stored, tmp_path, SMALL)
    pieced: dict[str, list[tuple[int, bytes]]] = {}
    async with here.opened() as town:
        for n in range(4):
            pieced[(await town.send(says(f"task {n}"))).id] = []
        leases = {delivery.task.id: delivery for delivery in [await town.lease() for _ in pieced]}
    for _ in range(25):
        async with here.opened() as town:
            for task_id, got in pieced.items():
                for _ in range(rng.randrange(12)):
                    await act(town, task_id, leases[task_id].lease_id, rng)
                for _ in range(rng.randrange(3)):
                    await _take(town, task_id, got, rng.randrange(9))
    async with here.opened() as town:
        for task_id, got in pieced.items():
            await town.finish(leases[task_id], Result.ok(leases[task_id], [Text("done")]))
            await _take(town, task_id, got, 10_000)
    async with here.opened() as town:
        for task_id, got in pieced.items():
            uncut = [raw(event) async for event in stream(town, task_id, 1)]
            assert [generation for generation, _ in uncut] == list(range(2, len(uncut) + 2))
            assert len(uncut) > 100
            assert got == uncut


async def _take(town: Town, task_id: str, got: list[tuple[int, bytes]], count: int) -> None:
    """So many events behind the last, then the connection is cut."""
    events = stream(town, task_id, got[-1][0] if got else 1)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1 if count < 100 else 10):
            async for event in events:
                if count == 0:
                    break
                count -= 1
                got.append(raw(event))
    await events.aclose()


async def test_who_is_far_behind_is_told_everything_in_bounded_stretches(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it from the commits at hand, the rest from the disk; while the writer goes on."""
    monkeypatch.setattr(follow, "_COMMITS_AT_ONCE", 7)
    monkeypatch.setattr(tail, "COMMITS_MAX", 20)
    monkeypatch.setattr(tail.Tail.__init__, "__defaults__", (20, tail.BYTES_MAX))
    async with place(kept, tmp_path, Limits(log_tail_max=10_000, segment_bytes=20_000)).opened() as town:
        task = await town.send()
        delivery = await town.lease()
        rng = random.Random(3)
        following = asyncio.ensure_future(heard(town, task.id))
        for n in range(300):
            await asyncio.sleep(0)
            await act(town, task.id, delivery.lease_id, rng)
            if n % 3 == 0:
                await town.work(c.BeatLease(None, delivery.lease_id))
        last = asyncio.ensure_future(heard(town, task.id, after=1))
        for _ in range(50):
            await act(town, task.id, delivery.lease_id, rng)
        await town.finish(delivery)
        assert (await last).generations == list(range(2, 354))
        assert (await following).generations[-1] == 353
        largest = 0
        async for told in follow.follow(town.exchange, town.alice, task.id, 1):
            largest = max(largest, len(told.updates))
        assert 0 < largest <= 14


async def test_a_sign_of_life_behind_an_event_is_no_gap(kept: str, tmp_path: Path) -> None:
    """It is in the log and moves nothing: who is one event behind is told that event, and nothing else."""
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        delivery = await town.lease()
        await town.work(c.AddArtifact(None, delivery.lease_id, piece("x")))
        for _ in range(3):
            await town.work(c.BeatLease(None, delivery.lease_id))
        events = stream(town, task.id, after=2)
        assert (await soon(anext(events))).generation == 3
        rest = asyncio.ensure_future(_all(events))
        await town.finish(delivery)
        told = await soon(rest)
        assert [event.generation for event in told] == list(range(4, 4 + len(told)))
        assert all(event.response.task is None for event in told)


async def _all(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


async def test_a_reader_that_falls_behind_the_log_begins_anew_and_is_told_so(tmp_path: Path) -> None:
    """Where the log is short, a gap is never passed over in silence."""
    async with place("memory", tmp_path, Limits(log_tail_max=30)).opened() as town:
        task = await town.send()
        delivery = await town.lease()
        slow = stream(town, task.id)
        first = await anext(slow)
        assert first.response.task is not None
        for n in range(100):
            await town.work(c.AddArtifact(None, delivery.lease_id, piece(f"{n}"), append=True))
        await town.finish(delivery)
        rest = [event async for event in slow]
        assert [event.generation for event in rest] == [103]
        assert rest[0].response.task is not None
        assert rest[0].response.task.metadata == {RESTARTED: True}
        assert len(rest[0].response.task.artifacts[0].parts) == 100


async def test_a_cursor_ahead_of_the_task_is_refused(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        with pytest.raises(CovenantError):
            await heard(town, task.id, after=2)


# --- replies -------------------------------------------------------------------------------------------------


def hello() -> Message:
    return says("hello")


async def test_an_agent_that_replies_is_waited_for(kept: str, tmp_path: Path) -> None:
    """Over a receiver that went away, and a holder that gave the task back."""
    async with place(kept, tmp_path).replies().opened() as town:
        sending = asyncio.ensure_future(town.send())
        lease = (await town.lease()).lease_id
        await town.exchange.store.run(c.GiveBack(town.writer.agent, (lease,), ()))
        await town.work(c.ReleaseLease(None, (await town.lease()).lease_id))
        delivery = await town.lease()
        done, _ = await asyncio.wait([sending], timeout=0.05)
        assert not done
        await town.work(c.ReplyDirectly(None, delivery.lease_id, hello()))
        reply = await sending
        assert isinstance(reply, Message)
        assert reply.role == "ROLE_AGENT"


async def test_a_task_that_was_shown_is_not_taken_back_by_a_reply(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the request was over before the agent did anything."""
    async with place(kept, tmp_path).replies().opened() as town:
        monkeypatch.setattr(town.exchange, "bounds", Bounds(wait_ms_max=20))
        task = await town.send()
        assert not isinstance(task, Message)
        monkeypatch.undo()
        delivery = await town.lease()
        following = asyncio.ensure_future(heard(town, task.id))
        await asyncio.sleep(0)
        await town.work(c.ReplyDirectly(None, delivery.lease_id, hello()))
        assert (await town.get(task.id)).status.state == "TASK_STATE_COMPLETED"
        client = await following
        assert client.message is None
        assert client.seen == seen(await town.get(task.id))


async def test_a_task_shown_at_once_is_completed_by_a_reply(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path).opened() as town:
        task = await town.send()
        await town.work(c.ReplyDirectly(None, (await town.lease()).lease_id, hello()))
        assert (await town.get(task.id)).status.message.parts == hello().parts


def sent_streaming(town: Town, key: str | None = None) -> AsyncIterator[Event]:
    return town.operations.send_streaming(town.alice, town.agent, a.SendMessage(message=says()), key)


async def told(events: AsyncIterator[Event]) -> Client:
    client = Client()
    async for event in events:
        client.hear(event.response, event.generation)
    return client


async def told_to_the_end(town: Town) -> Client:
    """A streamed message, which closes at the first question, and a subscription behind its last event."""
    client = await told(sent_streaming(town))
    assert client.task is not None
    if not client.task.status.state.is_terminal:
        assert client.task.status.state.is_interrupted
        request = a.SubscribeToTask(id=client.task.id)
        async for event in town.operations.subscribe(town.alice, town.agent, request, client.generations[-1]):
            client.hear(event.response, event.generation)
    return client


@pytest.mark.parametrize("first", ["update", "artifact", "ask", "partial"])
async def test_the_stream_of_an_agent_that_makes_a_task_after_all_begins_with_its_first_act(
    kept: str, tmp_path: Path, first: str
) -> None:
    """Then the task as it is with that, and everything behind it; what it did before counts, too."""
    async with place(kept, tmp_path).replies().opened() as town:
        following = asyncio.ensure_future(told_to_the_end(town))
        await town.work(c.ReleaseLease(None, (await town.lease()).lease_id))
        delivery = await town.lease()
        lease = delivery.lease_id
        acts: dict[str, c.Command] = {
            "update": c.UpdateTask(None, lease, says("half way")),
            "artifact": c.AddArtifact(None, lease, piece("x", "first")),
            "ask": c.UpdateTask(None, lease, says("which?"), Asks.INPUT),
            "partial": c.PostResult(None, Result.partial(delivery, (Text("x"),), 1), "worker-1"),
        }
        begun = (await town.exchange.watch(town.alice, delivery.task.id, 0, 0)).generation + 1
        await town.work(acts[first])
        rng = random.Random(7)
        for _ in range(50):
            await act(town, delivery.task.id, lease, rng)
        await town.finish(delivery, Result.ok(delivery, [Text("done")]))
        client = await soon(following)
        done = await town.get(delivery.task.id)
        assert begun <= client.generations[0]  # not before the first act
        assert client.generations == list(range(client.generations[0], int(done.generation) + 1))
        assert client.seen == seen(done) and client.message is None


async def test_a_stream_shows_each_act_as_it_comes_from_the_first_on(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path).replies().opened() as town:
        events = sent_streaming(town)
        first = asyncio.ensure_future(anext(events))
        lease = (await town.lease()).lease_id
        await town.work(c.UpdateTask(None, lease, says("reading")))
        begun = await soon(first)
        assert begun.response.task is not None and begun.generation == 3  # sent, leased, and that
        assert begun.response.task.status.message is not None
        assert begun.response.task.status.message.parts == says("reading").parts
        for generation in range(4, 8):
            await town.work(c.AddArtifact(None, lease, piece("x"), append=generation > 4))
            event = await soon(anext(events))
            assert event.generation == generation and event.response.artifact_update is not None
        await town.work(c.ReplyDirectly(None, lease, hello()))
        assert (await soon(anext(events))).generation == 8
        with pytest.raises(StopAsyncIteration):
            await soon(anext(events))
        assert (await town.get(begun.response.task.id)).status.state == "TASK_STATE_COMPLETED"


async def test_a_stream_of_an_agent_that_ends_the_task_in_one_act_is_that_task(kept: str, tmp_path: Path) -> None:
    async with place(kept, tmp_path).replies().opened() as town:
        following = asyncio.ensure_future(told(sent_streaming(town)))
        delivery = await town.lease()
        await town.finish(delivery, Result.ok(delivery, [Text("done")]))
        client = await soon(following)
        assert client.generations == [4]
        assert client.seen == seen(await town.get(delivery.task.id))


async def test_a_stream_of_an_agent_that_replies_is_that_message_and_so_is_its_repetition(
    kept: str, tmp_path: Path
) -> None:
    async with place(kept, tmp_path).replies().opened() as town:
        following = asyncio.ensure_future(told(sent_streaming(town, "k-1")))
        await town.work(c.ReplyDirectly(None, (await town.lease()).lease_id, hello()))
        for client in (await soon(following), await soon(told(sent_streaming(town, "k-1")))):
            assert client.task is None and client.message is not None
            assert client.message.parts == hello().parts
            assert client.generations == [3]


async def test_what_may_still_be_answered_by_a_message_is_not_listed_of_an_agent_that_replies(
    kept: str, tmp_path: Path
) -> None:
    """A listing would show a task that then never was."""

    async def listed(town: Town, **settings: Any) -> tuple[int, int]:
        page = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks(**settings))
        return len(page.tasks), page.total_size

    async with place(kept, tmp_path).replies().opened() as town:
        sending = [asyncio.ensure_future(town.send(says(f"task {n}"))) for n in range(3)]
        leases = [(await town.lease()).lease_id for _ in sending]
        assert await listed(town) == (0, 0)
        await town.work(c.ReplyDirectly(None, leases[0], hello()))
        for lease in leases[1:]:
            await town.work(c.UpdateTask(None, lease, says("half way")))
        await asyncio.gather(*sending)
        assert await listed(town) == (2, 2)
        assert await listed(town, page_size=1) == (1, 2)
    async with place(kept, tmp_path / "other").opened() as town:
        waiting = asyncio.ensure_future(town.send(return_immediately=False))
        delivery = await town.lease()
        assert await listed(town) == (1, 1)
        await town.finish(delivery)
        await waiting
