"""The operations that the journal asks of a file system, and no others.

They are gathered here so that a test can stand in between: record them, lose what was not synced, or fail any of them.
What survives a crash is only what this module was told to sync.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from covenant.model.error import StoreLocked

_READ_BYTES = 1 << 20


class AppendFile:
    """A file that only grows."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._place = _place_of(fd)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self.size += written
            view = view[written:]

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if self._is_gone():
            raise FileNotFoundError(errno.ENOENT, f"{self.path.name} was moved or removed while it was in use")

    def _is_gone(self) -> bool:
        """Whether what is written to it would be lost with it, or be where nobody looks."""
        now = _place_of(self._fd)
        if now is not None and self._place is not None:
            return now != self._place
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ReadFile:
    """A file that stays readable while it is open, also when it is removed meanwhile."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self._fd = fd

    def read_at(self, start: int, size: int) -> bytes:
        return os.pread(self._fd, size, start)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Lock:
    """One owner for a folder, as long as the process lives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()

    def check(self, folder: Path) -> None:
        """The folder must still be the one that is locked: another one in its place may be somebody else's."""
        if not os.path.samestat(os.fstat(self._fd), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, f"{folder} is not the folder that was opened")

    def release(self) -> None:
        if self._fd >= 0:
            if os.getpid() == self._owner:
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough while a forked child has it open
            os.close(self._fd)
            self._fd = -1


class Files:
    """One folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def make_folder(self) -> None:
        """Make it, with parents, so that it is there after a crash."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in missing:
            _sync_folder(path.parent)

    def lock(self, name: str) -> Lock:
        """The folder itself is locked: a file in it could be removed. The named file says by whom. From here on this is
        the folder, wherever a link on the way to it or the process goes: what they come to then is not locked."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        note = self.folder / name
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note.write_text(f"process {os.getpid()}\n")
            self.folder = self.folder.resolve()
        except BlockingIOError:
            os.close(fd)
            owner = note.read_text(errors="replace").strip() if note.exists() else "another process"
            raise StoreLocked(f"{self.folder} is in use by {owner}", folder=str(self.folder)) from None
        except BaseException:
            os.close(fd)
            raise
        return Lock(fd)

    def names(self, prefix: str, suffix: str) -> list[str]:
        """In the order of their names."""
        if not self.folder.is_dir():
            return []
        return sorted(n for n in os.listdir(self.folder) if n.startswith(prefix) and n.endswith(suffix))

    def create(self, name: str) -> AppendFile:
        path = self.folder / name
        return AppendFile(
            path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600), 0
        )

    def append_to(self, name: str) -> AppendFile:
        path = self.folder / name
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        return AppendFile(path, fd, os.fstat(fd).st_size)

    def open(self, name: str) -> ReadFile:
        return ReadFile(os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC))

    def copy_to(self, name: str, other: Files, new: str) -> None:
        """Copy a file as far as it goes now into another folder, durably but for its name."""
        file = other.create(new)
        try:
            for block in self.read(name):
                file.write(block)
            file.sync()
        finally:
            file.close()

    def truncate(self, name: str, size: int) -> None:
        """Cut a file, durably."""
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.folder / old, self.folder / new)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def remove_folder(self) -> None:
        """It must be empty."""
        self.folder.rmdir()

    def sync_folder(self) -> None:
        _sync_folder(self.folder)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def read_at(self, name: str, start: int, size: int) -> bytes:
        with open(self.folder / name, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(size)

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        """The file from there on, in blocks."""
        with open(self.folder / name, "rb", buffering=0) as file:
            file.seek(start)
            while block := file.read(_READ_BYTES):
                yield block


FilesOf: TypeAlias = Callable[[Path], Files]  # how several folders are reached


def _place_of(fd: int) -> str | None:
    """Where a file lies now; asked of /proc, and None where there is none. After an `fstat`, which tells times too,
    newer kernels give the next write a time of its own, and that makes its sync slower."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
