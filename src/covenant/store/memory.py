"""The engine without a disk: for tests, for users' tests, and as the reference of what the others do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from covenant.model.audit import AuditRow, Logged
from covenant.model.event import Event
from covenant.model.limits import Limits
from covenant.model.record import Key
from covenant.rules.context import Ids
from covenant.store.clock import Clock
from covenant.store.embedded import Embedded
from covenant.store.state import State
from covenant.store.tail import Tail

LOG_BYTES_MAX: Final = 64 << 20
_encoder: Final = msgspec.json.Encoder()


class Memory(Embedded):
    """Everything is gone when it is closed. Its log reaches back `log_tail_max` commits, or LOG_BYTES_MAX."""

    def __init__(self, limits: Limits, clock: Clock, ids: Ids) -> None:
        super().__init__(limits, clock, ids)
        self._tail = Tail(limits.log_tail_max, LOG_BYTES_MAX)
        self._record = self._note

    async def close(self) -> None:
        await super().close()
        self.state = State()
        self._tail = Tail(self.limits.log_tail_max, LOG_BYTES_MAX)

    async def log(self, after: int, limit: int) -> list[Logged]:
        return list(islice((entry for entry in self._tail if entry.last > after), limit))

    async def log_back(self, before: int | None, limit: int) -> list[Logged]:
        entries = (entry for entry in reversed(self._tail) if before is None or entry.seq < before)
        return list(islice(entries, limit))

    async def log_trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        return self._tail.trail(seq, key, limit)

    def _note(
        self,
        seq: int,
        at: int,
        by: str,
        events: Sequence[Event],
        prev: Sequence[int],
        audit: Sequence[AuditRow],
    ) -> None:
        logged = Logged(seq, at, by, events, prev, audit)
        self._tail.add(logged, len(_encoder.encode(logged)))
