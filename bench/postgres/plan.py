"""What is measured on PostgreSQL: one daemon and three, beside a plain queue and the peers, in turns on one server.

A daemon is an engine in a process of its own, with its clients in it; three of them share the clients. The plain queue
has as many processes as it stands beside.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.agents.plan import AgentRun
from bench.cell import Cell, CellFailed
from bench.postgres.server import Server
from bench.work import Figures

CLIENTS: Final = (1, 8, 32, 128)
COMPARED: Final = 32
DAEMONS: Final = (1, 3)
WAITERS: Final = (0, 1, 1000)
_PEER_SECONDS_MIN: Final = 3.0  # in which every client of a slow one gets several tasks done
_LISTEN_S: Final = 20.0
_SETTLE_S: Final = 3.0
_QUICK_LISTEN_S: Final = 10.0


class PostgresRun(AgentRun):
    def postgres(self, *, with_peers: bool, with_history: bool, absurd_sql: Path | None) -> None:
        with Server() as server:
            self._server_of_run = server
            for number in range(self.plan.rounds):
                for clients in CLIENTS:
                    self._say(f"PostgreSQL: round {number + 1} of {self.plan.rounds}, {clients} clients")
                    self._postgres_round(clients, with_peers, absurd_sql)
            if with_history:
                self._guarded(self._postgres_past)
            self._say(f"PostgreSQL: {WAITERS[-1]:,} agents that wait")
            self._guarded(self._postgres_waiting)

    def _postgres_round(self, clients: int, with_peers: bool, absurd_sql: Path | None) -> None:
        for daemons in DAEMONS:
            queue, ours = f"postgres queue {clients} by {daemons}", f"postgres covenant {clients} by {daemons}"
            self._shared("postgres queue", queue, clients, daemons, answers=False)
            self._shared("postgres covenant", ours, clients, daemons)
        if clients >= COMPARED:
            self._shared("postgres queue", f"postgres answering queue {clients}", clients, 1, answers=True)
            self._window("covenant", f"postgres rules {clients}", scheme="memory", clients=clients)
            with self._server_of_run.database() as url, self._server_of_run.database() as again_url:
                name = f"postgres statements {clients}"
                self._window("postgres statements", name, url=url, again_url=again_url, clients=clients)
        if with_peers:
            self._postgres_peers(clients, absurd_sql)

    def _postgres_peers(self, clients: int, absurd_sql: Path | None) -> None:
        self._beside("postgres procrastinate", f"postgres procrastinate {clients}", clients=clients)
        self._beside("postgres dbos", f"postgres dbos {clients}", clients=clients, form="queue")
        if clients == COMPARED:
            self._beside("postgres dbos", "postgres dbos direct", clients=clients, form="direct")
        if absurd_sql is not None:
            self._beside("postgres absurd", f"postgres absurd {clients}", clients=clients, sql=str(absurd_sql))

    def _beside(self, cell: str, name: str, **parameters: Any) -> None:
        with self._server_of_run.database() as url:
            self._window(cell, name, max(_PEER_SECONDS_MIN, self.plan.peer_seconds), url=url, **parameters)

    # --- several processes on one database --------------------------------------------------------------------

    def _shared(self, cell: str, name: str, clients: int, processes: int, **parameters: Any) -> None:
        """The clients are shared among the processes, which all work in the same moment."""
        try:
            with ExitStack() as stack:
                url = stack.enter_context(self._server_of_run.database())
                shares = [clients // processes + (number < clients % processes) for number in range(processes)]
                cells = []
                for number, share in enumerate(shares):
                    if share == 0 and cell == "postgres queue":
                        continue  # a process of the plain queue without a client is none
                    made = self._clients(cell, url, share, sum(shares[:number]), **parameters)
                    cells.append((stack.enter_context(made), share))
                self.rounds.add(name, _turn(cells))
        except CellFailed as failure:
            self._complain(failure)

    def _clients(self, cell: str, url: str, clients: int, first: int, **parameters: Any) -> Cell:
        window = {"warm_s": self.plan.warm_s, "seconds": self.plan.seconds}
        return Cell(cell, self._new_folder(), url=url, clients=clients, first=first, **window, **parameters)

    # --- stores with a past, and those who wait ---------------------------------------------------------------

    def _postgres_past(self) -> None:
        self._say(f"PostgreSQL: {self.plan.many:,} tasks in the tables")
        with self._server_of_run.database() as url, self._postgres_filled(self.plan.many, url) as large:
            self.rounds.add("postgres fill", large.figures())
            self._server_of_run.ask("VACUUM ANALYZE", url)
            for _ in range(self.plan.rounds):
                self._postgres_small()
                self.rounds.add("postgres cycles many", large.turn())

    def _postgres_small(self) -> None:
        with self._server_of_run.database() as url, self._postgres_filled(self.plan.few, url) as small:
            small.figures()
            self._server_of_run.ask("VACUUM ANALYZE", url)
            self.rounds.add("postgres cycles few", small.turn())

    def _postgres_filled(self, tasks: int, url: str) -> Cell:
        """A tenth of them resolved, the others queued: resolved ones take long to make."""
        window = {"clients": COMPARED, "warm_s": self.plan.warm_s, "seconds": self.plan.seconds}
        return Cell("filled", self._new_folder(), scheme=url, past="mixed", tasks=tasks, **window)

    def _postgres_waiting(self) -> None:
        """Counted by the server itself, which logs every statement of these databases. Each number of them has a store
        that was opened just now: none of the windows holds a round of housekeeping."""
        server = self._server_of_run
        listen_s = _LISTEN_S if self.plan.rounds > 3 else _QUICK_LISTEN_S
        folder = self._new_folder()
        for waiters in WAITERS:
            with server.database() as url:
                server.log_statements(url)
                with Cell("postgres waiting", folder, url=url, steps=[waiters]) as cell:
                    cell.figures()
                    cell.turn()
                    time.sleep(_SETTLE_S)
                    before = server.statements()
                    time.sleep(listen_s)
                    heard = server.statements() - before
                    self.rounds.add(f"postgres waiting {waiters}", {"statements": heard, "rate": heard / listen_s})
                    if waiters == WAITERS[-1]:
                        self.rounds.add("postgres woken", cell.turn())
        shutil.rmtree(folder, ignore_errors=True)


def _turn(cells: Sequence[tuple[Cell, int]]) -> Figures:
    """One window for all who have clients; each cell has said first that it is ready."""
    for cell, _ in cells:
        cell.figures()
    busy = [cell for cell, clients in cells if clients]
    for cell in busy:
        cell.ask()
    return _together([cell.figures() for cell in busy])


def _together(parts: Sequence[Figures]) -> Figures:
    """Rates add up; of the times of a reply, the middle one and the worst."""
    p50s = sorted(figures["p50_ms"] for figures in parts)
    return {
        "rate": sum(figures["rate"] for figures in parts),
        "p50_ms": p50s[len(p50s) // 2],
        "p99_ms": max(figures["p99_ms"] for figures in parts),
    }
