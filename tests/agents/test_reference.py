"""What a durable agent has to stand, by the names under which it is known: see the reference, section 11."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from covenant import Limits, WorkContext, Worker
from covenant.a2a import Client
from covenant.agents import AgentContext, EntryRole, Local, Selected, TaskFailed, agent, task
from covenant.model.error import LeaseSuperseded
from covenant.model.record import Outcome, TaskState
from covenant.model.run import RunStatus
from covenant.work.context import Ended
from tests.agents.conftest import Open
from tests.agents.house import PATIENCE_S, House

pytestmark = pytest.mark.usefixtures("everywhere")


class Killed(Ended):
    """The end of a process, as far as one process can show it: nothing is told to anybody any more, as when a handler
    has said its last word."""


class Killer:
    """Ends a worker at one of the places that it passes."""

    def __init__(self, house: House, at: int, *places: str) -> None:
        self.is_dead = asyncio.Event()
        self._house = house
        self._left = at
        self._places = places

    def __call__(self, place: str) -> None:
        self._house.hear(place)
        if place in self._places:
            self._left -= 1
        if self._left < 0:
            self.is_dead.set()
            raise Killed


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


# --- crashes -----------------------------------------------------------------------------------------------


async def test_t_kill_at_every_write(house: House, tmp_path: Path) -> None:
    bodies: list[Any] = []

    @task("work", idempotent=True)
    async def work(n: int) -> int:
        bodies.append(n)
        return 10 * n

    @agent("busy")
    async def busy(ctx: AgentContext) -> Any:
        if ctx.state is None:
            await ctx.append(EntryRole.USER, "begin")
            pages = await ctx.join_all([ctx.task("work", 1), ctx.task("work", 2)])
            await ctx.say(f"found {pages}")
            told = await ctx.wait_for_signal("go")
            await ctx.append(EntryRole.ASSISTANT, told)
            await ctx.checkpoint({"pages": pages})
        pages = ctx.state["pages"]
        effect = await ctx.run("write", lambda: "written", idempotent=True)
        more = await ctx.task("work", 3)
        await ctx.append(EntryRole.ASSISTANT, "begin")
        return [*pages, effect, more]

    async def killed_at(at: int) -> tuple[bool, Any, Any]:
        """Whether it was killed at all, what came out, and what is left."""
        bodies.clear()
        killer = Killer(house, at, "before a commit", "after a commit")
        home = tmp_path / str(at)
        async with house.worker(busy, tasks=[work], home=home, probe=killer):
            run_id = await house.begin(busy)
            await house.signal(run_id, "go", "on")
            ending = asyncio.create_task(house.answer(run_id))
            dying = asyncio.create_task(killer.is_dead.wait())
            await asyncio.wait((ending, dying), return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
        async with house.worker(busy, tasks=[work], home=home):
            result = await house.result(run_id)
        await ending
        assert all(bodies.count(n) in (1, 2) for n in (1, 2, 3))
        return killer.is_dead.is_set(), result, await house.told(run_id, every=True)

    _, result, told = await killed_at(10_000)
    assert result == [10, 20, "written", 30]
    assert sorted(bodies) == [1, 2, 3]
    crashes = 0
    for at in count():
        was_killed, *came_to = await killed_at(at)
        assert came_to == [result, told]
        if not was_killed:
            break
        crashes += 1
    assert crashes >= 6


async def test_t_crash_after_signal_delivery(house: House, tmp_path: Path) -> None:
    """The value is in the agent's hands, and the process ends before anything of it is committed."""
    heard = []

    @agent("listener")
    async def listener(ctx: AgentContext) -> str:
        value = await ctx.wait_for_signal("user_message")
        heard.append(value)
        await ctx.append(EntryRole.USER, value)
        return f"heard {value}"

    killer = Killer(house, 1, "an operation")
    async with house.worker(listener, home=tmp_path / "home", probe=killer):
        run_id = await house.begin(listener)
        await house.signal(run_id, "user_message", "hello")
        await soon(killer.is_dead)
    assert heard == ["hello"]
    async with house.worker(listener, home=tmp_path / "home"):
        assert await house.result(run_id) == "heard hello"
    assert heard == ["hello", "hello"]
    assert await house.told(run_id) == [("user", "hello")]


