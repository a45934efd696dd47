"""The generation: from 1, plus exactly 1 for each event, and for nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from covenant import ForceError, Mailbox, OpenMailbox, RepairRequest, Result, Text
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    Reopen,
    answer_next,
    drain,
    finish,
    keyed,
    plain,
    refused,
    requeue,
    stale,
    take,
    uid,
)

pytestmark = pytest.mark.write_ahead


class Scene:
    """Task 1, held by the worker at generation 2, and all who may do something to it."""

    def __init__(self, box: OpenMailbox, clock: ManualClock) -> None:
        self.box = box
        self.clock = clock
        self.alice = box.of("alice@lab")
        self.bob = box.of("bob@lab")

    async def hold(self) -> None:
        await self.alice.send_task(keyed(self.bob, id=uid(1), deadline_ms=self.clock.now_ms() + 1000))
        self.lease = await take(self.bob)

    async def generation(self) -> int:
        return (await self.alice.get_task(uid(1))).generation

    async def conflicting_result(self) -> None:
        with refused("lease_mismatch"):
            await self.bob.send_result(Result(uid(1), "ok", DONE, None, uid(9)))

    async def expire(self) -> None:
        """In flight a deadline is only shown; released it ends the task. Two events: the release and the deadline."""
        self.clock.advance(1001)
        assert await self.generation() == 2
        await self.bob.release(self.lease)
        self.clock.advance(0)


@pytest.fixture
async def scene(box: OpenMailbox, clock: ManualClock) -> Scene:
    scene = Scene(box, clock)
    await scene.hold()
    assert scene.lease.generation == await scene.generation() == 2
    return scene


Act: TypeAlias = Callable[[Scene], Awaitable[Any]]

EVENTS: dict[str, tuple[int, Act]] = {
    "partial": (1, lambda s: s.bob.send_result(Result.partial(s.lease, [Text("half")]))),
    "empty partial": (1, lambda s: s.bob.send_result(Result.partial(s.lease, []))),
    "released": (1, lambda s: s.bob.release(s.lease)),
    "released with a delay": (1, lambda s: s.bob.release(s.lease, not_before_ms=s.clock.now_ms() + 5)),
    "repaired": (1, lambda s: requeue(s.box, uid(1))),
    "retried": (1, lambda s: s.box.retry_stale(stale())),
    "result with content": (2, lambda s: s.bob.send_result(Result.ok(s.lease, DONE))),
    "result without content": (1, lambda s: s.bob.send_result(Result.ok(s.lease))),
    "error with content": (2, lambda s: s.bob.send_result(Result.error(s.lease, "broken", DONE))),
    "error without content": (1, lambda s: s.bob.send_result(Result.error(s.lease, "broken"))),
    "forced": (1, lambda s: s.box.repair_task(RepairRequest(uid(1), ForceError("given up"), "stuck"))),
    "canceled": (1, lambda s: s.alice.cancel_task(uid(1))),
    "released and past its deadline": (2, lambda s: s.expire()),
    "heartbeat": (0, lambda s: s.bob.heartbeat(s.lease)),
    "sent again": (0, lambda s: s.alice.send_task(keyed(s.bob, id=uid(1)))),
    "followed": (0, lambda s: s.alice.send_task(keyed(s.bob, id=uid(2)))),
    "refused": (0, lambda s: s.conflicting_result()),
    "previewed": (0, lambda s: s.box.retry_stale(stale(enabled=False))),
    "compacted": (0, lambda s: s.box.compact(older_than_ms=0)),
    "read": (0, lambda s: s.box.task_queue()),
}


@pytest.mark.parametrize("event", EVENTS)
async def test_an_event_moves_the_generation_by_exactly_its_number(scene: Scene, event: str) -> None:
    """Generation: the table of what moves it, and of what does not."""
    by, act = EVENTS[event]
    await act(scene)
    assert await scene.generation() == 2 + by


async def test_a_task_starts_at_generation_one(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: sent is 1, also for a follower."""
    assert (await alice.send_task(keyed(bob, id=uid(1)))).generation == 1
    assert (await alice.send_task(keyed(bob, id=uid(2)))).generation == 1
    assert [(await alice.get_task(uid(number))).generation for number in (1, 2)] == [1, 1]


