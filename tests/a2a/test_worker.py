"""The worker in a dialog: what it says on its way, what it asks, how it ends early; through crashes of either side."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from covenant import Json, Mailbox, OpenMailbox, Outcome, Task, TaskState, Text, WorkContext, Worker
from covenant.model.command import SendTask
from covenant.model.error import CovenantError, Unreachable
from covenant.model.message import Artifact, Message, Part
from covenant.model.protocol import TaskShown
from covenant.model.query import GetDialog
from covenant.model.record import Asks
from covenant.model.view import Dialog
from covenant.serve import wire as w
from covenant.work.patience import Patience
from covenant.worker import Ended, Handler, Release
from tests.conformance.support import drain, keyed, plain, requeue, soon, uid
from tests.daemons import WORKING
from tests.serve.test_kill import kill, start


async def shown(box: OpenMailbox, task_id: str) -> TaskShown:
    """The task as the A2A protocol shows it."""
    dialog: Dialog = await box._engine.ask(GetDialog(None, task_id, None, True, True))
    return dialog.task


async def until(box: Mailbox, task_id: str, is_so: Callable[[Any], bool]) -> None:
    """Wait for the task to have come so far."""
    entry = await box.get_task(task_id)
    while not is_so(entry):
        entry = await soon(box.wait_generation(task_id, entry.generation))


def asks(entry: Any) -> bool:
    return entry.asks is not None


def text_of(message: Message | None) -> str:
    assert message is not None and message.parts[0].text is not None
    return message.parts[0].text


# --- what it says ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_process")
async def test_what_a_handler_says_and_makes_is_shown(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> Message:
        await ctx.update("half way")
        await ctx.update(Message(message_id="mine", role="ROLE_AGENT", parts=(Part(data={"done": 0.5}),)))
        assert await ctx.artifact("one", name="draft") == "draft"
        assert await ctx.artifact([Text("two"), Part(url="https://x.test/")], name="draft", append=True) == "draft"
        made = await ctx.artifact(Json({"n": 1}))
        assert await ctx.artifact("more", artifact_id=made, append=True, last=True) == made
        await ctx.artifact(Artifact(artifact_id="whole", parts=(Part(text="all"),)))
        return Message(message_id="last", role="ROLE_AGENT", parts=(Part(text="with regards"),))

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        answer = await drain(alice)
    assert (answer.status, answer.content, text_of(answer.result.message)) == ("ok", (), "with regards")
    task = await shown(box, uid(1))
    assert [artifact.parts for artifact in task.artifacts] == [
        (Part(text="one"), Part(text="two"), Part(url="https://x.test/")),
        (Part(data={"n": 1}), Part(text="more")),
        (Part(text="all"),),
    ]
    assert [message.parts[0] for message in task.history][1:3] == [Part(text="half way"), Part(data={"done": 0.5})]
    assert task.generation == "10"


async def test_what_cannot_be_said_is_the_handlers_to_deal_with(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        refused = []
        for wrong in (
            lambda: ctx.update(" " * 5_000_000),
            lambda: ctx.update(Message(message_id="m", role="ROLE_AGENT", parts=())),
            lambda: ctx.artifact("x", append=True),
            lambda: ctx.ask(asks="money"),
        ):
            try:
                await wrong()
            except (CovenantError, ValueError) as refusal:
                refused.append(getattr(refusal, "code", "which"))
        return " ".join(refused)

    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        assert (await drain(alice)).content == (Text("too_large malformed which malformed"),)


async def test_what_is_said_at_once_is_said_one_after_the_other(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> None:
        await asyncio.gather(*(ctx.update(str(number)) for number in range(10)))

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await drain(alice)
    assert (await alice.get_task(uid(1))).generation == 13


class Deaf:
    """A box whose every answer to an act is lost once."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._lost: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    def of(self, agent: Any, *, incarnation: str) -> Deaf:
        return Deaf(self._box.of(agent, incarnation=incarnation))

    async def _lose(self, receipt: str, act: Awaitable[Any]) -> Any:
        done = await act
        if receipt not in self._lost:
            self._lost.add(receipt)
            raise Unreachable("the answer was lost", outcome="unknown")
        return done

    async def update(self, lease: Any, message: Any, *, receipt: str) -> Any:
        return await self._lose(receipt, self._box.update(lease, message, receipt=receipt))

    async def artifact(self, lease: Any, artifact: Any, *, append: bool, last: bool, receipt: str) -> Any:
        act = self._box.artifact(lease, artifact, append=append, last=last, receipt=receipt)
        return await self._lose(receipt, act)

    async def ask(self, lease: Any, message: Any = None, *, asks: Any, after: int, receipt: str) -> Any:
        act = self._box.ask(lease, message, asks=asks, after=after, receipt=receipt)
        return await self._lose(receipt, act)


