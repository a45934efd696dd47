"""Tasks of a run: which is the same, who does it, how often, how long; and how several are waited for."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from covenant import Limits, Text, WorkContext, Worker
from covenant.agents import (
    AgentContext,
    AllTasksFailed,
    Fatal,
    RunFailed,
    Settled,
    TaskFailed,
    agent,
    task,
)
from covenant.model.error import Malformed, TaskConflict
from covenant.model.message import Message, Part
from covenant.model.record import Outcome, TaskState
from covenant.model.run import RunStatus
from covenant.rules.content_key import task_id, task_key
from tests.agents.conftest import Open
from tests.agents.house import PATIENCE_S, House, pause

CAROL = "carol@lab"


@task("work")
async def work(n: int) -> int:
    if n < 0:
        raise ValueError(f"not {n}")
    return 10 * n


# --- the same and another ----------------------------------------------------------------------------------


async def test_the_same_content_is_the_same_task_in_the_whole_run(house: House) -> None:
    @agent("asks")
    async def asks(ctx: AgentContext) -> list[str]:
        first = ctx.task("look", {"a": 1, "b": 2}, recipient=CAROL)
        await first
        await pause(ctx)
        return [first.id, ctx.task("look", {"b": 2, "a": 1}, recipient=CAROL).id]

    async with house.worker(asks), Worker(house.carol, lambda _: "seen"):
        run_id = await house.begin(asks)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        first, again = await house.result(run_id)
    assert first == again == task_id(task_key(run_id, "look", {"a": 1, "b": 2}))


async def test_an_instance_tells_intended_duplicates_apart_and_a_key_takes_the_place_of_the_input(house: House) -> None:
    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        tasks = [
            ctx.task("work", 1),
            ctx.task("work", 1, instance=1),
            ctx.task("work", 1, instance=2),
            ctx.task("work", 1, key="mine"),
            ctx.task("work", 1, key="mine"),
        ]
        results = await ctx.join_all(tasks)
        await pause(ctx)
        return [[pending.id for pending in tasks], results]

    _, (ids, results) = await house.through(asks, tasks=[work])
    assert results == [10] * 5
    assert len(set(ids)) == 4 and ids[3] == ids[4]


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_key_with_another_input_is_an_error(house: House, is_paused: bool) -> None:
    @agent("careless")
    async def careless(ctx: AgentContext) -> str:
        assert await ctx.task("work", 1, key="mine") == 10
        if is_paused:
            await pause(ctx)
        with pytest.raises(TaskConflict):
            ctx.task("work", 2, key="mine")
        return "caught"

    assert (await house.through(careless, tasks=[work]))[1] == "caught"


async def test_a_key_with_another_input_behind_a_checkpoint_is_an_error(house: House) -> None:
    """Nothing here remembers the input of then: the store does."""

    @agent("careless")
    async def careless(ctx: AgentContext) -> Any:
        if ctx.state is None:
            assert await ctx.task("work", 1, key="mine") == 10
            await ctx.checkpoint({})
            await pause(ctx)
        return await ctx.task("work", 2, key="mine")

    with pytest.raises(RunFailed, match=r"another input|other content"):
        await house.through(careless, tasks=[work])


async def test_a_task_that_is_never_awaited_is_sent_all_the_same(house: House) -> None:
    @agent("forgets")
    async def forgets(ctx: AgentContext) -> str:
        return ctx.task("look", 1, recipient=CAROL).id

    async with house.worker(forgets):
        run_id = await house.begin(forgets)
        asked = await house.help()
        assert asked.task.id == await house.result(run_id)
    assert (asked.task.parent, asked.task.sender, asked.input) == (run_id, house.bob.agent, 1)


# --- who does it -------------------------------------------------------------------------------------------


async def test_a_plain_worker_of_another_agent_does_a_task(house: House) -> None:
    async def looks(work: WorkContext) -> Any:
        if work.text.startswith("look 3"):
            raise ValueError("it is gone")
        return [Text("a"), Text("b")] if work.text.startswith("look 2") else "one"

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        found = [await ctx.task("look", n, recipient=CAROL) for n in (1, 2)]
        await pause(ctx)
        try:
            await ctx.task("look", 3, recipient=house.carol.agent)
        except TaskFailed as failed:
            found.append([failed.kind, failed.message, failed.is_canceled, failed.is_timeout])
        return found

    async with Worker(house.carol, looks):
        _, result = await house.through(asks)
    assert result == ["one", ["a", "b"], ["look", "it is gone", False, False]]


async def test_workers_of_one_agent_may_have_different_functions(house: House, everywhere: None) -> None:
    """Each gets what it has functions for: nothing goes to and fro between them as one attempt after the other."""

    @task("saw")
    async def saw(n: int, /) -> int:
        return 2 * n

    @agent("builder")
    async def builder(ctx: AgentContext) -> list[int]:
        return await ctx.join_all([ctx.task("saw", n) for n in range(3)])

    @agent("other")
    async def other(ctx: AgentContext) -> str:
        return str(await ctx.wait_for_signal("go"))

    async with house.worker(other), house.worker(tasks=[saw]), house.worker(builder):
        runs = [await house.begin(builder) for _ in range(3)]
        waiting = await house.begin(other)
        assert [await house.result(run_id) for run_id in runs] == 3 * [[0, 2, 4]]
        await house.signal(waiting, "go", "on")
        assert await house.result(waiting) == "on"
    for run_id in runs:
        root = (await house.box.task_tree(run_id)).root
        assert [node.entry and node.entry.attempt for node in (root, *root.children)] == [1, 1, 1, 1]


async def test_what_nobody_has_a_function_for_waits_for_one_who_has(house: House) -> None:
    @agent("known")
    async def known(ctx: AgentContext) -> str:
        return "done"

    @agent("late")
    async def late(ctx: AgentContext) -> str:
        return "at last"

    async with house.worker(known):
        waiting = await house.begin(late)
        assert await house.result(await house.begin(known)) == "done"
        entry = await house.box.get_task(waiting)
        assert (entry.state, entry.attempt, entry.generation) == (TaskState.QUEUED, 0, 1)
        async with house.worker(late):
            assert await house.result(waiting) == "at last"


async def test_tasks_of_ones_own_are_done_beside_each_other(house: House) -> None:
    meeting = asyncio.Barrier(3)

    @task("meet")
    async def meet(n: int) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await meeting.wait()
        return n

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[int]:
        return await ctx.join_all([ctx.task("meet", n) for n in range(3)])

    assert (await house.through(asks, tasks=[meet]))[1] == [0, 1, 2]


async def test_a_plain_function_does_tasks_in_a_thread(house: House) -> None:
    @task("double")
    def double(n: int) -> int:
        return 2 * n

    @task("nothing")
    def nothing() -> None:
        return None

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        return [await ctx.task("double", 4), await ctx.task("nothing")]

    assert (await house.through(asks, tasks=[double, nothing]))[1] == [8, None]


async def test_a_task_gets_its_context_and_its_key(house: House) -> None:
    @task("who", idempotent=True)
    async def who(work: WorkContext, _: Any) -> list[Any]:
        return [work.task.id, work.idempotency_key, work.duplicate_safety, work.attempt]

    @agent("asks")
    async def asks(ctx: AgentContext) -> Any:
        return await ctx.task("who", 1)

    run_id, result = await house.through(asks, tasks=[who])
    key = task_key(run_id, "who", 1)
    assert result == [task_id(key), key, "idempotent", 1]


async def test_tasks_and_signals_are_waited_for_beside_each_other(house: House) -> None:
    """A task of one's own that somebody waits for while another place waits for a signal."""

    @agent("both")
    async def both(ctx: AgentContext) -> list[Any]:
        pending = ctx.task("work", 4)
        return list(await asyncio.gather(ctx.wait_for_signal("go"), ctx.join_all([pending])))

    async with house.worker(both, tasks=[work]):
        run_id = await house.begin(both)
        await house.until(run_id)
        await house.signal(run_id, "go", "on")
        assert await house.result(run_id) == ["on", [40]]


