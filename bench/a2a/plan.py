"""What is measured of the A2A protocol: the daemon and the official server take turns, as in the service."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.cell import Cell
from bench.serve.plan import ServiceRun

CONNECTIONS: Final = (1, 32, 128)
COMPARED: Final = 32
STREAMS: Final = 10_000
_STREAM_EVENTS: Final = 200
CHUNKS_FEW: Final = 5_000
CHUNKS_MANY: Final = 10_000
_PASSES: Final = 3
_SLOW_SECONDS_MIN: Final = 2.5


class ProtocolRun(ServiceRun):
    def protocol(self) -> None:
        for number in range(self.plan.rounds):
            self._say(f"the A2A protocol: round {number + 1} of {self.plan.rounds}")
            self._guarded(self._protocol_round)
            self._measure("chunks", "chunks", few=CHUNKS_FEW, many=CHUNKS_MANY)
        self._say(f"the A2A protocol: {STREAMS:,} streams")
        self._guarded(self._streams)

    def _protocol_round(self) -> None:
        with ExitStack() as stack:
            daemon = self._server(stack, "a2a daemon", scheme=self.plan.scheme, peers=CONNECTIONS[-1])
            memory = self._server(stack, "a2a sdk", store="memory", peers=0)
            sqlite = self._server(stack, "a2a sdk", store="sqlite", peers=0)
            remote = self._server(stack, "a2a idle", scheme=self.plan.scheme, peers=CONNECTIONS[-1])
            stack.enter_context(Cell("a2a worker", remote, server=str(remote))).figures()
            turns: list[tuple[str, Cell]] = []
            for connections in CONNECTIONS:
                turns.append((f"a2a {connections}", self._load(stack, "messages", daemon, connections=connections)))
                turns.append((f"remote {connections}", self._load(stack, "messages", remote, connections=connections)))
                if connections == COMPARED:
                    turns.append(("sdk memory", self._slow_load(stack, memory, connections)))
                    turns.append(("sdk sqlite", self._slow_load(stack, sqlite, connections)))
            for _, load in turns:
                load.figures()
            for _ in range(_PASSES):
                for name, load in turns:
                    self.rounds.add(name, load.turn())

    def _slow_load(self, stack: ExitStack, server: Path, connections: int) -> Cell:
        """A window in which every client of a slow server gets several answers."""
        window = {"warm_s": 0.5, "seconds": max(_SLOW_SECONDS_MIN, self.plan.seconds)}
        return stack.enter_context(Cell("messages", server, server=str(server), connections=connections, **window))

    def _streams(self) -> None:
        with ExitStack() as stack:
            folder = self._new_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(Cell("a2a idle", folder, scheme=self.plan.scheme, peers=1)).figures()
            self._measure("streams", "streams", server=str(folder), streams=STREAMS, events=_STREAM_EVENTS)
