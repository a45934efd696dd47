"""What becomes of a command once it is committed: its steps, its reply, and what is given back.

Work that a commit leaves to be done is run in steps, the first of them before the answer. Who goes away before the
answer has taken nothing: what the commit took for it is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final

from covenant.model.command import Command, Expire
from covenant.model.error import CovenantError
from covenant.rules.undo import undo
from covenant.store.embedded import SYSTEM
from covenant.store.postgres.entry import Entry, Group, observed

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

_STEPS_AT_ONCE: Final = 10  # before the answer
_STEPS_TOGETHER: Final = 100
_GIVING_BACK_S: Final = 2.0

log = logging.getLogger("covenant.store")


class Replies:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self.under_way: set[asyncio.Task[None]] = set()  # steps that are run before the store is closed

    def begin(self, steps: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(steps)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return task

    async def finish(self) -> None:
        """Those that are under way, and not what others begin meanwhile."""
        if self.under_way:
            await asyncio.wait(set(self.under_way))

    async def to(self, entry: Entry) -> Any:
        """The reply. Who goes away before has taken nothing: what was taken is given back first, unless that lasts."""
        try:
            return await entry.future
        except asyncio.CancelledError:
            await self.gone(entry)
            raise

    async def gone(self, entry: Entry) -> None:
        """Give back what was taken for a caller that has gone away. The entry may have been answered, and even settled,
        between the caller's cancellation and the turn of the loop in which its task learns of it."""
        if not entry.is_begun:
            return
        if not entry.future.cancelled():
            self._give_back(entry)
        if not entry.is_settled:
            entry.settled = asyncio.get_running_loop().create_future()
            await asyncio.wait([entry.settled], timeout=_GIVING_BACK_S)

    def committed(self, entry: Entry) -> None:
        """Its commit is durable, or it was refused: it is answered, after its first steps."""
        if entry.refusal is not None:
            entry.fail(entry.refusal)
            return
        commit = entry.commit
        assert commit is not None
        then = commit.then
        if type(entry.command) is Expire:  # whoever asked for it asks again by itself
            then = tuple(step for step in then if type(step) is not Expire)
        if then and not entry.is_step:
            self.begin(self._run_steps(entry, then))
        else:
            self._reply(entry)

    def _reply(self, entry: Entry) -> None:
        commit = entry.commit
        assert commit is not None
        if entry.future.cancelled():
            self._give_back(entry)
        elif not entry.future.done():
            if isinstance(commit.reply, CovenantError):
                entry.future.set_exception(commit.reply)
            else:
                entry.future.set_result(commit.reply)

    def _give_back(self, entry: Entry) -> None:
        """Nobody will ever see what was taken."""
        commands = [] if entry.commit is None or self._engine.is_closing else undo(entry.commit, entry.command)
        if not commands:
            entry.settle()
            return
        entry.is_settled = False
        given = asyncio.gather(*(self._engine.submit(command).future for command in commands), return_exceptions=True)
        given.add_done_callback(lambda _: entry.settle())

    async def _run_steps(self, entry: Entry, then: Iterable[Command]) -> None:
        """Bounded work that a commit left to be done: the first of it before the answer. Those that are known are given
        to a lane together, in their order: what small ones have to do goes into one transaction."""
        steps = deque(then)
        left, is_answered = _STEPS_AT_ONCE, False
        try:
            while steps:
                if not left:
                    left, is_answered = _STEPS_TOGETHER, True
                    self._reply(entry)
                known = [self._submit_step(steps.popleft()) for _ in range(min(len(steps), left))]
                group = Group()
                for step in known:
                    step.group = group
                await asyncio.wait([step.future for step in known])
                for step in known:
                    step.future.result()
                    assert step.commit is not None
                    steps.extend(step.commit.then)
                left -= 0 if is_answered else len(known)
        except CovenantError as failed:
            log.warning("a step is left for later: %s", failed)
        finally:
            if not is_answered:
                self._reply(entry)

    def _submit_step(self, command: Command) -> Entry:
        step = self._engine.submit(command, SYSTEM)
        step.is_step = True
        step.future.add_done_callback(observed)  # of several that fail, one is told
        return step
