"""Listing tasks while they move: newest status first, every one that was there is shown, the filters hold, and a page
costs no more than it may. (DESIGN 1; the protocol's ListTasks.)"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode

from covenant import Limits
from covenant.a2a import wire as a
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import BadCursor
from covenant.model.protocol import State
from covenant.model.task import Result
from covenant.rules.query import answer
from covenant.rules.sight import is_listed
from covenant.store import ledger as ledgers
from covenant.store.clock import ManualClock
from covenant.store.journal.archive import FILE
from tests.a2a.conftest import Town, says
from tests.a2a.stage import ADA, BOB, CYD, Stage, artifact, message
from tests.a2a.towns import place
from tests.floors import reached, reaches


@pytest.fixture(autouse=True)
def trim_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers tidy up after hundreds of removals; here after three."""
    monkeypatch.setattr(ledgers, "_TRIM_AT", 3)


def move(stage: Stage, data: st.DataObject, ids: list[str]) -> None:
    """Something happens to one of the tasks."""
    task_id = data.draw(st.sampled_from(ids))
    record = stage.record(task_id)
    if record.outcome is not None:
        return
    acts: list[c.Command] = [
        c.AddMessage(ADA, task_id, message()),
        c.CancelTask(ADA, task_id, "why"),
        c.ShowTask(ADA, task_id),
    ]
    if record.lease is not None:
        lease = record.lease.lease_id
        acts += [
            c.UpdateTask(BOB, lease, message()),
            c.ReleaseLease(BOB, lease),
            c.PostResult(BOB, Result(task_id, "ok", (), None, lease), "one"),
            c.ReplyDirectly(BOB, lease, message()),
        ]
    else:
        acts.append(c.LeaseTasks(BOB, BOB, "one"))
    stage.run(data.draw(st.sampled_from(acts)))


def ask(stage: Stage, limit: int, cursor: str | None, **filters: Any) -> Any:
    return answer(q.ListDialogs(ADA, BOB.pubkey, limit, cursor, **filters), stage.state, stage.ctx)


@reaches(moved_between_pages=20, counted=10)
@given(st.data(), st.integers(1, 12), st.integers(1, 4), st.sampled_from((10_000, 1, 3)))
def test_a_listing_misses_nothing_that_was_there_while_tasks_move(
    data: st.DataObject, count: int, limit: int, scan_max: int
) -> None:
    """However often, and also behind the last page; what is shown twice is shown as it has become, and nothing that was
    shown is taken back."""
    stage = Stage(Limits(scan_max=scan_max))
    ids = [stage.send(shown=data.draw(st.booleans())) for _ in range(count)]
    stage.run(c.SendTask(CYD, stage.record(ids[0]).task.__class__(recipient=BOB, intent_text="not hers"), True))
    stage.send(protocol=False)
    for _ in range(data.draw(st.integers(0, 6))):
        move(stage, data, ids)
    there = [i for i in ids if is_listed(stage.record(i))]
    seen: dict[str, str] = {}
    cursor, moves, pages = None, 0, 0
    while cursor is not None or pages == 0:
        page = ask(stage, limit, cursor)
        pages += 1
        assert pages < 200, "it ends"
        assert len(page.tasks) <= limit
        orders = [stage.record(task.id).status_order for task in page.tasks]
        assert orders == sorted(orders, reverse=True)
        seen |= {task.id: task.generation for task in page.tasks}
        if pages == 1 and scan_max > count + 2:
            reached("counted")
            assert page.total == len(there)
        cursor = page.cursor
        if cursor is not None and moves < 12:
            reached("moved_between_pages")
            for _ in range(data.draw(st.integers(0, 4))):
                moves += 1
                move(stage, data, ids)
    assert set(there) <= set(seen) <= {i for i in ids if is_listed(stage.record(i))}


@pytest.mark.parametrize("scan_max", [10_000, 64])
def test_a_listing_of_tasks_that_never_rest_ends_and_shows_each(scan_max: int) -> None:
    """Every one of them moves between any two pages."""
    stage = Stage(Limits(scan_max=scan_max))
    ids = [stage.send(shown=True) for _ in range(80)]
    leases = [stage.lease() for _ in ids]
    seen: list[str] = []
    cursor: str | None = None
    pages = 0
    while pages == 0 or cursor is not None:
        page = ask(stage, 10, cursor)
        cursor, pages = page.cursor, pages + 1
        assert pages <= 2 * len(ids) / 10 + 3, "it ends"
        seen += [task.id for task in page.tasks]
        for lease in leases:
            stage.run(c.UpdateTask(BOB, lease, message()))
        stage.send(shown=True)
    assert set(ids) == set(seen)
    assert max(seen.count(task_id) for task_id in ids) <= 2


