"""Agents in one process, without a daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from covenant import Limits, Mailbox
from covenant.agents import (
    AgentContext,
    AgentWorker,
    Local,
    RunFailed,
    RunInDoubt,
    TaskFunction,
    agent,
    run_local,
    task,
)
from covenant.model.content import Json
from covenant.model.error import Malformed, NotPermitted, TaskConflict
from covenant.model.record import Outcome
from covenant.model.run import Evidence, RunStatus
from covenant.model.task import Idempotency, Result, Task
from covenant.model.view import Delivery
from covenant.store.clock import RandomIds
from tests.agents.test_reference import Killed, soon
from tests.until import until


@task("work", idempotent=True)
async def work(n: int) -> int:
    return 10 * n


@agent("adds")
async def adds(ctx: AgentContext, n: int) -> int:
    await ctx.append("user", n)
    return int(sum(await ctx.join_all([ctx.task("work", i) for i in range(n)])))


async def test_a_run_from_beginning_to_end() -> None:
    async with asyncio.timeout(20):
        assert await run_local(adds, 4, tasks=[work]) == 60


async def test_in_a_folder_the_same_input_is_the_same_run(tmp_path: Path) -> None:
    calls = []

    @agent("counts")
    async def counts(ctx: AgentContext, n: int) -> int:
        calls.append(n)
        return n

    store = f"file:{tmp_path}/run"
    async with asyncio.timeout(20):
        for given, key in ((1, None), (1, None), (2, None), (1, "again"), (1, "again")):
            assert await run_local(counts, given, store=store, key=key) == given
        with pytest.raises(TaskConflict):
            await run_local(counts, 3, store=store, key="again")
    assert calls == [1, 2, 1]


async def test_a_house_that_cannot_be_entered_leaves_its_folder_free(tmp_path: Path) -> None:
    class NoHouse(Local):
        _worker_type = _NoWorker

    store = f"file:{tmp_path}/run"
    async with asyncio.timeout(20):
        with pytest.raises(Malformed, match="twice"):
            await Local(store, agents=[adds, adds]).__aenter__()
        with pytest.raises(NotPermitted):
            await NoHouse(store, agents=[adds]).__aenter__()
        assert await run_local(adds, 4, tasks=[work], store=store) == 60


class _NoWorker(AgentWorker):
    async def take_all_over(self) -> None:
        raise NotPermitted("nothing is taken over")


async def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    store = f"file:{tmp_path}/run"
    dead = asyncio.Event()
    calls = []

    @agent("dies")
    async def dies(ctx: AgentContext, n: int) -> Any:
        calls.append(ctx.resuming)
        await ctx.append("user", "before")
        done = await ctx.task("work", n)
        await ctx.checkpoint() if ctx.checkpoints == 0 else None
        if not dead.is_set():
            dead.set()
            raise Killed
        assert ctx.state is None
        return [done, len(await ctx.load_messages())]

    @agent("dies")
    async def goes_on(ctx: AgentContext, n: int) -> Any:
        assert ctx.state is None
        return [await ctx.task("work", n), len(await ctx.load_messages())]

    async with Local(store, agents=[dies], tasks=[work]) as house:
        handle = await house.start(dies, 4, run_id="00000000-0000-4000-8000-000000000001")
        await soon(dead)
    async with Local(store, agents=[goes_on], tasks=[work]) as house:
        async with asyncio.timeout(20):
            assert await house.find(goes_on, handle.id).result() == [40, 1]


async def test_a_failure_and_a_cancel_are_told() -> None:
    @agent("fails")
    async def fails(ctx: AgentContext) -> None:
        raise ValueError("no")

    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        return str(await ctx.wait_for_signal("go"))

    async with asyncio.timeout(20), Local(agents=[fails, waits]) as house:
        with pytest.raises(RunFailed, match="ValueError: no"):
            await (await house.start(fails)).result()
        run = await house.start(waits)
        await run.cancel("enough")
        with pytest.raises(RunFailed, match="canceled: enough"):
            await run.result()
        assert (await house.caller.get_task(run.id)).outcome is Outcome.CANCELED
        run = await house.signal_or_start(waits, "00000000-0000-4000-8000-000000000002", "go", "on", key="k")
        again = await house.signal_or_start(waits, run.id, "go", "on", key="k")
        assert await again.result() == "on"


async def test_what_nobody_knows_the_outcome_of_is_told_and_judged(tmp_path: Path) -> None:
    store = f"file:{tmp_path}/run"
    dead = asyncio.Event()

    def pay() -> str:
        if not dead.is_set():
            dead.set()
            raise Killed
        return "paid"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        return str(await ctx.run("pay", pay))

    run_id = "00000000-0000-4000-8000-000000000003"
    async with Local(store, agents=[pays]) as house:
        await house.start(pays, run_id=run_id)
        await soon(dead)
    async with asyncio.timeout(20), Local(store, agents=[pays]) as house:
        run = house.find(pays, run_id)
        with pytest.raises(RunInDoubt, match="pay"):
            await run.result()
        await run.judge("pay", "done", reason="looked it up", value="paid by hand")
        assert await run.result() == "paid by hand"


async def test_a_task_of_the_dead_that_may_not_be_done_twice_is_told(tmp_path: Path) -> None:
    store = f"file:{tmp_path}/run"
    dead = asyncio.Event()

    @task("pay")
    async def pay(n: int) -> str:
        dead.set()
        raise Killed

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        return str(await ctx.task("pay", 1))

    run_id = "00000000-0000-4000-8000-000000000004"
    async with Local(store, agents=[pays], tasks=[pay]) as house:
        await house.start(pays, run_id=run_id)
        await soon(dead)
    async with asyncio.timeout(20), Local(store, agents=[pays], tasks=[pay]) as house:
        with pytest.raises(RunInDoubt, match="task"):
            await house.find(pays, run_id).result()


async def test_a_task_that_is_about_to_be_done_is_not_in_doubt() -> None:
    """It is leased by the commit that asks for it, and done a moment later."""
    houses: list[Local] = []
    orphaned: list[bool] = []

    class Asking(AgentWorker):
        async def do(self, function: TaskFunction, delivery: Delivery) -> Result | None:
            orphaned.append(await houses[0]._is_orphaned(delivery.task.id))
            return await super().do(function, delivery)

    class AskingHouse(Local):
        _worker_type = Asking

    @task("once")
    async def once(n: int) -> int:
        return n

    @agent("waits")
    async def waits(ctx: AgentContext) -> int:
        return int(await ctx.task("once", 7))

    async with asyncio.timeout(20), AskingHouse(agents=[waits], tasks=[once]) as house:
        houses.append(house)
        assert await (await house.start(waits)).result() == 7
    assert orphaned == [False]


async def test_a_task_that_another_agent_holds_is_not_in_doubt() -> None:
    @agent("asks")
    async def asks(ctx: AgentContext) -> str:
        return str(await ctx.task("look", 1, recipient="carol@lab"))

    async with asyncio.timeout(20), Local(agents=[asks]) as house:
        carol = house.box.of("carol@lab")
        run = await house.start(asks)
        (taken,) = await carol.recv_tasks(1, wait_ms=10_000)
        assert (await run.status()).status is RunStatus.AWAITING_WORK
        await house.check_doubt(run.id)
        await carol.send_result(Result.ok(taken, (Json("found"),)))
        assert await run.result() == "found"


@pytest.mark.parametrize("more", [{"store": "file:x"}, {"limits": Limits()}, {"ids": RandomIds()}])
async def test_a_box_that_is_open_takes_no_settings(more: dict[str, Any]) -> None:
    async with Mailbox.open("memory:") as box:
        with pytest.raises(Malformed, match="box"):
            Local(agents=[adds], tasks=[work], box=box, **more)


async def test_a_scan_that_is_refused_is_made_again() -> None:
    again = asyncio.Event()
    scans: list[str] = []

    class Refused(AgentWorker):
        async def _resume_all(self, evidence: Evidence, dead: str | None = None) -> None:
            scans.append(evidence)
            if len(scans) > 1:
                again.set()
            raise NotPermitted("not now")

    opened = Mailbox.open("memory:", limits=Limits(run_lapse_ms=1))
    async with opened as box, Refused(box.of("bob@lab"), agents=[adds]):
        await soon(again)


async def test_a_task_that_no_run_asked_for_is_left_to_the_retry_gate() -> None:
    async with Mailbox.open("memory:") as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        sent = Task(
            recipient=bob.agent,
            intent_text="work",
            task_kind="work",
            content=(Json(1),),
            idempotency=Idempotency("idempotent", "work 1"),
        )
        task_id = (await alice.send_task(sent)).task_id
        (taken,) = await bob.of(bob.agent, incarnation="dead").recv_tasks(1)
        async with AgentWorker(bob, tasks=[work]) as worker:
            await worker.take_all_over()
            entry = await box.get_task(task_id)
    assert (entry.lease_id, entry.incarnation, entry.attempt) == (taken.lease_id, "dead", 1)


async def test_a_house_says_what_it_has_no_function_for(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else will do it: who forgot `tasks=` would wait for ever, and not know for what."""
    async with Local(agents=[adds]) as house:
        run = await house.start(adds, 2)

        async def waits() -> bool:
            await house.check_doubt(run.id)
            return "work" in caplog.text

        await until(waits)
        await house.check_doubt(run.id)
        await run.cancel()
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert told.getMessage() == "no function here does tasks of the kind 'work': name it in tasks=[…]"


