"""The worker: over every mailbox, through cancels, crashes, restarts, and its own end."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant import AgentId, Answer, Json, Limits, Mailbox, OpenMailbox, Result, TaskState, Text, WorkContext, Worker
from covenant import worker as worker_module
from covenant.model.command import CancelTask, PostResult
from covenant.model.error import CovenantError, StoreUnavailable
from covenant.model.query import GetTask
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import ManualClock
from covenant.work import patience
from covenant.worker import Handler, Release
from tests.conformance.support import drain, keyed, plain, refused, requeue, soon, stale, take, turn, uid
from tests.daemons import _REALM, OPERATOR_TOKEN, WORKING, Realmful, enrolled, start_daemon, url_of
from tests.docs.support import ROOT
from tests.serve.test_kill import kill, start

BEAT_MS = 5
FIVE_MINUTES_MS = 300_000


@pytest.fixture
async def local() -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open("memory:") as box:
        yield box


async def answer_to(sender: Mailbox, recipient: Mailbox, handler: Handler, **task: Any) -> Answer:
    """What comes back when a worker with this handler gets one task."""
    async with Worker(recipient, handler, heartbeat_ms=BEAT_MS):
        await sender.send_task(plain(recipient, **task))
        return await drain(sender)


class Hands:
    """A handler that says when it has begun and waits until it may end."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[WorkContext] = asyncio.Queue()
        self.may_end = asyncio.Event()

    async def __call__(self, ctx: WorkContext) -> str:
        self.begun.put_nowait(ctx)
        await self.may_end.wait()
        return "done"

    async def hold(self) -> WorkContext:
        ctx: WorkContext = await soon(self.begun.get())
        return ctx


# --- what goes in ------------------------------------------------------------------------------------------


async def test_a_handler_gets_its_task_and_its_text_goes_back(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        assert (ctx.task.sender, ctx.attempt, ctx.duplicate_safety) == (alice.agent, 1, "idempotent")
        assert (ctx.idempotency_key, ctx.content) == ("brief-42", (Text("short"),))
        assert not ctx.cancel_requested and ctx.lease_id == ctx.delivery.lease_id
        return ctx.text.upper()

    async with Worker(bob, handler):
        await alice.send_task(keyed(bob, "brief-42", "draft", content=[Text("short")]))
        answer = await drain(alice)
    assert (answer.status, answer.content, answer.attempt) == ("ok", (Text("DRAFT"),), 1)


async def test_a_task_that_declares_nothing_is_unsafe_and_has_no_key(local: OpenMailbox) -> None:
    seen: list[Any] = []
    handler: Handler = lambda ctx: seen.append((ctx.duplicate_safety, ctx.idempotency_key))  # noqa: E731
    await answer_to(local.of("alice@lab"), local.of("bob@lab"), handler)
    assert seen == [("unsafe", None)]


async def test_a_plain_function_runs_in_a_thread_of_its_own(alice: Mailbox, bob: Mailbox) -> None:
    threads: list[str] = []

    def handler(ctx: WorkContext) -> str:
        threads.append(threading.current_thread().name)
        ctx.wait(ctx.partial("half"))
        return "whole"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        half, whole = await drain(alice), await drain(alice)
    assert threads == ["covenant-handler"]
    assert [(answer.status, answer.content) for answer in (half, whole)] == [
        ("partial", (Text("half"),)),
        ("ok", (Text("whole"),)),
    ]


async def test_a_function_that_returns_something_to_await_is_waited_for(local: OpenMailbox) -> None:
    async def work(ctx: WorkContext) -> str:
        return "later"

    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), lambda ctx: work(ctx))
    assert answer.content == (Text("later"),)


# --- what comes out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ("text", (Text("text"),)),
        (None, ()),
        ([], ()),
        (Json({"a": 1}), (Json({"a": 1}),)),
        ([Text("a"), Json([2])], (Text("a"), Json([2]))),
        (("a", Text("b")), (Text("a"), Text("b"))),
    ],
)
async def test_what_a_handler_returns_is_the_content(
    local: OpenMailbox, returned: Any, content: tuple[Any, ...]
) -> None:
    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), lambda ctx: returned)
    assert (answer.status, answer.content) == ("ok", content)


async def test_a_result_passes_through(local: OpenMailbox) -> None:
    answer = await answer_to(
        local.of("alice@lab"),
        local.of("bob@lab"),
        lambda ctx: Result(ctx.task.id, "error", (Text("see there"),), "no such city"),
    )
    assert (answer.status, answer.error_message, answer.content) == ("error", "no such city", (Text("see there"),))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda ctx: 42, "not int"),
        (lambda ctx: {"a": 1}, "not dict"),
        (lambda ctx: Result(uid(9), "ok"), "its own task"),
        (lambda ctx: Result(ctx.task.id, "partial"), "final result"),
        (lambda ctx: [42], "content"),
        (lambda ctx: Json(float("nan")), "JSON"),
        (lambda ctx: "x" * 5_000_000, "at most"),
    ],
)
async def test_what_cannot_be_posted_is_an_error_and_not_a_silence(
    local: OpenMailbox, returned: Handler, says: str
) -> None:
    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), returned)
    assert answer.status == "error" and says in str(answer.error_message)


