"""How often rules are gone over on a shared store: a few times, however much a command or a question touches.

What a rule lacks is loaded, and the rule begins anew: asked for one by one, each record would have all before it
decided again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from covenant import AgentId, Limits, Mailbox, Result, TaskState
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.message import Artifact, Part
from covenant.model.peer import Capability, Demand, Grant, Role, Scope
from covenant.model.push import PushConfig
from covenant.model.run import SIGNAL_PREFIX, Memo, RunStatus, Wait
from covenant.store.clock import ManualClock
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.view import Working
from tests.conformance.runs import RUN, answer, begin, entry, is_so, memo, part, parts, raw, says, step
from tests.conformance.support import PATIENCE_MS, keyed, plain, soon, take, uid
from tests.postgres import store_url

_COUNT = 60


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a command was decided, in vain or not."""
    gone_over: list[None] = []
    decide = Lane.decide

    def noted(lane: Lane, *args: Any, **how: Any) -> Any:
        gone_over.append(None)
        return decide(lane, *args, **how)

    monkeypatch.setattr(Lane, "decide", noted)
    return gone_over


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a lane asked the database for what was lacking."""
    asked: list[None] = []
    load = Lane._load

    async def noted(lane: Lane, *args: Any) -> Any:
        asked.append(None)
        return await load(lane, *args)

    monkeypatch.setattr(Lane, "_load", noted)
    return asked


@pytest.fixture
def loaded_signals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signals that were brought from the tables."""
    keys: list[str] = []
    take_in = Working.take_in

    def noted(work: Working, key: str, kind: bytes, body: bytes) -> None:
        if key.startswith(SIGNAL_PREFIX):
            keys.append(key)
        take_in(work, key, kind, body)

    monkeypatch.setattr(Working, "take_in", noted)
    return keys


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that were asked of a connection."""
    asked: list[str] = []
    fetch = asyncpg.Connection.fetch

    async def noted(connection: Any, query: str, *args: Any, **how: Any) -> Any:
        asked.append(query)
        return await fetch(connection, query, *args, **how)

    monkeypatch.setattr(asyncpg.Connection, "fetch", noted)
    return asked


async def test_commands_that_each_see_what_is_committed_are_not_decided_for_one_another(decided: list[None]) -> None:
    """Each has a transaction of its own, in which those behind it ask for nothing."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
        config = PushConfig(id="hook", url="https://example.com/hook")
        decided.clear()
        await soon(asyncio.gather(*(box._engine.run(c.SetPush(alice.agent, uid(n), config)) for n in range(_COUNT))))
        assert len(decided) <= 8 * _COUNT