async def test_t_zombie_write_rejected(house: House) -> None:
    """A worker that was taken for dead, and is not: whatever it writes is refused."""
    going, reached, refused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @agent("slow")
    async def slow(ctx: AgentContext) -> str:
        await ctx.append(EntryRole.ASSISTANT, "first")
        await ctx.checkpoint({"by": "the first"})
        reached.set()
        await going.wait()
        await ctx.append(EntryRole.ASSISTANT, "by a zombie")
        try:
            await ctx.checkpoint({"by": "a zombie"})
        finally:
            refused.set()
        return "done by a zombie"

    @agent("slow")
    async def second(ctx: AgentContext) -> str:
        assert ctx.state == {"by": "the first"}
        await ctx.append(EntryRole.ASSISTANT, "by the second")
        return "done by the second"

    async with house.worker(slow, heartbeat_ms=10**8) as zombie:
        run_id = await house.begin(slow)
        await soon(reached)
        zombie.stop()  # it takes nothing more
        held = await house.until(run_id, RunStatus.RUNNING)
        assert held.incarnation is not None and held.lease_id is not None
        other = house.bob.of(house.bob.agent, incarnation="other")
        taken = await other.resume_run(run_id, dead=held.incarnation, evidence="attested", reason="it hangs")
        going.set()
        await soon(refused)
        with pytest.raises(LeaseSuperseded):
            await house.bob.heartbeat(held.lease_id)
        await other.release(taken.lease_id, reason="worker stopped")
        async with house.worker(second):
            assert await house.result(run_id) == "done by the second"
    assert await house.told(run_id, every=True) == [("assistant", "first"), ("assistant", "by the second")]


async def test_t_hung_agent_reclaimed(open_house: Open) -> None:
    house = await open_house(Limits(run_lapse_ms=60))
    hanging, hung = asyncio.Event(), asyncio.Event()

    @agent("thinker")
    async def hangs(ctx: AgentContext) -> str:
        await ctx.append(EntryRole.ASSISTANT, "thinking")
        await ctx.checkpoint()
        hung.set()
        await hanging.wait()
        return "too late"

    @agent("thinker")
    async def thinks(ctx: AgentContext) -> str:
        assert ctx.state is None and ctx.resuming
        await ctx.append(EntryRole.ASSISTANT, "thought")
        return "here"

    async with house.worker(hangs, heartbeat_ms=10**8, grace_ms=0):
        run_id = await house.begin(hangs)
        await soon(hung)
        async with house.worker(thinks, heartbeat_ms=10**8):
            house.clock.advance(60)
            assert await house.result(run_id) == "here"
        assert (await house.alice.get_run(run_id)).attempt == 1
    assert await house.told(run_id) == [("assistant", "thinking"), ("assistant", "thought")]


# --- signals -----------------------------------------------------------------------------------------------


async def test_t_two_signals_two_waits(house: House) -> None:
    @agent("two")
    async def two(ctx: AgentContext) -> list[str]:
        first = await ctx.wait_for_signal("go")
        await ctx.append(EntryRole.USER, first)
        second = await ctx.wait_for_signal("go")
        await ctx.append(EntryRole.USER, second)
        third = await ctx.wait_for_signal("go")
        return [first, second, third]

    async with house.worker(two):
        run_id = await house.begin(two)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await asyncio.gather(house.signal(run_id, "go", "a"), house.signal(run_id, "go", "b"))
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "go", "c")
        result = await house.result(run_id)
    assert sorted(result[:2]) == ["a", "b"] and result[2] == "c"
    assert [content for _, content in await house.told(run_id)] == result[:2]


async def test_t_n_signals_none_lost(house: House) -> None:
    n = 30

    @agent("many")
    async def many(ctx: AgentContext) -> list[int]:
        return [await ctx.wait_for_signal("item") for _ in range(n)]

    async with house.worker(many):
        run_id = await house.begin(many)
        for start in range(0, n, 3):
            await asyncio.gather(*(house.signal(run_id, "item", i, key=f"k{i}") for i in range(start, start + 3)))
            assert await house.signal(run_id, "item", start, key=f"k{start}")
        result = await house.result(run_id)
    assert sorted(result) == list(range(n))


