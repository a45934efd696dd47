"""What a caller may list: its own, filtered first and limited then, complete over all pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from covenant import Delivery, Json, Limits, Mailbox, OpenMailbox, QueuePage, Result, TaskState, Text
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.limits import RETENTION_MS
from covenant.model.push import PushConfig
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    Reopen,
    all_entries,
    answer_next,
    drain,
    finish,
    keyed,
    lease_many,
    plain,
    refused,
    requeue,
    take,
    uid,
)


async def test_recent_tasks_are_newest_first_in_any_state(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 8: a listing consumes nothing."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (2, 3, 4)])
    await take(bob)
    assert [task.id for task in await box.recent_tasks(3)] == [uid(4), uid(3), uid(2)]
    assert [task.id for task in await box.recent_tasks()] == [uid(4), uid(3), uid(2), uid(1)]
    assert await box.recent_tasks(0) == []
    assert (await take(bob)).task.id == uid(3)


async def test_recent_results_are_final_and_those_of_the_newest_tasks_first(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 8: drained or not; partial results are not among them."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (1, 2)])
    one, two = await take(bob), await take(bob)
    await bob.send_result(Result.partial(two, [Text("half")]))
    await bob.send_result(Result.ok(one, DONE))
    assert [answer.task_id for answer in await box.recent_results()] == [uid(1)]
    await bob.send_result(Result.ok(two, DONE))
    await drain(alice)
    await drain(alice)
    for party in (box, alice, bob):
        found = await party.recent_results()
        assert [(answer.task_id, answer.status) for answer in found] == [(uid(2), "ok"), (uid(1), "ok")]
    assert [answer.task_id for answer in await box.recent_results(1)] == [uid(2)]
    assert (await drain(alice)).task_id == uid(2)


async def test_a_peer_lists_its_own_however_many_others_there_are(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 13: visibility comes before the limit, in every listing."""
    await carol.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    await carol.send_task(keyed(bob, id=uid(2)))
    await take(bob)
    for number in range(10, 40):
        await alice.send_task(plain(bob, id=uid(number)))
        await answer_next(bob)
    assert [task.id for task in await carol.recent_tasks(2)] == [uid(2), uid(1)]
    assert [answer.task_id for answer in await carol.recent_results(1)] == [uid(1)]
    page = await carol.task_queue(1)
    assert [entry.task.id for entry in page.tasks] == [uid(2)]
    assert [answer.task_id for answer in page.results] == [uid(1)]


