"""Signals: each heard once, in order, in the commit that records what came of it; and waits for what comes first."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from covenant import Json, Limits, Task
from covenant.agents import AgentContext, TaskFailed, agent, task
from covenant.model.error import Malformed
from covenant.model.message import Message, Part
from covenant.model.run import RunStatus
from tests.agents.conftest import Open
from tests.agents.house import House, pause

CAROL = "carol@lab"


@task("work")
async def work(n: int) -> int:
    return 10 * n


async def test_a_signal_is_waited_for_and_heard(house: House) -> None:
    @agent("hears")
    async def hears(ctx: AgentContext) -> list[Any]:
        first = await ctx.wait_for_signal("go")
        await pause(ctx)
        return [first, await ctx.wait_for_signal("stop")]

    async with house.worker(hears):
        run_id = await house.begin(hears)
        seen = await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert list(seen.awaits) == ["signal go"]
        await house.signal(run_id, "other", "is not waited for")
        assert (await house.alice.get_run(run_id)).status is RunStatus.AWAITING_INPUT
        await house.signal(run_id, "stop", {"a": [1]})
        await house.signal(run_id, "go")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [None, {"a": [1]}]


async def test_signals_are_heard_in_their_order(house: House) -> None:
    """Also those of one millisecond, and those that came before the run began."""

    @agent("hears")
    async def hears(ctx: AgentContext) -> list[int]:
        heard = [await ctx.wait_for_signal("n") for _ in range(5)]
        await pause(ctx)
        return heard + [await ctx.wait_for_signal("n") for _ in range(5)]

    run_id = await house.begin(hears)
    for n in range(7):
        await house.signal(run_id, "n", n)
    async with house.worker(hears):
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        for n in range(7, 10):
            await house.signal(run_id, "n", n)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == list(range(10))


async def test_a_pattern_hears_whatever_fits_oldest_first(house: House) -> None:
    @agent("hears")
    async def hears(ctx: AgentContext) -> list[Any]:
        one = [await ctx.wait_for_signal("user.*") for _ in range(2)]
        await pause(ctx)
        return [*one, await ctx.wait_for_signal("user.**")]

    run_id = await house.begin(hears)
    for name in ("user.a.deep", "other", "user.b", "user.a"):
        await house.signal(run_id, name, name)
    async with house.worker(hears):
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == ["user.b", "user.a", "user.a.deep"]


async def test_under_a_key_a_signal_is_told_once(house: House) -> None:
    @agent("hears")
    async def hears(ctx: AgentContext) -> list[Any]:
        first = await ctx.wait_for_signal("n")
        await pause(ctx)
        return [first, *await ctx.drain_signals("n")]

    async with house.worker(hears):
        run_id = await house.begin(hears)
        assert not await house.signal(run_id, "n", 1, key="k")
        assert await house.signal(run_id, "n", 1, key="k")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert await house.signal(run_id, "n", 1, key="k")
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [1]


async def test_when_the_time_is_over_a_wait_says_so_and_remembers_it(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> list[Any]:
        heard: list[Any] = []
        for _ in range(2):
            try:
                heard.append(await ctx.wait_for_signal("go", timeout_ms=1000))
            except TimeoutError:
                heard.append("late")
            await pause(ctx)
        return heard

    async with house.worker(waits):
        run_id = await house.begin(waits)
        seen = await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert seen.until_ms == house.clock.now_ms() + 1000
        house.clock.advance(1000)
        await house.paused(run_id)
        await house.signal(run_id, "go", "now it comes")
        await house.signal(run_id, "pause")
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == ["late", "now it comes"]


async def test_a_timeout_counts_from_when_the_wait_was_first_reached(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        async def go() -> str:
            try:
                return str(await ctx.wait_for_signal("go", timeout_ms=1000))
            except TimeoutError:
                return "late"

        return (await asyncio.gather(go(), ctx.wait_for_signal("other")))[0]

    async with house.worker(waits):
        run_id = await house.begin(waits)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        house.clock.advance(600)
        await house.signal(run_id, "other")
        seen = await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert seen.until_ms == house.clock.now_ms() + 400
        house.clock.advance(400)
        assert await house.result(run_id) == "late"


async def test_a_peek_is_bound_to_its_place(house: House) -> None:
    """What comes later was not there then, however often the function is called."""

    @agent("peeks")
    async def peeks(ctx: AgentContext) -> list[Any]:
        before = await ctx.has_signal("n")
        await pause(ctx)
        there = await ctx.has_signal("n")
        value = await ctx.wait_for_signal("n")
        after = await ctx.has_signal("n")
        await pause(ctx)
        return [before, there, value, after]

    async with house.worker(peeks):
        run_id = await house.begin(peeks)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "n", 1)
        await house.signal(run_id, "pause")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "n", 2)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [False, True, 1, False]


async def test_all_that_wait_are_drained_once(house: House) -> None:
    @agent("drains")
    async def drains(ctx: AgentContext) -> list[Any]:
        first = await ctx.drain_signals("n.*")
        await pause(ctx)
        second = await ctx.drain_signals("n.*")
        await pause(ctx)
        return [first, second, await ctx.drain_signals("n.*")]

    run_id = await house.begin(drains)
    for n in range(3):
        await house.signal(run_id, f"n.{n}", n)
    async with house.worker(drains):
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "n.x", 3)
        await house.signal(run_id, "pause")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [[0, 1, 2], [3], []]


async def test_more_than_one_commit_takes_are_drained_in_parts(open_house: Open) -> None:
    @agent("drains")
    async def drains(ctx: AgentContext) -> list[Any]:
        first = await ctx.drain_signals("n")
        await pause(ctx)
        return [first, await ctx.drain_signals("n")]

    house = await open_house(Limits(batch_max=3))
    run_id = await house.begin(drains)
    for n in range(5):
        await house.signal(run_id, "n", n)
    async with house.worker(drains):
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [[0, 1, 2], [3, 4]]


async def test_a_signal_is_typed(house: House) -> None:
    @agent("hears")
    async def hears(ctx: AgentContext) -> bool:
        return isinstance(await ctx.wait_for_signal("n", type=float), float)

    async with house.worker(hears):
        run_id = await house.begin(hears)
        await house.signal(run_id, "n", 1)
        assert await house.result(run_id) is True


async def test_a_run_begins_with_its_first_signal(house: House) -> None:
    """Start or signal, in one call; told again, it is the same run."""

    @agent("hears")
    async def hears(ctx: AgentContext) -> list[Any]:
        return [await ctx.wait_for_signal("n"), await ctx.wait_for_signal("n")]

    run_id = "00000000-0000-4000-8000-000000000001"
    start = Task(recipient=house.bob.agent, intent_text="hears", task_kind="hears", content=(Json(None),))
    async with house.worker(hears):
        first = await house.alice.signal_run(run_id, "n", 1, start=start)
        second = await house.alice.signal_run(run_id, "n", 2, start=start)
        assert (first.started, second.started) == (True, False)
        assert await house.result(run_id) == [1, 2]


# --- any of several ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["task", "signal", "timer"])
async def test_whatever_comes_first_is_told_and_remembered(house: House, comes: str) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> list[Any]:
        pending = ctx.task("look", 1, recipient=CAROL)
        first = await ctx.any_of(pending, ctx.signal("go"), ctx.timer(1000))
        await pause(ctx)
        return [first.index, first.value, len(first.rest)]

    async with house.worker(waits):
        run_id = await house.begin(waits)
        asked = await house.help()
        await house.until(run_id, RunStatus.AWAITING_WORK)
        if comes == "task":
            await asked.answers("seen")
        elif comes == "signal":
            await house.signal(run_id, "go", "on")
        else:
            house.clock.advance(1000)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        if comes != "signal":
            await house.signal(run_id, "go", "too late")
        await house.signal(run_id, "pause")
        expected = {"task": [0, "seen", 2], "signal": [1, "on", 2], "timer": [2, None, 2]}
        assert await house.result(run_id) == expected[comes]


async def test_a_task_that_fails_comes_first_too(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        with pytest.raises(TaskFailed, match="gone"):
            await ctx.any_of(ctx.task("look", 1, recipient=CAROL), ctx.signal("go"))
        return "caught"

    async with house.worker(waits):
        run_id = await house.begin(waits)
        await (await house.help()).fails("gone")
        assert await house.result(run_id) == "caught"


async def test_a_task_of_ones_own_is_one_of_several(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> list[Any]:
        first = await ctx.any_of(ctx.signal("go"), ctx.task("work", 4))
        return [first.index, first.value]

    assert (await house.through(waits, tasks=[work]))[1] == [1, 40]


async def test_the_same_several_are_waited_for_again_and_again(house: House) -> None:
    @agent("daemon")
    async def daemon(ctx: AgentContext) -> list[Any]:
        heard = []
        for _ in range(4):
            first = await ctx.any_of(ctx.signal("a"), ctx.signal("b"), ctx.timer(1000))
            heard.append([first.index, first.value])
        with pytest.raises(Malformed):
            await ctx.any_of()
        return heard

    async with house.worker(daemon):
        run_id = await house.begin(daemon)
        await house.signal(run_id, "b", 1)
        await house.signal(run_id, "a", 2)
        await house.signal(run_id, "a", 3)
        await house.until(run_id, is_so=lambda seen: not seen.signals)
        house.clock.advance(1000)
        assert await house.result(run_id) == [[1, 1], [0, 2], [0, 3], [2, None]]


# --- beside each other -------------------------------------------------------------------------------------


async def test_operations_beside_each_other_come_to_the_same(house: House) -> None:
    @agent("gathers")
    async def gathers(ctx: AgentContext) -> list[Any]:
        async def search(n: int) -> Any:
            found = await ctx.task("look", n, recipient=CAROL)
            told = await ctx.wait_for_signal(f"ok.{n}")
            await ctx.append("assistant", [n, found, told])
            return [found, told]

        return list(await asyncio.gather(*(search(n) for n in range(3))))

    async with house.worker(gathers):
        run_id = await house.begin(gathers)
        helps = {asked.input: asked for asked in [await house.help() for _ in range(3)]}
        for n in (2, 0, 1):
            await helps[n].answers(f"page {n}")
        for n in (1, 2, 0):
            await house.signal(run_id, f"ok.{n}", n)
        assert await house.result(run_id) == [[f"page {n}", n] for n in range(3)]
    told = [content for _, content in await house.told(run_id, every=True)]
    assert sorted(told) == [[n, f"page {n}", n] for n in range(3)]


async def test_another_place_goes_on_while_the_run_is_parked(house: House) -> None:
    """Only a function that is still here has another place: put away, it begins anew."""
    going = asyncio.Event()

    @agent("two places")
    async def two_places(ctx: AgentContext) -> list[Any]:
        async def outside() -> int:
            await going.wait()
            return int(await ctx.task("work", 7))

        return list(await asyncio.gather(ctx.wait_for_signal("go"), outside()))

    async with house.worker(two_places, tasks=[work]):
        run_id = await house.begin(two_places)
        await house.until(run_id)
        going.set()
        await house.signal(run_id, "go", "on")
        assert await house.result(run_id) == ["on", 70]


async def test_one_signal_is_for_one_of_two_places(house: House) -> None:
    @agent("two")
    async def two(ctx: AgentContext) -> list[Any]:
        async def first() -> Any:
            return (await ctx.any_of(ctx.signal("n"), ctx.signal("never"))).value

        return sorted(await asyncio.gather(first(), ctx.wait_for_signal("n"), ctx.wait_for_signal("*")))

    async with house.worker(two):
        run_id = await house.begin(two)
        for n in range(3):
            await house.until(run_id, is_so=lambda seen: not seen.signals)
            await house.signal(run_id, "n", n)
        assert await house.result(run_id) == [0, 1, 2]


# --- before the time is over --------------------------------------------------------------------------------


async def test_a_signal_that_waits_is_heard_before_a_time_of_nothing(house: House) -> None:
    """However short the time: what is there is there."""

    @agent("glances")
    async def glances(ctx: AgentContext) -> list[Any]:
        await pause(ctx)
        heard = [await ctx.wait_for_signal("a", timeout_ms=0), (await ctx.any_of(ctx.timer(0), ctx.signal("b"))).index]
        with pytest.raises(TimeoutError):
            await ctx.wait_for_signal("c", timeout_ms=0)
        return heard

    async with house.worker(glances):
        run_id = await house.begin(glances)
        await house.paused(run_id)
        for name in ("a", "b", "pause"):
            await house.signal(run_id, name, name)
        assert await house.result(run_id) == ["a", 1]


async def test_a_message_that_came_before_the_run_is_heard_before_a_time_of_nothing(house: House) -> None:
    @agent("glances")
    async def glances(ctx: AgentContext) -> str:
        return await ctx.wait_for_message(timeout_ms=0)

    run_id = await house.begin(glances)
    await house.say(run_id, "early")
    async with house.worker(glances):
        assert await house.result(run_id) == "early"


async def test_a_signal_in_time_is_heard_by_a_worker_that_comes_too_late(house: House) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> list[Any]:
        approved = await ctx.wait_for_signal("approve", timeout_ms=1000)
        first = await ctx.any_of(ctx.timer(1000), ctx.signal("again"))
        return [approved, first.index]

    run_id = await house.begin(waits)
    for name in ("approve", "again"):
        async with house.worker(waits):
            awaited = f"signal {name}"
            await house.until(run_id, is_so=lambda seen, awaited=awaited: awaited in seen.awaits)  # type: ignore[misc]
        await house.signal(run_id, name, 1)
        house.clock.advance(2000)
    async with house.worker(waits):
        assert await house.result(run_id) == [1, 1]


async def test_a_signal_that_was_seen_and_left_does_not_come_before_an_older_one(house: House) -> None:
    @agent("picks")
    async def picks(ctx: AgentContext) -> list[Any]:
        await pause(ctx)
        first = await ctx.any_of(ctx.signal("b"), ctx.signal("c"))
        return [first.value, *[await ctx.wait_for_signal("*") for _ in range(2)]]

    async with house.worker(picks):
        run_id = await house.begin(picks)
        await house.paused(run_id)
        for name in ("a", "b", "c", "pause"):
            await house.signal(run_id, name, name)
        assert await house.result(run_id) == ["b", "a", "c"]


# --- large ones --------------------------------------------------------------------------------------------


def _nested(depth: int) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = [value]
    return value


async def test_the_largest_signals_that_are_taken_are_heard(open_house: Open) -> None:
    @agent("hears")
    async def hears(ctx: AgentContext) -> list[bool]:
        heard = [await ctx.wait_for_signal("long"), await ctx.wait_for_signal("deep")]
        chosen = await ctx.any_of(ctx.signal("long"))
        await pause(ctx)
        return [heard == [long, deep], chosen.value == long]

    house = await open_house(Limits(content_bytes_max=5000))
    long, deep = "x" * 4998, _nested(64)
    run_id = await house.begin(hears)
    for name, value in (("long", long), ("deep", deep), ("long", long)):
        await house.signal(run_id, name, value)
    async with house.worker(hears):
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [True, True]


async def test_signals_that_are_too_much_for_one_commit_are_drained_in_parts(open_house: Open) -> None:
    @agent("drains")
    async def drains(ctx: AgentContext) -> list[list[int]]:
        parts = []
        while part := await ctx.drain_signals("n"):
            parts.append([len(value) for value in part])
        await pause(ctx)
        return parts

    house = await open_house(Limits(content_bytes_max=5000))
    run_id = await house.begin(drains)
    for size in (2000, 2000, 2000, 4998, 10):
        await house.signal(run_id, "n", "x" * size)
    async with house.worker(drains):
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [[2000, 2000], [2000], [4998], [10]]


async def test_a_long_message_of_several_parts_is_heard_once(open_house: Open) -> None:
    """Its text and its parts together are more than one value may be."""

    @agent("hears")
    async def hears(ctx: AgentContext) -> list[Any]:
        text = await ctx.wait_for_message()
        [drained] = await ctx.drain_signals("message")
        await pause(ctx)
        return [len(text), len(drained["text"]), drained["parts"][1]["data"], await ctx.has_signal("message")]

    house = await open_house(Limits(content_bytes_max=5000))
    run_id = await house.begin(hears)
    async with house.worker(hears):
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        for _ in range(2):
            await house.alice.add_message(run_id, _in_parts("x" * 3000, {"n": 1}))
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [3000, 3000, {"n": 1}, False]
    assert len(await house.entries(run_id)) == 2


def _in_parts(text: str, data: Any) -> Message:
    return Message(message_id=str(uuid.uuid4()), role="ROLE_USER", parts=(Part(text=text), Part(data=data)))