async def test_what_many_commands_touch_beside_what_they_read_is_loaded_at_once(loads: list[None]) -> None:
    """The slots of results, and who follows in them."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([keyed(bob, f"k{n}") for n in range(_COUNT)])
        deliveries = await bob.recv_tasks(_COUNT)
        loads.clear()
        await soon(asyncio.gather(*(bob.send_result(Result.ok(delivery)) for delivery in deliveries)))
        assert len(loads) <= 12


async def test_what_was_taken_is_given_back_in_a_few_looks(decided: list[None]) -> None:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(2 * _COUNT)])
        deliveries = await bob.recv_tasks(2 * _COUNT)
        done, held = deliveries[:_COUNT], deliveries[_COUNT:]
        await asyncio.gather(*(bob.send_result(Result.ok(delivery)) for delivery in done))
        assert len(await alice.recv_results(_COUNT)) == _COUNT
        for delivery in held[::2]:
            await alice.cancel_task(delivery.task.id, graceful=True)
        leases, results = tuple(one.lease_id for one in held), tuple((one.task.id, 0) for one in done)
        decided.clear()
        await soon(box._engine.run(c.GiveBack(None, leases, results)))
        assert len(decided) <= 6
        assert len(await alice.recv_results(1000)) == _COUNT + len(held[::2])
        assert [one.task.id for one in await bob.recv_tasks(1000)] == [one.task.id for one in held[1::2]]


async def test_a_commit_of_a_run_is_decided_a_few_times(decided: list[None]) -> None:
    """Its tasks, those that it begins, answers and cancels, the keys of its entries, the signals that it takes, what it
    waits for."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
        delivery, _ = await begin(alice, bob)
        own, others = range(100, 100 + _COUNT), range(1000, 1000 + _COUNT)
        for number in range(_COUNT):
            await alice.add_message(RUN, says(f"{number}", signal=f"s{number}"))
        heard = await bob.look_around(delivery, Wait(signals=("*",)), every=True)
        tasks = [*(part(n, bob) for n in own), *(part(n, carol) for n in others)]
        steps = [
            step(2, tasks=tasks, begins=[uid(n) for n in own], takes=[signal.id for signal in heard.signals]),
            step(3, entries=[entry(n, parent=n, key=f"k{n}") for n in range(_COUNT)]),
            step(4, cancels=[uid(n) for n in others]),
            step(5, wait=Wait(tasks=parts(*others, *own), signals=("no",))),
        ]
        for made in steps:
            decided.clear()
            standing = await soon(bob.commit_run(delivery, made))
            assert len(decided) <= 8
            if made.begins:
                leases = standing.leases
                repeated = await soon(bob.commit_run(delivery, made))
                assert repeated.leases == leases
                assert len(decided) <= 16
        assert standing.parked
        assert set(leases) == {uid(n) for n in own}
        await bob.wake_run(RUN)
        delivery = await take(bob)
        decided.clear()
        await soon(bob.commit_run(delivery, step(6, answers=[answer(uid(n), leases[uid(n)]) for n in own])))
        assert len(decided) <= 8


async def test_a_commit_that_is_refused_is_refused_for_the_same_on_any_store() -> None:
    """For the first that is wrong, whatever was not loaded when it was come to."""
    refusals: list[list[str]] = []
    for url in (store_url(), "memory:"):
        async with Mailbox.open(url) as box:
            alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
            await alice.send_task(plain(carol, id=uid(9)))
            delivery, _ = await begin(alice, bob, step(1, entries=[entry(0, key="k")], tasks=[part(10, carol)]))
            wrong = [
                step(2, cancels=[uid(10), "nobody", uid(9)]),
                step(2, cancels=[uid(10), uid(9), "nobody"]),
                step(2, entries=[entry(1, key="l"), entry(2, key="k"), entry(3, parent=99)]),
                step(2, entries=[entry(1, key="l"), entry(2, parent=99), entry(3, key="k")]),
                step(2, tasks=[part(11, carol), part(9, carol)], begins=["nobody"]),
                step(2, wait=Wait(tasks=parts(10, 11, 12))),
            ]
            refused = await asyncio.gather(*(bob.commit_run(delivery, made) for made in wrong), return_exceptions=True)
            refusals.append([str(refusal) for refusal in refused])
    assert refusals[0] == refusals[1]


async def test_what_a_holder_looks_for_takes_few_looks(looks: list[None]) -> None:
    async with Mailbox.open(store_url()) as box:
        alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
        numbers = range(100, 100 + _COUNT)
        delivery, _ = await begin(alice, bob, step(1, tasks=[part(n, carol) for n in numbers]))
        for number in range(_COUNT):
            await alice.add_message(RUN, says(f"{number}", signal=f"s{number}"))
        looks.clear()
        found = await soon(bob.look_around(delivery, Wait(tasks=parts(*numbers), signals=("*",)), every=True))
        assert [signal.message and signal.message.parts[0].text for signal in found.signals] == [
            f"{number}" for number in range(_COUNT)
        ]
        assert len(looks) <= 12


async def test_a_sweep_asks_for_all_that_a_run_lets_go(decided: list[None]) -> None:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
        numbers = range(100, 100 + _COUNT)
        asked = step(1, tasks=[part(n, carol) for n in numbers], memos=[memo(n) for n in numbers])
        delivery, _ = await begin(alice, bob, asked)
        done = await carol.recv_tasks(_COUNT)
        await asyncio.gather(*(carol.send_result(Result.ok(one)) for one in done))
        decided.clear()
        await bob.commit_run(delivery, step(2, checkpoint=raw("here")))

        async def is_let_go() -> bool:
            return all([(await bob.get_task(uid(n))).state is TaskState.RESOLVED for n in numbers])

        await is_so(is_let_go)
        assert len(decided) <= 20


