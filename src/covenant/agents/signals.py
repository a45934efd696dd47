"""How a run hears signals, and takes them. (Contract 22.)

A signal is consumed in the commit that remembers what it was; a message becomes an entry in the same.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from covenant.agents import values
from covenant.agents.entries import Entries
from covenant.agents.hold import Hold
from covenant.agents.inbox import Inbox
from covenant.agents.lookout import Lookout
from covenant.agents.notes import Notes
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.run import EntryDraft, EntryRole, Memo, SignalSeen, Wait


class Signals:
    def __init__(
        self, hold: Hold, notes: Notes, times: Times, inbox: Inbox, waits: Waits, lookout: Lookout, entries: Entries
    ) -> None:
        self._hold = hold
        self._notes = notes
        self._times = times
        self._inbox = inbox
        self._waits = waits
        self._lookout = lookout
        self._entries = entries

    # --- operations ---------------------------------------------------------------------------------------

    async def next(self, name: str, timeout_ms: int | None) -> Any:
        """The value of the next one that fits."""
        key = self._notes.memory.key("signal", name)
        memo = self._notes.memory.recall(key)
        if memo is None:
            memo = await self._next(key, name, timeout_ms)
        if values.unraw(memo.value) is None:
            raise TimeoutError(f"no signal {name} in {timeout_ms} ms")
        if memo.entry is not None:
            self._entries.leaf = memo.entry
        return await self.heard_in(memo)

    async def _next(self, key: str, name: str, timeout_ms: int | None) -> Memo:
        until = None if timeout_ms is None else self._times.until(f"{key}/until", timeout_ms)
        signal = await self.hear(Wait(signals=(name,), until_ms=until))
        if signal is None:
            return self._notes.note(key, None)
        return self.take(key, signal)

    async def has(self, name: str) -> bool:
        key = self._notes.memory.key("peek", name)
        memo = self._notes.memory.recall(key)
        if memo is None:
            memo = self._notes.note(key, bool(await self._all(name)))
        return bool(values.unraw(memo.value))

    async def drain(self, pattern: str) -> list[Any]:
        """The values of all that wait now, oldest first."""
        notes = self._notes
        key = notes.memory.key("drain", pattern)
        memo = notes.memory.recall(key)
        if memo is None:
            taken = [
                self.take(f"{key}/{at}", signal) for at, signal in enumerate(self._carried(await self._all(pattern)))
            ]
            notes.note(key, len(taken))
            notes.remember(Memo(f"{key}/leaf", values.raw(self._entries.leaf)))
        else:
            count = values.unraw(memo.value)
            kept = (notes.memory.recall(f"{key}/{at}") for at in range(count if type(count) is int else len(count)))
            taken = [one for one in kept if one is not None]
            leaf = notes.memory.recall(f"{key}/leaf")
            self._entries.leaf = self._entries.leaf if leaf is None else values.unraw(leaf.value)
        return [await self.heard_in(one) for one in taken]

    def _carried(self, waiting: list[SignalSeen]) -> list[SignalSeen]:
        """As many as are not too much for one commit; the first always is one of them."""
        left, carried = self._hold.box.limits.content_bytes_max, list[SignalSeen]()
        for signal in waiting:
            left -= len(self._remembered(signal)[0])
            if left < 0 and carried:
                break
            carried.append(signal)
        return carried

    # --- hearing ------------------------------------------------------------------------------------------

    async def hear(self, wait: Wait) -> SignalSeen | None:
        """The oldest signal that fits; or None, when one of the tasks has ended, or the time is over."""
        inbox, outcomes = self._inbox, self._notes.memory.outcomes

        def has_ended() -> bool:
            return any(task_id in outcomes for task_id in wait.tasks)

        def has_come() -> bool:
            return has_ended() or inbox.heard(wait.signals) is not None

        def is_there() -> bool:
            return has_come() or self._times.is_over(wait.until_ms)

        await self._waits.make_room(self._hold.box.limits.content_bytes_max)
        while True:  # another place may have been quicker to take what was there
            await self._waits.wait(wait, is_there)
            if not has_come() and is_there():
                await self._lookout.look(wait)  # it may have come before the time was over
            if is_there():
                return None if has_ended() else inbox.heard(wait.signals)

    async def _all(self, pattern: str) -> list[SignalSeen]:
        hold, batch = self._hold, self._notes.batch
        if not hold.number or batch.takes or batch.entries:
            await self._waits.flush()  # a run hears what was said before it began once it has; a commit takes so many
        await self._waits.make_room(hold.box.limits.content_bytes_max)
        looked = Wait(signals=(pattern,))
        standing = await self._lookout.look_up(lambda: hold.box.look_around(hold.lease_id, looked, every=True))
        return [signal for signal in standing.signals if signal.id not in self._inbox.taken]

    # --- taking -------------------------------------------------------------------------------------------

    def take(self, key: str, signal: SignalSeen, **more: Any) -> Memo:
        """Consume it, and remember it under the key of the operation."""
        value, content = self._remembered(signal, **more)
        entry: int | None = None
        if signal.message is not None:
            draft = EntryDraft(signal.message.message_id, EntryRole.USER, said=signal.said)
            self._entries.enter(None, draft, content)
            entry = self._entries.leaf
        memo = Memo(key, Raw(value), entry)
        self._notes.remember(memo)
        self.consume(signal)
        return memo

    def _remembered(self, signal: SignalSeen, **more: Any) -> tuple[bytes, Any]:
        """What is kept of it, and what it says. A long message is not kept twice: it is in its entry."""
        if signal.message is None:
            content = values.unraw(signal.value)
            return bytes(values.raw({**more, "value": content})), content
        content = values.content_of(signal.message)
        value = bytes(values.raw({**more, "value": content}))
        if len(value) > self._hold.box.limits.content_bytes_max:
            value = bytes(values.raw(more))
        return value, content

    async def heard_in(self, memo: Memo) -> Any:
        """The value of a signal that was taken."""
        heard = values.unraw(memo.value)
        if "value" not in heard and memo.entry is not None:
            return await self._entries.content_at(memo.entry)
        return heard.get("value")

    def consume(self, signal: SignalSeen) -> None:
        self._notes.batch.takes.append(signal.id)
        self._inbox.taken.add(signal.id)
