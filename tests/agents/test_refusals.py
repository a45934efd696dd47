"""What the store refuses: the function hears of it where it asked, may catch it, and nothing else is lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from covenant import AgentId, Json, Limits, Result, Task, Text, WorkContext
from covenant.agents import (
    Agent,
    AgentContext,
    EffectFailed,
    PendingTask,
    RunFailed,
    TaskFailed,
    TaskRefused,
    agent,
    task,
)
from covenant.model.error import CovenantError, TooLarge
from covenant.rules.content_key import task_id, task_key
from covenant.testing import AgentTest
from covenant.testing.gate import Gate
from tests.agents.conftest import Open
from tests.agents.house import PATIENCE_S, House, content_of, pause
from tests.daemons import enrolled

CAROL = "carol@lab"


@task("work")
async def work(n: int) -> int:
    return 10 * n


async def _as_dan(house: House) -> AgentId:
    """Dan may answer, and nothing else."""
    house.tokens["dan@lab"] = (await enrolled(house.box, "dan@lab", "a2a.respond.*")).token
    return AgentId.named("dan@lab")


async def _begin(house: House, dan: AgentId, agent: Agent) -> str:
    sent = Task(
        id=str(uuid.uuid4()), recipient=dan, intent_text=agent.name, task_kind=agent.name, content=(Json(None),)
    )
    await house.alice.send_task(sent)
    return sent.id


async def _until_asked(house: House, run_id: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        entry = await house.alice.get_task(run_id)
        while entry.asks is None and entry.outcome is None:
            entry = await house.alice.wait_generation(run_id, entry.generation)


async def _told(house: House, run_id: str) -> list[Any]:
    return [content_of(entry) for entry in (await house.box.run_entries(run_id)).entries]


async def test_a_task_that_may_not_be_sent_has_failed(house: House, served: None) -> None:
    """Alone it: what stands beside it in the same commit is kept, and a second call finds the same refusal."""

    @agent("eager")
    async def eager(ctx: AgentContext) -> list[Any]:
        await ctx.append("user", "before")
        mine, theirs = ctx.task("work", 1), ctx.task("look", 1, recipient=CAROL)
        heard: list[Any] = []
        try:
            await ctx.join_all([mine, theirs])
        except TaskRefused as refused:
            heard.append(refused.code)
            await ctx.append("assistant", "may not")
        await pause(ctx)
        settled = await ctx.join_all_settled([mine, theirs, ctx.task("look", 2, recipient=CAROL)])
        return [*heard, *(one.status for one in settled), type(settled[2].error).__name__]

    dan = await _as_dan(house)
    async with house.worker(eager, tasks=[work], name="dan"):
        run_id = await _begin(house, dan, eager)
        await _until_asked(house, run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == ["missing_capability", "completed", "failed", "failed", "TaskRefused"]
    assert await _told(house, run_id) == ["before", "may not"]


async def test_many_that_may_not_be_sent_are_refused_at_once(house: House, served: None) -> None:
    @agent("eager")
    async def eager(ctx: AgentContext) -> list[str]:
        settled = await ctx.join_all_settled([ctx.task("look", n, recipient=CAROL) for n in range(50)])
        return sorted({one.error.code for one in settled})

    dan = await _as_dan(house)
    async with house.worker(eager, name="dan"):
        assert await house.result(await _begin(house, dan, eager)) == ["missing_capability"]
    denied = [row for row in await house.box.recent_audit(1000) if row.passed is False]
    assert len(denied) == 1


async def test_a_run_that_ends_with_what_may_not_be_sent_has_failed_and_keeps_its_tail(
    house: House, served: None
) -> None:
    """Nobody can hear it any more: it must not look as if it had been done."""

    @agent("hasty")
    async def hasty(ctx: AgentContext) -> str:
        await ctx.append("user", "the tail")
        ctx.task("look", 1, recipient=CAROL)
        return "done"

    dan = await _as_dan(house)
    async with house.worker(hasty, name="dan"):
        run_id = await _begin(house, dan, hasty)
        assert "missing_capability" in await house.failure(run_id)
    assert await _told(house, run_id) == ["the tail"]


async def test_a_recipient_that_is_nobody_is_heard_of_beside_a_checkpoint(house: House, served: None) -> None:
    @agent("lost")
    async def lost(ctx: AgentContext) -> list[Any]:
        if ctx.state is None:
            ctx.task("look", 1, recipient="nobody@lab")
            await ctx.checkpoint({"phase": 2})
        await pause(ctx)
        with pytest.raises(TaskFailed):
            await ctx.task("look", 1, recipient="nobody@lab")
        return [ctx.state, ctx.checkpoints]

    assert (await house.through(lost))[1] == [{"phase": 2}, 1]


async def test_a_task_under_a_taken_key_behind_a_checkpoint_can_be_caught(house: House) -> None:
    @agent("careless")
    async def careless(ctx: AgentContext) -> str:
        if ctx.state is None:
            assert await ctx.task("work", 1, key="mine") == 10
            await ctx.checkpoint({})
            await pause(ctx)
        try:
            await ctx.task("work", 2, key="mine")
        except TaskRefused as refused:
            return refused.code
        return "taken"

    assert (await house.through(careless, tasks=[work]))[1] == "task_conflict"


async def test_a_task_that_makes_no_sense_has_failed(house: House) -> None:
    @agent("odd")
    async def odd(ctx: AgentContext) -> str:
        try:
            await ctx.task("x" * 1000, 1, recipient=CAROL)
        except TaskRefused as refused:
            return refused.code
        return "sent"

    assert (await house.through(odd))[1] == "too_large"


def _too_much(ctx: AgentContext) -> dict[str, Callable[[], Any]]:
    big = "x" * 2000
    return {
        "an entry": lambda: ctx.append("user", big),
        "a deep entry": lambda: ctx.append("user", [[[[[[[[[["deep"]]]]]]]]]]),
        "a word": lambda: ctx.say(big),
        "a state": lambda: ctx.checkpoint({"big": big}),
        "an effect": lambda: ctx.run("big", lambda: big),
    }


async def test_what_is_too_much_is_refused_where_it_is_given(open_house: Open) -> None:
    house = await open_house(Limits(content_bytes_max=1000, content_depth_max=8))

    @agent("much")
    async def much(ctx: AgentContext) -> list[str]:
        refused = []
        assert ctx.state is None
        for name, operation in _too_much(ctx).items():
            try:
                await operation()
            except (CovenantError, EffectFailed):
                refused.append(name)
        try:
            ctx.task("work", "x" * 2000, recipient=CAROL)
        except CovenantError:
            refused.append("a task")
        await ctx.append("user", "after")
        await pause(ctx)
        return refused

    run_id, refused = await house.through(much)
    assert refused == ["an entry", "a deep entry", "a word", "a state", "an effect", "a task"]
    assert await house.told(run_id) == [("user", "after")]


def _misnamed(ctx: AgentContext) -> dict[str, Callable[[], Any]]:
    long = "x" * 2000
    return {
        "a turn": lambda: ctx.set_turn(long),
        "a blank turn": lambda: ctx.set_turn(" "),
        "an odd turn": lambda: ctx.set_turn("\ud800"),
        "a key": lambda: ctx.append("user", 1, key=long),
        "a blank key": lambda: ctx.say("x", key=""),
        "an effect": lambda: ctx.run(long, lambda: 1),
        "a blank effect": lambda: ctx.run("", lambda: 1),
        "a signal": lambda: ctx.wait_for_signal(long),
        "a blank signal": lambda: ctx.any_of(ctx.signal(""), ctx.timer(0)),
        "a time": lambda: ctx.sleep(10**18),
    }


async def test_names_that_are_none_are_refused_where_they_are_given(house: House) -> None:
    @agent("names")
    async def names(ctx: AgentContext) -> list[str]:
        refused = []
        await ctx.append("user", "before")
        for name, operation in _misnamed(ctx).items():
            try:
                done = operation()
                if done is not None:
                    await done
            except CovenantError:
                refused.append(name)
        await pause(ctx)
        return refused

    run_id, refused = await house.through(names)
    assert len(refused) == 10
    assert await house.told(run_id) == [("user", "before")]


async def test_more_than_one_commit_carries_is_done_in_several(open_house: Open) -> None:
    """What no operation could be refused for: there is room made for it."""
    house = await open_house(Limits(batch_max=5))

    @agent("much")
    async def much(ctx: AgentContext) -> list[Any]:
        theirs: list[PendingTask] = []
        mine: list[PendingTask] = []
        for n in range(12):
            theirs.append(ctx.task("look", n, recipient=CAROL))
            mine.append(ctx.task("work", n))
            await ctx.run("keep", lambda: None)
        joined = len(await ctx.join_all(mine))
        for pending in theirs:
            await pending.cancel()
        settled = await ctx.join_all_settled(theirs)
        times = [await ctx.now() for _ in range(50)]
        done = [await ctx.run("count", lambda: 1, idempotent=True) for _ in range(50)]
        await pause(ctx)
        heard = 0
        while (await ctx.any_of(ctx.signal("a"), ctx.timer(0))).index == 0:
            heard += 1
        return [joined, {one.status for one in settled}, len(times), sum(done), heard]

    async with house.worker(much, tasks=[work]):
        run_id = await house.begin(much)
        await house.paused(run_id)
        for n in range(12):
            await house.signal(run_id, "a", n)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [12, ["canceled"], 50, 50, 12]


async def test_what_no_commit_carries_is_refused_where_it_is_given(open_house: Open) -> None:
    """The function waits in between, and goes on."""
    house = await open_house(Limits(batch_max=5, entries_max=11))

    @agent("many")
    async def many(ctx: AgentContext) -> list[int]:
        refused = []
        for n in range(14):
            try:
                await ctx.append("user", n)
            except TooLarge:
                refused.append(n)
                await pause(ctx)
        asked = []
        for n in range(6):
            try:
                asked.append(ctx.task("work", n))
            except TooLarge:
                refused.append(n)
        return [*refused, len(await ctx.join_all(asked))]

    run_id, refused = await house.through(many, tasks=[work])
    assert refused == [5, 11, 13, 5, 5]
    entries = (await house.bob.run_entries(run_id, 100)).entries
    assert [content_of(entry) for entry in entries] == [n for n in range(14) if n not in (5, 11, 13)]


@pytest.mark.parametrize("beside", ["an entry", "a signal"])
async def test_all_that_waits_is_drained_beside_what_was_noted_before(open_house: Open, beside: str) -> None:
    house = await open_house(Limits(batch_max=5))

    @agent("drains")
    async def drains(ctx: AgentContext) -> int:
        await pause(ctx)
        if beside == "an entry":
            await ctx.run("keep", lambda: None)  # that it has paused
            await ctx.append("user", "one")
        return len(await ctx.drain_signals("message"))

    async with house.worker(drains):
        run_id = await house.begin(drains)
        await house.paused(run_id)
        for n in range(5):
            await house.say(run_id, str(n))
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == 5


async def test_a_message_that_waits_is_heard_beside_all_the_entries_that_a_commit_carries(open_house: Open) -> None:
    house = await open_house(Limits(batch_max=5))

    @agent("hears")
    async def hears(ctx: AgentContext) -> str:
        await pause(ctx)
        await ctx.run("keep", lambda: None)  # that it has paused
        for n in range(5):
            await ctx.append("user", n)
        return await ctx.wait_for_message(timeout_ms=0)

    async with house.worker(hears):
        run_id = await house.begin(hears)
        await house.paused(run_id)
        await house.say(run_id, "well?")
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == "well?"


async def test_what_was_noted_while_a_commit_was_refused_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    committing, noted, change = asyncio.Event(), asyncio.Event(), Gate._change

    async def waits_for_a_note(gate: Gate, name: str, act: Callable[[], Any]) -> Any:
        if name == "CommitRun" and not committing.is_set():
            committing.set()
            await noted.wait()
        return await change(gate, name, act)

    monkeypatch.setattr(Gate, "_change", waits_for_a_note)

    @agent("both")
    async def both(ctx: AgentContext) -> str:
        async def beside() -> None:
            await committing.wait()
            await ctx.append("user", "meanwhile")
            noted.set()

        going = asyncio.create_task(beside())
        try:
            await ctx.task("x" * 1000, 1, recipient=CAROL)
        except TaskRefused:
            await going
            return "refused"
        return "sent"

    async with AgentTest(agents=[both]) as test, asyncio.timeout(10):
        run = await test.start(both)
        assert await run.result() == "refused"
        assert [content_of(entry) for entry in await test.entries(run)] == ["meanwhile"]


async def test_what_is_to_be_kept_while_a_commit_is_refused_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is gone that one place waits for; meanwhile another wants a commit, with nothing new in it."""
    committing, asked, change = asyncio.Event(), asyncio.Event(), Gate._change
    is_gone = False

    async def waits_for_a_flush(gate: Gate, name: str, act: Callable[[], Any]) -> Any:
        if name == "CommitRun" and is_gone and not committing.is_set():
            committing.set()
            await asked.wait()
        return await change(gate, name, act)

    monkeypatch.setattr(Gate, "_change", waits_for_a_flush)

    @agent("both")
    async def both(ctx: AgentContext) -> list[str]:
        pending = ctx.task("look", 1, recipient=CAROL)
        await pending
        await ctx.checkpoint({})
        await ctx.wait_for_signal("go")
        await ctx.run("keep", lambda: None)
        nonlocal is_gone
        is_gone = True

        async def beside() -> None:
            await committing.wait()
            flushing = asyncio.create_task(ctx._run.waits.flush())
            await asyncio.sleep(0)
            asked.set()
            await flushing

        going = asyncio.create_task(beside())
        try:
            await pending
        except TaskRefused as refused:
            await going
            return [refused.code]
        return ["there"]

    limits = Limits(retention_ms=1000, dedup_ms=1000)
    async with AgentTest(agents=[both], limits=limits) as test, asyncio.timeout(10):
        run = await test.start(both)
        carol = test.box.of(CAROL)
        (taken,) = await carol.recv_tasks(1)
        await carol.send_result(Result.ok(taken, [Text("seen")]))
        await test.until_parked(run)
        await test.advance(10_000)
        await test.box.compact()
        await test.signal(run, "go")
        assert await run.result() == ["result_gone"]


