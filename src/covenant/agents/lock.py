"""The lock in a worker's home: who has it lives, and who gets it knows that the one before is dead."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from covenant.model.error import Malformed


class Lock:
    """Held as long as this process lives; `before` is the incarnation of the one who had it last."""

    def __init__(self, home: Path, pubkey: str, incarnation: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(home / f"worker-{pubkey}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise Malformed(f"another worker of this agent lives in {home}", field="home") from None
        text = os.read(self._fd, 1024).decode(errors="replace").strip()
        self.before = text or None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, incarnation.encode(), 0)
        os.fsync(self._fd)

    def release(self) -> None:
        os.close(self._fd)
