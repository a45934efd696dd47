"""What is measured, in which order: every comparison takes turns, A B A B, and keeps all rounds.

A cell that fails is reported and left out; its rows then say so, and the rest of the run goes on.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from bench.cell import Cell, CellFailed, measure
from bench.covenant_cycle import LINE_KINDS
from bench.floor import FORMS as FLOOR_FORMS
from bench.history import snapshots_in
from bench.rounds import Rounds
from bench.work import Figures

CLIENTS: Final = (1, 8, 64, 256)
PEER_CLIENTS: Final = 64
PACED_GAP_S: Final = 0.0013  # what 64 commits take between two syncs, roughly
DBOS_FORMS: Final = ("queue", "direct")
PASTS: Final = ("queued", "resolved")
STARTS: Final = ("as left", "snapshot", "replay")
_DEFAULT_SIZES: Final = (600, 388, 510, 197)  # for a store without a journal
_REBUILT: Final = ("snapshot-*", "archive*")  # what an opening journal makes anew when it is missing


class Plan(Struct, frozen=True, kw_only=True):
    """How long and how much."""

    scheme: str
    rounds: int
    seconds: float  # of each window
    peer_seconds: float
    warm_s: float
    few: int  # tasks in the small store
    many: int  # tasks in the large one, and events in the log that is opened
    start_rounds: int


class Run:
    """One run of a plan in one work folder."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.rounds = Rounds()
        self.sizes: list[int] = list(_DEFAULT_SIZES)
        self._folder = folder
        self._numbers: Iterator[int] = iter(range(1_000_000))
        self._began = time.monotonic()

    def all(self, *, with_peers: bool, with_history: bool) -> None:
        self._measure_sizes()
        for number in range(self.plan.rounds):
            self._say(f"cycles, floors and peers: round {number + 1} of {self.plan.rounds}")
            self._throughput_round(with_peers)
        if with_history:
            for past in PASTS:
                self._past(past)
            self._starts()

    # --- throughput -------------------------------------------------------------------------------------------

    def _measure_sizes(self) -> None:
        if self.plan.scheme == "memory":
            return
        sizes = self._measure("sizes", "sizes", scheme=self.plan.scheme)
        if sizes is not None:
            self.sizes = [round(sizes[kind]) for kind in LINE_KINDS]

    def _throughput_round(self, with_peers: bool) -> None:
        for clients in CLIENTS:
            self._window("bare", f"bare beside {clients}")
            self._window("covenant", f"covenant {clients}", scheme=self.plan.scheme, clients=clients)
            if clients == CLIENTS[-1]:
                self._window("covenant", f"diskless {clients}", scheme="memory", clients=clients)
            for form in FLOOR_FORMS:
                self._window("group", f"group {form} {clients}", writers=clients, sizes=self.sizes, form=form)
            if clients == PEER_CLIENTS:
                batch = round(sum(self.sizes) / len(self.sizes) * clients)
                self._window("paced", "paced", size=batch, gap_s=PACED_GAP_S)
                if with_peers:
                    self._peers_round()

    def _peers_round(self) -> None:
        seconds = self.plan.peer_seconds
        self._window("queue", "queue", seconds, clients=PEER_CLIENTS)
        self._window("huey", "huey", seconds, clients=PEER_CLIENTS)
        for form in DBOS_FORMS:
            self._window("dbos", f"dbos {form}", seconds, clients=PEER_CLIENTS, form=form)

    def _window(self, cell: str, name: str, seconds: float | None = None, **parameters: Any) -> None:
        self._measure(cell, name, warm_s=self.plan.warm_s, seconds=seconds or self.plan.seconds, **parameters)

    # --- stores with a past -----------------------------------------------------------------------------------

    def _past(self, past: str) -> None:
        """The large store stays open; each turn of it follows one of a small store that is new, and so still small."""
        folder = self._new_folder()
        self._say(f"a store with {self.plan.many:,} tasks, {past}")
        try:
            with self._filled(past, self.plan.many, folder) as large:
                self.rounds.add(f"fill {past} many", large.figures())
                for _ in range(self.plan.rounds):
                    self._small_past(past)
                    self.rounds.add(f"cycles {past} many", large.turn())
        except CellFailed as failure:
            self._complain(failure)
        shutil.rmtree(folder, ignore_errors=True)

    def _small_past(self, past: str) -> None:
        folder = self._new_folder()
        with self._filled(past, self.plan.few, folder) as small:
            self.rounds.add(f"fill {past} few", small.figures())
            self.rounds.add(f"cycles {past} few", small.turn())
        shutil.rmtree(folder, ignore_errors=True)

    def _filled(self, past: str, tasks: int, folder: Path) -> Cell:
        plan = self.plan
        return Cell(
            "filled",
            folder,
            scheme=plan.scheme,
            past=past,
            tasks=tasks,
            clients=PEER_CLIENTS,
            warm_s=plan.warm_s,
            seconds=plan.seconds,
        )

    def _starts(self) -> None:
        for past in PASTS:
            self._say(f"start-up with {self.plan.many:,} events in the log, {past}")
            folders = {start: self._new_folder() for start in STARTS}
            try:
                self._make_starts(folders, past)
                for _ in range(self.plan.start_rounds if past == "resolved" else 1):
                    for start, folder in folders.items():
                        self._start(folder, f"start {past} {start}")
            except CellFailed as failure:
                self._complain(failure)
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    def _make_starts(self, folders: dict[str, Path], past: str) -> None:
        """One journal, three ways to open it: as housekeeping left it, with a snapshot at its end, with none."""
        left = folders["as left"]
        measure("made", left, scheme=self.plan.scheme, past=past, events=self.plan.many)
        if not snapshots_in(left):
            del folders["as left"]  # too short a log: it would be the replay once more
        shutil.copytree(left, folders["snapshot"])
        measure("snapped", folders["snapshot"], scheme=self.plan.scheme)
        shutil.copytree(left, folders["replay"])
        for pattern in _REBUILT:
            for path in folders["replay"].glob(pattern):
                path.unlink()

    def _start(self, original: Path, name: str) -> None:
        """Open a copy, so that what an opening writes does not help the next one."""
        copy = self._new_folder()
        shutil.copytree(original, copy)
        self._measure("opened", name, copy, scheme=self.plan.scheme)

    # --- inside -----------------------------------------------------------------------------------------------

    def _measure(self, cell: str, name: str, folder: Path | None = None, **parameters: Any) -> Figures | None:
        folder = folder or self._new_folder()
        try:
            figures = measure(cell, folder, **parameters)
        except CellFailed as failure:
            self._complain(failure)
            return None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.rounds.add(name, figures)
        return figures

    def _new_folder(self) -> Path:
        return self._folder / f"cell-{next(self._numbers)}"

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def _complain(self, failure: CellFailed) -> None:
        self._say(f"!!! {failure}")