# --- how long and how often --------------------------------------------------------------------------------


async def test_a_task_that_nobody_does_in_time_has_failed(house: House) -> None:
    @agent("hurries")
    async def hurries(ctx: AgentContext) -> list[Any]:
        try:
            await ctx.task("look", 1, recipient=CAROL, timeout_ms=1000)
        except TaskFailed as failed:
            await pause(ctx)
            return [failed.is_timeout, failed.is_canceled]
        return []

    async with house.worker(hurries):
        run_id = await house.begin(hurries)
        await house.until(run_id, RunStatus.AWAITING_WORK)
        house.clock.advance(999)
        assert (await house.alice.get_run(run_id)).status is RunStatus.AWAITING_WORK
        house.clock.advance(1)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [True, False]


async def test_a_timeout_counts_from_when_the_task_was_first_asked_for(house: House) -> None:
    @agent("hurries")
    async def hurries(ctx: AgentContext) -> str:
        pending = ctx.task("look", 1, recipient=CAROL, timeout_ms=1000)
        await pause(ctx)
        return str(await pending)

    async with house.worker(hurries):
        run_id = await house.begin(hurries)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        deadline = house.clock.now_ms() + 1000
        house.clock.advance(500)
        await house.signal(run_id, "pause")
        asked = await house.help()
        assert asked.task.deadline_ms == deadline
        await asked.answers("seen")
        assert await house.result(run_id) == "seen"