async def test_tasks_of_many_runs_that_end_at_once_wake_them_in_a_few_looks(decided: list[None]) -> None:
    clock = ManualClock()
    async with Mailbox.open(f"{store_url()}&lanes=1", clock=clock) as box:
        alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
        for number, run in enumerate(await bob.recv_tasks(_COUNT)):
            asked = part(100 + number, carol, deadline_ms=clock.now_ms() + 1000)
            await bob.commit_run(run, step(1, tasks=[asked], wait=Wait(tasks=parts(100 + number))))
        decided.clear()
        clock.advance(2000)
        woken: list[Any] = []
        while len(woken) < _COUNT:
            woken += await bob.recv_tasks(_COUNT, wait_ms=PATIENCE_MS)
        assert len(decided) <= 50


async def test_a_cascade_takes_few_transactions_however_many_children_there_are(loads: list[None]) -> None:
    """Each child is a step of it, which looks for children of its own."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_task(plain(bob, id=uid(1)))
        await alice.send_tasks([plain(bob, id=uid(100 + n), parent=uid(1)) for n in range(_COUNT)])
        await alice.send_tasks([plain(bob, id=uid(1000 + n), parent=uid(100 + n)) for n in range(0, _COUNT, 20)])
        loads.clear()
        await soon(alice.cancel_task(uid(1), cascade=True))

        async def are_all_canceled() -> bool:
            return not (await bob.task_queue(1)).tasks

        await is_so(are_all_canceled)
        await soon(box._engine.replies.finish())  # type: ignore[attr-defined]
        assert len(loads) <= 25
        assert len(await alice.recv_results(1000)) == 1 + _COUNT + _COUNT // 20


async def test_a_cascade_loads_no_more_than_it_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are given to a lane together are not all done in its next transaction."""
    loaded: list[str] = []
    take_in = Working.take_in

    def noted(work: Working, key: str, *rest: Any) -> None:
        loaded.append(key)
        take_in(work, key, *rest)

    width = 60
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_task(plain(bob, id=uid(1)))
        await alice.send_tasks([plain(bob, id=uid(100 + n), parent=uid(1)) for n in range(width)])
        for n in range(width):
            below = [plain(bob, id=uid(1000 + n * width + m), parent=uid(100 + n)) for m in range(width)]
            await alice.send_tasks(below)
        monkeypatch.setattr(Working, "take_in", noted)
        await soon(alice.cancel_task(uid(1), cascade=True))
        await soon(box._engine.replies.finish())  # type: ignore[attr-defined]
        assert not (await bob.task_queue(1)).tasks
        assert len(loaded) <= 10 * (1 + width + width**2)