def test_a_listing_that_nobody_disturbs_shows_each_once_in_order() -> None:
    stage = Stage()
    ids = [stage.send(shown=True) for _ in range(20)]
    for task_id in random.Random(5).sample(ids, 20):
        stage.run(c.AddMessage(ADA, task_id, message()))
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(7):
        page = ask(stage, 3, cursor)
        assert page.total == 20
        seen += [task.id for task in page.tasks]
        cursor = page.cursor
    assert cursor is None
    assert seen == sorted(ids, key=lambda i: -stage.record(i).status_order)


@pytest.mark.parametrize("trim_at", [3, 512])
def test_what_was_answered_by_a_message_is_not_counted_either(trim_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it throw the count of the others out, however many there are."""
    monkeypatch.setattr(ledgers, "_TRIM_AT", trim_at)
    stage = Stage()
    for _ in range(20):
        stage.send()
        stage.run(c.ReplyDirectly(BOB, stage.lease(), message()))
    ids = [stage.send(shown=True) for _ in range(3)]
    stage.send()
    assert stage.state.dialog_count(ADA.pubkey, BOB.pubkey) == 3
    page = ask(stage, 2, None)
    assert page.total == 3
    for task_id in ids:
        stage.run(c.CancelTask(ADA, task_id, "why"))
    stage.run(c.CompactHistory(None, 0))
    stage.ctx.now += 10
    stage.state.bury(stage.ctx)
    assert stage.state.dialog_count(ADA.pubkey, BOB.pubkey) == 0


def test_filters_hold_together_and_a_page_that_finds_nothing_goes_on() -> None:
    stage = Stage(Limits(scan_max=64))
    wanted = [stage.send(shown=True, context_id="here") for _ in range(3)]
    for n in range(300):
        stage.send(shown=True, context_id=f"c{n % 5}")
    seen: list[str] = []
    cursor: str | None = None
    pages = 0
    while pages == 0 or cursor is not None:
        page = ask(stage, 2, cursor, context_id="here")
        seen += [task.id for task in page.tasks]
        cursor = page.cursor
        pages += 1
    assert seen == wanted[::-1]
    assert pages <= 303 // 64 + 3


def test_tasks_are_listed_by_context_state_and_time() -> None:
    stage = Stage()
    one, two, three = (stage.send(shown=True, context_id=name) for name in ("a", "b", "b"))
    stage.lease()
    moment = stage.ctx.now
    stage.run(c.CancelTask(ADA, two, "why"))

    def found(**filters: Any) -> list[str]:
        page = ask(stage, 10, None, **filters)
        assert page.total == len(page.tasks)
        return [task.id for task in page.tasks]

    assert found(context_id="b") == [two, three]
    assert found(state=State.WORKING) == [one]
    assert found(state=State.CANCELED) == [two]
    assert found(state=State.REJECTED) == []
    assert found(since_ms=moment) == [two, one]
    assert found(since_ms=moment + 1, context_id="b") == [two]
    assert found(context_id="nowhere") == []


def test_a_cursor_of_something_else_is_refused() -> None:
    stage = Stage()
    stage.send(shown=True)
    stage.send(shown=True)
    ours = ask(stage, 1, None).cursor
    mark = ours.rpartition(".")[2]
    assert ask(stage, 1, f"0.9.9.9.{mark}").total == 9
    for odd in ("", "1", "1.2", "a.b.c.d", "1.2.3.-4", "9" * 40, "0.1.2.3.4", "2.1.1.1", f"0.9.9.{2**31}"):
        for cursor in (odd, f"{odd}.{mark}", f"{mark}.{odd}"):
            with pytest.raises(BadCursor):
                ask(stage, 2, cursor)


def test_a_cursor_of_another_caller_or_agent_is_refused() -> None:
    stage = Stage()
    for _ in range(2):
        stage.send(shown=True)
    cursor = ask(stage, 1, None).cursor
    assert ask(stage, 1, cursor).tasks
    for by, agent in ((CYD, BOB), (ADA, CYD), (BOB, ADA)):
        with pytest.raises(BadCursor):
            answer(q.ListDialogs(by, agent.pubkey, 1, cursor), stage.state, stage.ctx)


def test_a_cursor_of_other_filters_is_refused() -> None:
    """It would go on in the middle of what is asked for now, and tell how many there are of something else."""
    stage = Stage()
    for _ in range(3):
        stage.send(shown=True, context_id="a")
    questions: list[dict[str, Any]] = [{}, {"context_id": "a"}, {"state": State.SUBMITTED}, {"since_ms": 1}]
    for asked in questions:
        cursor = ask(stage, 1, None, **asked).cursor
        assert ask(stage, 2, cursor, **asked).tasks
        for other in questions:
            if other is not asked:
                with pytest.raises(BadCursor):
                    ask(stage, 1, cursor, **other)


def test_a_page_ends_where_it_has_no_more_room() -> None:
    """One that is too large for any page has a page of its own."""
    stage = Stage(Limits(page_bytes_max=5_000))
    ids = [stage.send(message=message("x" * size), shown=True) for size in (10, 1_500, 1_500, 1_500, 20_000, 10, 1_500)]
    pages: list[list[str]] = []
    cursor: str | None = None
    while not pages or cursor is not None:
        page = ask(stage, 100, cursor)
        assert page.total == len(ids)
        assert len(page.tasks) == 1 or len(encode(page.tasks)) <= 5_100
        pages.append([task.id for task in page.tasks])
        cursor = page.cursor
    assert [task_id for page in pages for task_id in page] == ids[::-1]
    assert [ids[4]] in pages
    assert len(pages) < len(ids)


def test_a_page_of_what_has_moved_ends_there_too() -> None:
    stage = Stage(Limits(page_bytes_max=5_000))
    ids = [stage.send(message=message("x" * 1_500), shown=True) for _ in range(12)]
    leases = [stage.lease() for _ in ids]
    seen: set[str] = set()
    cursor: str | None = None
    pages = 0
    while not pages or cursor is not None:
        page = ask(stage, 100, cursor)
        assert len(encode(page.tasks)) <= 5_100
        cursor, pages = page.cursor, pages + 1
        assert pages <= 12, "it ends"
        seen |= {task.id for task in page.tasks}
        for lease in leases:
            stage.run(c.UpdateTask(BOB, lease, message("p")))
    assert seen == set(ids)


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_page_looks_at_no_more_than_some_pages_of_large_tasks(
    has_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few of them pass; and the listing goes on there."""
    stage = Stage(Limits(page_bytes_max=5_000))
    wanted = [stage.send(message=message("x" * 1_500), shown=True, context_id="here") for _ in range(2)]
    for n in range(120):
        stage.send(message=message("x" * 1_500), shown=True, context_id=f"c{n}")
    looked: list[int] = []
    for name in ("dialogs", "moved_dialogs"):
        listing = getattr(stage.state, name)

        def noted(*args: Any, listing: Any = listing) -> Any:
            found = listing(*args)
            looked[-1] += len(found)
            return found

        monkeypatch.setattr(type(stage.state), name, staticmethod(noted))

    seen: list[str] = []
    cursor: str | None = None
    while not looked or cursor is not None:
        looked.append(0)
        page = ask(stage, 100, cursor, context_id="here")
        if cursor is None:
            looked[0] = 0  # the first one counts all of them, too
            while has_moved and stage.lease():
                pass
        seen += [task.id for task in page.tasks]
        cursor = page.cursor
    assert set(seen) == set(wanted)
    assert max(looked) <= 8 * 5_000 // 1_500 + 16
    assert len(looked) > 3


def test_artifacts_count_among_what_a_page_carries() -> None:
    stage = Stage(Limits(page_bytes_max=5_000))
    for _ in range(4):
        stage.send(shown=True)
        lease = stage.lease()
        for _ in range(2):
            stage.run(c.AddArtifact(BOB, lease, artifact("x" * 1_000), append=True))
    assert len(ask(stage, 100, None).tasks) == 4
    page = ask(stage, 100, None, artifacts=True)
    assert len(page.tasks) == 2
    assert page.cursor is not None


def test_the_history_of_a_task_is_as_long_as_there_is_room_for() -> None:
    """The newest of it, and that always."""
    stage = Stage(Limits(page_bytes_max=5_000))
    task_id = stage.send(shown=True)
    texts = [f"{n}" + "x" * 1_000 for n in range(40)]
    for text in texts:
        stage.run(c.AddMessage(ADA, task_id, message(text)))

    def history(length: int | None) -> list[str]:
        dialog = answer(q.GetDialog(ADA, task_id, length), stage.state, stage.ctx)
        return [said.parts[0].text for said in dialog.task.history]

    assert history(None) == texts[-4:]
    assert history(2) == texts[-2:]
    assert history(0) == []
    stage.run(c.AddMessage(ADA, task_id, message("x" * 9_000)))
    assert history(None) == ["x" * 9_000]


def test_a_list_shows_less_of_the_history_than_the_task_does() -> None:
    stage = Stage()
    task_id = stage.send(shown=True)
    texts = [f"{n}" for n in range(40)]
    for text in texts:
        stage.run(c.AddMessage(ADA, task_id, message(text)))

    def listed(**asked: Any) -> list[str]:
        (task,) = ask(stage, 10, None, **asked).tasks
        return [said.parts[0].text for said in task.history]

    assert listed() == texts[-10:]
    assert listed(history=100) == ["draft the brief", *texts]
    assert len(answer(q.GetDialog(ADA, task_id), stage.state, stage.ctx).task.history) == 41


async def _pages(town: Town, between: Any, **request: Any) -> list[str]:
    seen: list[str] = []
    token = ""
    for number in range(200):
        page = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks(page_token=token, **request))
        seen += [task.id for task in page.tasks]
        token = page.next_page_token
        if not token:
            return seen
        await between(number)
    raise AssertionError("it does not end")


