"""How those who wait for the log share its appends: all in one, or in two halves that take turns.

In halves, one is decided while the other is on its way: of an append, only what it takes longer than that is lost. All
in one, nobody waits for an append that he is not in. So halves are better as long as an append takes no longer than it
takes to decide for all. Both are measured: they change with the disk, and with what else is done here.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.1
_SLOWER_MAX: Final = 2  # times: one that takes longer than usual says little of the next


class Pace:
    def __init__(self) -> None:
        self._append_s = 0.0  # how long one takes of late
        self._command_s = 0.0  # how long this process works for a command
        self._crowd = 0  # how many had a command under way when the last one was done

    def appended(self, append_s: float, worked_s: float, commands: int, crowd: int) -> None:
        """One is done. So long this process has worked since the one before, for so many commands."""
        self._crowd = crowd
        if commands == 0:
            return
        command_s = worked_s / commands
        if self._command_s == 0.0:
            self._append_s, self._command_s = append_s, command_s
        self._append_s += _SMOOTHING * (min(append_s, _SLOWER_MAX * self._append_s) - self._append_s)
        self._command_s += _SMOOTHING * (command_s - self._command_s)

    @property
    def is_halved(self) -> bool:
        return self._crowd > 1 and self._append_s <= self._command_s * self._crowd

    @property
    def share(self) -> int:
        """How many are worth waiting for, before the next one goes out."""
        return self._crowd // 2 if self.is_halved else self._crowd