async def test_grants_with_a_bound_on_their_uses_are_loaded_at_once(looks: list[None], decided: list[None]) -> None:
    """They are listed, looked through for a call, and ended with their peer."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        engine, holder, bob = box._engine, AgentId.named("holder@lab"), AgentId.named("bob@lab")
        await engine.run(c.EnrollPeer(None, holder, Role.PEER, "digest"))
        await engine.run(c.EnrollPeer(None, bob, Role.PEER, "another digest"))
        for number in range(_COUNT):
            capability = Capability(uid(number), holder, "a2a.send.*", bob, 1, Scope(max_uses=2))
            await engine.run(c.GrantCapability(None, Grant(capability, "signed")))
        looks.clear()
        page = await soon(engine.ask(q.ListGrants(None, 1000)))
        assert len(page.capabilities) == _COUNT
        found, _ = await soon(engine.ask(q.CheckGrant(None, holder.pubkey, Demand("a2a.send.bob@lab", "send", bob))))
        assert found == uid(0)
        assert len(looks) <= 12
        decided.clear()
        await soon(engine.run(c.RevokePeer(None, holder.pubkey, "gone")))

        async def are_ended() -> bool:
            return not (await engine.ask(q.ListGrants(None, 1))).capabilities

        await is_so(are_ended)
        assert len(decided) <= 12


async def test_what_a_run_remembers_takes_few_looks(looks: list[None]) -> None:
    """What its steps name, what it has said, what it waits for."""
    async with Mailbox.open(store_url()) as box:
        alice, bob, carol = box.of("alice@lab"), box.of("bob@lab"), box.of("carol@lab")
        numbers = range(100, 100 + _COUNT)
        delivery, _ = await begin(alice, bob, step(1, tasks=[part(n, carol) for n in numbers]))
        done = await carol.recv_tasks(_COUNT)
        await asyncio.gather(*(carol.send_result(Result.ok(one)) for one in done[1:]))
        spoken = [entry(n, parent=n, says=says(f"{n}")) for n in range(_COUNT)]
        memos = [*map(memo, numbers), *(Memo(f"entry {n}", entry=n) for n in range(1, _COUNT + 1))]
        await bob.commit_run(delivery, step(2, entries=spoken, memos=memos, leaf=_COUNT))
        looks.clear()
        loaded = await soon(bob.load_run(delivery))
        assert [(len(seen.entries), len(seen.outcomes)) for seen in loaded.steps] == [(_COUNT, _COUNT - 1)]
        assert len(looks) <= 10
        await bob.commit_run(delivery, step(3, wait=Wait(tasks=parts(*numbers)), leaf=_COUNT))
        looks.clear()
        assert len((await soon(bob.get_run(RUN))).awaits) == 20
        page = await soon(alice.run_entries(RUN, limit=1000))
        assert [seen.message and seen.message.parts[0].text for seen in page.entries] == [f"{n}" for n in range(_COUNT)]
        assert len(looks) <= 25


async def listed(box: Mailbox, limit: int, status: RunStatus | None) -> list[list[str]]:
    pages, cursor = [], None
    while True:
        page = await soon(box.list_runs(limit=limit, status=status, cursor=cursor))
        pages.append([run.task_id for run in page.runs])
        cursor = page.cursor
        if cursor is None:
            return pages


async def test_runs_are_listed_in_a_few_looks_and_as_in_memory(looks: list[None]) -> None:
    shown: list[list[list[list[str]]]] = []
    for url in (store_url(), "memory:"):
        async with Mailbox.open(url) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
            for number, run in enumerate(await bob.recv_tasks(_COUNT)):
                if number % 7:
                    await bob.commit_run(run, step(1, wait=Wait(signals=("no",)) if number % 3 == 0 else None))
            looks.clear()
            whole = await listed(bob, 1000, None)
            assert len(looks) <= 10
            paged = [await listed(bob, limit, status) for limit in (1, 5) for status in (None, RunStatus.RUNNING)]
            shown.append([whole, *paged])
    assert shown[0] == shown[1]


async def test_a_page_of_runs_takes_a_few_statements_however_many_there_are(fetches: list[str]) -> None:
    """Each with the signals that wait for it."""
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
        for run in await bob.recv_tasks(_COUNT):
            await bob.commit_run(run, step(1, wait=Wait(signals=("no",))))
            for number in range(22):
                await alice.signal_run(run.task.id, f"s{number}", key=f"{number}")
        fetches.clear()
        page = await soon(bob.list_runs(limit=1000))
        assert len(fetches) <= 12
        assert len(page.runs) == _COUNT
        assert all(list(run.signals) == [f"s{number}" for number in range(20)] for run in page.runs)


@pytest.mark.parametrize("url", ["postgresql", "memory:"])
async def test_a_page_of_runs_ends_early_where_much_waits_for_them(url: str) -> None:
    limits = Limits(page_bytes_max=100_000)
    async with Mailbox.open(store_url() if url == "postgresql" else url, limits=limits) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n)) for n in range(_COUNT)])
        for run in await bob.recv_tasks(_COUNT):
            await bob.commit_run(run, step(1, wait=Wait(signals=("no",))))
            await alice.signal_run(run.task.id, "large", "x" * 50_000)
        pages = await listed(bob, 1000, None)
        assert [len(page) for page in pages] == [16, 16, 16, 12]
        assert sorted(run_id for page in pages for run_id in page) == sorted(uid(n) for n in range(_COUNT))


async def test_dialogs_are_listed_in_a_few_looks(looks: list[None]) -> None:
    """Each with its messages and its artifacts."""
    async with Mailbox.open(store_url()) as box:
        engine, alice, bob = box._engine, box.of("alice@lab"), box.of("bob@lab")
        for number in range(_COUNT):
            await engine.run(c.SendTask(alice.agent, plain(bob, id=uid(number)), protocol=True, shown=True))
        for delivery in await bob.recv_tasks(_COUNT):
            await bob.update(delivery, "working")
            await bob.artifact(delivery, Artifact(artifact_id="made", parts=(Part(text="piece"),)))
        looks.clear()
        page = await soon(engine.ask(q.ListDialogs(alice.agent, bob.agent.pubkey, 1000, artifacts=True)))
        assert [(len(task.history), len(task.artifacts)) for task in page.tasks] == [(2, 1)] * _COUNT
        assert len(looks) <= 15


async def test_a_long_history_takes_few_looks(looks: list[None]) -> None:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        engine, alice, bob = box._engine, box.of("alice@lab"), box.of("bob@lab")
        await engine.run(c.SendTask(alice.agent, plain(bob, id=uid(1)), protocol=True, shown=True))
        await asyncio.gather(*(alice.add_message(uid(1), says(f"{n}")) for n in range(400)))
        looks.clear()
        dialog = await soon(engine.ask(q.GetDialog(alice.agent, uid(1), history=400)))
        assert [message.parts[0].text for message in dialog.task.history] == [f"{n}" for n in range(400)]
        assert len(looks) <= 12


@pytest.mark.parametrize("what", ["leaders", "errors"])
async def test_slots_that_are_due_at_once_are_looked_through_at_once(what: str, decided: list[None]) -> None:
    """For who follows in them, if anybody does."""
    clock = ManualClock()
    async with Mailbox.open(f"{store_url()}&lanes=1", clock=clock) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        late = clock.now_ms() + 1000 if what == "leaders" else None
        await alice.send_tasks([keyed(bob, f"k{n}", id=uid(n), deadline_ms=late) for n in range(_COUNT)])
        if what == "leaders":
            await alice.send_tasks([keyed(bob, f"k{n}", id=uid(1000 + n)) for n in range(0, _COUNT, 2)])
        else:
            taken = await bob.recv_tasks(_COUNT)
            await asyncio.gather(*(bob.send_result(Result.error(one, "broken")) for one in taken))
        decided.clear()
        clock.advance(box.limits.error_ttl_ms + 1)
        await soon(alice.send_task(plain(bob, id=uid(9000))))
        assert len(decided) <= 60
        ready = [one.task.id for one in await bob.recv_tasks(1000)]
        followers = [uid(1000 + n) for n in range(0, _COUNT, 2)] if what == "leaders" else []
        assert sorted(ready) == sorted([*followers, uid(9000)])


async def test_a_signal_is_told_without_those_that_wait(loaded_signals: list[str]) -> None:
    """They are counted where they stand; a message to a run is one of them."""
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await begin(alice, bob)
        for number in range(_COUNT):
            await soon(alice.signal_run(RUN, "go", number))
        await soon(alice.add_message(RUN, says("and this")))
        assert loaded_signals == []


async def test_who_hears_one_signal_after_the_other_loads_a_few(loaded_signals: list[str]) -> None:
    """Those behind them stay where they are."""
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        delivery, _ = await begin(alice, bob)
        await soon(asyncio.gather(*(alice.signal_run(RUN, "go", number) for number in range(200))))
        seen = await soon(bob.look_around(delivery, Wait(signals=("go",))))
        assert len(seen.signals) == 1
        assert len(loaded_signals) < 100
