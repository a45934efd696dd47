"""How a commit of a run is put together, and how its answer is absorbed. (Contract 22.)

If the store does not take a task, the others go without it: that one has failed, and the commit is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from covenant.agents.batch import Batch
from covenant.agents.hold import LOST
from covenant.agents.run import Run
from covenant.model.error import CovenantError, NotPermitted, UnknownPeer
from covenant.model.run import Memo, RunCommit, Standing, Wait
from covenant.model.task import Result

# Of these every other task for the same recipient would hear, too.
_OF_RECIPIENT: Final = (NotPermitted, UnknownPeer)

log = logging.getLogger("covenant.agents")


class Reduced(Exception):
    """A commit was refused for some of its tasks: without them it is to be tried again."""


class Commits:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._unheard: RunCommit | None = None  # of which nobody was told whether it was made

    async def commit(self, wait: Wait | None, result: Result | None = None) -> Standing:
        """Everything that was noted so far, and what the run waits for or ends with."""
        run = self._run
        run.own.stop_lingering()
        await run.own.told()
        batch = run.notes.hand_over()
        flushed = run.waits.flushing
        run.waits.is_commit_due = False
        commit = batch.commit(run.hold.number + 1, run.entries.leaf, wait, result, run.waits.is_told)
        try:
            standing = await self._send(commit)
        except LOST:
            raise
        except CovenantError as refusal:
            self._leave_out(refusal, batch, wait)
            raise Reduced(f"{refusal.code}: {refusal.message}") from refusal
        run.hold.number = standing.number
        run.inbox.forget_taken(batch.takes, is_looking=run.lookout.under_way > 0)
        run.notes.batch.cancels += run.notes.cancels_due
        run.notes.cancels_due = []
        for waiting in flushed:
            waiting.go_on()
        run.lookout.absorb(standing)
        self._begin(batch, standing)
        return standing

    async def _send(self, commit: RunCommit) -> Standing:
        hold = self._run.hold
        hold.probe("before a commit")
        try:
            standing = await hold.ask(lambda: hold.box.commit_run(hold.lease_id, commit))
        except asyncio.CancelledError:
            self._unheard = commit
            raise
        hold.probe("after a commit")
        return standing

    async def call_off(self) -> bool:
        """The worker stops. A commit of which it has not heard is said again, and what was noted since is committed, so
        that what was done is told; what they start has not begun, and is taken back. Whether the run is still held."""
        run, unheard = self._run, self._unheard
        hold, number, memos = run.hold, run.hold.number, list[Memo]()
        if unheard is not None:
            standing = await hold.box.commit_run(hold.lease_id, unheard)
            if standing.parked or standing.ended:
                return False
            number, memos = standing.number, [*unheard.memos]
            await asyncio.gather(
                *(hold.box.release(lease_id, reason="worker stopped") for lease_id in standing.leases.values())
            )
        await run.own.all_told()
        batch = run.notes.hand_over()
        memos += batch.memos
        batch.memos += [Memo(memo.key) for memo in memos if memo.begun is not None]
        batch.begins.clear()
        if not batch.is_empty:
            await hold.box.commit_run(hold.lease_id, batch.commit(number + 1, run.entries.leaf, None, None, False))
        return True

    def _begin(self, batch: Batch, standing: Standing) -> None:
        """The tasks that this worker was given to do itself."""
        own = self._run.own
        for child_id in batch.begins:
            lease_id = standing.leases.get(child_id)
            if lease_id is None:
                own.leave(child_id)
            else:
                own.begin(child_id, lease_id, standing.attempts.get(child_id, 1), batch.tasks.get(child_id))

    def _leave_out(self, refusal: CovenantError, batch: Batch, wait: Wait | None) -> None:
        """Raise it unless it is about tasks alone: those have failed then, and all else is still to be committed."""
        notes, tasks = self._run.notes, self._run.tasks
        child_id = refusal.details.get("task_id")
        if child_id not in batch.tasks and (wait is None or child_id not in wait.tasks):
            raise refusal
        refused = [child_id]
        if isinstance(refusal, _OF_RECIPIENT) and child_id in batch.tasks:
            to = batch.tasks[child_id].recipient.pubkey
            refused = [i for i, task in batch.tasks.items() if task.recipient.pubkey == to]
        notes.take_back(batch)
        for child in refused:
            log.warning("run %s: task %s is not taken: %s (%s)", self._run.task.id, child, refusal, refusal.code)
            tasks.refuse(child, refusal)
        notes.cancels_due = [child for child in notes.cancels_due if child not in refused]
