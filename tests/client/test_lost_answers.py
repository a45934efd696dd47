"""Receives whose answers get lost: whatever they took is found again. (Contract 2, 8.)"""

from __future__ import annotations

import asyncio

import pytest

from covenant import Delivery, Mailbox, OpenMailbox, Task, TaskState, WorkContext, Worker
from covenant.model.run import RunCommit, Wait
from tests.client.proxy import Proxy
from tests.conformance.support import answer_next, drain, plain, refused, soon, take, turn, uid
from tests.daemons import Realmful
from tests.until import until

LEASED = b'"lease_id"'
GIVEN_BACK = b'"given_back"'


async def test_an_answer_that_is_lost_once_costs_nothing(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    proxy.loses = (LEASED,)
    receiving = asyncio.create_task(take(far))
    await until(lambda: proxy.lost > 0)
    proxy.loses = ()
    delivery = await soon(receiving)
    assert (delivery.task.id, delivery.attempt) == (uid(1), 1)


async def test_what_a_lost_answer_took_comes_with_the_next_receive(
    proxy: Proxy, box: OpenMailbox, far: OpenMailbox
) -> None:
    """The line breaks with the answer, and is broken when it is asked again."""
    await box.of("alice@lab").send_tasks([plain(far, id=uid(1)), plain(far, id=uid(2))])
    proxy.loses, proxy.goes_down = (LEASED,), True
    for _ in range(3):
        with refused("unreachable"):
            await take(far)
    assert (await box.get_task(uid(1))).state is TaskState.IN_FLIGHT
    proxy.loses, proxy.is_down = (), False
    found = [await take(far) for _ in range(2)]
    assert [(delivery.task.id, delivery.attempt) for delivery in found] == [(uid(1), 1), (uid(2), 1)]


async def test_a_lost_answer_to_giving_back_changes_nothing(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    proxy.loses = (LEASED, GIVEN_BACK)
    for _ in range(3):
        with refused("unreachable"):
            await take(far)
    proxy.loses = ()
    assert (await take(far)).task.id == uid(1)
    assert len((await box.task_queue(state="in_flight")).tasks) == 1


async def test_what_a_lost_answer_took_is_given_back_at_the_close(
    proxy: Proxy, box: OpenMailbox, realm: Realmful
) -> None:
    async with Mailbox.open(proxy.url, token=realm.tokens["bob@lab"]) as far:
        await box.of("alice@lab").send_task(plain(far, id=uid(1)))
        proxy.loses, proxy.goes_down = (LEASED,), True
        with refused("unreachable"):
            await take(far)
        proxy.loses, proxy.is_down = (), False
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)


async def test_a_box_that_is_closed_while_it_receives_keeps_no_lease(
    proxy: Proxy, box: OpenMailbox, realm: Realmful
) -> None:
    """The answer is on its way when the box is closed."""
    far = await Mailbox.open(proxy.url, token=realm.tokens["bob@lab"])
    proxy.loses = (LEASED,)
    receiving = asyncio.create_task(far.recv_task())
    await turn()
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    await far.close()
    with refused("store_closed"):
        await soon(receiving)
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)


@pytest.mark.usefixtures("short_waits")
async def test_a_receive_that_is_cancelled_while_the_line_is_down_keeps_no_lease(
    proxy: Proxy, box: OpenMailbox, far: OpenMailbox
) -> None:
    proxy.may_answer.clear()
    receiving = asyncio.create_task(take(far))
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    while (entry := await box.get_task(uid(1))).state is not TaskState.IN_FLIGHT:
        await soon(box.wait_generation(uid(1), entry.generation))
    proxy.is_down = True
    receiving.cancel()
    await soon(asyncio.wait([receiving]))
    assert receiving.cancelled()
    proxy.is_down = False
    proxy.may_answer.set()
    assert (await take(far)).attempt == 1


