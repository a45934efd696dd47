"""Checkpoints: the state that a run keeps, and that what lies before is let go. (Contract 20.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from msgspec import Raw

from covenant.agents.entries import Entries
from covenant.agents.hold import Hold
from covenant.agents.notes import Notes
from covenant.agents.tasks import Tasks
from covenant.agents.waits import Waits
from covenant.model.error import Malformed
from covenant.model.run import NOTHING, RunLoaded

_IN_EFFECT: Final[ContextVar[bool]] = ContextVar("in_effect", default=False)


class Checkpoints:
    def __init__(self, hold: Hold, notes: Notes, waits: Waits, entries: Entries, tasks: Tasks) -> None:
        self.state: Raw = NOTHING  # of the last one
        self.count = 0
        self.has_old = False  # of a former call of the function
        self._hold = hold
        self._notes = notes
        self._waits = waits
        self._entries = entries
        self._tasks = tasks
        self._effects = 0  # that are asked for and not settled
        self._making = 0  # of these, that wait for those
        self._moved = asyncio.Event()

    def learn(self, loaded: RunLoaded) -> None:
        self.state, self.count = loaded.state, loaded.checkpoints
        self.has_old = loaded.checkpoints > 0

    def outside(self, key: str) -> str:
        """The key of an operation for those outside. Behind a checkpoint the same operation is another."""
        return f"{self._hold.run_id}:{self.count}:{key}"

    @asynccontextmanager
    async def held_off(self) -> AsyncIterator[None]:
        """While an effect is begun, done and told: a checkpoint of another place would forget that it was begun, and it
        would be done again without a question. One that waits for its turn comes before the next effect."""
        while self._making and not _IN_EFFECT.get():
            await self._move()
        self._effects += 1
        try:
            yield
        finally:
            self._effects -= 1
            self._moved.set()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside an effect, which it would wait for."""
        token = _IN_EFFECT.set(True)
        try:
            yield
        finally:
            _IN_EFFECT.reset(token)

    async def make(self, state: Raw) -> None:
        notes, waits = self._notes, self._waits
        notes.check_value(state)
        if _IN_EFFECT.get():
            raise Malformed("no checkpoint inside an effect: what it did would be forgotten", field="checkpoint")
        self._making += 1
        try:
            await waits.room_for(len(memoryview(state)))
            while self._effects:
                await self._move()
                await waits.room_for(len(memoryview(state)))
        finally:
            self._making -= 1
            self._moved.set()
        notes.batch.checkpoint = state
        notes.batch.memos.clear()  # what comes while this is being committed lies behind it
        notes.memory.forget()
        self.state = state
        self.count += 1
        ended, waited, is_alone = list(notes.memory.outcomes), waits.count, not waits.all
        await waits.flush()
        if is_alone and waits.count == waited + 1:
            self._let_go(ended)

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _let_go(self, ended: list[str]) -> None:
        """What has ended before a checkpoint is seldom asked for behind it; then the store tells it again. Not while
        another place in the function waits, which may be about to read it."""
        self._entries.forget()
        self._tasks.forget(ended)
