"""The engine without a disk: for tests, for users' tests, and as the reference of what the others do."""

from __future__ import annotations

from covenant.store.embedded import Embedded
from covenant.store.state import State


class Memory(Embedded):
    """Everything is gone when it is closed."""

    async def close(self) -> None:
        await super().close()
        self.state = State(self.limits.audit_tail_max)
