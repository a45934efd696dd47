"""What is measured of durable agents: the same script beside the peers, in turns, and what only we can tell."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import Final

from bench.a2a.plan import ProtocolRun
from bench.agents.covenant import FORMS
from bench.agents.peers import PEERS
from bench.agents.script import STEPS
from bench.cell import Cell

ENTRIES_FEW: Final = 1_000
ENTRIES_MANY: Final = 10_000
PAUSES: Final = 1_000
_WAKES: Final = 200


class AgentRun(ProtocolRun):
    def agents(self, with_peers: bool) -> None:
        for number in range(self.plan.rounds):
            self._say(f"durable agents: round {number + 1} of {self.plan.rounds}")
            for form in FORMS:
                self._measure("agents covenant", f"agent covenant {form}", steps=STEPS, form=form)
            for name, (cell, form) in PEERS.items() if with_peers else ():
                self._measure(cell, name, steps=STEPS, form=form)
            self._guarded(self._wakes)
            self._measure("agents resumed", "agent resumed few", entries=ENTRIES_FEW)
            self._measure("agents resumed", "agent resumed many", entries=ENTRIES_MANY)
        self._measure("agents paused", "agent paused", pauses=PAUSES)

    def _wakes(self) -> None:
        """Beside the bare disk in the same moment."""
        with ExitStack() as stack:
            folder = self._new_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(Cell("a2a idle", folder, scheme=self.plan.scheme, peers=2)).figures()
            self._measure("agents wakes", "agent wakes", server=str(folder), times=_WAKES)
            self._measure("bare", "bare beside agents", warm_s=0.1, seconds=0.5)