async def test_a_refusal_that_is_not_caught_ends_the_run(house: House) -> None:
    @agent("endless")
    async def endless(ctx: AgentContext) -> None:
        for n in range(2000):
            await ctx.append("user", n)

    with pytest.raises(RunFailed, match="at most 1000 entries"):
        await house.through(endless)


async def test_a_result_that_cannot_be_kept_has_failed(open_house: Open) -> None:
    """What a task of its own came to is the task's fault, and not the end of the run."""
    house = await open_house(Limits(content_bytes_max=1000, content_depth_max=8))
    results: dict[str, Any] = {
        "big": "x" * 2000,
        "at the edge": ["x" * 960],
        "deep": [[[[[[[[[["deep"]]]]]]]]]],
        "odd": "a\ud800b",
        "odd inside": {"a": "\udfff"},
        "no number": [float("nan")],
    }
    edge = len(msgspec.json.encode([Json(results["at the edge"])]))
    results["at the edge"][0] += "x" * (1001 - edge)

    @task("make")
    async def make(name: str) -> Any:
        return results[name]

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[str]:
        await ctx.append("user", "before")
        failed = []
        for name in results:
            try:
                await ctx.task("make", name)
            except TaskFailed as caught:
                failed.append(name)
                assert caught.message
        return failed

    run_id, failed = await house.through(asks, tasks=[make])
    assert failed == list(results)
    assert await house.told(run_id) == [("user", "before")]


