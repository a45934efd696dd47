"""The engine without a disk: for tests, for users' tests, and as the reference of what the others do."""

from __future__ import annotations

from covenant.store.embedded import Embedded


class Memory(Embedded):
    """Everything is gone when it is closed."""
