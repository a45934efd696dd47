"""Effects inside an agent. (Contract 21.)

The start of one that may not be done twice is committed before it: if nobody knows the outcome, somebody has to say.
"""

from __future__ import annotations

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
        notes = self._notes
        key = notes.memory.key("run", name)
        count = key.partition("#")[2]
        shown = f"{name}#{count}" if count else name
        notes.check_name(shown, "name")
        memo = notes.memory.recall(key)
        if memo is not None and memo.begun is not None and not idempotent:
            memo = await self._judged(key, shown)
        if memo is None or memo.begun is not None:
            memo = await self._perform(key, shown, function, idempotent)
        outcome = values.unraw(memo.value)
        if "error" in outcome:
            raise EffectFailed(name, outcome["error"])
        return outcome.get("value")

    async def _perform(self, key: str, shown: str, function: Callable[..., Any], idempotent: bool) -> Memo:
        await self._waits.make_room(self._hold.box.limits.content_bytes_max)
        if not idempotent:
            self._notes.remember(Memo(key, begun=shown))
            await self._waits.flush()
        memo = await self._noted(key, function, idempotent)
        if not idempotent:
            await self._waits.flush()
        return memo

    async def _noted(self, key: str, function: Callable[..., Any], idempotent: bool) -> Memo:
        """Done now: what it returned, or how it failed."""
        self._hold.probe("an effect")
        self.under_way += 1
        try:
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
        return self._notes.note(key, outcome)

    async def _judged(self, key: str, shown: str) -> Memo | None:
        """Nobody knows what became of it: wait until somebody says. None is: do it again."""
        signal = await self._signals.hear(Wait(signals=(f"{EFFECT}{key}",), doubt=shown))
        assert signal is not None
        self._signals.consume(signal)
        said = values.unraw(signal.value)
        if said["verdict"] == "retry":
            return None
        told = said.get("value")
        outcome = {"value": told} if said["verdict"] == "done" else {"error": str(told or "failed")}
        return self._notes.note(key, outcome)