async def test_an_exception_is_an_error_with_its_message(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        raise ValueError(f"cannot {ctx.text}")

    answer = await answer_to(alice, bob, handler, intent="fly")
    assert (answer.status, answer.error_message, answer.content) == ("error", "cannot fly", ())


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ValueError(), "ValueError"),
        (ValueError("  "), "ValueError"),
        (ValueError("é" * 20_000), "é" * 8192),
        (ValueError("\ud800!"), "?!"),
        (StopIteration("end"), "the handler raised StopIteration('end')"),
        (SystemExit(3), "the handler raised SystemExit(3)"),
    ],
)
async def test_whatever_a_function_raises_is_an_answer(
    local: OpenMailbox, failure: BaseException, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "covenant.worker")  # half a character cannot be reported

    def handler(ctx: WorkContext) -> None:
        raise failure

    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), handler)
    assert (answer.status, answer.error_message) == ("error", message)


async def test_a_handler_that_cancels_itself_has_failed(local: OpenMailbox) -> None:
    async def handler(ctx: WorkContext) -> None:
        raise asyncio.CancelledError

    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), handler)
    assert (answer.status, answer.error_message) == ("error", "CancelledError")


async def test_a_handler_that_fails_of_anything_has_failed(local: OpenMailbox) -> None:
    class Panic(BaseException): ...

    async def handler(ctx: WorkContext) -> None:
        raise Panic("lost my head")

    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), handler)
    assert (answer.status, answer.error_message) == ("error", "lost my head")