async def test_who_is_not_party_sees_nothing(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 13: a task of others is unknown, by whatever verb."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await take(bob)
    for read in (carol.get_task, carol.get_result, carol.task_tree, carol.cancel_task):
        with refused("unknown_task"):
            await read(uid(1))
    with refused("unknown_task"):
        await carol.wait_generation(uid(1), 0)
    assert await carol.recent_tasks() == []
    page = await carol.task_queue()
    assert (page.tasks, page.results, page.cursor) == ([], [], None)
    assert (await carol.task_queue(state="in_flight")).tasks == []


async def test_sender_recipient_and_operator_see_a_task(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: to its parties a task looks the same."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    entry = await box.get_task(uid(1))
    assert await alice.get_task(uid(1)) == await bob.get_task(uid(1)) == entry
    listed = (await box.task_queue()).tasks
    assert (await alice.task_queue()).tasks == (await bob.task_queue()).tasks == listed
    assert (listed[0].task, listed[0].lease_id, listed[0].generation) == (entry.task, entry.lease_id, 2)


async def test_an_unknown_task_is_refused(box: OpenMailbox) -> None:
    """Contract 13: reads of what is not there say so."""
    for read in (box.get_task, box.get_result, box.task_tree):
        with refused("unknown_task"):
            await read(uid(1))


async def test_the_queue_shows_what_is_open_and_what_waits_to_be_drained(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 8: queued tasks, leases, and pending results; nothing that was drained."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (2, 3, 4)])
    await answer_next(bob)
    await take(bob)
    page = await box.task_queue()
    assert [(entry.task.id, entry.state) for entry in page.tasks] == [
        (uid(3), TaskState.IN_FLIGHT),
        (uid(4), TaskState.QUEUED),
    ]
    assert [answer.task_id for answer in page.results] == [uid(2)]
    assert [answer.task_id for answer in (await box.task_queue(state="result_pending")).results] == [uid(2)]
    assert (await box.task_queue(state="queued")).results == []
    assert (await drain(alice)).task_id == uid(2)


async def test_the_state_filter_comes_before_the_limit(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: leases are found behind any number of queued tasks, and the other way round."""
    await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(30)])
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(30, 60)])
    queued = await box.task_queue(1, state="queued")
    assert [entry.task.id for entry in queued.tasks] == [uid(30)]
    in_flight = await box.task_queue(1, state=TaskState.IN_FLIGHT)
    assert [entry.task.id for entry in in_flight.tasks] == [uid(0)]
    with refused("malformed"):
        await box.task_queue(state="lost")


async def test_the_age_filter_comes_before_the_limit(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 2: it concerns leases alone, and a young one does not use up the page."""
    leased = await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(3)])
    await alice.send_task(plain(bob, id=uid(9)))
    clock.advance(1000)
    await bob.heartbeat(leased[0])
    page = await box.task_queue(1, state="in_flight", min_lease_age_ms=1000)
    assert [entry.task.id for entry in page.tasks] == [uid(1)]
    everything = await box.task_queue(min_lease_age_ms=1000)
    assert [entry.task.id for entry in everything.tasks] == [uid(1), uid(2), uid(9)]
    assert (await box.task_queue(state="in_flight", min_lease_age_ms=1001)).tasks == []


async def test_the_deadline_filter_comes_before_the_limit(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: it leaves out tasks without a deadline, and those whose deadline is farther off."""
    now = clock.now_ms()
    await alice.send_tasks([plain(bob) for _ in range(5)])
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=now + 2001))
    await alice.send_task(plain(bob, id=uid(2), deadline_ms=now + 2000))
    page = await box.task_queue(1, deadline_within_ms=2000)
    assert [entry.task.id for entry in page.tasks] == [uid(2)]


async def test_pages_are_complete_and_in_order(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: every task once, whatever the size of the page."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(600)])
    expected = [uid(number) for number in range(600)]
    for page in (1000, 600, 256, 7):
        assert [entry.task.id for entry in await all_entries(box, page)] == expected
    assert [entry.task.id for entry in await all_entries(bob, 100, state="queued")] == expected


async def test_pages_are_complete_while_tasks_change_their_state(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 12: a task that is leased, requeued or released meanwhile is neither missed nor repeated."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(40)])
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await box.task_queue(5, cursor=cursor)
        seen += [entry.task.id for entry in page.tasks]
        cursor = page.cursor
        if cursor is None:
            break
        one, two, _ = await bob.recv_tasks(3)
        await bob.release(one)
        await requeue(box, two.task.id)
    assert seen == [uid(number) for number in range(40)]


async def test_pages_go_on_when_what_they_ended_with_is_gone(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: a cursor is a place, not a task."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(6)])
    page = await box.task_queue(3)
    for number in range(3):
        await alice.cancel_task(uid(number))
        await drain(alice)
    rest = await box.task_queue(10, cursor=page.cursor)
    assert [entry.task.id for entry in rest.tasks] == [uid(3), uid(4), uid(5)]


async def test_pages_of_leases_are_complete(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: the stalest first, every lease once."""
    leased = await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(20)])
    await bob.heartbeat(leased[0])
    expected = [uid(number) for number in range(1, 20)] + [uid(0)]
    assert [entry.task.id for entry in await all_entries(box, 3, state="in_flight")] == expected
    assert [entry.task.id for entry in await all_entries(alice, 3, state="in_flight")] == expected


async def test_what_a_task_carries_does_not_end_the_listing_of_another(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 12: content that looks like a task of somebody is no task of theirs."""
    lookalike = Json({"sender": alice.agent.pubkey, "recipient": alice.agent.pubkey})
    await lease_many(carol, bob, [plain(bob, content=(lookalike,))])
    await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(300)])
    found = await all_entries(alice, 1000, state="in_flight")
    assert [entry.task.id for entry in found] == [uid(number) for number in range(300)]


@pytest.mark.parametrize("limits", [Limits(scan_max=10)], ids=["scan of 10"])
async def test_a_page_that_looked_far_ends_early_with_a_cursor(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: a filter that finds little bounds its work, and still finds all."""
    tasks = [plain(bob, id=uid(number)) for number in range(600)]
    tasks[299] = plain(bob, id=uid(299), deadline_ms=clock.now_ms() + 1000)
    tasks[599] = plain(bob, id=uid(599), deadline_ms=clock.now_ms() + 1000)
    await alice.send_tasks(tasks)
    first = await box.task_queue(10, deadline_within_ms=1000)
    assert first.cursor is not None
    found = await all_entries(box, 10, deadline_within_ms=1000)
    assert [entry.task.id for entry in found] == [uid(299), uid(599)]


@pytest.mark.parametrize("cursor", ["", "5", "task:", "task:x", "task:-1", "lease:1", "task:" + "9" * 40, 5], ids=repr)
async def test_a_foreign_cursor_is_refused(box: OpenMailbox, cursor: Any) -> None:
    """Contract 12: a cursor belongs to its listing."""
    with refused("bad_cursor"):
        await box.task_queue(cursor=cursor)
    with refused("bad_cursor"):
        await box.cached_results(cursor=cursor)


@pytest.mark.parametrize(
    ("limit", "code"), [(-1, "malformed"), ("5", "malformed"), (True, "malformed"), (10**6, "too_large")]
)
async def test_a_limit_is_a_bounded_number(box: OpenMailbox, limit: Any, code: str) -> None:
    """Contract 12: a page has a size, and a largest one."""
    for listing in (box.task_queue, box.recent_tasks, box.recent_results, box.cached_results, box.recent_audit):
        with refused(code):
            await listing(limit)


async def test_tasks_past_retention_do_not_hide_an_open_one(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: what is past retention is filtered before the limit, not after it."""
    await alice.send_task(plain(bob, id=uid(1), not_before_ms=clock.now_ms() + 10 * RETENTION_MS))
    for number in range(2, 7):
        await finish(alice, bob, plain(bob, id=uid(number)))
    clock.advance(RETENTION_MS + 1)
    for party in (box, alice, bob):
        assert [task.id for task in await party.recent_tasks(3)] == [uid(1)]


async def test_results_past_retention_do_not_hide_one_that_waits(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: a result that nobody drained is listed, whatever finished after it."""
    await carol.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    for number in range(2, 7):
        await finish(alice, bob, plain(bob, id=uid(number)))
    clock.advance(RETENTION_MS + 1)
    for party in (box, bob, carol):
        assert [answer.task_id for answer in await party.recent_results(3)] == [uid(1)]


async def test_listings_are_the_same_after_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 1: order, pages and results survive."""
    for number in range(1, 6):
        await finish(alice, bob, keyed(bob, str(number), id=uid(number)))
    leased = await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(6, 12)])
    await bob.heartbeat(leased[2])
    await bob.send_result(Result.ok(leased[0], DONE))
    await bob.send_result(Result.partial(leased[1], [Text("half")]))
    await bob.release(leased[5])

    async def listings(box: OpenMailbox) -> list[Any]:
        everyone = [box, box.of("alice@lab"), box.of("bob@lab")]
        found: list[Any] = []
        for one in everyone:
            found += [await one.recent_tasks(), await one.recent_results(), await one.task_queue(100)]
            found += [await one.task_queue(100, state="in_flight"), await one.cached_results()]
        return found

    before = await listings(box)
    assert await listings(await reopen()) == before


async def test_what_strangers_do_does_not_show_in_the_pages_of_a_peer(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 13: neither what a page holds nor where it ends depends on what its peer cannot see."""
    await lease_many(carol, carol, [keyed(carol, "1", id=uid(1)), keyed(carol, "2", id=uid(2))])
    await finish(carol, carol, keyed(carol, "3", id=uid(3)))

    async def pages() -> list[Any]:
        found: list[Any] = [await carol.cached_results(limit) for limit in (1, 10)]
        for state in (None, "queued", "in_flight", "result_pending"):
            found += [await carol.task_queue(limit, state=state) for limit in (1, 2, 10)]
        return found

    alone = await pages()
    await finish(alice, bob, keyed(bob, id=uid(10)))
    await lease_many(alice, bob, [plain(bob, id=uid(11)), plain(bob, id=uid(12))])
    await alice.send_task(plain(bob, id=uid(13)))
    assert await pages() == alone


@pytest.mark.parametrize("limits", [Limits(scan_max=10)], ids=["scan of 10"])
async def test_a_page_does_not_look_at_what_its_peer_cannot_see(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 13: what strangers have costs a peer nothing, in leases and cached results too."""
    tasks = [keyed(bob, str(number), id=uid(number)) for number in range(300)]
    for delivery in await lease_many(alice, bob, tasks):
        await bob.send_result(Result.ok(delivery, DONE))
    await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(300, 600)])
    await finish(carol, carol, keyed(carol, id=uid(1000)))
    await lease_many(carol, carol, [plain(carol, id=uid(1001))])
    leases = await carol.task_queue(10, state="in_flight")
    assert ([entry.task.id for entry in leases.tasks], leases.cursor) == ([uid(1001)], None)
    cached = await carol.cached_results(10)
    assert ([entry.source_task_id for entry in cached.entries], cached.cursor) == ([uid(1000)], None)


async def test_what_a_peer_holds_is_right_at_every_look(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 2: leases come, give a sign of life, are given back and end; each party sees that in its listing."""
    own = {party: await all_entries(party, state="in_flight") for party in (alice, bob, carol)}
    assert list(own.values()) == [[], [], []]
    leased = await lease_many(alice, bob, [plain(bob, id=uid(number)) for number in range(5)])
    await lease_many(bob, bob, [plain(bob, id=uid(5))])
    await lease_many(alice, carol, [plain(carol, id=uid(6))])
    await bob.heartbeat(leased[0])
    await bob.release(leased[1])
    await bob.send_result(Result.partial(leased[2], [Text("half")]))
    await bob.send_result(Result.ok(leased[3], DONE))
    await requeue(box, leased[4].task.id)
    await take(bob)
    expected = {alice: [6, 0, 2, 1], bob: [5, 0, 2, 1], carol: [6]}
    for party, numbers in expected.items():
        assert [e.task.id for e in await all_entries(party, 2, state="in_flight")] == [uid(n) for n in numbers]


SMALL_PAGES = pytest.mark.parametrize("limits", [Limits(page_bytes_max=3000)], ids=["3000 bytes"])
LARGE = (Text("x" * 1000),)


@SMALL_PAGES
async def test_a_batch_takes_no_more_than_an_answer_carries(alice: Mailbox, bob: Mailbox) -> None:
    """What does not fit is neither leased nor drained, and comes with the next call."""
    await alice.send_tasks([plain(bob, id=uid(number), content=LARGE) for number in range(1, 6)])
    taken = []
    while batch := await bob.recv_tasks(10, wait_ms=0):
        assert len(batch) <= 2
        taken += batch
    assert [(d.task.id, d.attempt) for d in taken] == [(uid(number), 1) for number in range(1, 6)]
    for delivery in taken:
        await bob.send_result(Result.ok(delivery, LARGE))
    drained = []
    while answers := await alice.recv_results(10, wait_ms=0):
        assert len(answers) <= 2
        drained += answers
    assert [answer.task_id for answer in drained] == [uid(number) for number in range(1, 6)]


@SMALL_PAGES
async def test_pages_end_where_an_answer_is_full_and_lose_nothing(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    ids = [uid(number) for number in range(1, 6)]
    await alice.send_tasks([keyed(bob, key=id, id=id, content=LARGE) for id in ids])
    assert [entry.task.id for entry in await all_entries(box, 10)] == ids
    assert len((await box.task_queue(10)).tasks) == 2
    taken = [delivery async for delivery in each(bob)]
    assert [e.task.id for e in await all_entries(box, 10, state=TaskState.IN_FLIGHT)] == ids
    assert [task.id for task in await box.recent_tasks(10)] == ids[:-3:-1]
    for delivery in taken:
        await bob.send_result(Result.ok(delivery, LARGE))
    assert [answer.task_id for answer in await box.recent_results(10)] == ids[:-3:-1]
    assert len((await box.task_queue(10)).results) == 2
    pages = [page async for page in pages_of(box, state=TaskState.RESULT_PENDING)]
    assert [answer.task_id for page in pages for answer in page.results] == ids
    assert max(len(page.results) for page in pages) == 2
    cached = await box.cached_results(10)
    found = list(cached.entries)
    while cached.cursor is not None:
        assert len(cached.entries) <= 2
        cached = await box.cached_results(10, cursor=cached.cursor)
        found += cached.entries
    assert [entry.source_task_id for entry in found] == ids


@SMALL_PAGES
async def test_one_that_is_larger_than_an_answer_goes_alone(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_tasks([plain(bob, id=uid(number), content=(Text("x" * 5000),)) for number in (1, 2)])
    assert [task.id for task in await box.recent_tasks()] == [uid(2)]
    assert [entry.task.id for entry in await all_entries(box, 10)] == [uid(1), uid(2)]
    assert [delivery.task.id for delivery in await bob.recv_tasks(10, wait_ms=0)] == [uid(1)]


@pytest.mark.usefixtures("in_process")
async def test_webhooks_are_listed_in_the_order_in_which_they_were_set(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """One that is set again comes last."""
    await box._engine.run(c.SendTask(alice.agent, plain(bob, id=uid(1)), protocol=True))
    for name, path in (("b", "1"), ("a", "1"), ("b", "2")):
        config = PushConfig(id=name, url=f"https://example.org/{path}")
        await box._engine.run(c.SetPush(alice.agent, uid(1), config))
    pushed = await box._engine.ask(q.GetPushed(None, uid(1)))
    assert [one.config.id for one in pushed.pushes] == ["a", "b"]


async def each(worker: Mailbox) -> AsyncIterator[Delivery]:
    while batch := await worker.recv_tasks(10, wait_ms=0):
        for delivery in batch:
            yield delivery


async def pages_of(box: OpenMailbox, **filters: Any) -> AsyncIterator[QueuePage]:
    page = await box.task_queue(10, **filters)
    yield page
    while page.cursor is not None:
        page = await box.task_queue(10, cursor=page.cursor, **filters)
        yield page


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"state": TaskState.RESOLVED}, "state"),
        ({"state": TaskState.QUEUED, "min_lease_age_ms": 0}, "min_lease_age_ms"),
        ({"state": TaskState.PARKED, "min_lease_age_ms": 1}, "min_lease_age_ms"),
        ({"state": TaskState.RESULT_PENDING, "min_lease_age_ms": 1}, "min_lease_age_ms"),
        ({"state": TaskState.RESULT_PENDING, "deadline_within_ms": 1}, "deadline_within_ms"),
    ],
)
async def test_a_filter_that_can_take_no_effect_is_refused(
    box: OpenMailbox, alice: Mailbox, filters: dict[str, Any], field: str
) -> None:
    """Contract 34: whoever gives it believes that it does; also where nothing is listed."""
    for party in (box, alice):
        with refused("malformed") as caught:
            await party.task_queue(**filters)
        assert caught.value.details["field"] == field
