"""Effects inside an agent. (Contract 21.)

The start of one that may not be done twice is committed before it: if nobody knows the outcome, somebody has to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from covenant.agents import values
from covenant.agents.checkpoints import Checkpoints
from covenant.agents.error import EffectFailed
from covenant.agents.hold import Hold
from covenant.agents.host import Host
from covenant.agents.notes import Notes
from covenant.agents.signals import Signals
from covenant.agents.waits import Waits
from covenant.model.run import EFFECT, Memo, Wait
from covenant.worker import is_own_failure


class Effects:
    def __init__(
        self, host: Host, hold: Hold, notes: Notes, waits: Waits, signals: Signals, checkpoints: Checkpoints
    ) -> None:
        self.under_way = 0  # the run is held as long as one lasts
        self._host = host
        self._hold = hold
        self._notes = notes
        self._waits = waits
        self._signals = signals
        self._checkpoints = checkpoints

    async def run(self, name: str, function: Callable[..., Any], idempotent: bool) -> Any:
        """What it came to; or `EffectFailed`."""
        async with self._checkpoints.held_off():
            outcome = await self._outcome(name, function, idempotent)
        if "error" in outcome:
            raise EffectFailed(name, outcome["error"])
        return outcome.get("value")

    async def _outcome(self, name: str, function: Callable[..., Any], idempotent: bool) -> dict[str, Any]:
        notes = self._notes
        key = notes.memory.key("run", name)
        count = key.partition("#")[2]
        shown = f"{name}#{count}" if count else name
        notes.check_name(shown, "name")
        try:
            outcome = await self._known(key, shown, idempotent)
            if outcome is None:
                await self._start(key, shown, idempotent)
        except asyncio.CancelledError:
            notes.memory.give_back(key)
            raise
        return outcome if outcome is not None else await self._perform(key, function, idempotent)

    async def _known(self, key: str, shown: str, idempotent: bool) -> dict[str, Any] | None:
        """What it came to before; None where it has not begun, or is to be done again."""
        memo = self._notes.memory.recall(key)
        if memo is not None and memo.begun is not None and not idempotent:
            memo = await self._judged(key, shown)
        return None if memo is None else values.unraw(memo.value)

    async def _start(self, key: str, shown: str, idempotent: bool) -> None:
        """Whoever asked may be canceled before it begins: then the start is taken back, as soon as that can be
        committed."""
        await self._waits.make_room(self._hold.box.limits.content_bytes_max)
        if idempotent:
            return
        self._notes.remember(Memo(key, begun=shown))
        try:
            await self._waits.flush()
        except asyncio.CancelledError:
            self._notes.remember(Memo(key))
            self._waits.commit_soon()
            raise

    async def _perform(self, key: str, function: Callable[..., Any], idempotent: bool) -> dict[str, Any]:
        outcome = await self._noted(key, function, idempotent)
        if not idempotent:
            await self._waits.flush()
        return outcome

    async def _noted(self, key: str, function: Callable[..., Any], idempotent: bool) -> dict[str, Any]:
        """Done now: what it returned, or how it failed."""
        self._hold.probe("an effect")
        self.under_way += 1
        try:
            with self._checkpoints.refused():
                came = await self._host.perform(function, self._checkpoints.outside(key), idempotent)
            outcome: dict[str, Any] = {"value": values.plain(came)}
            self._notes.check_value(values.raw(outcome), is_wrapped=True)
        except BaseException as failed:
            if self._hold.is_dropped or not is_own_failure(failed):
                raise
            limit = self._hold.box.limits.text_bytes_max
            outcome = {"error": values.clipped(f"{type(failed).__name__}: {failed}", limit)}
        finally:
            self.under_way -= 1
            self._hold.news.set()
        kept: dict[str, Any] = values.unraw(self._notes.note(key, outcome).value)
        return kept

    async def _judged(self, key: str, shown: str) -> Memo:
        """Nobody knows what became of it: wait until somebody says."""
        signal = await self._signals.hear(Wait(signals=(f"{EFFECT}{key}",), doubt=shown))
        assert signal is not None
        self._signals.consume(signal)
        said = values.unraw(signal.value)
        if said["verdict"] == "retry":
            return self._notes.note(key, None)
        told = said.get("value")
        outcome = {"value": told} if said["verdict"] == "done" else {"error": str(told or "failed")}
        return self._notes.note(key, outcome)