async def test_what_the_sender_says_about_duplicates_and_attempts_holds(house: House) -> None:
    tried = []

    @task("flaky", idempotent=True, attempts=5)
    async def flaky(work: WorkContext, n: int) -> int:
        tried.append((n, work.attempt, work.duplicate_safety))
        raise ValueError("never")

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        settled = await ctx.join_all_settled(
            [
                ctx.task("flaky", 1, attempts=2, backoff_ms=0),
                ctx.task("flaky", 2, idempotent=False),
            ]
        )
        return [one.status for one in settled]

    assert (await house.through(asks, tasks=[flaky]))[1] == ["failed", "failed"]
    assert sorted(tried) == [(1, 1, "idempotent"), (1, 2, "idempotent"), (2, 1, "unsafe")]


async def test_what_is_fatal_is_not_tried_again(house: House) -> None:
    tried = []

    @task("doomed", idempotent=True, attempts=5)
    async def doomed(n: int) -> None:
        tried.append(n)
        raise Fatal("give it up")

    @agent("asks")
    async def asks(ctx: AgentContext) -> str:
        with pytest.raises(TaskFailed, match="give it up"):
            await ctx.task("doomed", 1)
        return "caught"

    assert (await house.through(asks, tasks=[doomed]))[1] == "caught"
    assert tried == [1]


def test_what_may_not_be_done_twice_has_one_attempt() -> None:
    with pytest.raises(ValueError, match="idempotent"):
        task("x", attempts=2)(lambda: None)


# --- several -----------------------------------------------------------------------------------------------


async def test_a_join_is_in_the_order_of_its_tasks(house: House) -> None:
    @agent("joins")
    async def joins(ctx: AgentContext) -> list[Any]:
        tasks = [ctx.task("look", n, recipient=CAROL) for n in range(3)]
        joined = await ctx.join_all(tasks)
        await pause(ctx)
        return [joined, await ctx.join_all(tasks[::-1]), await ctx.join_all([])]

    async with house.worker(joins):
        run_id = await house.begin(joins)
        helps = {asked.input: asked for asked in [await house.help() for _ in range(3)]}
        for n in (2, 0, 1):
            await house.until(run_id, RunStatus.AWAITING_WORK)
            await helps[n].answers(n)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [[0, 1, 2], [2, 1, 0], []]


async def test_a_join_fails_with_the_first_failure_and_remembers_it(house: House) -> None:
    @agent("joins")
    async def joins(ctx: AgentContext) -> list[Any]:
        tasks = [ctx.task("look", n, recipient=CAROL) for n in range(3)]
        try:
            await ctx.join_all(tasks)
        except TaskFailed as failed:
            await ctx.append("assistant", failed.message)
            await pause(ctx)
            return [tasks.index(next(t for t in tasks if t.id == failed.task_id)), failed.message]
        return []

    async with house.worker(joins):
        run_id = await house.begin(joins)
        helps = {asked.input: asked for asked in [await house.help() for _ in range(3)]}
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await helps[2].fails("two is broken")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await helps[0].fails("so is zero")
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [2, "two is broken"]
    assert await house.told(run_id, every=True) == [("assistant", "two is broken")]


async def test_a_join_of_ones_own_tasks_fails_with_the_first_failure(house: House) -> None:
    """It does not wait for the others, which go on."""
    slow = asyncio.Event()

    @task("slow")
    async def slowly(n: int) -> int:
        await slow.wait()
        return n

    @agent("joins")
    async def joins(ctx: AgentContext) -> str:
        with pytest.raises(TaskFailed, match="not -1"):
            await ctx.join_all([ctx.task("slow", 1), ctx.task("work", -1)])
        slow.set()
        return str(await ctx.task("slow", 1))

    assert (await house.through(joins, tasks=[slowly, work]))[1] == "1"


