"""Following one task over cuts, restarts and refusals, until it ends.

A cut stream is taken up again where it was left, if the server can do that; if not, its snapshot mends the cut. What is
shown of what comes is decided by the track. An agent that does not stream is asked again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from covenant.a2a.calls import Calls
from covenant.a2a.fault import INVALID_PARAMS, UNSUPPORTED, Fault
from covenant.a2a.patience import Patience, Pauses
from covenant.a2a.refusal import is_passing
from covenant.a2a.seen import Element, Event, read
from covenant.a2a.sse import Sent
from covenant.a2a.track import Look, Track
from covenant.model.error import Unreachable

_EMPTY_MAX: Final = 3  # streams in a row that end without a word, before the task itself is read


class Follower:
    def __init__(self, calls: Calls, patience: Patience, task_id: str, after: int | None = None) -> None:
        self._calls = calls
        self._task_id = task_id
        self._track = Track(after, calls.is_numbered)
        self._patience = patience
        self._pauses = Pauses(patience)
        self._streams = calls.streams
        self._last_id: str | None = None
        self._failures = 0
        self._empties = 0
        self._has_shown = False

    async def events(self, stream: AsyncGenerator[Sent, None] | None = None) -> AsyncGenerator[Event, None]:
        """Yield events from the given stream, or from one that is opened here.

        A stream that ends right after a question was not cut: the next one is opened without a pause.
        """
        while not self._track.is_over:
            began, least_s = asyncio.get_running_loop().time(), 0.0
            is_asked = False
            try:
                async with aclosing(self._listen(stream) if stream or self._streams else self._ask()) as heard:
                    async for event in heard:
                        self._pauses.begin_anew()
                        self._has_shown = True
                        is_asked = event.status is not None and event.status.is_interrupted
                        yield event
            except Unreachable as cut:
                is_asked = False
                self._fail(cut)
            except Fault as refusal:
                is_asked = False
                if not self._has_another_way(refusal):
                    self._fail(refusal)
                least_s = refusal.details.get("retry_after_s", 0.0)
            stream = None
            if asyncio.get_running_loop().time() - began > self._patience.longest_s:
                self._failures = 0
                self._pauses.begin_anew()
            if not self._track.is_over:
                if not is_asked:
                    await self._pauses.pause(least_s)
                self._track.reconnect()

    # --- a stream -----------------------------------------------------------------------------------------------

    async def _listen(self, stream: AsyncGenerator[Sent, None] | None) -> AsyncGenerator[Event, None]:
        is_empty = True
        async with aclosing(stream or self._calls.subscribe(self._task_id, self._cursor())) as open_stream:
            async for sent in open_stream:
                self._failures, is_empty = 0, False
                shown = await self._take(read(sent.data, Element))
                self._last_id = sent.id or self._last_id
                if shown is not None:
                    yield shown
                if self._track.is_over or self._track.is_broken:
                    return
        self._failures = 0
        self._empties = self._empties + 1 if is_empty else 0
        shown = await self._after_silence() if is_empty else None
        if shown is not None:
            yield shown

    def _cursor(self) -> str | None:
        """Where to go on: by number with a server that counts so, otherwise by what it called its last event."""
        if self._calls.resumes and self._track.is_numbered:
            return str(self._track.known) if self._track.known else None
        return self._last_id

    async def _take(self, element: Element) -> Event | None:
        self._task_id = self._task_id or element.task_id
        shown = self._track.take(element)
        if isinstance(shown, Look):
            task = await self._calls.get(self._task_id, shown.after)
            shown = self._track.look(task, shown.after + 1)
        self._note_trust()
        return shown

    async def _after_silence(self) -> Event | None:
        """A stream that ends without a word may be that of a task that has ended. Whatever else there is to see, the
        next stream tells better, if the server is one that tells what was missed."""
        task = await self._calls.get(self._task_id)
        track = self._track
        is_behind = track.is_numbered and task.generation > track.known
        if is_behind and self._calls.resumes and self._empties < _EMPTY_MAX:
            return None
        shown = track.look(task)
        self._note_trust()
        return shown

    # --- without one --------------------------------------------------------------------------------------------

    async def _ask(self) -> AsyncGenerator[Event, None]:
        """The task, held back by the server until there is something new, if it can do that."""
        task = await self._calls.get(self._task_id, self._track.known)
        self._failures = 0
        shown = self._track.look(task)
        self._note_trust()
        if shown is not None:
            yield shown

    # --- what goes wrong ----------------------------------------------------------------------------------------

    def _has_another_way(self, refusal: Fault) -> bool:
        if refusal.kind is UNSUPPORTED and self._streams:  # the task has ended, or the agent does not stream
            self._streams = False
            return True
        if refusal.kind is INVALID_PARAMS and self._has_shown and self._cursor() is not None:
            self._last_id = None  # a server that does not know its own cursor has lost count
            self._track.is_numbered = False
            self._note_trust()
            return True
        return False

    def _fail(self, error: Unreachable | Fault) -> None:
        self._failures += 1
        is_final = isinstance(error, Fault) and not is_passing(error)
        if is_final or self._failures > self._patience.failures_max:
            raise error

    def _note_trust(self) -> None:
        self._calls.is_numbered = self._calls.is_numbered and self._track.is_numbered