async def test_the_worker_goes_on_after_a_failure(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")

    def handler(ctx: WorkContext) -> str:
        if ctx.text == "bad":
            raise ValueError("bad")
        return "good"

    async with Worker(bob, handler):
        for intent in ("bad", "good"):
            await alice.send_task(plain(bob, intent))
        assert [(await drain(alice)).status for _ in range(2)] == ["error", "ok"]


async def test_a_handler_gives_its_task_back(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        if ctx.attempt == 1:
            raise Release(reason="the source is down")
        return f"attempt {ctx.attempt}"

    assert (await answer_to(alice, bob, handler)).content == (Text("attempt 2"),)
    assert "the source is down" in [row.reason for row in await box.recent_audit(100)]


async def test_a_task_that_was_given_back_until_later_waits(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, clock: ManualClock
) -> None:
    given_back = asyncio.Event()

    async def handler(ctx: WorkContext) -> str:
        if ctx.attempt == 1:
            given_back.set()
            raise Release(not_before_ms=clock.now_ms() + 1000)
        return "now"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await soon(given_back.wait())
        await becomes(box, TaskState.QUEUED)
        clock.advance(1000)
        assert (await drain(alice)).attempt == 2


async def becomes(box: OpenMailbox, state: TaskState, number: int = 1) -> None:
    async with asyncio.timeout(10):
        while (entry := await box.get_task(uid(number))).state is not state:
            await box.wait_generation(uid(number), entry.generation, wait_ms=1000)


@pytest.mark.parametrize("wrong", [{"reason": " "}, {"not_before_ms": -1}, {"not_before_ms": 1.5}])
def test_a_release_that_could_not_be_posted_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(CovenantError):
        Release(**wrong)


# --- partials ----------------------------------------------------------------------------------------------


async def test_partials_arrive_once_and_in_order(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        await asyncio.gather(*(ctx.partial(f"part {number}") for number in range(1, 4)))
        await ctx.partial([Text("last"), Json(4)])
        return "whole"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        answers = [await drain(alice) for _ in range(5)]
    assert [answer.result.sequence for answer in answers] == [1, 2, 3, 4, None]
    assert [answer.content[0] for answer in answers] == [
        *(Text(f"part {number}") for number in range(1, 4)),
        Text("last"),
        Text("whole"),
    ]


async def test_a_partial_of_a_lost_lease_is_refused_in_the_handler(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    codes: list[str] = []
    hands = Hands()

    async def handler(ctx: WorkContext) -> str:
        if ctx.attempt == 1:
            await hands(ctx)
            for act in (ctx.partial("too late"), ctx.heartbeat()):
                try:
                    await act
                except CovenantError as refusal:
                    codes.append(refusal.code)
            assert ctx.cancel_requested
        return f"attempt {ctx.attempt}"

    async with Worker(bob, handler, heartbeat_ms=60_000):
        await alice.send_task(plain(bob, id=uid(1)))
        await hands.hold()
        await requeue(local, uid(1))
        hands.may_end.set()
        assert (await drain(alice)).content == (Text("attempt 2"),)
    assert codes == ["lease_superseded", "lease_superseded"]


# --- how much at once --------------------------------------------------------------------------------------


async def test_no_more_is_leased_than_can_be_done_at_once(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    hands = Hands()
    async with Worker(bob, hands, concurrency=2):
        for _ in range(5):
            await alice.send_task(plain(bob))
        await hands.hold()
        await hands.hold()
        in_flight = await box.task_queue(state="in_flight")
        assert len(in_flight.tasks) == 2 and hands.begun.empty()
        hands.may_end.set()
        assert [(await drain(alice)).status for _ in range(5)] == ["ok"] * 5


async def test_plain_functions_run_side_by_side_too(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    together = threading.Barrier(12, timeout=10)
    async with Worker(bob, lambda ctx: str(together.wait()), concurrency=12):
        for _ in range(12):
            await alice.send_task(plain(bob))
        assert sorted([int((await drain(alice)).content[0].text) for _ in range(12)]) == list(range(12))  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"heartbeat_ms": 0}, {"grace_ms": -1}, {"concurrency": True}])
async def test_a_worker_needs_sound_numbers(local: OpenMailbox, wrong: dict[str, Any]) -> None:
    with refused("malformed"):
        Worker(local.of("bob@lab"), lambda ctx: None, **wrong)


async def test_a_worker_needs_a_box_of_somebody(local: OpenMailbox) -> None:
    with refused("malformed"):
        Worker(local, lambda ctx: None)


# --- signs of life -----------------------------------------------------------------------------------------


async def beaten(box: OpenMailbox, clock: ManualClock, number: int = 1) -> None:
    """Until the lease has given a sign of life at a later time than this."""
    clock.advance(1000)
    now_ms = clock.now_ms()
    async with asyncio.timeout(10):
        while (await box.get_task(uid(number))).heartbeat_ms != now_ms:  # noqa: ASYNC110
            await asyncio.sleep(BEAT_MS / 1000)


async def test_a_lease_gives_signs_of_life_as_long_as_the_handler_works(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, clock: ManualClock
) -> None:
    hands = Hands()
    async with Worker(bob, hands, heartbeat_ms=BEAT_MS):
        await alice.send_task(plain(bob, id=uid(1)))
        await hands.hold()
        for _ in range(3):
            await beaten(box, clock)
        hands.may_end.set()
        await drain(alice)


async def test_a_handler_that_is_asked_to_stop_hears_it(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, clock: ManualClock
) -> None:
    """Contract 7: a graceful cancel reaches the holder through a heartbeat; giving the task back ends it."""
    begun = asyncio.Event()

    async def handler(ctx: WorkContext) -> None:
        begun.set()
        await ctx.canceled()
        assert ctx.cancel_requested and ctx.cancel_reason == "changed my mind"
        raise Release(reason="asked to stop")

    async with Worker(bob, handler, heartbeat_ms=BEAT_MS):
        sent = await alice.send_task(plain(bob))
        await soon(begun.wait())
        await alice.cancel_task(sent.task_id, reason="changed my mind", graceful=True)
        answer = await drain(alice)
    assert (answer.task_id, answer.status) == (sent.task_id, "error")
    assert (await box.get_task(sent.task_id)).outcome == "canceled"


async def test_a_function_in_a_thread_sees_the_cancel_too(alice: Mailbox, bob: Mailbox) -> None:
    begun = threading.Event()

    def handler(ctx: WorkContext) -> str:
        begun.set()
        while not ctx.cancel_requested:
            time.sleep(BEAT_MS / 1000)
        return "stopped in time"

    async with Worker(bob, handler, heartbeat_ms=BEAT_MS):
        sent = await alice.send_task(plain(bob))
        await asyncio.to_thread(begun.wait)
        await alice.cancel_task(sent.task_id, graceful=True)
        assert (await drain(alice)).content == (Text("stopped in time"),)


async def test_a_task_that_was_canceled_outright_ends_its_handler_and_not_its_worker(
    alice: Mailbox, bob: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    contexts: list[WorkContext] = []
    begun = asyncio.Event()

    async def handler(ctx: WorkContext) -> str:
        if ctx.text == "next":
            return "next"
        contexts.append(ctx)
        begun.set()
        await ctx.canceled()
        return "too late"

    async with Worker(bob, handler, heartbeat_ms=BEAT_MS):
        sent = await alice.send_task(plain(bob))
        await soon(begun.wait())
        await alice.cancel_task(sent.task_id)
        assert (await drain(alice)).status == "error"
        await alice.send_task(plain(bob, "next"))
        assert (await drain(alice)).content == (Text("next"),)
    assert contexts[0].cancel_reason in ("task_terminal", "unknown_lease")
    assert "was refused" in caplog.text


async def test_a_superseded_result_is_told_and_never_posted_again(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, caplog: pytest.LogCaptureFixture
) -> None:
    hands = Hands()

    async def handler(ctx: WorkContext) -> str:
        if ctx.attempt == 1:
            await hands(ctx)
        return f"attempt {ctx.attempt}"

    async with Worker(bob, handler, concurrency=2, heartbeat_ms=BEAT_MS):
        await alice.send_task(plain(bob, id=uid(1)))
        ctx = await hands.hold()
        await requeue(box, uid(1))
        assert (await drain(alice)).content == (Text("attempt 2"),)
        await soon(ctx.canceled())
        hands.may_end.set()
    assert caplog.text.count("(lease_superseded)") == 1
    assert [result.content for result in (await box.get_task(uid(1))).late_results] == [(Text("attempt 1"),)]


async def test_a_lost_lease_is_not_beaten_any_more(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covenant.worker")
    hands = Hands()
    async with Worker(bob, hands, concurrency=2, heartbeat_ms=BEAT_MS):
        lost, held = [await alice.send_task(plain(bob, id=uid(number))) for number in (2, 1)]
        first, second = await hands.hold(), await hands.hold()
        await alice.cancel_task(lost.task_id)
        await soon((first if first.task.id == lost.task_id else second).canceled())
        for _ in range(3):
            await beaten(box, clock)
        hands.may_end.set()
        assert {(await drain(alice)).task_id for _ in range(2)} == {lost.task_id, held.task_id}
    assert caplog.text.count("is lost") == 1


async def test_a_heartbeat_that_crosses_the_result_is_no_lost_lease(
    local: OpenMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covenant.worker")
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    run, refusals = local._engine.run, asyncio.Event()

    async def crossing(command: Any) -> Any:
        """The result is there, and its poster hears of that only after a heartbeat was refused."""
        try:
            done = await run(command)
        except CovenantError:
            refusals.set()
            raise
        if isinstance(command, PostResult):
            await soon(refusals.wait())
        return done

    monkeypatch.setattr(local._engine, "run", crossing)
    assert (await answer_to(alice, bob, lambda ctx: "done")).status == "ok"
    assert refusals.is_set() and "is lost" not in caplog.text


async def test_each_start_is_an_incarnation_of_its_own(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    incarnations: list[str] = []
    state = local._engine.state  # type: ignore[attr-defined]

    def note(ctx: WorkContext) -> None:
        incarnations.append(state.records[ctx.task.id].lease.incarnation)

    worker = Worker(bob, note)
    for current in (worker, worker, Worker(bob, note, incarnation="mine")):
        async with current:
            await alice.send_task(plain(bob))
            await drain(alice)
    assert len(set(incarnations)) == 3 and incarnations[2] == "mine"


# --- the end -----------------------------------------------------------------------------------------------


async def test_a_stop_lets_the_handlers_finish_and_takes_nothing_more(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    hands = Hands()
    async with Worker(bob, hands) as worker:
        for number in (1, 2):
            await alice.send_task(plain(bob, id=uid(number)))
        await hands.hold()
        worker.stop()
        await asyncio.sleep(0)
        hands.may_end.set()
    assert (await drain(alice)).task_id == uid(1)
    entry = await box.get_task(uid(2))
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)


async def test_what_is_not_finished_in_time_is_given_back(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    hands = Hands()
    async with Worker(bob, hands, grace_ms=10):
        await alice.send_task(keyed(bob, id=uid(1)))
        await hands.hold()
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 1)
    assert "worker stopped" in [row.reason for row in await box.recent_audit(100)]
    assert (await take(bob)).attempt == 2


async def test_what_is_cut_off_and_unsafe_waits_for_a_decision(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    hands = Hands()
    async with Worker(bob, hands, grace_ms=10):
        await alice.send_task(plain(bob, id=uid(1)))
        await hands.hold()
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt) == (TaskState.IN_FLIGHT, 1)


async def test_a_handler_may_still_answer_when_it_is_interrupted(local: OpenMailbox) -> None:
    """Work that must not be done twice says what became of it."""
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    hands = Hands()

    async def handler(ctx: WorkContext) -> str | Result:
        try:
            return await hands(ctx)
        except asyncio.CancelledError:
            return Result(ctx.task.id, "error", (), "interrupted half way")

    async with Worker(bob, handler, grace_ms=0):
        await alice.send_task(plain(bob))
        await hands.hold()
    assert (await drain(alice)).error_message == "interrupted half way"


async def test_what_a_thread_still_works_on_is_not_given_back(
    local: OpenMailbox, caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    begun, may_end = threading.Event(), threading.Event()

    def handler(ctx: WorkContext) -> None:
        begun.set()
        may_end.wait(timeout=10)

    async with Worker(bob, handler, grace_ms=1):
        await alice.send_task(plain(bob, id=uid(1)))
        await asyncio.to_thread(begun.wait)
    may_end.set()
    assert (await local.get_task(uid(1))).state is TaskState.IN_FLIGHT
    assert "still being worked on" in caplog.text


async def test_an_idle_worker_stops_at_once_and_leaves_nothing_leased(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    worker = Worker(bob, lambda ctx: None, concurrency=3)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0.01)  # until it waits for tasks; it must not matter whether it does
    worker.stop()
    await soon(running)
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await box.get_task(uid(1))).state is TaskState.QUEUED


async def test_a_worker_that_is_stopped_as_it_starts_never_works(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    await alice.send_task(plain(bob, id=uid(1)))
    worked: list[WorkContext] = []
    async with Worker(bob, worked.append):
        pass
    assert worked == []
    assert (await local.get_task(uid(1))).state is TaskState.QUEUED


async def test_a_worker_that_is_told_to_stop_before_it_begins_does_not_work_for_ever(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    await alice.send_task(plain(bob, id=uid(1)))
    worked: list[WorkContext] = []
    early = Worker(bob, worked.append)
    early.stop()
    await soon(early.run())
    running = asyncio.create_task(early.run())
    early.stop()  # before its first turn
    await soon(running)
    assert worked == []
    assert (await local.get_task(uid(1))).state is TaskState.QUEUED


async def test_a_worker_that_has_ended_can_begin_again(local: OpenMailbox) -> None:
    """What ended it once is not what ends it the next time."""
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    worker = Worker(bob, lambda ctx: "done")
    for _ in range(2):
        async with worker:
            await alice.send_task(plain(bob))
            assert (await drain(alice)).status == "ok"
            worker.stop()
            assert worker._running is not None
            await soon(worker._running)


async def test_a_task_that_came_as_the_worker_stopped_is_given_back(
    local: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    worker = Worker(bob, lambda ctx: None)
    take_now = local._engine.take

    async def take_and_stop(*args: Any) -> list[Any]:
        taken = await take_now(*args)
        worker.stop()
        await asyncio.sleep(0)
        return taken

    monkeypatch.setattr(local._engine, "take", take_and_stop)
    await alice.send_task(plain(bob, id=uid(1)))
    await soon(worker.run())
    entry = await local.get_task(uid(1))
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 1)


async def test_a_worker_that_is_cancelled_gives_back_what_it_held(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    hands = Hands()
    running = asyncio.create_task(Worker(bob, hands).run())
    await alice.send_task(keyed(bob, id=uid(1)))
    await hands.hold()
    running.cancel()
    await soon(asyncio.wait([running]))
    assert running.cancelled()
    assert (await box.get_task(uid(1))).state is TaskState.QUEUED


async def test_a_handler_can_stop_its_worker(local: OpenMailbox) -> None:
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    worker = Worker(bob, lambda ctx: worker.stop())
    for _ in range(2):
        await alice.send_task(plain(bob))
    await soon(worker.run())
    assert (await drain(alice)).status == "ok"
    assert await local.of("alice@lab").try_recv_result_for() is None


async def test_a_handler_that_will_not_be_interrupted_is_left_behind(
    local: OpenMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "_LAST_WORDS_S", 0.01)
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(ctx: WorkContext) -> None:
        begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    async with Worker(bob, handler, grace_ms=0):
        await alice.send_task(plain(bob))
        await soon(begun.wait())
    assert "left behind" in caplog.text
    may_end.set()
    await soon(ended.wait())


async def test_a_box_that_is_closed_ends_its_worker_with_the_reason(local: OpenMailbox) -> None:
    running = asyncio.create_task(Worker(local.of("bob@lab"), lambda ctx: None).run())
    await asyncio.sleep(0)
    await local.close()
    with refused("store_closed"):
        await soon(running)


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_box_over_a_daemon_that_is_closed_ends_its_worker_with_the_reason(
    folder: Path, clock: ManualClock, scheme: str
) -> None:
    """A daemon comes back; a box that was closed here does not."""
    hands = Hands()
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        async with site.realm.open(site.daemon, scheme) as box, site.realm.open(site.daemon, scheme) as other:
            running = asyncio.create_task(Worker(box.of("bob@lab"), hands, concurrency=2).run())
            await other.of("alice@lab").send_task(plain(other.of("bob@lab"), id=uid(1)))
            await hands.hold()
            await box.close()
            hands.may_end.set()
            with refused("store_closed"):
                await soon(running)
            assert (await other.get_task(uid(1))).state is TaskState.IN_FLIGHT


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_worker_whose_token_is_revoked_ends_and_its_handler_hears_it(
    folder: Path, clock: ManualClock, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str | None] = []
    begun = asyncio.Event()

    async def handler(ctx: WorkContext) -> str:
        begun.set()
        await ctx.canceled()
        reasons.append(ctx.cancel_reason)
        return "too late"

    async with serving(folder, clock) as site:
        assert site.daemon is not None
        exchange = site.daemon.exchange
        async with site.realm.open(site.daemon, scheme) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            running = asyncio.create_task(Worker(bob, handler, heartbeat_ms=BEAT_MS).run())
            await alice.send_task(plain(bob, id=uid(1)))
            await soon(begun.wait())
            await exchange.trust.revoke_peer(exchange.authenticate(OPERATOR_TOKEN), "bob@lab", "thrown out")
            with refused("unauthenticated"):
                await soon(running)
            assert (await box.get_task(uid(1))).state is TaskState.IN_FLIGHT
    assert reasons == ["unauthenticated"]
    assert "was refused" in caplog.text


async def test_a_worker_that_is_cancelled_while_it_stops_leaves_no_handler_behind(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    hands = Hands()
    worker = Worker(bob, hands)
    running = asyncio.create_task(worker.run())
    await alice.send_task(keyed(bob, id=uid(1)))
    await hands.hold()
    worker.stop()
    for _ in range(5):
        await turn()  # until it waits for the handler
    running.cancel()
    await soon(asyncio.wait([running]))
    assert running.cancelled() and not worker._jobs
    assert (await box.get_task(uid(1))).state is TaskState.QUEUED


async def test_a_worker_can_be_stopped_twice_and_when_it_has_ended(alice: Mailbox, bob: Mailbox) -> None:
    hands = Hands()
    worker = Worker(bob, hands)
    running = asyncio.create_task(worker.run())
    await alice.send_task(plain(bob))
    await hands.hold()
    worker.stop()
    worker.stop()
    hands.may_end.set()
    await soon(running)
    worker.stop()
    assert (await drain(alice)).status == "ok"


async def test_a_stop_meets_the_receive_wherever_it_is(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Whatever it took just then goes back, and nothing is lost."""
    await alice.send_tasks([keyed(bob, str(number), id=uid(number)) for number in range(20)])
    done: set[str] = set()
    for turns in range(1, 21):
        worker = Worker(bob, lambda ctx: done.add(ctx.task.id))
        running = asyncio.create_task(worker.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.stop()
        await soon(running)
    in_flight = await box.task_queue(state="in_flight")
    queued = await box.task_queue(100, state="queued")
    assert in_flight.tasks == []
    assert len(queued.tasks) + len(done) == 20


_ENDED = """
import asyncio, os, sys, threading
from covenant import Mailbox, Worker

async def begin(url, token):
    begun = asyncio.Event()

    async def handler(ctx):
        begun.set()
        await asyncio.Event().wait()

    box = await Mailbox.open(url, token=token)
    kept.extend((box, asyncio.create_task(Worker(box, handler, heartbeat_ms=5).run())))
    await begun.wait()

kept = []
loop = asyncio.new_event_loop()
loop.run_until_complete(begin(*sys.argv[1:]))
(pulse,) = [thread for thread in threading.enumerate() if thread.name == "covenant-heartbeat"]
loop.close()
pulse.join(timeout=10)
print("still beating" if pulse.is_alive() else "silent", flush=True)
os._exit(0)  # what was left open is the point, and no news
"""


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_no_sign_of_life_comes_from_a_loop_that_has_ended(folder: Path, clock: ManualClock, scheme: str) -> None:
    """Its handlers will never go on: a lease that looked alive would wait for them for ever."""
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        async with site.realm.open(site.daemon, scheme) as box:
            await box.of("alice@lab").send_task(plain(box.of("bob@lab")))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _ENDED,
            url_of(site.daemon, scheme),
            site.realm.tokens["bob@lab"],
            stdout=subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert said.split() == [b"silent"]


async def test_a_thread_that_outlives_its_loop_is_told_so(local: OpenMailbox) -> None:
    told: list[str] = []

    async def main() -> threading.Thread:
        async with Mailbox.open("memory:") as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            async with Worker(bob, handler, grace_ms=0):
                await alice.send_task(plain(bob))
                await asyncio.to_thread(begun.wait)
            return next(thread for thread in threading.enumerate() if thread.name == "covenant-handler")

    def handler(ctx: WorkContext) -> None:
        begun.set()
        may_go_on.wait(timeout=10)
        try:
            ctx.wait(ctx.partial("nobody is there"))
        except CovenantError as refusal:
            told.append(refusal.code)

    begun, may_go_on = threading.Event(), threading.Event()
    thread = await asyncio.to_thread(lambda: asyncio.run(main()))
    may_go_on.set()
    thread.join(timeout=10)
    assert told == ["store_closed"]


async def test_a_worker_runs_once_at_a_time(local: OpenMailbox) -> None:
    async with Worker(local.of("bob@lab"), lambda ctx: None) as worker:
        with refused("malformed"):
            await worker.run()


async def test_waiting_on_the_loop_for_itself_is_refused(local: OpenMailbox) -> None:
    async def handler(ctx: WorkContext) -> None:
        ctx.wait(ctx.partial("never"))

    answer = await answer_to(local.of("alice@lab"), local.of("bob@lab"), handler)
    assert "await it instead" in str(answer.error_message)


async def test_no_thread_is_left_when_a_worker_has_ended(alice: Mailbox, bob: Mailbox) -> None:
    await answer_to(alice, bob, lambda ctx: None)
    for thread in threading.enumerate():
        assert thread.name != "covenant-heartbeat"
        if thread.name == "covenant-handler":
            thread.join(timeout=10)
            assert not thread.is_alive()


# --- when the other side is away ---------------------------------------------------------------------------


async def test_a_result_that_could_not_be_posted_is_posted_again(
    local: OpenMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "FIRST_DELAY_S", 0.001)
    alice, bob = local.of("alice@lab"), local.of("bob@lab")
    run, failures = local._engine.run, 3

    async def flaky(command: Any) -> Any:
        nonlocal failures
        done = await run(command)
        if isinstance(command, PostResult) and failures:
            failures -= 1
            raise StoreUnavailable("was it stored?", outcome="unknown")
        return done

    monkeypatch.setattr(local._engine, "run", flaky)

    async def handler(ctx: WorkContext) -> str:
        await ctx.partial("half")
        return "whole"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        assert [(await drain(alice)).content[0] for _ in range(2)] == [Text("half"), Text("whole")]
    assert failures == 0
    assert caplog.text.count("waiting for the mailbox") == 1
    assert await alice.try_recv_result_for() is None


class Site:
    """A daemon that can be stopped and started again at the same address."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self._folder = folder
        self._clock = clock
        self._socket = Path(tempfile.mkdtemp(prefix="cov-")) / "sock"
        self._http = "127.0.0.1:0"
        self.daemon: Daemon | None = None
        self.realm = Realmful()

    async def start(self) -> None:
        settings = Settings(store=f"file:{self._folder}", http=self._http, ipc=self._socket, limits=Limits())
        daemon = Daemon(settings, _REALM, OPERATOR_TOKEN, self._clock)
        await daemon.start()
        await self.realm.enroll(daemon)
        assert daemon.address is not None
        self._http = f"127.0.0.1:{daemon.address[1]}"
        self.daemon = daemon

    async def stop(self) -> None:
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            await daemon.stop()


@asynccontextmanager
async def serving(folder: Path, clock: ManualClock) -> AsyncIterator[Site]:
    site = Site(folder, clock)
    await site.start()
    try:
        yield site
    finally:
        await site.stop()


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_daemon_that_restarts_meanwhile_is_waited_for(
    folder: Path, clock: ManualClock, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease survives it, the result arrives, and the worker takes the next task."""
    hands = Hands()
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        async with site.realm.open(site.daemon, scheme) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            async with Worker(bob, hands, concurrency=2, heartbeat_ms=BEAT_MS):
                await alice.send_task(plain(bob, id=uid(1)))
                await hands.hold()
                await site.stop()
                hands.may_end.set()
                async with asyncio.timeout(10):
                    while "waiting for the mailbox" not in caplog.text:  # noqa: ASYNC110
                        await asyncio.sleep(BEAT_MS / 1000)
                await site.start()
                answer = await drain(alice)
                assert (answer.task_id, answer.attempt, answer.content) == (uid(1), 1, (Text("done"),))
                await alice.send_task(plain(bob))
                assert (await drain(alice)).status == "ok"


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_heartbeats_go_on_after_a_restart(folder: Path, clock: ManualClock, scheme: str) -> None:
    hands = Hands()
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        async with site.realm.open(site.daemon, scheme) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            async with Worker(bob, hands, heartbeat_ms=BEAT_MS):
                await alice.send_task(plain(bob, id=uid(1)))
                await hands.hold()
                await beaten(box, clock)
                await site.stop()
                await site.start()
                await beaten(box, clock)
                hands.may_end.set()
                await drain(alice)


async def test_a_killed_daemon_is_waited_for(tmp_path: Path) -> None:
    """Killed while a handler works, and while the worker waits for the next task."""
    home = Path(tempfile.mkdtemp(prefix="cov-"))
    process, _ = await asyncio.to_thread(start, home)
    hands = Hands()
    try:
        async with Mailbox.open(f"unix:{home}/sock") as box:
            alice, bob = await enrolled(box, "alice@lab", *WORKING), await enrolled(box, "bob@lab", *WORKING)
            tokens = {"alice@lab": alice.token, "bob@lab": bob.token}
            agents = [AgentId(peer.display, peer.pubkey) for peer in (alice, bob)]
            async with Mailbox.open(f"unix:{home}/sock", tokens=tokens) as all_of_them:
                sender, recipient = (all_of_them.of(agent) for agent in agents)
                async with Worker(recipient, hands, concurrency=2, heartbeat_ms=BEAT_MS):
                    await sender.send_task(plain(recipient, id=uid(1)))
                    await hands.hold()
                    await asyncio.to_thread(kill, process)
                    hands.may_end.set()
                    process, _ = await asyncio.to_thread(start, home)
                    answer = await drain(sender)
                    assert (answer.task_id, answer.attempt) == (uid(1), 1)
                    await sender.send_task(plain(recipient, id=uid(2)))
                    assert (await drain(sender)).task_id == uid(2)
    finally:
        await asyncio.to_thread(kill, process)


# --- a loop that is blocked --------------------------------------------------------------------------------


class FarDaemon:
    """A daemon on an event loop in another thread, and a way to ask it without a loop."""

    def __init__(self, daemon: Daemon, loop: asyncio.AbstractEventLoop, realm: Realmful) -> None:
        self.daemon = daemon
        self.realm = realm
        self._loop = loop

    def last_sign_of_life(self, task_id: str) -> int:
        asking = asyncio.run_coroutine_threadsafe(self.daemon.store.ask(GetTask(None, task_id)), self._loop)
        return int(asking.result(timeout=10).heartbeat_ms)


@contextmanager
def far_daemon(folder: Path) -> Iterator[FarDaemon]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=10)

    daemon = there(start_daemon(f"file:{folder}", Limits()))
    realm = Realmful()
    there(realm.enroll(daemon))
    try:
        yield FarDaemon(daemon, loop, realm)
    finally:
        there(daemon.stop())
        there(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_handler_that_blocks_the_loop_does_not_look_dead(folder: Path, scheme: str) -> None:
    with far_daemon(folder) as far:

        async def handler(ctx: WorkContext) -> str:
            """Three signs of life, seen from a handler that never lets the loop turn."""
            seen = {far.last_sign_of_life(ctx.task.id)}
            end = time.monotonic() + 10
            while len(seen) < 4 and time.monotonic() < end:
                seen.add(far.last_sign_of_life(ctx.task.id))
            return str(len(seen))

        async with far.realm.open(far.daemon, scheme) as box:
            answer = await answer_to(box.of("alice@lab"), box.of("bob@lab"), handler)
            assert answer.content == (Text("4"),)


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_handler_that_blocks_the_loop_sees_a_cancel(folder: Path, scheme: str) -> None:
    with far_daemon(folder) as far:

        async def handler(ctx: WorkContext) -> str:
            operator = far.daemon.exchange.authenticate(OPERATOR_TOKEN)
            cancel = far.daemon.exchange.run(operator, CancelTask(None, ctx.task.id, "stop", graceful=True))
            asyncio.run_coroutine_threadsafe(cancel, far._loop).result(timeout=10)
            end = time.monotonic() + 10
            while not ctx.cancel_requested and time.monotonic() < end:
                time.sleep(BEAT_MS / 1000)  # noqa: ASYNC251
            return f"asked to {ctx.cancel_reason}"

        async with far.realm.open(far.daemon, scheme) as box:
            answer = await answer_to(box.of("alice@lab"), box.of("bob@lab"), handler)
            assert answer.content == (Text("asked to stop"),)


# --- a process that dies -----------------------------------------------------------------------------------

_DOOMED = """
import asyncio, sys
from covenant import Mailbox, Worker

async def handler(ctx):
    print(ctx.text, flush=True)
    if ctx.text == "hold":
        await asyncio.Event().wait()
    return "done"

async def main(url, token):
    async with Mailbox.open(url, token=token) as box:
        await Worker(box, handler, heartbeat_ms=5).run()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_killed_worker_loses_nothing_and_the_retry_gate_hands_its_task_on(
    folder: Path, clock: ManualClock, scheme: str
) -> None:
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        url = str(site.daemon.url) if scheme == "http" else f"unix:{site.daemon.settings.ipc}"
        async with site.realm.open(site.daemon, scheme) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            for number, intent in enumerate(("first", "hold", "never begun"), 1):
                await alice.send_task(keyed(bob, intent, intent, id=uid(number)))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _DOOMED, url, site.realm.tokens["bob@lab"], stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            async with asyncio.timeout(30):
                while (await process.stdout.readline()).strip() != b"hold":
                    pass
            process.kill()
            assert await process.wait() == -signal.SIGKILL
            assert (await drain(alice)).task_id == uid(1)
            states = [(await box.get_task(uid(number))).state for number in (2, 3)]
            assert states == [TaskState.IN_FLIGHT, TaskState.QUEUED]

            clock.advance(FIVE_MINUTES_MS)
            report = await box.retry_stale(stale(min_lease_age_ms=FIVE_MINUTES_MS))
            assert [candidate.task_id for candidate in report.requeued] == [uid(2)]
            async with Worker(bob, lambda ctx: f"attempt {ctx.attempt}"):
                answers = [await drain(alice) for _ in range(2)]
    assert [(answer.task_id, answer.content[0]) for answer in answers] == [
        (uid(3), Text("attempt 1")),
        (uid(2), Text("attempt 2")),
    ]


# --- the example -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory:", "file:./box"])
def test_the_example_does_what_it_promises(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "utf8", str(ROOT / "examples" / "worker.py"), url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "partial  reading 'the sea'",
        "ok       'the sea' has 7 characters",
        "error    nothing to measure",
        "ok       took 2 attempts",
        "the worker has stopped",
    ]