async def test_an_agent_answers_its_own_tasks_without_a_grant(house: House, served: None) -> None:
    """As it sends them: also where the result is told beside, and where it is more than a result."""
    begun, told = asyncio.Event(), asyncio.Event()

    @task("show")
    async def show(work: WorkContext, n: int) -> int:
        begun.set()
        await work.update("half way")
        return 10 * n

    @task("refuse")
    async def refuse(work: WorkContext, n: int) -> None:
        work.reject("not mine")

    @agent("slow")
    async def slow(ctx: AgentContext) -> list[Any]:
        shown = await ctx.task("show", 1)
        await told.wait()
        [refused] = await ctx.join_all_settled([ctx.task("refuse", 1)])
        return [shown, str(refused.error)]

    house.tokens["dan@lab"] = (await enrolled(house.box, "dan@lab", "a2a.respond.alice@lab")).token
    async with house.worker(slow, tasks=[show, refuse], name="dan", grace_ms=0):
        run_id = await _begin(house, AgentId.named("dan@lab"), slow)
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        shown = await house.until_task(task_id(task_key(run_id, "show", 1)), lambda entry: entry.outcome is not None)
        told.set()
        assert await house.result(run_id) == [10, "rejected: not mine"]
    assert shown.attempt == 1


# --- more than a daemon takes at once ----------------------------------------------------------------------

