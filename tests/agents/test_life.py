"""How runs end, and how their workers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from covenant import ForceError, Limits, RepairRequest, Task
from covenant.agents import AgentContext, AgentWorker, CancelRequested, RunFailed, Suspended, TaskFailed, agent, task
from covenant.model.command import ResumeRun
from covenant.model.error import Malformed, ResumesExhausted, TaskTerminal
from covenant.model.record import Outcome, TaskState
from covenant.model.run import RunStatus
from tests.agents.conftest import Open
from tests.agents.house import PATIENCE_S, House, pause
from tests.agents.test_reference import Killed, Killer, soon

CAROL = "carol@lab"


@task("work")
async def work(n: int) -> int:
    return 10 * n


# --- ends --------------------------------------------------------------------------------------------------


async def test_an_exception_ends_the_run_and_keeps_what_it_did(house: House) -> None:
    @agent("fails")
    async def fails(ctx: AgentContext) -> None:
        await ctx.append("user", "before")
        await pause(ctx)
        await ctx.append("user", "the tail")
        ctx.task("look", 1, recipient=CAROL)
        raise KeyError("nothing there")

    async with house.worker(fails):
        run_id = await house.begin(fails)
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.failure(run_id) == "KeyError: 'nothing there'"
    assert await house.told(run_id) == [("user", "before"), ("user", "the tail")]
    assert (await house.help()).input == 1


async def test_an_end_keeps_the_tail(house: House) -> None:
    @agent("ends")
    async def ends(ctx: AgentContext) -> dict[str, Any]:
        await pause(ctx)
        await ctx.append("user", "the tail")
        await ctx.say("bye")
        return {"a": [1, None]}

    run_id, result = await house.through(ends)
    assert result == {"a": [1, None]}
    assert await house.told(run_id) == [("user", "the tail"), ("assistant", {"text": "bye"})]


class Unreadable:
    def model_dump(self, mode: str) -> Any:
        raise RuntimeError("it has no words")


@pytest.mark.parametrize("kind", ["object", "ring", "model"])
async def test_what_is_no_json_cannot_be_returned(house: House, kind: str) -> None:
    ring: list[Any] = []
    ring.append(ring)
    odd_values = {"object": object(), "ring": ring, "model": Unreadable()}

    @agent("odd")
    async def odd(ctx: AgentContext) -> Any:
        await ctx.append("user", "before")
        return odd_values[kind]

    async with house.worker(odd):
        run_id = await house.begin(odd)
        assert "no JSON" in await house.failure(run_id)
    assert await house.told(run_id) == [("user", "before")]


@pytest.mark.parametrize(
    "odd", [object(), float("nan"), {"a": [1.0, float("inf")]}, "\ud800"], ids=("object", "nan", "inf", "surrogate")
)
async def test_what_is_no_json_is_refused_where_it_is_given(house: House, odd: Any) -> None:
    """The agent may catch it, and nothing of it is left."""

    @agent("odd")
    async def odd_one(ctx: AgentContext) -> int:
        refused = 0
        for operation in (
            lambda: ctx.append("user", odd),
            lambda: ctx.checkpoint(odd),
            lambda: ctx.say(odd) if isinstance(odd, str) else ctx.append("user", {"a": odd}),
        ):
            try:
                await operation()
            except Exception:
                refused += 1
        try:
            ctx.task("work", odd)
        except Exception:
            refused += 1
        assert ctx.state is None
        await ctx.append("user", "after")
        return refused

    run_id, refused = await house.through(odd_one, tasks=[work])
    assert (refused, await house.told(run_id)) == (4, [("user", "after")])


async def test_what_is_too_much_ends_the_run_and_says_so(house: House) -> None:
    @agent("much")
    async def much(ctx: AgentContext) -> str:
        await ctx.append("user", "before")
        await pause(ctx)
        return "x" * 5_000_000

    with pytest.raises(RunFailed, match="too_large"):
        await house.through(much)


async def test_suspension_cannot_be_caught_as_an_exception(house: House) -> None:
    seen: list[BaseException] = []

    @agent("catches")
    async def catches(ctx: AgentContext) -> str:
        while True:
            try:
                await ctx.wait_for_signal("go")
                return "heard"
            except Exception as failed:
                seen.append(failed)
                await ctx.append("assistant", f"error: {failed}")

    async with house.worker(catches):
        run_id = await house.begin(catches)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
    async with house.worker(catches):
        await house.signal(run_id, "go")
        assert await house.result(run_id) == "heard"
    assert seen == []
    assert await house.told(run_id, every=True) == []
    assert not issubclass(Suspended, Exception)


async def test_a_function_that_is_put_away_does_nothing_more(house: House) -> None:
    """Not even where it catches everything."""
    tried = asyncio.Event()

    @agent("stubborn")
    async def stubborn(ctx: AgentContext) -> str:
        try:
            return str(await ctx.wait_for_signal("go"))
        except BaseException:
            try:
                await ctx.append("assistant", "still here")
                await ctx.wait_for_signal("other")
            except BaseException:
                tried.set()
                raise
            raise

    async with house.worker(stubborn):
        run_id = await house.begin(stubborn)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
    await soon(tried)
    async with house.worker(stubborn):
        await house.signal(run_id, "go", "on")
        assert await house.result(run_id) == "on"
    assert await house.told(run_id, every=True) == []


# --- cancel and deadlines ----------------------------------------------------------------------------------


async def test_a_run_is_canceled_with_all_that_it_has_asked_for(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> None:
        await ctx.append("user", "before")
        await ctx.join_all([ctx.task("look", n, recipient=CAROL) for n in range(3)])

    async with house.worker(waits):
        run_id = await house.begin(waits)
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await house.alice.cancel_task(run_id, reason="enough")
        assert await house.outcome(run_id) is Outcome.CANCELED
        with pytest.raises(TaskTerminal):
            await house.signal(run_id, "go")
    tree = await house.box.task_queue(100)
    assert tree.tasks == []
    assert await house.told(run_id) == [("user", "before")]


async def test_a_run_that_is_asked_to_end_cleans_up(house: House) -> None:
    """A graceful cancel reaches it where it waits."""
    cleaned = []

    @agent("tidy")
    async def tidy(ctx: AgentContext) -> None:
        try:
            await ctx.wait_for_signal("go")
        except CancelRequested:
            cleaned.append(ctx.cancel_requested)
            await ctx.append("assistant", "cleaned up")
            raise

    async with house.worker(tidy):
        run_id = await house.begin(tidy)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.alice.cancel_task(run_id, reason="enough", graceful=True)
        assert await house.outcome(run_id) is Outcome.CANCELED
    assert cleaned == [True]
    assert await house.told(run_id) == [("assistant", "cleaned up")]


async def test_a_run_that_is_asked_to_end_may_end_well(house: House) -> None:
    @agent("tidy")
    async def tidy(ctx: AgentContext) -> str:
        try:
            await ctx.task("look", 1, recipient=CAROL)
        except CancelRequested:
            return "as far as I got"
        return "done"

    async with house.worker(tidy):
        run_id = await house.begin(tidy)
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await house.alice.cancel_task(run_id, reason="enough", graceful=True)
        assert await house.result(run_id) == "as far as I got"


async def test_a_run_that_works_hears_of_a_cancel(house: House) -> None:
    begun = asyncio.Event()

    @agent("busy")
    async def busy(ctx: AgentContext) -> str:
        for turn in count():
            if ctx.cancel_requested:
                break
            await ctx.task("work", 1, instance=turn)
            begun.set()
        return "stopped"

    async with house.worker(busy, tasks=[work]):
        run_id = await house.begin(busy)
        await soon(begun)
        await house.alice.cancel_task(run_id, reason="enough", graceful=True)
        assert await house.result(run_id) == "stopped"


async def test_a_run_that_works_is_put_away_when_it_is_canceled(house: House) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @agent("busy")
    async def busy(ctx: AgentContext) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    async with house.worker(busy, heartbeat_ms=5):
        run_id = await house.begin(busy)
        await soon(begun)
        await house.alice.cancel_task(run_id, reason="enough")
        await soon(ended)
    assert await house.outcome(run_id) is Outcome.CANCELED


async def test_a_deadline_ends_a_run_that_waits(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> None:
        await ctx.task("look", 1, recipient=CAROL)

    async with house.worker(waits):
        run_id = await house.begin(waits, deadline_ms=house.clock.now_ms() + 1000)
        await house.until(run_id, RunStatus.AWAITING_WORK)
        asked = await house.help()
        house.clock.advance(1000)
        assert (await house.failure(run_id)).startswith("deadline_exceeded")
    with pytest.raises(TaskTerminal):
        await asked.answers()


# --- who does what -----------------------------------------------------------------------------------------


async def test_one_worker_has_several_agents(house: House) -> None:
    @agent("one")
    async def one(ctx: AgentContext, n: int) -> Any:
        return [ctx.agent.display, await ctx.task("two", n)]

    @agent("two")
    async def two(ctx: AgentContext, n: int) -> int:
        await ctx.append("user", n)
        return int(await ctx.task("work", n))

    async with house.worker(one, two, tasks=[work]):
        run_id = await house.begin(one, 4)
        assert await house.result(run_id) == ["bob@lab", 40]


async def test_a_message_is_for_the_first_agent(house: House) -> None:
    @agent("one")
    async def one(ctx: AgentContext, text: str) -> str:
        return f"one: {text}"

    @agent("two")
    async def two(ctx: AgentContext, text: str) -> str:
        return f"two: {text}"

    async with house.worker(one, two):
        sent = await house.alice.send_task(Task(recipient=house.bob.agent, intent_text="hello"))
        assert await house.result(sent.task_id) == "one: hello"


def test_a_worker_has_something_to_do_and_each_of_it_once() -> None:
    @agent("work")
    async def also_work(ctx: AgentContext) -> None: ...

    worker: Callable[..., Any] = AgentWorker
    undecorated = also_work.function
    for agents, tasks in (((), ()), ((also_work,), (work,)), ((also_work, also_work), ()), ((undecorated,), ())):
        with pytest.raises(Malformed):
            worker("memory:", agents=agents, tasks=tasks)


# --- coming and going --------------------------------------------------------------------------------------


async def test_a_worker_that_is_told_to_stop_before_it_begins_does_not_work_for_ever(house: House) -> None:
    @agent("quick")
    async def quick(ctx: AgentContext) -> str:
        return "done"

    worker = house.worker(quick)
    worker.stop()
    async with asyncio.timeout(PATIENCE_S):
        await worker.run()
        running = asyncio.create_task(worker.run())
        worker.stop()  # before its first turn
        await running
    async with worker:  # it was told of those two alone
        assert await house.result(await house.begin(quick)) == "done"


async def test_a_worker_that_stops_gives_its_runs_back(house: House) -> None:
    """No new attempt: whoever takes it up goes on where it was."""
    begun = asyncio.Event()
    calls = []

    @agent("slow")
    async def slow(ctx: AgentContext) -> str:
        calls.append(ctx.resuming)
        await ctx.append("user", "begun")
        if ctx.state is None and not ctx.resuming:
            await ctx.run("mark", lambda: None, idempotent=True)
            await ctx.task("work", 1)
            begun.set()
            await asyncio.Event().wait()
        return "done"

    async with house.worker(slow, tasks=[work], grace_ms=0):
        run_id = await house.begin(slow)
        await soon(begun)
    entry = await house.alice.get_task(run_id)
    assert (entry.state, entry.attempt) == (TaskState.PARKED, 1)
    generation = entry.generation
    async with house.worker(slow, tasks=[work]):
        assert await house.result(run_id) == "done"
    entry = await house.alice.get_task(run_id)
    assert (entry.attempt, entry.generation) == (1, generation + 2)
    assert calls == [False, True]
    assert await house.told(run_id, every=True) == [("user", "begun")]


async def test_the_least_recently_parked_are_put_away_first(house: House) -> None:
    calls: list[int] = []

    @agent("waits")
    async def waits(ctx: AgentContext, n: int) -> int:
        calls.append(n)
        await ctx.append("user", n)
        await ctx.wait_for_signal("go")
        return n

    async with house.worker(waits, warm_max=2):
        runs = []
        for n in range(4):
            runs.append(await house.begin(waits, n))
            await house.until(runs[-1], RunStatus.AWAITING_INPUT)
        assert calls == [0, 1, 2, 3]
        for run_id in (runs[3], runs[2], runs[1], runs[0]):
            await house.signal(run_id, "go")
            await house.result(run_id)
    assert calls == [0, 1, 2, 3, 1, 0]
    for run_id in runs:
        assert len(await house.entries(run_id, every=True)) == 1


async def test_a_run_of_the_dead_is_taken_up_by_who_holds_the_lock(house: House, tmp_path: Path) -> None:
    @task("work", idempotent=True)
    async def work(n: int) -> int:
        return 10 * n

    @agent("dies")
    async def dies(ctx: AgentContext) -> int:
        await ctx.append("user", "before")
        done = await ctx.task("work", 1)
        await ctx.append("user", "after")
        return int(done)

    killer = Killer(house, 3, "an operation")
    async with house.worker(dies, tasks=[work], home=tmp_path / "home", probe=killer):
        run_id = await house.begin(dies)
        await soon(killer.is_dead)
        with pytest.raises(Malformed, match="another worker"):
            async with house.worker(dies, home=tmp_path / "home"):
                pass
    async with house.worker(dies, tasks=[work], home=tmp_path / "other"):
        assert (await house.alice.get_run(run_id)).status is RunStatus.RUNNING
    async with house.worker(dies, tasks=[work], home=tmp_path / "home"):
        assert await house.result(run_id) == 10
    seen = await house.alice.get_run(run_id)
    assert seen.attempt == 1
    rows = [row for row in await house.box.recent_audit(1000) if row.kind == "resume" and row.task_id == run_id]
    assert [row.action for row in rows] == ["attested"]
    assert await house.told(run_id) == [("user", "before"), ("user", "after")]


async def test_a_run_whose_worker_is_silent_is_taken_up_when_it_has_lapsed(open_house: Open) -> None:
    house = await open_house(Limits(run_lapse_ms=30))

    @agent("dies")
    async def dies(ctx: AgentContext) -> str:
        await ctx.append("user", "before")
        await ctx.task("work", 1)
        return "done"

    killer = Killer(house, 0, "a wait")
    async with house.worker(dies, tasks=[work], probe=killer):
        run_id = await house.begin(dies)
        await soon(killer.is_dead)
    async with house.worker(dies, tasks=[work]):
        house.clock.advance(29)
        assert (await house.alice.get_task(run_id)).state is TaskState.IN_FLIGHT
        house.clock.advance(1)
        assert await house.result(run_id) == "done"


async def test_a_run_that_kills_every_worker_is_left_to_the_operator(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(Limits(resumes_max=2))
    lived = asyncio.Event()
    deaths: asyncio.Queue[None] = asyncio.Queue()

    @agent("kills")
    async def kills(ctx: AgentContext) -> str:
        if not lived.is_set():
            deaths.put_nowait(None)
            raise Killed
        return "at last"

    home = tmp_path / "home"
    run_id = await house.begin(kills)
    for _ in range(3):
        async with house.worker(kills, home=home):
            async with asyncio.timeout(PATIENCE_S):
                await deaths.get()
    lived.set()
    held = await house.alice.get_run(run_id)
    assert held.resumes == 2 and held.incarnation is not None
    with pytest.raises(ResumesExhausted):
        await house.bob.of(house.bob.agent, incarnation="x").resume_run(
            run_id, dead=held.incarnation, evidence="attested", reason="x"
        )
    await house.store.run(ResumeRun(None, run_id, None, held.incarnation, "attested", "mended"))
    async with house.worker(kills):
        assert await house.result(run_id) == "at last"


async def test_a_task_of_the_dead_that_may_not_be_done_twice_is_in_doubt(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(Limits(run_lapse_ms=30))
    done = []
    dead = asyncio.Event()

    @task("pay")
    async def pay(n: int) -> str:
        done.append(n)
        dead.set()
        await asyncio.Event().wait()
        return "paid"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        try:
            return str(await ctx.task("pay", 1))
        except TaskFailed as failed:
            return f"failed: {failed.message}"

    async with house.worker(pays, tasks=[pay], home=tmp_path / "home", grace_ms=0):
        run_id = await house.begin(pays)
        await soon(dead)
    async with house.worker(pays, tasks=[pay], home=tmp_path / "home"):
        await house.until(run_id)
        house.clock.advance(30)
        seen = await house.alice.get_run(run_id)
        assert seen.status is RunStatus.CHILD_IN_DOUBT
        assert len(seen.doubts) == 1
        await house.box.repair_task(RepairRequest(seen.doubts[0], ForceError("the bank says no"), "looked it up"))
        assert "the bank says no" in await house.result(run_id)
    assert done == [1]


async def test_a_run_that_two_looks_find_is_taken_up_once(house: House) -> None:
    """One look for the runs of the dead may last until the next one begins: both are told of the same lease."""
    calls = 0

    @agent("counts")
    async def counts(ctx: AgentContext) -> int:
        nonlocal calls
        calls += 1
        await ctx.append("user", "one")
        return calls

    run_id = await house.begin(counts)
    dead = house.box.of("bob@lab", incarnation="dead")
    assert len(await dead.recv_tasks(1)) == 1
    async with house.worker(counts) as worker:
        await asyncio.gather(worker.take_all_over(), worker.take_all_over())
        assert await house.result(run_id) == 1
    assert calls == 1


async def test_a_worker_that_is_not_let_in_again_gives_back_nothing_of_others(house: House, tmp_path: Path) -> None:
    @agent("idle")
    async def idle(ctx: AgentContext) -> None: ...

    again = house.worker(idle, home=tmp_path / "home")
    async with again:
        pass
    async with house.worker(idle, home=tmp_path / "home"):
        for _ in range(2):
            with pytest.raises(Malformed, match="another worker"):
                await again.__aenter__()