# --- tasks -------------------------------------------------------------------------------------------------


async def test_t_select_winner_stable(house: House) -> None:
    picked = []

    @agent("picks")
    async def picks(ctx: AgentContext) -> list[Any]:
        tasks = [ctx.task("race", n, recipient="carol@lab") for n in (1, 2)]
        first: Selected = await ctx.select(tasks)
        picked.append(first.index)
        await ctx.wait_for_signal("go")
        again = await ctx.select(tasks)
        left = await ctx.join_all(list(first.rest))
        return [first.index, first.value, again.value, left]

    async with house.worker(picks):
        run_id = await house.begin(picks)
        helps = {asked.input: asked for asked in [await house.help(), await house.help()]}
        await helps[2].answers("second")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await helps[1].answers("first")
        await house.signal(run_id, "go")
        result = await house.result(run_id)
    assert set(picked) == {1}
    assert result == [1, "second", "first", ["first"]]


async def test_t_identical_tasks_distinct(house: House) -> None:
    made = []

    @task("make")
    async def make(what: str) -> int:
        made.append(what)
        return len(made)

    @agent("twice")
    async def twice(ctx: AgentContext) -> list[int]:
        same = [ctx.task("make", "x"), ctx.task("make", "x")]
        other = [ctx.task("make", "x", instance=1), ctx.task("make", "x", instance=2)]
        assert same[0].id == same[1].id
        assert len({pending.id for pending in (*same, *other)}) == 3
        results = await ctx.join_all([*same, *other])
        await ctx.wait_for_signal("go")
        return [*results, *await ctx.join_all([*same, *other])]

    async with house.worker(twice, tasks=[make]):
        run_id = await house.begin(twice)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "go")
        result = await house.result(run_id)
    assert len(made) == 3
    assert result[:4] == result[4:] and result[0] == result[1] and len(set(result)) == 3


async def test_t_poll_loop_progresses(house: House) -> None:
    asked = []

    @task("status")
    async def status(what: str) -> str:
        asked.append(what)
        return "ready" if len(asked) == 3 else "busy"

    @agent("polls")
    async def polls(ctx: AgentContext) -> int:
        for turn in range(10):
            if await ctx.task("status", "job", instance=turn) == "ready":
                return turn
            await ctx.sleep(1000)
        return -1

    async with house.worker(polls, tasks=[status]):
        run_id = await house.begin(polls)
        for _ in range(2):
            await house.until(run_id, RunStatus.AWAITING_WORK)
            house.clock.advance(1000)
        assert await house.result(run_id) == 2
    assert len(asked) == 3


async def test_t_retry_after_failure_runs_again(house: House) -> None:
    tried = []

    @task("flaky", idempotent=True, attempts=3, backoff_ms=1000)
    async def flaky(work: WorkContext, n: int) -> str:
        tried.append((work.task.id, work.attempt))
        if len(tried) < 3:
            raise ValueError("not yet")
        return "at last"

    @agent("retries")
    async def retries(ctx: AgentContext) -> str:
        return str(await ctx.task("flaky", 1))

    async with house.worker(retries, tasks=[flaky]):
        run_id = await house.begin(retries)
        seen = await house.until(run_id, RunStatus.AWAITING_WORK)
        task_id = seen.awaits[0].removeprefix("task ")
        for failures, backoff_ms in ((1, 1000), (2, 2000)):
            await house.until_task(
                task_id,
                lambda entry, n=failures: entry.state is TaskState.QUEUED and entry.attempt == n,  # type: ignore[misc]
            )
            house.clock.advance(backoff_ms - 1)
            assert len(tried) == failures
            house.clock.advance(1)
        assert await house.result(run_id) == "at last"
    assert [attempt for _, attempt in tried] == [1, 2, 3]
    assert len({task_id for task_id, _ in tried}) == 1