async def test_each_lease_is_an_event(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: leased for a first or a new attempt."""
    await alice.send_task(plain(bob))
    first = await take(bob)
    released = await bob.release(first)
    second = await take(bob)
    assert (first.generation, released.generation, second.generation) == (2, 3, 4)


@pytest.mark.parametrize(("content", "generation"), [(DONE, 3), ((), 2)], ids=["content", "empty"])
async def test_a_replay_is_sent_and_then_answered(
    alice: Mailbox, bob: Mailbox, content: tuple[Text, ...], generation: int
) -> None:
    """Generation: a replay has the event of its send, and those of its result."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await bob.send_result(Result.ok(await take(bob), content))
    sent = await alice.send_task(keyed(bob, id=uid(2)))
    assert sent.generation == (await alice.get_task(uid(2))).generation == generation


@pytest.mark.parametrize(("content", "generation"), [(DONE, 3), ((), 2)], ids=["content", "empty"])
async def test_a_follower_that_is_answered_moves_like_a_result(
    alice: Mailbox, bob: Mailbox, content: tuple[Text, ...], generation: int
) -> None:
    """Generation: the leader's result is an artifact and an end, or only an end."""
    await alice.send_tasks([keyed(bob, id=uid(1)), keyed(bob, id=uid(2))])
    await bob.send_result(Result.ok(await take(bob), content))
    await drain(alice)
    assert (await drain(alice)).generation == (await alice.get_task(uid(2))).generation == generation


async def test_a_promoted_follower_does_not_move(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: to become the task to do changes no state."""
    await alice.send_tasks([keyed(bob, id=uid(1)), keyed(bob, id=uid(2))])
    await alice.cancel_task(uid(1))
    assert (await alice.get_task(uid(2))).generation == 1
    assert (await take(bob)).generation == 2


async def test_a_delay_that_is_over_does_not_move(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Generation: a task whose time has come is as submitted as before."""
    await alice.send_task(plain(bob, id=uid(1), not_before_ms=clock.now_ms() + 1000))
    clock.advance(1000)
    assert (await alice.get_task(uid(1))).generation == 1
    assert (await take(bob)).generation == 2


async def test_a_queued_task_past_its_deadline_moves_once(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Generation: deadline passed is one event."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    clock.advance(1001)
    assert (await drain(alice)).generation == 2
    clock.advance(1001)
    assert (await alice.get_task(uid(1))).generation == 2


async def test_a_drain_and_a_late_result_move_nothing(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Generation: drained, cached and kept for the operator are no events of the task."""
    await alice.send_task(keyed(bob, id=uid(1)))
    old = await take(bob)
    await bob.release(old)
    new = await answer_next(bob)
    generation = (await alice.get_task(uid(1))).generation
    assert generation == 6
    assert (await drain(alice)).generation == generation
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, DONE))
    with refused("result_conflict"):
        await bob.send_result(Result.ok(new, [Text("else")]))
    assert (await alice.get_task(uid(1))).generation == generation


async def test_a_life_has_no_gap_and_no_repeat(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Generation: whoever waits for each next one sees them all."""
    seen = [(await alice.send_task(keyed(bob, id=uid(1)))).generation]
    first = await take(bob)
    seen.append(first.generation)
    seen.append((await bob.send_result(Result.partial(first, [Text("a")]))).generation)
    seen.append((await bob.send_result(Result.partial(first, [Text("b")]))).generation)
    seen.append((await bob.release(first)).generation)
    second = await take(bob)
    seen.append(second.generation)
    outcome = await box.repair_task(RepairRequest(uid(1), ForceError("given up"), "stuck"))
    seen.append(outcome.generation)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    answers = [await drain(alice) for _ in range(3)]
    assert [answer.generation for answer in answers] == [3, 4, 7]


async def test_generations_go_on_after_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Generation: no gap and no repeat across restarts."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    posted = await bob.send_result(Result.partial(delivery, [Text("a")]))
    assert posted.generation == 3
    bob = (await reopen()).of("bob@lab")
    assert (await bob.get_task(uid(1))).generation == 3
    assert (await bob.send_result(Result.partial(delivery, [Text("b")]))).generation == 4
    bob = (await reopen()).of("bob@lab")
    assert (await bob.release(delivery)).generation == 5
    bob = (await reopen()).of("bob@lab")
    assert (await take(bob)).generation == 6


async def test_a_resolved_task_keeps_its_generation_after_a_restart(
    alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Generation: the end of a life is where it was."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    assert (await (await reopen()).get_task(uid(1))).generation == 4
