"""Those who use the mailbox: senders, workers, followers of streams, and the operator. None of them loads without
bound: a sender has so many tasks open, and all have a rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec

from covenant import (
    AgentId,
    Answer,
    Artifact,
    CovenantError,
    Delivery,
    Idempotency,
    Mailbox,
    Part,
    RepairRequest,
    Requeue,
    Result,
    Task,
    TaskState,
    Text,
)
from covenant import a2a as protocol
from covenant.a2a.fault import INTERNAL, Fault
from covenant.a2a.interface import JSONRPC, REST, Interface
from covenant.a2a.transport import Wire
from tests.cluster.caller import ANSWER_S, PAUSE_S, Caller, NoAnswer, outcome_of
from tests.cluster.history import Outcome, Verb

OPEN_MAX: Final = 12  # tasks of one sender
WAIT_MS: Final = 300
STALE_MS: Final = 3_000  # without a sign of life: then the operator decides
SILENT_S: Final = 2.0  # a stream that says nothing may be that of a frozen daemon
STREAM_S: Final = 120.0  # of one task, whatever happens
PAGE: Final = 100
_HURRIED: Final = protocol.Patience(first_s=0.01, longest_s=0.05, failures_max=1, repeats_max=0)

T = TypeVar("T")


def _text(answer: Answer) -> str:
    return " ".join(block.text for block in answer.content if isinstance(block, Text)) or str(answer.error_message)


class Over:
    """When the clients are to begin nothing new, and when they are to end."""

    def __init__(self) -> None:
        self.sending = asyncio.Event()
        self.working = asyncio.Event()


async def _until_answered(caller: Caller, once: Callable[[int], Awaitable[T]], over: asyncio.Event) -> T | None:
    """Again and again by other daemons; None when there is no time left for it."""
    tries = 0
    while not over.is_set():
        tries += 1
        try:
            return await once(tries)
        except NoAnswer:
            continue
    return None


# --- senders -------------------------------------------------------------------------------------------------


class Sender:
    """Sends, drains, and reads what it may have drained without hearing of it."""

    def __init__(self, caller: Caller, worker: AgentId, over: Over) -> None:
        self._caller = caller
        self._worker = worker
        self._over = over
        self._open: set[str] = set()

    async def run(self) -> None:
        chance = self._caller.chance
        while not self._over.working.is_set():
            if len(self._open) < OPEN_MAX and not self._over.sending.is_set():
                for task in self._tasks():
                    await self._send(task)
            await self._drain()
            if chance.random() < 0.1 or self._over.sending.is_set():
                await self._read()
            if self._over.sending.is_set() and not self._open and await self._drain() == 0:
                return
            await asyncio.sleep(PAUSE_S)

    def _tasks(self) -> list[Task]:
        """One; or two that are the same work."""
        chance = self._caller.chance
        key = f"k-{self._caller.some_id()}" if chance.random() < 0.2 else None
        same = None if key is None else Idempotency("idempotent", key)
        intent = "work"
        return [
            Task(id=self._caller.some_id(), recipient=self._worker, intent_text=intent, idempotency=same)
            for _ in range(1 if key is None else 2)
        ]

    async def _send(self, task: Task) -> None:
        caller, key = self._caller, "" if task.idempotency is None else task.idempotency.key

        async def once(_: int) -> None:
            began = monotonic()
            sent = await caller.call(Verb.SEND, lambda box: box.send_task(task), task=task.id, key=key)
            facts: dict[str, Any] = {"duplicate": sent.duplicate, "generation": sent.generation}
            caller.done(Verb.SEND, began, task=task.id, key=key, **facts)

        self._open.add(task.id)
        await _until_answered(caller, once, self._over.working)

    async def _drain(self) -> int | None:
        """How many there were, if that is known."""
        began = monotonic()
        try:
            drained = await self._caller.call(Verb.DRAIN, lambda box: box.recv_results(PAGE, wait_ms=WAIT_MS))
        except NoAnswer:
            return None
        for answer in drained:
            await self._note(Verb.DRAIN, began, answer)
        return len(drained)

    async def _read(self) -> None:
        """A daemon that dies behind a drain takes the answer along."""
        for task in sorted(self._open):
            began = monotonic()
            try:
                answer = await self._caller.call(Verb.READ, partial(Mailbox.get_result, task_id=task), task=task)
            except NoAnswer:
                return
            if answer is not None:
                await self._note(Verb.READ, began, answer)

    async def _note(self, verb: Verb, began: float, answer: Answer) -> None:
        note_answer(self._caller, verb, began, answer)
        if answer.is_final and answer.task_id in self._open:
            self._open.discard(answer.task_id)
            await self._caller.progress.move()


def note_answer(caller: Caller, verb: Verb, began: float, answer: Answer) -> None:
    caller.done(
        verb,
        began,
        task=answer.task_id,
        attempt=answer.attempt,
        generation=answer.generation,
        text=_text(answer),
        is_last=answer.is_final,
    )


# --- workers -------------------------------------------------------------------------------------------------


class Worker:
    """Does what it is handed; now and then it forgets about it, gives it back, or answers twice."""

    def __init__(self, caller: Caller, over: Over) -> None:
        self._caller = caller
        self._over = over
        self._forgotten: list[Delivery] = []

    async def run(self) -> None:
        chance = self._caller.chance
        while not self._over.working.is_set():
            began = monotonic()
            limit = chance.randint(1, 4)
            try:
                taken = await self._caller.call(Verb.LEASE, partial(Mailbox.recv_tasks, limit=limit, wait_ms=WAIT_MS))
            except NoAnswer:
                continue
            for delivery in taken:
                self._caller.done(Verb.LEASE, began, generation=delivery.generation, **of(delivery))
            for delivery in taken:
                await self._do(delivery)
            if self._forgotten and chance.random() < 0.1:
                await self._post(self._forgotten.pop(0), "remembered")

    async def _do(self, delivery: Delivery) -> None:
        chance = self._caller.chance
        try:
            if delivery.task.message is not None:
                await self._write(delivery, chance.randint(1, 6))
            elif chance.random() < 0.2:
                await self._part(delivery)
            if chance.random() < 0.2:
                await self._use(Verb.BEAT, delivery, lambda box: box.heartbeat(delivery))
        except CovenantError:
            return  # the lease has ended; it is in the history
        fate = chance.random()
        if fate < 0.02:
            self._forgotten.append(delivery)
        elif fate < 0.07:
            await self._release(delivery)
        else:
            await self._post(delivery, "done")
            if chance.random() < 0.1:
                await self._post(delivery, "done")
            if chance.random() < 0.1:
                await self._post(delivery, "done otherwise")

    async def _write(self, delivery: Delivery, count: int) -> None:
        """Pieces of one artifact, and words between them."""
        for number in range(count):
            text = f"<{delivery.lease_id} {number}>"
            if self._caller.chance.random() < 0.3:
                await self._use(Verb.WRITE, delivery, _updating(delivery, text), text)
            else:
                await self._use(Verb.WRITE, delivery, _adding(delivery, text, number > 0), text)

    async def _part(self, delivery: Delivery) -> None:
        text = f"part of {delivery.lease_id}"
        result = Result.partial(delivery, [Text(text)], 1)
        await self._use(Verb.PART, delivery, lambda box: box.send_result(result), text)

    async def _use(
        self, verb: Verb, delivery: Delivery, ask: Callable[[Mailbox], Awaitable[Any]], text: str = ""
    ) -> None:
        caller, facts = self._caller, {**of(delivery), "text": text}

        async def once(tries: int) -> None:
            began = monotonic()
            done = await caller.call(verb, ask, **facts)
            generation = getattr(done, "generation", 0)
            caller.done(verb, began, generation=generation, duplicate=tries > 1, **facts)

        await _until_answered(caller, once, self._over.working)

    async def _release(self, delivery: Delivery) -> None:
        began = monotonic()
        try:
            done = await self._caller.call(Verb.RELEASE, lambda box: box.release(delivery), **of(delivery))
        except (NoAnswer, CovenantError):
            return
        self._caller.done(Verb.RELEASE, began, generation=done.generation, **of(delivery))

    async def _post(self, delivery: Delivery, word: str) -> None:
        caller, text = self._caller, f"{word} under {delivery.lease_id}"

        async def once(_: int) -> None:
            await post(caller, delivery, text)

        try:
            await _until_answered(caller, once, self._over.working)
        except CovenantError:
            return  # it was refused, and is in the history as that


def of(delivery: Delivery) -> dict[str, Any]:
    return {"task": delivery.task.id, "lease": delivery.lease_id, "attempt": delivery.attempt}


def _updating(delivery: Delivery, text: str) -> Callable[[Mailbox], Awaitable[Any]]:
    message = protocol.Message(message_id=text, role="ROLE_AGENT", parts=(Part(text=text),))
    return lambda box: box.update(delivery, message, receipt=text)


def _adding(delivery: Delivery, text: str, append: bool) -> Callable[[Mailbox], Awaitable[Any]]:
    artifact = Artifact(artifact_id="draft", parts=(Part(text=text),))
    return lambda box: box.artifact(delivery, artifact, append=append, receipt=text)


async def post(caller: Caller, delivery: Delivery, text: str, answer_s: float = ANSWER_S) -> None:
    """One try."""
    began, facts = monotonic(), {**of(delivery), "text": text}
    result = Result.ok(delivery, [Text(text)])
    posted = await caller.call(Verb.POST, lambda box: box.send_result(result), answer_s=answer_s, **facts)
    caller.done(Verb.POST, began, generation=posted.generation, duplicate=posted.duplicate, **facts)


# --- followers -----------------------------------------------------------------------------------------------


class Follower:
    """Asks by the A2A protocol, and follows what happens on two streams, each by another daemon."""

    def __init__(self, caller: Caller, card: dict[str, Any], token: str, over: Over) -> None:
        self._caller = caller
        self._card = card
        self._token = token
        self._over = over

    async def run(self) -> None:
        while not self._over.sending.is_set():
            task = await self._send()
            if task is None:
                return
            first = self._caller.chance.randrange(len(self._caller.daemons))
            async with asyncio.TaskGroup() as both:
                for number in range(2):
                    both.create_task(self.follow(task, f"stream {number}", first + number))
            await self._caller.progress.move()

    def _client(self, at: int) -> protocol.Client:
        daemons, binding = self._caller.daemons, self._caller.chance.choice((JSONRPC, REST))
        interface = Interface(daemons[at % len(daemons)].url, binding, "1.1")
        return protocol.Client(self._card, interface, Wire(self._token, ANSWER_S, ANSWER_S), (), _HURRIED)

    async def _send(self) -> str | None:
        caller, key = self._caller, self._caller.some_id()
        at, task = caller.chance.randrange(len(caller.daemons)), None
        repeats = 2 if caller.chance.random() < 0.3 else 1  # the same message once more, elsewhere
        while repeats and not self._over.working.is_set():
            began = monotonic()
            facts: dict[str, Any] = {"key": key, "stream": "a2a", "daemon": at % len(caller.daemons)}
            try:
                async with self._client(at) as client, asyncio.timeout(ANSWER_S):
                    sent = await client.send("write", idempotency_key=key, blocking=False)
                assert isinstance(sent, protocol.Task)
                task = task or sent.id
                caller.history.note(Verb.SEND, began, task=sent.id, generation=sent.generation, **facts)
                repeats -= 1
            except (CovenantError, TimeoutError) as failed:
                caller.history.note(Verb.SEND, began, **_failure(failed), **facts)
                await caller.progress.fail()
                await asyncio.sleep(PAUSE_S)
            at += 1
        return task

    async def follow(self, task: str, stream: str, at: int = 0) -> None:
        """Until its end, from where it was left."""
        known, caller, end = 1, self._caller, monotonic() + STREAM_S
        while monotonic() < end:
            began = monotonic()
            facts: dict[str, Any] = {"task": task, "stream": stream, "daemon": at % len(caller.daemons)}
            try:
                async with self._client(at) as client, aclosing(client.follow(task, known)) as events:
                    while True:
                        async with asyncio.timeout(SILENT_S):
                            event = await anext(events)
                        known = event.generation
                        told = msgspec.json.encode(event).decode()
                        caller.history.note(
                            Verb.EVENT, began, generation=known, text=told, is_last=event.is_last, **facts
                        )
                        if event.is_last:
                            return
            except (CovenantError, TimeoutError, StopAsyncIteration) as failed:
                caller.history.note(Verb.EVENT, began, **_failure(failed), **facts)
                await asyncio.sleep(PAUSE_S)
            at += 1


def _failure(failed: BaseException) -> dict[str, Any]:
    if not isinstance(failed, CovenantError):
        return {"outcome": Outcome.UNKNOWN, "code": type(failed).__name__}
    code = failed.kind.reason if isinstance(failed, Fault) else failed.code
    is_untyped = isinstance(failed, Fault) and failed.kind is INTERNAL
    return {
        "outcome": Outcome.UNKNOWN if is_untyped else outcome_of(failed),
        "code": "internal" if is_untyped else code,
        "text": failed.message,
    }


# --- the operator --------------------------------------------------------------------------------------------


class Operator:
    """Decides about leases of a worker that show no sign of life: nobody else would."""

    def __init__(self, caller: Caller, worker: AgentId, over: Over) -> None:
        self._caller = caller
        self._worker = worker
        self._over = over

    async def run(self) -> None:
        while not self._over.working.is_set():
            try:
                page = await self._caller.call(
                    Verb.STANDING,
                    lambda box: box.task_queue(PAGE, state=TaskState.IN_FLIGHT, min_lease_age_ms=STALE_MS),
                )
                for entry in page.tasks:
                    if entry.task.recipient == self._worker and entry.lease_id is not None:
                        await requeue(self._caller, entry.task.id, entry.lease_id)
            except NoAnswer:
                continue
            await asyncio.sleep(10 * PAUSE_S)


async def requeue(caller: Caller, task: str, lease: str) -> None:
    """One try; a refusal says that somebody was quicker."""
    began = monotonic()
    request = RepairRequest(task, Requeue("operator_accepted", lease), "no sign of life")
    try:
        done = await caller.call(Verb.REQUEUE, lambda box: box.repair_task(request), task=task, lease=lease)
    except CovenantError:
        return
    caller.done(Verb.REQUEUE, began, task=task, lease=lease, generation=done.generation)
