"""How a run ends: with what its function returned or raised, or canceled as it was asked to be. (Contract 22.)"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from msgspec.json import encode

from covenant.agents import values
from covenant.agents.commits import Commits, Reduced
from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.hold import LOST
from covenant.agents.run import Run
from covenant.model.error import CovenantError
from covenant.model.task import Result
from covenant.worker import is_own_failure

log = logging.getLogger("covenant.agents")


class Ending:
    def __init__(self, run: Run, commits: Commits) -> None:
        self._run = run
        self._run_id = run.task.id
        self._commits = commits

    async def end(self, function: asyncio.Task[Any]) -> None:
        """The last commits of a function that is done."""
        run = self._run
        failed = None if function.cancelled() else function.exception()
        if function.cancelled() or isinstance(failed, Suspended):
            result = self._error("the agent was canceled from inside")
        elif failed is not None:
            if not is_own_failure(failed):
                raise failed
            if run.hold.cancel_requested and isinstance(failed, CancelRequested):
                await self._end_canceled()
                return
            log.info("run %s failed", self._run_id, exc_info=failed)
            result = self._error(str(failed) or type(failed).__name__, failed)
        else:
            result = self._ok(function.result())
        await run.own.finish()
        try:
            await self._commit_last(result)
        except LOST:
            raise
        except CovenantError as refused:
            run.notes.hand_over()  # to nobody: it was refused
            run.entries.give_up()
            await self._commits.commit(None, self._error(f"{refused.code}: {refused.message}"))

    async def _commit_last(self, result: Result) -> None:
        """Nobody can hear any more that a task was refused: the run itself ends with that."""
        while True:
            try:
                if self._run.notes.cancels_due or not self._run.notes.carries(len(encode(result))):
                    await self._commits.commit(None)
                await self._commits.commit(None, result)
                return
            except Reduced as reduced:
                result = result if result.status == "error" else self._error(str(reduced))

    async def _end_canceled(self) -> None:
        """It has cleaned up: what it noted while doing so is kept, and the task ends as it was asked to."""
        notes, hold = self._run.notes, self._run.hold
        while notes.cancels_due or not notes.batch.is_empty:
            with suppress(Reduced):
                await self._commits.commit(None)
        await hold.ask(lambda: hold.box.release(hold.lease_id, reason="canceled"))

    def _ok(self, value: Any) -> Result:
        try:
            return Result(self._run_id, "ok", values.blocks_of(value))
        except Exception as wrong:  # a model brings its own way to become JSON
            return self._error(f"what the agent returned is no JSON: {wrong}")

    def _error(self, message: str, failed: BaseException | None = None) -> Result:
        text = message if failed is None else f"{type(failed).__name__}: {message}"
        limit = self._run.hold.box.limits.text_bytes_max
        return Result(self._run_id, "error", (), values.clipped(text, limit))