async def test_a_listing_over_memory_and_archive_misses_nothing(tmp_path: Path) -> None:
    """Some are open, some finished and at hand, most in the archive; and they move there while the pages turn."""
    limits = Limits(finished_tail_max=4, archive_batch=4, segment_bytes=30_000, snapshot_every_bytes=30_000)
    here = place("file", tmp_path, limits)
    ids: list[str] = []
    async with here.opened() as town:
        for n in range(60):
            ids.append((await town.send(says(f"task {n}"))).id)
            if n % 3:
                await town.finish(await town.lease())

        async def between(number: int) -> None:
            if number < 6:
                await town.finish(await town.lease())

        for _ in range(2):
            seen = await _pages(town, between, page_size=7)
            assert set(seen) == set(ids)
    for path in (tmp_path / "data").glob(f"{FILE}*"):
        path.unlink()
    async with here.opened() as town:

        async def nothing(number: int) -> None:
            pass

        seen = await _pages(town, nothing, page_size=7)
        assert sorted(seen) == sorted(ids)
        done = await _pages(town, nothing, page_size=7, status="TASK_STATE_COMPLETED")
        assert len(done) == len(set(done)) > 40


async def test_what_is_past_retention_is_not_listed(tmp_path: Path) -> None:
    clock = ManualClock()
    for engine in ("memory", "file"):
        async with place(engine, tmp_path, Limits(retention_ms=1_000), clock).opened() as town:
            await town.send()
            await town.finish(await town.lease())
            kept = (await town.send()).id
            clock.advance(2_000)
            page = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())
            assert ([task.id for task in page.tasks], page.total_size) == ([kept], 1)


async def test_later_pages_cost_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole is counted for the first page, and the cursor carries it."""
    async with place("memory", tmp_path).opened() as town:
        for n in range(300):
            await town.send(says(f"task {n}"))
        state: Any = town.exchange.store
        first = await town.operations.list_tasks(
            town.alice, town.agent, a.ListTasks(page_size=5, status="TASK_STATE_SUBMITTED")
        )
        assert first.total_size == 300
        looked: list[int] = []
        real = state.state.dialogs

        def dialogs(sender: str, recipient: str, before: int, limit: int) -> Any:
            found = real(sender, recipient, before, limit)
            looked.append(len(found))
            return found

        monkeypatch.setattr(type(state.state), "dialogs", lambda _, *asked: dialogs(*asked))
        request = a.ListTasks(page_size=5, status="TASK_STATE_SUBMITTED", page_token=first.next_page_token)
        second = await town.operations.list_tasks(town.alice, town.agent, request)
        assert second.total_size == 300
        assert sum(looked) <= 64