async def test_all_settled_tells_how_each_ended(house: House) -> None:
    @agent("settles")
    async def settles(ctx: AgentContext) -> list[Any]:
        tasks = [ctx.task("look", n, recipient=CAROL) for n in range(3)]
        await ctx.append("assistant", "asked")
        await ctx.wait_for_signal("go")
        await ctx.cancel(tasks[2])
        settled: list[Settled] = await ctx.join_all_settled(tasks)
        await pause(ctx)
        again = await ctx.join_all_settled(tasks)
        assert [one.status for one in again] == [one.status for one in settled]
        assert await ctx.join_all_settled([]) == []
        return [[one.status, one.value, one.is_ok, one.error and one.error.message] for one in settled]

    async with house.worker(settles):
        run_id = await house.begin(settles)
        helps = {asked.input: asked for asked in [await house.help() for _ in range(3)]}
        await helps[1].answers("seen")
        await helps[0].fails("broken")
        await house.signal(run_id, "go")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.signal(run_id, "pause")
        result = await house.result(run_id)
    assert result == [
        ["failed", None, False, "broken"],
        ["completed", "seen", True, None],
        ["canceled", None, False, "canceled: by its run"],
    ]


async def test_of_several_the_first_that_succeeds_is_selected(house: House) -> None:
    @agent("selects")
    async def selects(ctx: AgentContext) -> list[Any]:
        tasks = [ctx.task("look", n, recipient=CAROL) for n in range(3)]
        first = await ctx.select(tasks)
        second = await ctx.select(list(first.rest))
        return [first.index, first.value, second.index, second.value, [t.id == tasks[0].id for t in second.rest]]

    async with house.worker(selects):
        run_id = await house.begin(selects)
        helps = {asked.input: asked for asked in [await house.help() for _ in range(3)]}
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await helps[0].fails()
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await helps[2].answers("two")
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await helps[1].answers("one")
        assert await house.result(run_id) == [2, "two", 1, "one", [True]]


async def test_when_all_fail_select_says_how(house: House) -> None:
    @agent("selects")
    async def selects(ctx: AgentContext) -> list[str]:
        tasks = [ctx.task("work", -1), ctx.task("look", 2, recipient=CAROL)]
        for _ in range(2):
            try:
                await ctx.select(tasks)
            except AllTasksFailed as failed:
                messages = [one.message for one in failed.failures]
            await pause(ctx)
        with pytest.raises(Malformed):
            await ctx.select([])
        return messages

    async with house.worker(selects, tasks=[work]):
        run_id = await house.begin(selects)
        await (await house.help()).fails("gone")
        for _ in range(2):
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            await house.signal(run_id, "pause")
        assert await house.result(run_id) == ["ValueError: not -1", "gone"]


# --- cancel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["scheduled", "queued", "running", "finished"])
async def test_a_task_is_canceled_wherever_it_is(house: House, when: str) -> None:
    @agent("cancels")
    async def cancels(ctx: AgentContext) -> str:
        pending = ctx.task("look", 1, recipient=CAROL)
        if when != "scheduled":
            await ctx.wait_for_signal("go")
        await ctx.cancel(pending)
        await pause(ctx)
        await pending.cancel()
        try:
            return str(await pending)
        except TaskFailed as failed:
            return "canceled" if failed.is_canceled else "failed"

    async with house.worker(cancels):
        run_id = await house.begin(cancels)
        if when != "scheduled":
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            if when in ("running", "finished"):
                asked = await house.help()
            if when == "finished":
                await asked.answers("seen")
            await house.signal(run_id, "go")
        while (await house.until(run_id, RunStatus.AWAITING_INPUT, RunStatus.ENDED)).outcome is None:
            await house.signal(run_id, "pause")
        assert await house.result(run_id) == ("seen" if when == "finished" else "canceled")
    child = await house.box.get_task(task_id(task_key(run_id, "look", 1)))
    assert child.outcome is (Outcome.ANSWERED if when == "finished" else Outcome.CANCELED)