@pytest.mark.usefixtures("in_process")
async def test_an_act_whose_answer_was_lost_is_done_once(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        await ctx.update("begun")
        for piece in "abc":
            await ctx.artifact(piece, name="draft", append=True)
        return text_of(await ctx.ask("go on?"))

    async with Worker(Deaf(bob), handler):  # type: ignore[arg-type]
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.add_message(uid(1), "yes")
        assert (await drain(alice)).content == (Text("yes"),)
    task = await shown(box, uid(1))
    assert [part.text for part in task.artifacts[0].parts] == ["a", "b", "c"]
    assert [text_of(message) for message in task.history][1:] == ["begun", "go on?", "yes"]


# --- what it asks ------------------------------------------------------------------------------------------


async def test_a_question_waits_for_its_answer(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        colour = await ctx.ask("which colour?")
        size = await ctx.ask("which size?", asks="auth")
        return f"{text_of(size)} {text_of(colour)}"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        for kind, answer in ((Asks.INPUT, "red"), (Asks.AUTH, "small")):
            await until(alice, uid(1), asks)
            assert (await alice.get_task(uid(1))).asks is kind
            await alice.add_message(uid(1), answer)
        assert (await drain(alice)).content == (Text("small red"),)


async def test_a_plain_function_asks_too(alice: Mailbox, bob: Mailbox) -> None:
    async with Worker(bob, lambda ctx: text_of(ctx.wait(ctx.ask("which colour?")))):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.add_message(uid(1), "red")
        assert (await drain(alice)).content == (Text("red"),)


async def test_what_was_said_before_the_question_answers_it(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        answers = [text_of(await ctx.ask("and?")) for _ in range(3)]
        return " ".join(answers)

    await alice.send_task(plain(bob, id=uid(1)))
    for word in ("one", "two", "three"):
        await alice.add_message(uid(1), word)
    async with Worker(bob, handler):
        assert (await drain(alice)).content == (Text("one two three"),)
    assert (await alice.get_task(uid(1))).generation == 7  # sent, three messages, leased, and two for the result


async def test_inputs_come_in_order_as_they_are_said(alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        heard = []
        async for message in ctx.inputs():
            heard.append(text_of(message))
            await ctx.update(f"heard {heard[-1]}")
            if heard[-1] == "end":
                break
        return " ".join(heard)

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        for word in ("one", "two", "end"):
            await alice.add_message(uid(1), word)
        assert (await drain(alice)).content == (Text("one two end"),)


async def test_a_cancel_ends_a_question_and_the_task(alice: Mailbox, bob: Mailbox) -> None:
    seen: list[Any] = []

    async def handler(ctx: WorkContext) -> None:
        try:
            await ctx.ask("which colour?")
        except Release as release:
            seen.append((release.reason, ctx.cancel_requested))
            raise

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.cancel_task(uid(1), reason="too dear", graceful=True)
        await drain(alice)
    assert seen == [("too dear", True)]
    assert (await alice.get_task(uid(1))).outcome is Outcome.CANCELED


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_cancel_ends_the_inputs(alice: Mailbox, bob: Mailbox, graceful: bool) -> None:
    ended: asyncio.Queue[tuple[list[str], str | None]] = asyncio.Queue()

    async def handler(ctx: WorkContext) -> None:
        heard = [text_of(message) async for message in ctx.inputs()]
        ended.put_nowait((heard, ctx.cancel_reason))

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), lambda entry: entry.state is TaskState.IN_FLIGHT)
        await alice.cancel_task(uid(1), reason="too dear", graceful=graceful)
        assert await soon(ended.get()) == ([], "too dear" if graceful else "task_terminal")


async def test_a_question_under_a_lost_lease_is_refused(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    codes: asyncio.Queue[str] = asyncio.Queue()

    async def handler(ctx: WorkContext) -> None:
        try:
            await ctx.ask("which colour?")
        except CovenantError as lost:
            codes.put_nowait(lost.code)
            await ctx.canceled()
            raise

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.cancel_task(uid(1))
        assert await soon(codes.get()) == "task_terminal"


async def _in_two_tasks(ctx: WorkContext) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.update("one"))
        group.create_task(ctx.update("two"))


@pytest.mark.parametrize(
    "verb",
    [
        lambda ctx: ctx.ask("which colour?"),
        lambda ctx: ctx.update("half way"),
        lambda ctx: ctx.artifact("piece"),
        lambda ctx: ctx.partial("piece"),
        lambda ctx: ctx.heartbeat(),
        _in_two_tasks,
    ],
)
async def test_a_cancel_ends_a_handler_in_one_line(
    alice: Mailbox, bob: Mailbox, verb: Callable[[WorkContext], Awaitable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it was about to say. There is nothing to answer any more, and nothing that has failed."""
    caplog.set_level(logging.INFO, "covenant.worker")
    is_canceled = asyncio.Event()

    async def handler(ctx: WorkContext) -> str:
        if ctx.task.id == uid(1):
            await is_canceled.wait()
            await verb(ctx)
        return "done"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), lambda entry: entry.state is TaskState.IN_FLIGHT)
        await alice.cancel_task(uid(1))
        is_canceled.set()
        await alice.send_task(plain(bob, id=uid(2)))
        assert {(await drain(alice)).task_id for _ in range(2)} == {uid(1), uid(2)}
    assert [record.getMessage() for record in caplog.records] == [f"the lease of task {uid(1)} is lost: task_terminal"]
    assert not any(record.exc_info for record in caplog.records)


async def test_a_cancel_ends_a_question_of_a_plain_function_in_one_line(
    alice: Mailbox, bob: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covenant.worker")
    async with Worker(bob, lambda ctx: text_of(ctx.wait(ctx.ask("which colour?")))):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.cancel_task(uid(1))
        await drain(alice)
    assert [record.getMessage() for record in caplog.records] == [f"the lease of task {uid(1)} is lost: task_terminal"]


async def test_a_failure_after_a_cancel_is_told_as_one(
    alice: Mailbox, bob: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: WorkContext) -> None:
        try:
            await ctx.ask("which colour?")
        except CovenantError:
            raise ValueError("no paint") from None

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.cancel_task(uid(1))
        await drain(alice)
    assert "ValueError: no paint" in caplog.text


async def test_the_next_attempt_hears_everything_from_the_start(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> str:
        colour = text_of(await ctx.ask("which colour?"))
        if ctx.attempt == 1:
            raise Release
        return f"{colour} {text_of(await ctx.ask('which size?'))}"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        await until(alice, uid(1), asks)
        await alice.add_message(uid(1), "red")
        await until(alice, uid(1), lambda entry: entry.attempt == 2 and asks(entry))
        await alice.add_message(uid(1), "small")
        assert (await drain(alice)).content == (Text("red small"),)


# --- the last word -----------------------------------------------------------------------------------------


async def test_a_rejection_passes_by_whoever_catches_exceptions(alice: Mailbox, bob: Mailbox) -> None:
    after: list[str] = []

    async def handler(ctx: WorkContext) -> str:
        try:
            ctx.reject("not my trade")
        except Exception:
            after.append("caught")
        after.append("went on")
        return "done"

    async with Worker(bob, handler):
        await alice.send_task(plain(bob, id=uid(1)))
        answer = await drain(alice)
    assert after == []
    assert (answer.status, answer.error_message) == ("error", "rejected: not my trade")
    assert (await alice.get_task(uid(1))).outcome is Outcome.REJECTED


async def _in_a_group(ctx: WorkContext) -> None:
    async def refuse() -> None:
        ctx.reject("no")

    async with asyncio.TaskGroup() as group:
        group.create_task(refuse())


async def _swallowed(ctx: WorkContext) -> str:
    try:
        ctx.reject("no")
    except Ended:
        return "yes"


async def _awaited(ctx: WorkContext) -> None:
    await ctx.reject("no")


def _in_a_thread(ctx: WorkContext) -> None:
    ctx.reject("no")


@pytest.mark.parametrize("handler", [_in_a_group, _swallowed, _awaited, _in_a_thread])
@pytest.mark.usefixtures("in_process")
async def test_the_last_word_counts_however_the_handler_ends(alice: Mailbox, bob: Mailbox, handler: Handler) -> None:
    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        assert (await drain(alice)).error_message == "rejected: no"


@pytest.mark.usefixtures("in_process")
async def test_a_wrong_last_word_is_an_error_and_not_a_silence(alice: Mailbox, bob: Mailbox) -> None:
    async with Worker(bob, lambda ctx: ctx.reject("x" * 10_000_000)):
        await alice.send_task(plain(bob))
        answer = await drain(alice)
    assert answer.status == "error" and "message has" in str(answer.error_message)


@pytest.mark.usefixtures("in_process")
async def test_a_reply_is_the_whole_answer(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    async def handler(ctx: WorkContext) -> None:
        assert text_of(ctx.message) == "hello?"
        ctx.reply("hello")

    message = Message(message_id="m", role="ROLE_USER", parts=(Part(text="hello?"),))
    task = Task(recipient=bob.agent, intent_text="hello?", message=message, id=uid(1))
    async with Worker(bob, handler):
        await alice._engine.run(SendTask(alice.agent, task, protocol=True))
        await until(alice, uid(1), lambda entry: entry.outcome is not None)
    dialog = await box._engine.ask(GetDialog(None, uid(1), None, True, True))
    assert text_of(dialog.reply) == "hello"


async def test_a_reply_that_comes_too_late_is_the_result(alice: Mailbox, bob: Mailbox) -> None:
    """What came by the mailbox is a task, and so is what somebody has seen already."""

    async def handler(ctx: WorkContext) -> None:
        ctx.reply("hello")

    async with Worker(bob, handler):
        await alice.send_task(plain(bob))
        answer = await drain(alice)
    assert (answer.status, text_of(answer.result.message)) == ("ok", "hello")


# --- kill -9 -----------------------------------------------------------------------------------------------


@pytest.fixture
async def house() -> AsyncIterator[House]:
    there = House()
    await there.open()
    yield there
    there.close()


class House:
    """A daemon in a process of its own, which is killed and comes back; alice and bob are enrolled."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="cov-"))
        self.url = f"unix:{self.home}/sock"
        self.tokens: dict[str, str] = {}
        self.daemon, _ = start(self.home)

    async def open(self) -> None:
        async with Mailbox.open(self.url) as box:
            for name in ("alice@lab", "bob@lab"):
                request = w.EnrollPeer(display=name, grants=list(WORKING))
                reply: w.PeerEnrolled = await box._engine.call(request, w.PeerEnrolled)  # type: ignore[attr-defined]
                self.tokens[name] = reply.token

    def box(self, name: str) -> OpenMailbox:
        return Mailbox.open(self.url, token=self.tokens[name])

    def kill_and_restart(self) -> None:
        kill(self.daemon)
        self.daemon, _ = start(self.home)

    def close(self) -> None:
        kill(self.daemon)
        shutil.rmtree(self.home)

    async def left(self, task_id: str) -> TaskShown:
        """What the folder holds in the end."""
        kill(self.daemon)
        async with Mailbox.open(f"file:{self.home}/data") as box:
            task = await shown(box, task_id)
        self.daemon, _ = start(self.home)
        return task


async def patiently(box: Mailbox, act: Callable[[], Awaitable[Any]]) -> Any:
    """While the daemon is away, ask again."""
    async with asyncio.timeout(60):
        return await Patience(box).until_answered(act)


async def test_a_daemon_that_is_killed_again_and_again_has_heard_everything_once(house: House) -> None:
    pieces, dice = 60, random.Random(5)

    async def handler(ctx: WorkContext) -> None:
        for number in range(pieces):
            await ctx.artifact(f"{number},", name="draft", append=True)
            await ctx.update(f"wrote {number}")

    async with house.box("alice@lab") as alice, house.box("bob@lab") as bob, Worker(bob, handler):
        task_id = (await alice.send_task(Task(recipient=bob.agent, intent_text="write"))).task_id
        for at in sorted(dice.sample(range(5, 2 * pieces), 4)):
            await patiently(alice, lambda at=at: until(alice, task_id, lambda entry: entry.generation >= at))  # type: ignore[misc]
            await asyncio.to_thread(house.kill_and_restart)
        await patiently(alice, lambda: until(alice, task_id, lambda entry: entry.outcome is not None))
    task = await house.left(task_id)
    assert "".join(part.text or "" for part in task.artifacts[0].parts) == "".join(f"{n}," for n in range(pieces))
    assert [text_of(message) for message in task.history][-pieces:] == [f"wrote {n}" for n in range(pieces)]
    assert task.generation == str(2 + 2 * pieces + 1)


_DOOMED = """
import asyncio, sys
from covenant import Mailbox, WorkContext, Worker

async def handler(ctx: WorkContext) -> str:
    colour = await ctx.ask("which colour?")
    print(colour.parts[0].text, flush=True)
    await ctx.ask("which size?")
    return "never"

async def main(url: str, token: str) -> None:
    async with Mailbox.open(url, token=token) as box:
        await Worker(box, handler, heartbeat_ms=5).run()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_when_daemon_and_worker_are_killed_the_next_worker_goes_on_from_the_answers(house: House) -> None:
    async def handler(ctx: WorkContext) -> str:
        colour, size = await ctx.ask("which colour?"), await ctx.ask("which size?")
        return f"{text_of(colour)} {text_of(size)}, attempt {ctx.attempt}"

    async with house.box("alice@lab") as alice, house.box("bob@lab") as bob:
        task = keyed(bob, "door", "paint the door")
        task_id = (await alice.send_task(task)).task_id
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _DOOMED, house.url, house.tokens["bob@lab"], stdout=subprocess.PIPE
        )
        await until(alice, task_id, asks)
        await alice.add_message(task_id, "red")
        assert worker.stdout is not None
        assert await soon(worker.stdout.readline()) == b"red\n"
        await until(alice, task_id, asks)
        worker.kill()
        await worker.wait()
        await asyncio.to_thread(house.kill_and_restart)

        async with Mailbox.open(house.url) as operator:
            assert (await patiently(operator, lambda: operator.get_task(task_id))).asks is Asks.INPUT
            await requeue(operator, task_id)
        async with Worker(bob, handler):
            await patiently(alice, lambda: until(alice, task_id, lambda entry: entry.attempt == 2 and asks(entry)))
            await alice.add_message(task_id, "small")
            assert (await drain(alice)).content == (Text("red small, attempt 2"),)
    task_left = await house.left(task_id)
    assert [text_of(message) for message in task_left.history][1:] == [
        "which colour?",
        "red",
        "which size?",
        "which size?",
        "small",
    ]