async def test_a_house_says_nothing_of_a_kind_that_it_does_itself(caplog: pytest.LogCaptureFixture) -> None:
    """However long it waits for its turn, and whether an agent or a task does it."""
    may_go_on = asyncio.Event()

    @agent("inner")
    async def inner(ctx: AgentContext) -> None:
        await may_go_on.wait()

    @task("later", idempotent=True)
    async def later() -> None:
        await may_go_on.wait()

    @agent("outer")
    async def outer(ctx: AgentContext) -> None:
        await ctx.join_all([ctx.task(kind, instance=str(number)) for number in range(2) for kind in ("inner", "later")])

    async with Local(agents=[outer, inner], tasks=[later], concurrency=1) as house:
        run = await house.start(outer)
        await until(lambda: is_queued(house, "inner", "later"))
        await house.check_doubt(run.id)
        may_go_on.set()
        await run.result()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def is_queued(house: Local, *kinds: str) -> bool:
    page = await house.box.task_queue(100, state="queued")
    return {entry.task.task_kind for entry in page.tasks} >= set(kinds)


def test_a_name_that_was_forgotten_is_asked_for() -> None:
    wrong: Any = lambda ctx: None  # noqa: E731
    with pytest.raises(TypeError, match=r'@agent\("name"\)'):
        agent(wrong)
    with pytest.raises(TypeError, match=r'@task\("name"\)'):
        task(wrong)


async def test_a_function_that_is_no_agent_is_told_so() -> None:
    async def plain(ctx: AgentContext) -> None: ...

    wrong: Any = plain
    with pytest.raises(Malformed, match="decorate it"):
        await run_local(wrong)
    with pytest.raises(Malformed, match="decorate it"):
        Local(agents=[wrong])
    with pytest.raises(Malformed, match="decorate it"):
        Local(agents=[], tasks=[wrong])