async def test_a_task_of_ones_own_is_canceled_while_it_is_done(house: House) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @task("endless")
    async def endless(_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @agent("cancels")
    async def cancels(ctx: AgentContext) -> str:
        pending = ctx.task("endless", 1)

        async def give_up() -> None:
            await begun.wait()
            await ctx.cancel(pending)

        giving_up = asyncio.create_task(give_up())
        try:
            await pending
        except TaskFailed as failed:
            await giving_up
            return "canceled" if failed.is_canceled else failed.message
        return "done"

    assert (await house.through(cancels, tasks=[endless]))[1] == "canceled"
    assert ended.is_set()


async def test_what_is_canceled_elsewhere_is_heard(house: House) -> None:
    """The operator ends a task of the run."""

    @agent("asks")
    async def asks(ctx: AgentContext) -> str:
        with pytest.raises(TaskFailed) as caught:
            await ctx.task("look", 1, recipient=CAROL)
        return f"{caught.value.is_canceled}"

    async with house.worker(asks):
        run_id = await house.begin(asks)
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await house.box.cancel_task(task_id(task_key(run_id, "look", 1)), reason="no")
        assert await house.result(run_id) == "True"


async def test_the_end_of_a_run_leaves_its_tasks_to_their_fate(house: House) -> None:
    @agent("leaves")
    async def leaves(ctx: AgentContext) -> str:
        return ctx.task("look", 1, recipient=CAROL).id

    async with house.worker(leaves):
        run_id = await house.begin(leaves)
        child = await house.result(run_id)
    asked = await house.help()
    await asked.answers("late")
    assert (await house.box.get_task(child)).state is TaskState.RESOLVED
    assert await house.bob.try_recv_result_for() is None


@pytest.mark.parametrize("way", ["join_all", "join_all_settled"])
async def test_results_that_one_answer_does_not_carry_are_joined(open_house: Open, way: str) -> None:
    """What is there already is not asked for again: the rest would never come."""
    house = await open_house(Limits(page_bytes_max=3000))

    @agent("gathers")
    async def gathers(ctx: AgentContext) -> int:
        asked = [ctx.task("look", n, recipient=CAROL) for n in range(10)]
        return len(await getattr(ctx, way)(asked))

    async with house.worker(gathers), Worker(house.carol, lambda _: "x" * 1000), asyncio.timeout(PATIENCE_S):
        run_id = await house.begin(gathers)
        assert await house.result(run_id) == 10
        assert (await house.bob.get_run(run_id)).step < 20


# --- functions that end in another way ---------------------------------------------------------------------


class Panic(BaseException):
    """As extensions raise it that are written in another language."""


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_task_whose_function_fails_of_anything_has_failed(house: House, idempotent: bool) -> None:
    @task("break", idempotent=idempotent)
    async def breaks(how: str) -> None:
        raise Panic("lost my head") if how == "panic" else asyncio.CancelledError("given up")

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[str]:
        settled = await ctx.join_all_settled([ctx.task("break", how) for how in ("panic", "cancel")])
        return [str(one.error) for one in settled]

    async with house.worker(asks, tasks=[breaks]):
        run_id = await house.begin(asks)
        assert await house.result(run_id) == ["Panic: lost my head", "CancelledError: given up"]


@pytest.mark.parametrize("has_children", [False, True])
async def test_a_task_that_its_function_rejects_has_failed(house: House, has_children: bool) -> None:
    async def refuse(work: WorkContext) -> None:
        work.reject("not my kind of work")

    @task("refuse")
    async def refuses(work: WorkContext, what: str) -> None:
        if not has_children:
            await refuse(work)
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse(work))

    @task("refuse plainly")
    def refuses_plainly(work: WorkContext, what: str) -> None:
        work.reject("nor mine")

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[str]:
        kinds = ("refuse", "refuse plainly")
        return [str(one.error) for one in await ctx.join_all_settled([ctx.task(kind, "x") for kind in kinds])]

    async with house.worker(asks, tasks=[refuses, refuses_plainly]):
        run_id = await house.begin(asks)
        assert await house.result(run_id) == ["rejected: not my kind of work", "rejected: nor mine"]
    for kind in ("refuse", "refuse plainly"):
        assert (await house.bob.get_task(task_id(task_key(run_id, kind, "x")))).outcome is Outcome.REJECTED


async def test_an_agent_that_fails_of_anything_has_failed(house: House) -> None:
    @agent("breaks")
    async def breaks(ctx: AgentContext) -> None:
        await ctx.append("assistant", "before")
        raise Panic("lost my head")

    async with house.worker(breaks):
        run_id = await house.begin(breaks)
        assert await house.failure(run_id) == "Panic: lost my head"
    assert await house.told(run_id) == [("assistant", "before")]


async def test_a_message_that_answers_a_task_is_what_the_run_gets(house: House) -> None:
    """Its data, or else its text: what an agent is called with that is sent the same."""

    @task("greet")
    async def greet(work: WorkContext, name: str) -> None:
        work.reply(f"hello {name}")

    @task("greet again")
    async def again(work: WorkContext, name: str) -> NoReturn:
        work.reply(f"hello again {name}")

    async def data(work: WorkContext) -> Message:
        return Message(message_id="m", role="ROLE_AGENT", parts=(Part(text="see"), Part(data={"n": 1})))

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        answers = [await ctx.task("greet", "owl"), await ctx.task("greet again", "owl")]
        answers += [await ctx.task("data", recipient=CAROL)]
        await pause(ctx)
        return answers

    async with Worker(house.carol, data):
        _, result = await house.through(asks, tasks=[greet, again])
    assert result == ["hello owl", "hello again owl", {"n": 1}]
