"""Checkpoints: the state that a run keeps, and that what lies before is let go. (Contract 20.)"""

from __future__ import annotations

from msgspec import Raw

from covenant.agents.entries import Entries
from covenant.agents.hold import Hold
from covenant.agents.notes import Notes
from covenant.agents.tasks import Tasks
from covenant.agents.waits import Waits
from covenant.model.run import NOTHING, RunLoaded


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

    def learn(self, loaded: RunLoaded) -> None:
        self.state, self.count = loaded.state, loaded.checkpoints
        self.has_old = loaded.checkpoints > 0

    def outside(self, key: str) -> str:
        """The key of an operation for those outside. Behind a checkpoint the same operation is another."""
        return f"{self._hold.run_id}:{self.count}:{key}"

    async def make(self, state: Raw) -> None:
        notes, waits = self._notes, self._waits
        notes.check_value(state)
        await waits.room_for(len(memoryview(state)))
        notes.batch.checkpoint = state
        notes.batch.memos.clear()  # what comes while this is being committed lies behind it
        notes.memory.forget()
        self.state = state
        self.count += 1
        ended, waited, is_alone = list(notes.memory.outcomes), waits.count, not waits.all
        await waits.flush()
        if is_alone and waits.count == waited + 1:
            self._let_go(ended)

    def _let_go(self, ended: list[str]) -> None:
        """What has ended before a checkpoint is seldom asked for behind it; then the store tells it again. Not while
        another place in the function waits, which may be about to read it."""
        self._entries.forget()
        self._tasks.forget(ended)