async def test_t_cancel_reaches_running_task(house: House) -> None:
    """Both ways: the run cancels a task of its own, and the run itself is canceled with all that it has asked for."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def long(work: WorkContext) -> str:
        begun.put_nowait(work.task.id)
        await work.canceled()
        ended.put_nowait(work.task.id)
        return "too late"

    @agent("cancels")
    async def cancels(ctx: AgentContext) -> str:
        first = ctx.task("long", 1, recipient="carol@lab")
        await ctx.wait_for_signal("go")
        await ctx.cancel(first)
        try:
            await first
        except TaskFailed as failed:
            assert failed.is_canceled
        return str(await ctx.task("long", 2, recipient="carol@lab"))

    async with house.worker(cancels), Worker(house.carol, long, concurrency=4, heartbeat_ms=10):
        run_id = await house.begin(cancels)
        async with asyncio.timeout(PATIENCE_S):
            first = await begun.get()
            await house.signal(run_id, "go")
            assert await ended.get() == first
            second = await begun.get()
            await house.until(run_id, RunStatus.AWAITING_WORK)
            await house.alice.cancel_task(run_id, reason="enough")
            assert await ended.get() == second
    assert await house.outcome(run_id) is Outcome.CANCELED
    for task_id in (first, second):
        assert (await house.box.get_task(task_id)).outcome is Outcome.CANCELED


# --- faces -------------------------------------------------------------------------------------------------


@agent("storyteller")
async def storyteller(ctx: AgentContext, topic: str) -> str:
    await ctx.say(f"about {topic}")
    for turn in range(3):
        more = await ctx.wait_for_message()
        await ctx.say(f"{turn}: {more}")
    return "the end"


@pytest.mark.usefixtures("served")
async def test_t_stream_resume_no_gap_no_dup(house: House) -> None:
    await house.box.publish_agent({"name": "bob"}, house.bob.agent)
    async with house.worker(storyteller), Client.connect(house.a2a_url, token=house.tokens["alice@lab"]) as client:
        sent: Any = await client.send("cats", blocking=False)
        for turn in range(3):
            await house.until(sent.id, RunStatus.AWAITING_INPUT)
            await client.send(f"more {turn}", task_id=sent.id, blocking=False)
        assert await house.result(sent.id) == "the end"
        async with asyncio.timeout(PATIENCE_S):
            whole = [event async for event in client.follow(sent.id, 1)]
            assert [event.generation for event in whole] == list(range(2, whole[-1].generation + 1))
            assert whole[-1].is_last
            for cut in range(1, len(whole)):
                rest = [event async for event in client.follow(sent.id, whole[cut - 1].generation)]
                assert rest == whole[cut:]
    said = [content["text"] for _, content in await house.told(sent.id)]
    assert said == ["cats", "about cats", "more 0", "0: more 0", "more 1", "1: more 1", "more 2", "2: more 2"]


async def test_t_local_equals_remote(house: House) -> None:
    """The same agent in a house of its own leaves the same behind."""

    @task("work")
    async def work(n: int) -> int:
        return 10 * n

    @agent("both")
    async def both(ctx: AgentContext, question: str) -> Any:
        if ctx.state is None:
            await ctx.append(EntryRole.USER, question)
            pages = await ctx.join_all([ctx.task("work", n) for n in range(3)])
            told = await ctx.wait_for_signal("go")
            await ctx.append(EntryRole.ASSISTANT, told)
            await ctx.checkpoint({"pages": pages})
        await ctx.append(EntryRole.ASSISTANT, "on")
        await ctx.sleep(10)
        return {"pages": ctx.state["pages"], "id": ctx.task("work", 1).id}

    run_id = "00000000-0000-4000-8000-000000000001"
    async with Local(agents=[both], tasks=[work]) as local:
        handle = await local.start(both, "why?", run_id=run_id)
        await handle.signal("go", "so")
        expected = await handle.result()
        entries = (await local.box.run_entries(run_id)).entries
    async with house.worker(both, tasks=[work]):
        await house.begin(both, "why?", id=run_id)
        await house.signal(run_id, "go", "so")
        await house.until(run_id, RunStatus.AWAITING_WORK)
        house.clock.advance(10)
        assert await house.result(run_id) == expected
    here = await house.entries(run_id)
    assert [(e.role, bytes(e.content), e.parent) for e in here] == [
        (e.role, bytes(e.content), e.parent) for e in entries
    ]