async def test_a_result_whose_answer_was_lost_is_drained_with_the_next_receive(
    proxy: Proxy, box: OpenMailbox, far: OpenMailbox
) -> None:
    alice = box.of("alice@lab")
    for number in (1, 2):
        await far.send_task(plain(alice, id=uid(number)))
        await answer_next(alice)
    proxy.loses, proxy.goes_down = (b'"results"',), True
    with refused("unreachable"):
        await drain(far)
    assert (await box.get_task(uid(1))).state is TaskState.RESOLVED
    proxy.loses, proxy.is_down = (), False
    assert [(await drain(far)).task_id for _ in range(2)] == [uid(1), uid(2)]


async def test_an_outage_leaves_no_more_than_one_answer_to_ask_for(proxy: Proxy, far: OpenMailbox) -> None:
    """What was not even sent is not remembered, and nothing is taken before the last is settled."""
    proxy.is_down = True
    proxy.hang_up()
    for _ in range(20):
        with refused("unreachable"):
            await far.try_recv_task_for()
    assert len(far._engine._unheard._lost) <= 1  # type: ignore[attr-defined]


async def test_a_worker_over_a_bad_line_does_everything_once(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    """Every third answer with a lease gets lost."""
    alice, done = box.of("alice@lab"), list[str]()
    proxy.loses, proxy.loses_every = (LEASED,), 3

    async def handler(ctx: WorkContext) -> str:
        done.append(ctx.task.id)
        return "done"

    await alice.send_tasks([plain(far, id=uid(number)) for number in range(20)])
    async with Worker(far.of(far.agent), handler, concurrency=2):
        answers = [await drain(alice) for _ in range(20)]
    assert sorted(done) == [uid(number) for number in range(20)]
    assert {(answer.attempt, answer.status) for answer in answers} == {(1, "ok")}
    assert proxy.lost
    assert not (await box.task_queue(state="in_flight")).tasks


# --- runs --------------------------------------------------------------------------------------------------

STANDING = b'"run_standing"'
SIGNALED = b'"run_signaled"'
RESUMED = b'"run_resumed"'


async def begun(box: OpenMailbox, far: OpenMailbox) -> Delivery:
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    return await take(far)


async def test_a_commit_whose_answer_was_lost_is_said_again(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    """Contract 22: under its lease and number it is done once."""
    delivery = await begun(box, far)
    task = Task(id=uid(10), recipient=far.agent, intent_text="part")
    commit = RunCommit(number=1, tasks=[task], begins=[uid(10)], wait=Wait(tasks=frozenset((uid(10),))))
    proxy.loses = (STANDING,)
    with refused("unreachable") as lost:
        await far.commit_run(delivery, commit)
    assert lost.value.details["outcome"] == "unknown"
    proxy.loses = ()
    standing = await far.commit_run(delivery, commit)
    assert standing.parked and list(standing.leases) == [uid(10)]
    run = await box.get_run(uid(1))
    assert (run.step, run.awaits) == (1, [f"task {uid(10)}"])


async def test_a_signal_under_a_key_is_said_again(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    """Contract 22: it is heard once; one without a key is not repeated by itself."""
    await far.commit_run(await begun(box, far), RunCommit(number=1))
    for key in (None, "k"):
        proxy.loses = (SIGNALED,)
        with refused("unreachable"):
            await far.signal_run(uid(1), "go", key=key)
        proxy.loses = ()
    assert (await far.signal_run(uid(1), "go", key="k")).duplicate
    assert (await box.get_run(uid(1))).signals == ["go", "go"]


async def test_a_resume_whose_answer_was_lost_is_said_again(proxy: Proxy, box: OpenMailbox, far: OpenMailbox) -> None:
    """Contract 23: who took the run over hears of its own lease."""
    await far.of(far.agent, incarnation="dead").commit_run(await begun(box, far), RunCommit(number=1))
    held = (await box.get_run(uid(1))).incarnation
    assert held is not None
    heir = far.of(far.agent, incarnation="heir")
    proxy.loses = (RESUMED,)
    with refused("unreachable"):
        await heir.resume_run(uid(1), dead=held, evidence="attested", reason="crash")
    proxy.loses = ()
    resumed = await heir.resume_run(uid(1), dead=held, evidence="attested", reason="crash")
    assert (await heir.commit_run(resumed.lease_id, RunCommit(number=2))).number == 2
    assert (await box.get_task(uid(1))).attempt == 1
