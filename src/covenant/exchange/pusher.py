"""The pusher: tells webhooks what happens to their tasks, in order, at least once, beside everything else.

What there is to tell is read from the log, and how far a webhook was told is a record: a restart, orderly or not, goes
on where the last note was made, so that a receiver may hear something twice and never misses anything. Each webhook has
a line of its own while there is something to tell it, and costs nothing while there is not. One that does not answer is
tried again, later and later, and given up in the end: with a row in the audit.

The secrets of a webhook go to its receiver. Logs name its host, its task and its id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from covenant.exchange.exchange import Exchange
from covenant.exchange.follow import Steps, steps_since, updates_at
from covenant.exchange.outbound import BAD_URL, TIMEOUT_S, Outbound
from covenant.exchange.scheduler import sleep_until
from covenant.model.command import NotePush
from covenant.model.error import CovenantError, UnknownTask
from covenant.model.peer import Caller
from covenant.model.protocol import RESTARTED, StreamResponse, Update
from covenant.model.push import Push, PushConfig
from covenant.model.query import GetDialog, GetPushed
from covenant.model.view import Dialog, Pushed
from covenant.rules.dialect import PLAIN, plain_event
from covenant.store.clock import Clock

FIRST_WAIT_MS: Final = 1000
WAIT_MS_MAX: Final = 10 * 60 * 1000
GIVE_UP_MS: Final = 24 * 60 * 60 * 1000  # of waiting, after the first try of what is not taken
UPDATES_PER_TURN: Final = 16  # after which it is noted how far it was told; a crash repeats no more than these
TURN_MS_MAX: Final = 1000
GRACE_S: Final = 2.0  # for the posts that are under way when the daemon ends
_STORE_WAIT_MS: Final = 1000

SENDER_REVOKED: Final = "sender_revoked"
TASK_GONE: Final = "task_gone"
_FINAL: Final = (BAD_URL, SENDER_REVOKED, TASK_GONE)  # it will not be otherwise tomorrow

MEDIA_TYPE: Final = "application/a2a+json"
TOKEN_HEADER: Final = "X-A2A-Notification-Token"

log = logging.getLogger("covenant.pusher")


class PushCounts(Struct):
    taken: int = 0
    failed: int = 0
    given_up: int = 0


class _Line:
    """The way to one webhook, as it was set by the event `since`, while there is something to tell."""

    def __init__(self, task_id: str, push: Push) -> None:
        self.task_id = task_id
        self.config = push.config
        self.since = push.since
        self.host = urlsplit(push.config.url).hostname
        self.headers = headers_of(push.config)
        self.is_stirred = False  # something has come since it last looked
        self.is_posting = False
        self.told = self.noted = push.delivered
        self.is_over = False  # nothing comes after what was told
        self.is_direct = False  # there is no task, but a message
        self.steps: Steps | None = None  # to tell next
        self.waited_ms = 0  # in vain, since it last took something
        self.wait_ms = FIRST_WAIT_MS
        self.hopeless: str | None = None  # why it is given up
        self.running: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"webhook {self.config.id!r} of task {self.task_id} at {self.host}"


class Pusher:
    def __init__(
        self,
        exchange: Exchange,
        clock: Clock,
        *,
        private: bool = False,
        timeout_s: float = TIMEOUT_S,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._exchange = exchange
        self._store = exchange.store
        self._clock = clock
        self._outbound = Outbound(private, timeout_s)
        self._dice = dice
        self._stirred: dict[str, None] = {}  # tasks to look at, in the order in which they were told of
        self._came = asyncio.Event()
        self._lines: dict[str, dict[str, _Line]] = {}  # by task, by id of the webhook
        self._watching: asyncio.Task[None] | None = None
        self._is_ending = False
        self.counts = PushCounts()

    @property
    def behind(self) -> int:
        """How many webhooks have something to hear."""
        return sum(len(lines) for lines in self._lines.values())

    def start(self) -> None:
        self._store.watch_pushes(self._stir)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """What is under way has a moment to arrive: it would be told again otherwise."""
        self._is_ending = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        lines = [line for of_task in self._lines.values() for line in of_task.values()]
        running = [line.running for line in lines if line.running is not None]
        for line in lines:
            if line.running is not None and not line.is_posting:
                line.running.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self._outbound.close()

    # --- who has something to hear ------------------------------------------------------------------------

    def _stir(self, task_id: str) -> None:
        self._stirred[task_id] = None
        self._came.set()

    async def _watch(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._stirred:
                task_id = next(iter(self._stirred))
                del self._stirred[task_id]
                try:
                    await self._look(task_id)
                except CovenantError:  # the store is away, and tells of every task when it is back
                    self._stir(task_id)
                    await self._pause()

    async def _pause(self) -> None:
        await sleep_until(self._clock, self._clock.now_ms() + _STORE_WAIT_MS)

    async def _look(self, task_id: str) -> None:
        """Open a line to each webhook that is behind, and cut those to webhooks that are gone."""
        pushed: Pushed = await self._store.ask(GetPushed(None, task_id))
        there = {push.config.id: push for push in pushed.pushes}
        for line in list(self._lines.get(task_id, {}).values()):
            push = there.get(line.config.id)
            if push is None or push.since != line.since:
                self._cut(line)
        for push in there.values():
            line_there = self._lines.get(task_id, {}).get(push.config.id)
            if line_there is not None:
                line_there.is_stirred = True
            elif push.delivered < pushed.generation:
                self._open(_Line(task_id, push))

    def _open(self, line: _Line) -> None:
        self._lines.setdefault(line.task_id, {})[line.config.id] = line
        line.running = asyncio.create_task(self._run(line))

    def _cut(self, line: _Line) -> None:
        self._close(line)
        if line.running is not None:
            line.running.cancel()

    def _close(self, line: _Line) -> None:
        lines = self._lines.get(line.task_id, {})
        if lines.get(line.config.id) is line:
            del lines[line.config.id]
            if not lines:
                del self._lines[line.task_id]

    # --- one webhook --------------------------------------------------------------------------------------

    async def _run(self, line: _Line) -> None:
        try:
            while not self._is_ending and self._store.leads():  # who leads next goes on where this was noted
                line.is_stirred = False
                try:
                    is_done = await self._go_on(line)
                except CovenantError as failed:  # of the store, mostly
                    log.debug("%s has to wait: %s", line, failed)
                    await self._pause()
                    continue
                if is_done and not line.is_stirred:
                    return
        except Exception:
            log.exception("%s is left until its task moves on", line)
        finally:
            self._close(line)
            if line.hopeless is not None:
                self.counts.given_up += 1
                log.warning("%s is given up: %s", line, line.hopeless)
            if line.told > line.noted:
                with suppress(CovenantError):  # then it is told again
                    await self._note(line)

    async def _go_on(self, line: _Line) -> bool:
        """Tell some of what there is to tell. Whether nothing is left."""
        pushed: Pushed = await self._store.ask(GetPushed(None, line.task_id))
        if not any(push.config.id == line.config.id and push.since == line.since for push in pushed.pushes):
            return True
        line.is_direct = pushed.is_direct
        if line.told >= pushed.generation and pushed.sender is not None:
            line.is_over = pushed.is_over
            await self._note(line)
            return True
        async with self._outbound.turn(line.config.url):
            trouble = await self._tell(line, pushed.sender)
        if trouble is not None and (trouble in _FINAL or self._is_hopeless(line)):
            await self._give_up(line, trouble)
            return True
        await self._note(line)
        if trouble is not None and not self._is_ending:
            await self._back_off(line)
        return line.is_over

    async def _tell(self, line: _Line, sender: str | None) -> str | None:
        """For the time of a turn. What went wrong, if anything."""
        end_ms = self._clock.now_ms() + TURN_MS_MAX
        for _ in range(UPDATES_PER_TURN):
            caller = None if sender is None else self._store.caller_at(sender)
            if caller is None:
                return SENDER_REVOKED if sender is not None else TASK_GONE
            try:
                update = await self._next(line, caller)
            except UnknownTask:
                return TASK_GONE
            if update is None:
                return None
            trouble = await self._post(line, update)
            if trouble is not None:
                return trouble
            line.told, line.is_over = update.generation, update.ends
            if update.ends or self._is_ending or self._clock.now_ms() >= end_ms:
                return None
        return None

    async def _next(self, line: _Line, caller: Caller) -> Update | None:
        """What comes next. To who is further behind than the log reaches, the task as it is."""
        if line.steps is None or not line.steps.steps:
            line.steps = await steps_since(self._exchange, caller, line.task_id, line.told)
        is_whole = line.steps.is_whole
        while is_whole and line.steps.steps:
            updates = await updates_at(self._exchange, line.steps.place, line.steps.steps[-1])
            is_whole = bool(updates)
            for update in updates:
                if update.generation > line.told and (update.response.message is not None or not line.is_direct):
                    return update
            line.steps.steps.pop()
        line.steps = None
        return None if is_whole else await self._as_it_is(line, caller)

    async def _as_it_is(self, line: _Line, caller: Caller) -> Update:
        query = GetDialog(self._exchange.by(caller), line.task_id, None, True, True)
        dialog: Dialog = await self._exchange.ask(caller, query)
        task = structs.replace(dialog.task, metadata={RESTARTED: True})
        response = StreamResponse(task=task) if dialog.reply is None else StreamResponse(message=dialog.reply)
        return Update(dialog.generation, response, dialog.state.is_terminal)

    async def _post(self, line: _Line, update: Update) -> str | None:
        is_plain = line.config.protocol_version == PLAIN
        body = msgspec.json.encode(plain_event(update.response) if is_plain else update.response)
        line.is_posting = True
        try:
            trouble = await self._outbound.post(line.config.url, body, line.headers)
        finally:
            line.is_posting = False
        if trouble is None:
            self.counts.taken += 1
            line.waited_ms, line.wait_ms = 0, FIRST_WAIT_MS
        else:
            self.counts.failed += 1
            log.info("%s did not take generation %d: %s", line, update.generation, trouble)
        return trouble

    def _is_hopeless(self, line: _Line) -> bool:
        """Whether it has failed for so long that there is no use in trying. What counts is the time in which it was
        tried: not that in which the machine slept, or over which its clock was set."""
        return line.waited_ms >= GIVE_UP_MS

    async def _back_off(self, line: _Line) -> None:
        wait_ms = int(line.wait_ms * (1 + self._dice()) / 2)
        line.wait_ms = min(2 * line.wait_ms, WAIT_MS_MAX)
        line.waited_ms += wait_ms
        await sleep_until(self._clock, self._clock.now_ms() + wait_ms)

    async def _note(self, line: _Line) -> None:
        told = line.told
        if told > line.noted or line.is_over:
            await self._store.run(NotePush(None, line.task_id, line.config.id, line.since, told, line.is_over))
            line.noted = told

    async def _give_up(self, line: _Line, why: str) -> None:
        line.hopeless = why
        await self._store.run(NotePush(None, line.task_id, line.config.id, line.since, line.told, reason=why))
        line.noted = line.told


def headers_of(config: PushConfig) -> dict[str, str]:
    headers = {"Content-Type": MEDIA_TYPE}
    if config.token is not None:
        headers[TOKEN_HEADER] = config.token
    known = config.authentication
    if known is not None and known.credentials is not None:
        headers["Authorization"] = f"{known.scheme} {known.credentials}"
    return headers
