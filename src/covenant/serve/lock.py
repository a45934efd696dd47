"""One daemon for a socket, as long as it lives: of two that begin at the same moment, neither would find the other
listening, and the second would take the path from under the first."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from covenant.model.error import BadSetting


class SocketLock:
    """A file beside the socket. It stays: who removed it could remove that of the next one."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._fd = -1

    def take(self) -> bool:
        """False where another daemon has it."""
        path = self._socket.with_name(f"{self._socket.name}.lock")
        fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            if fd >= 0:
                os.close(fd)
            if isinstance(failed, BlockingIOError):
                return False
            why = f"cannot listen on {self._socket}: {path.name}: {failed.strerror or failed}"
            raise BadSetting(why, name="--ipc") from failed
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough while a forked child has it open
            os.close(self._fd)
            self._fd = -1
