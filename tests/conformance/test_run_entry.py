"""Entries: what was said and done, in a tree; and who sees a run."""

from __future__ import annotations

from typing import Any

import pytest

from covenant import Limits, Mailbox, OpenMailbox, Result
from covenant.model.run import EntryDraft, EntryRole, EntryType, Wait

from .runs import DONE, RUN, begin, entry, parked_on, plainly, raw, says, step
from .support import plain, refused, take, uid


async def numbers(box: Mailbox, limit: int = 100, **which: Any) -> list[int]:
    return [one.number for one in (await box.run_entries(RUN, limit, **which)).entries]


async def with_a_branch(alice: Mailbox, bob: Mailbox) -> None:
    """1 - 2 - 3, and from 1 another way: 4 - 5."""
    drafts = [entry(1), entry(2, parent=1), entry(3, parent=2), entry(4, parent=1), entry(5, parent=4)]
    await begin(alice, bob, step(1, entries=drafts, leaf=5))


async def test_entries_are_a_tree_read_by_the_way_to_a_leaf(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 18: oldest first; without a leaf, to that of the run."""
    await with_a_branch(alice, bob)
    assert await numbers(bob) == [1, 4, 5]
    assert await numbers(bob, leaf=3) == [1, 2, 3]
    assert await numbers(bob, leaf=1) == [1]
    assert await numbers(bob, every=True) == [1, 2, 3, 4, 5]
    assert [one.parent for one in (await bob.run_entries(RUN, 10, every=True)).entries] == [0, 1, 2, 1, 4]
    assert (await bob.get_run(RUN)).leaf == 5


@pytest.mark.parametrize("limits", [Limits(page_bytes_max=2_000)])
@pytest.mark.parametrize("every", [True, False])
async def test_pages_of_large_entries_end_early_and_go_on_there(alice: Mailbox, bob: Mailbox, every: bool) -> None:
    """As much is looked at for a page, shown or not, as eight pages carry."""
    drafts = [entry(number, "x" * 1_000, parent=number - 1) for number in range(1, 61)]
    drafts[4] = EntryDraft(uid(5), EntryRole.ASSISTANT, parent=4, says=says("hello"))
    await begin(alice, bob, step(1, entries=drafts, leaf=60))
    for who, shown in ((bob, [*range(1, 61)]), (alice, [5])):
        found: list[int] = []
        before: int | None = None
        count = 0
        while count == 0 or before is not None:
            page = await who.run_entries(RUN, 1000, before=before, every=every)
            found, before, count = [*(one.number for one in page.entries), *found], page.before, count + 1
        assert found == shown
        assert count > 1


async def test_an_entry_is_as_it_was_added(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 18: id, role, type, content and turn."""
    content = {"tool": "search", "input": {"q": "ö", "n": 12345678901234567890, "x": 0.1}}
    draft = EntryDraft(uid(77), EntryRole.TOOL_RESULT, raw(content), type=EntryType.LLM_CALL, turn="t1")
    await begin(alice, bob, step(1, entries=[draft], leaf=1))
    (seen,) = (await bob.run_entries(RUN)).entries
    assert (seen.id, seen.role, seen.type, seen.turn) == (uid(77), "tool_result", "llm_call", "t1")
    assert plainly(seen.content) == content


async def test_entries_come_in_pages(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 18: the newest first, each oldest first; none is missed or told twice."""
    drafts = [entry(number, parent=number - 1) for number in range(1, 8)]
    await begin(alice, bob, step(1, entries=drafts, leaf=7))
    found: list[list[int]] = []
    before: int | None = None
    while True:
        page = await bob.run_entries(RUN, 3, before=before)
        found.append([one.number for one in page.entries])
        before = page.before
        if before is None:
            break
    assert found == [[5, 6, 7], [2, 3, 4], [1]]


async def test_a_compaction_stands_for_what_came_before_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 18: the way begins with it; all of it is still there."""
    summary = EntryDraft(uid(50), EntryRole.SYSTEM, raw("summary"), parent=2, type=EntryType.COMPACTION)
    drafts = [entry(1), entry(2, parent=1), summary, entry(4, parent=3)]
    await begin(alice, bob, step(1, entries=drafts, leaf=4))
    assert await numbers(bob) == [3, 4]
    assert await numbers(bob, every=True) == [1, 2, 3, 4]


async def test_an_entry_under_a_key_is_there_once(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 18: in the life of the run, over checkpoints; its holder finds it by its key."""
    delivery, _ = await begin(alice, bob, step(1, entries=[entry(1, key="greeting")], leaf=1))
    with refused("key_reused"):
        await bob.commit_run(delivery, step(2, entries=[entry(2, "other", key="greeting")]))
    with refused("key_reused"):
        await bob.commit_run(delivery, step(2, entries=[entry(2, key="new"), entry(3, key="new")]))
    await bob.commit_run(delivery, step(2, checkpoint=raw(None), leaf=1))
    found = await bob.find_entry(delivery, "greeting")
    assert found is not None and (found.number, found.id) == (1, entry(1).id)
    assert await bob.find_entry(delivery, "nothing") is None
    with refused("key_reused"):
        await bob.commit_run(delivery, step(3, entries=[entry(2, key="greeting")]))
    assert (await bob.get_run(RUN)).entries == 1


async def test_what_the_sender_said_becomes_an_entry_as_it_was(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 20: with the message's own id, in the commit that consumes it; its first message is number 0."""
    delivery, _ = await begin(alice, bob)
    await alice.add_message(RUN, says("shorter"))
    (heard,) = (await bob.look_around(delivery, Wait(signals=("message",)))).signals
    assert heard.message is not None
    drafts = [
        EntryDraft(uid(60), EntryRole.USER, said=0),
        EntryDraft(heard.message.message_id, EntryRole.USER, parent=1, said=heard.said),
    ]
    await bob.commit_run(delivery, step(2, entries=drafts, takes=[heard.id], leaf=2))
    first, second = (await bob.run_entries(RUN)).entries
    assert first.message is not None and first.message.parts[0].text == "research"
    assert (second.id, second.message) == ("m-shorter", heard.message)
    with refused("malformed"):
        await bob.commit_run(delivery, step(3, entries=[EntryDraft(uid(61), EntryRole.USER, said=9)]))


@pytest.mark.parametrize("wrong", [{"parent": 5}, {"parent": -1}, {"turn": ""}, {"key": " "}])
async def test_an_entry_that_makes_no_sense_is_refused(alice: Mailbox, bob: Mailbox, wrong: dict[str, Any]) -> None:
    """Contract 18: its parent comes before it."""
    delivery, _ = await begin(alice, bob)
    with refused("invalid_input"):
        await bob.commit_run(delivery, step(2, entries=[entry(1, **wrong)]))
    with refused("malformed"):
        await bob.commit_run(delivery, step(2, leaf=1))
    assert (await bob.get_run(RUN)).entries == 0


# --- who sees a run ----------------------------------------------------------------------------------------


async def test_a_run_is_seen_by_its_sender_and_its_agent(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 27: for anybody else there is none, and no lease of it."""
    delivery, _ = await begin(alice, bob, step(1, entries=[entry(1)], leaf=1))
    for party in (alice, bob):
        assert (await party.get_run(RUN)).agent == "bob@lab"
        assert [one.task_id for one in (await party.list_runs()).runs] == [RUN]
    with refused("unknown_task"):
        await carol.get_run(RUN)
    with refused("unknown_task"):
        await carol.run_entries(RUN)
    assert (await carol.list_runs()).runs == []
    for stranger in (alice, carol):
        with refused("unknown_lease"):
            await stranger.load_run(delivery.lease_id)
        with refused("unknown_lease"):
            await stranger.look_around(delivery.lease_id, Wait(signals=("x",)))
        with refused("unknown_lease"):
            await stranger.find_entry(delivery.lease_id, "x")


async def test_what_a_run_keeps_for_itself_its_sender_does_not_see(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    """Contract 27: what was said is for both; the state and what the agent noted are its own, and the operator's."""
    drafts = [
        EntryDraft(uid(60), EntryRole.USER, said=0),
        EntryDraft(uid(61), EntryRole.SYSTEM, raw("never tell"), parent=1),
        EntryDraft(uid(62), EntryRole.ASSISTANT, parent=2, says=says("hello")),
        EntryDraft(uid(63), EntryRole.TOOL_RESULT, raw("secret"), parent=3),
    ]
    await begin(alice, bob, step(1, entries=drafts, leaf=4, checkpoint=raw({"plan": "secret"})))
    for insider in (bob, box):
        assert await numbers(insider) == [1, 2, 3, 4]
        assert plainly((await insider.get_run(RUN)).state) == {"plan": "secret"}
    for which in ({}, {"every": True}, {"leaf": 4}):
        assert await numbers(alice, **which) == [1, 3]
    assert await numbers(alice, 1) == [3]
    assert plainly((await alice.get_run(RUN)).state) is None


async def test_a_task_that_nobody_has_begun_with_is_no_run(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 23: it is a task like any other until the first commit."""
    await alice.send_task(plain(bob, id=RUN))
    delivery = await take(bob)
    for ask in (bob.get_run(RUN), bob.run_entries(RUN)):
        with refused("not_a_run"):
            await ask
    loaded = await bob.load_run(delivery)
    assert (loaded.task_id, loaded.step, list(loaded.steps)) == (RUN, 0, [])
    assert (await bob.list_runs()).runs == []


async def test_runs_are_listed_by_status_in_pages(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 23: newest first; those that await input are told from those that await work."""
    waits = [Wait(signals=("go",)), Wait(until_ms=2**50), Wait(signals=("go",)), None]
    for number, wait in enumerate(waits, start=1):
        await alice.send_task(plain(bob, id=uid(number)))
        delivery = await take(bob)
        await bob.commit_run(delivery, step(1, wait=wait))
    await alice.send_task(plain(bob, id=uid(9)))
    ended = await take(bob)
    await bob.commit_run(ended, step(1, result=Result(uid(9), "ok", DONE)))
    listed = (await box.list_runs()).runs
    assert [(one.task_id, one.status.value) for one in listed] == [
        (uid(9), "ended"),
        (uid(4), "running"),
        (uid(3), "awaiting_input"),
        (uid(2), "awaiting_work"),
        (uid(1), "awaiting_input"),
    ]
    assert [one.task_id for one in (await bob.list_runs(status="awaiting_input")).runs] == [uid(3), uid(1)]
    pages: list[list[str]] = []
    cursor = None
    while True:
        page = await bob.list_runs(2, cursor=cursor)
        pages.append([one.task_id for one in page.runs])
        cursor = page.cursor
        if cursor is None:
            break
    assert pages == [[uid(9), uid(4)], [uid(3), uid(2)], [uid(1)]]
    with refused("bad_cursor"):
        await bob.list_runs(cursor="nonsense")
    with refused("malformed"):
        await bob.list_runs(status="asleep")


async def test_a_run_tells_what_it_waits_for(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 23: names, and the time at which it stops waiting."""
    await parked_on(alice, bob, Wait(signals=("approve", "reject"), until_ms=2**50))
    run = await alice.get_run(RUN)
    assert (run.awaits, run.until_ms) == (["signal approve", "signal reject"], 2**50)
    assert (run.lease_id, run.incarnation, run.heartbeat_ms) == (None, None, None)
