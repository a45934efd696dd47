"""The play around a frozen daemon. Who holds a task by it posts its result into it; meanwhile the operator decides, and
somebody else gets the task. Thawed, the daemon may not write what it was told before."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Final, Protocol, TypeVar

from covenant import AgentId, CovenantError, Delivery, Task
from tests.cluster.caller import Caller, NoAnswer
from tests.cluster.clients import PAGE, WAIT_MS, note_answer, of, post, requeue
from tests.cluster.daemons import ServedDaemon
from tests.cluster.history import Verb

_PATIENCE_S: Final = 120.0  # of who has spoken to the frozen one
_TRIES_MAX: Final = 100

T = TypeVar("T")


class Casting(Protocol):
    def __call__(self, role: str, daemons: list[ServedDaemon]) -> Caller: ...


class Play:
    """`cast` makes a caller for a role: `asker`, `holder` or `operator`."""

    def __init__(self, daemons: list[ServedDaemon], cast: Casting, holder: AgentId, chance: random.Random) -> None:
        self._daemons = daemons
        self._cast = cast
        self._holder = holder
        self._chance = chance

    async def around(self, frozen: ServedDaemon, meanwhile: Callable[[], Awaitable[None]]) -> str:
        """How it ended for the one that was frozen."""
        others = [daemon for daemon in self._daemons if daemon is not frozen]
        asker, heir, operator = (self._cast(role, others) for role in ("asker", "holder", "operator"))
        holder = self._cast("holder", [frozen])
        is_answered_before = self._chance.random() < 0.5
        task = Task(id=asker.some_id(), recipient=self._holder, intent_text="hold it")
        await _until(lambda: _send(asker, task))
        delivery = await _until(lambda: _take(holder, task, operator))
        with _frozen(frozen):
            late = asyncio.ensure_future(post(holder, delivery, f"late under {delivery.lease_id}", _PATIENCE_S))
            await _until(lambda: requeue(operator, task.id, delivery.lease_id))
            again = await _until(lambda: _take(heir, task, operator))
            if is_answered_before:
                await _until(lambda: _answer(heir, again))
            await meanwhile()
        ending = await _ending(late)
        if not is_answered_before:
            await _until(lambda: _answer(heir, again))
        await _until(lambda: _drain(asker, task))
        return ending


@contextmanager
def _frozen(daemon: ServedDaemon) -> Iterator[None]:
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


async def _until(once: Callable[[], Awaitable[T]]) -> T:
    for _ in range(_TRIES_MAX):
        try:
            return await once()
        except NoAnswer:
            continue
    raise AssertionError("there is no answer")


async def _send(caller: Caller, task: Task) -> None:
    began = monotonic()
    sent = await caller.call(Verb.SEND, lambda box: box.send_task(task), task=task.id)
    caller.done(Verb.SEND, began, task=task.id, generation=sent.generation, duplicate=sent.duplicate)


async def _take(caller: Caller, task: Task, operator: Caller) -> Delivery:
    """What was handed over to nobody, because the answer was lost, is requeued first."""
    began = monotonic()
    taken = await caller.call(Verb.LEASE, lambda box: box.recv_tasks(1, wait_ms=WAIT_MS))
    if not taken:
        entry = await operator.call(Verb.STANDING, lambda box: box.get_task(task.id))
        if entry.lease_id is not None:
            await requeue(operator, task.id, entry.lease_id)
        raise NoAnswer("there is nothing to take")
    assert taken[0].task.id == task.id
    caller.done(Verb.LEASE, began, generation=taken[0].generation, **of(taken[0]))
    return taken[0]


async def _answer(caller: Caller, delivery: Delivery) -> None:
    with suppress(CovenantError):  # which is in the history
        await post(caller, delivery, f"done under {delivery.lease_id}")


async def _drain(caller: Caller, task: Task) -> None:
    began = monotonic()
    for answer in await caller.call(Verb.DRAIN, lambda box: box.recv_results(PAGE, wait_ms=WAIT_MS)):
        note_answer(caller, Verb.DRAIN, began, answer)
    began = monotonic()
    read = await caller.call(Verb.READ, lambda box: box.get_result(task.id))
    if read is not None:
        note_answer(caller, Verb.READ, began, read)


async def _ending(late: asyncio.Future[None]) -> str:
    try:
        await late
    except NoAnswer as unheard:
        return f"late post unheard: {unheard}"
    except CovenantError as refusal:
        return f"late post refused: {refusal.code}"
    return "late post accepted"  # which the checker knows better how to call