_LARGE = 3 * 1024 * 1024


async def test_large_entries_go_in_as_many_commits_as_they_need(house: House) -> None:
    @agent("writes")
    async def writes(ctx: AgentContext) -> str:
        for n in range(3):
            await ctx.append("assistant", str(n) * _LARGE)
        await pause(ctx)
        await ctx.append("assistant", "x" * _LARGE)
        await ctx.checkpoint("y" * _LARGE)
        await ctx.append("assistant", "x" * _LARGE)
        await ctx.say("x" * _LARGE)
        return "z" * _LARGE

    _, result = await house.through(writes)
    assert result == "z" * _LARGE


async def test_large_results_of_own_tasks_are_told(house: House) -> None:
    @task("make")
    async def make(n: int) -> str:
        return str(n) * _LARGE

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[int]:
        made = await ctx.join_all([ctx.task("make", n) for n in range(4)])
        return [int(one[0]) for one in made if len(one) == _LARGE]

    assert (await house.through(asks, tasks=[make]))[1] == [0, 1, 2, 3]


async def test_tasks_that_are_too_much_for_one_commit_are_refused_where_they_are_asked_for(house: House) -> None:
    @task("measure")
    async def measure(text: str) -> int:
        return len(text)

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[int]:
        asked = [ctx.task("measure", letter * _LARGE) for letter in "a"]
        with pytest.raises(TooLarge, match="wait for something in between"):
            ctx.task("measure", "b" * _LARGE)
        sizes = await ctx.join_all(asked)
        await pause(ctx)
        return [*sizes, await ctx.task("measure", "b" * _LARGE)]

    assert (await house.through(asks, tasks=[measure]))[1] == [_LARGE, _LARGE]
