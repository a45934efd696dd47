"""What is measured of the service: the servers and their loads stay for a round, and take short turns in it.

A turn is a fraction of a second, and what is compared comes in turns that follow one another: what else the machine
does meanwhile falls on all of them alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.cell import Cell, CellFailed
from bench.plan import Run

CONNECTIONS: Final = (1, 32, 128)
FULL: Final = CONNECTIONS[-1]
IPC_CONNECTIONS: Final = 8
POLLS: Final = 10_000
GRANTS_FEW: Final = 10
GRANTS_MANY: Final = 100_000
_POLL_EVENTS: Final = 100
_PASSES: Final = 5  # of a round
_WARM_S: Final = 0.05  # the connections are there already
_SECONDS_MIN: Final = 0.25


class ServiceRun(Run):
    def service(self) -> None:
        for number in range(self.plan.rounds):
            self._say(f"the service: round {number + 1} of {self.plan.rounds}")
            self._guarded(self._service_round)
            self._measure("checks", "checks", few=GRANTS_FEW, many=GRANTS_MANY)
        self._say(f"the service: {POLLS:,} requests that wait")
        self._guarded(self._polls)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CellFailed as failure:
            self._complain(failure)

    def _service_round(self) -> None:
        with ExitStack() as stack:
            daemon = self._server(stack, "daemon", scheme=self.plan.scheme, peers=FULL, door=True)
            doorless = self._server(stack, "daemon", scheme=self.plan.scheme, peers=FULL, door=False)
            floor = self._server(stack, "http floor", beside=str(daemon))
            turns = self._loads(stack, daemon, floor, doorless)
            for _ in range(_PASSES):
                for name, load in turns:
                    self.rounds.add(name, load.turn())
            self._window("wakes", "wakes", server=str(daemon))

    def _loads(self, stack: ExitStack, daemon: Path, floor: Path, doorless: Path) -> list[tuple[str, Cell]]:
        """In the order of their turns: neighbours are compared. With and without the door, so little lies between the
        two that each comes first once."""
        turns: list[tuple[str, Cell]] = []
        for connections in CONNECTIONS:
            turns.append((f"floor {connections}", self._load(stack, "http", floor, connections=connections)))
            turns.append((f"http {connections}", self._load(stack, "http", daemon, connections=connections)))
        in_flight = FULL // IPC_CONNECTIONS
        turns.append(("ipc", self._load(stack, "ipc", daemon, connections=IPC_CONNECTIONS, in_flight=in_flight)))
        open_door = ("no door", self._load(stack, "http", doorless, connections=FULL))
        door = ("door", self._load(stack, "http", daemon, connections=FULL))
        turns += [door, open_door]
        for _, load in turns:
            load.figures()
        return [*turns, open_door, door]

    def _server(self, stack: ExitStack, cell: str, **parameters: Any) -> Path:
        """Up when this returns; its folder says where."""
        folder = self._new_folder()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(Cell(cell, folder, **parameters)).figures()
        return folder

    def _load(self, stack: ExitStack, cell: str, server: Path, **parameters: Any) -> Cell:
        seconds = max(self.plan.seconds / _PASSES, _SECONDS_MIN)
        made = Cell(cell, server, server=str(server), warm_s=_WARM_S, seconds=seconds, **parameters)
        return stack.enter_context(made)

    def _polls(self) -> None:
        with ExitStack() as stack:
            daemon = self._server(stack, "daemon", scheme=self.plan.scheme, peers=1, door=True)
            self._measure("polls", "polls", server=str(daemon), polls=POLLS, events=_POLL_EVENTS)
