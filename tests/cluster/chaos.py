"""What happens to a cluster: one thing after the other, chosen by a seed, and after each of them work has to go on.

A fault waits for the clients to have got further, not for time to pass; who waits for too long has found that they do
not get further any more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, Literal

from covenant.store.postgres.pulse import BEAT_S, LAPSE_S
from tests.cluster.caller import Progress
from tests.cluster.daemons import Cluster, ServedDaemon
from tests.cluster.frozen import Play

FURTHER_S: Final = 45.0  # until there is more, whatever has just happened
FURTHER: Final = 8  # results and streams between two faults
_BYTES_MAX: Final = 20_000  # of answers before a line is cut
_DEATH_S: Final = LAPSE_S + 2 * BEAT_S
_MODES: Final[tuple[Literal["fast", "immediate"], ...]] = ("fast", "immediate")

log = logging.getLogger(__name__)


class Chaos:
    """With `has_time`, a daemon is also frozen for so long that the others take it for dead."""

    def __init__(
        self, cluster: Cluster, progress: Progress, play: Play, chance: random.Random, has_time: bool = False
    ) -> None:
        self._cluster = cluster
        self._progress = progress
        self._play = play
        self._chance = chance
        self._has_time = has_time
        self.counts: Counter[str] = Counter()

    @property
    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        alone = [self.kill, self.cut_clients, self.cut_an_answer]
        if self._cluster.database is None:
            return [*alone]
        faults = [*alone, self.cut_database, self.cut_a_commit, self.stop_database, self.freeze]
        return [*faults, self.freeze_to_death] if self._has_time else [*faults]

    async def run(self, until: float) -> None:
        """Each of the faults in turn, in an order of the seed's, until the time is over and all have been."""
        while monotonic() < until:
            for fault in self._chance.sample(self.faults, len(self.faults)):
                if monotonic() < until or not self.counts[fault.__name__]:
                    await self._suffer(fault)
        await self.further("the end")

    async def _suffer(self, fault: Callable[[], Awaitable[None]]) -> None:
        name = fault.__name__
        await self.further(name)
        began = monotonic()
        await fault()
        self.counts[name] += 1
        log.info("%s took %.1f s", name, monotonic() - began)

    async def further(self, before: str) -> None:
        began, there = monotonic(), self._progress.count + FURTHER
        await self._progress.wait_for(lambda: self._progress.count >= there, FURTHER_S, f"progress before {before}")
        log.info("%.1f s until %s", monotonic() - began, before)

    def _any(self) -> ServedDaemon:
        return self._chance.choice(self._cluster.daemons)

    async def kill(self) -> None:
        daemon = self._any()
        await daemon.kill()
        if len(self._cluster.daemons) > 1:
            await self.further("the killed one comes back")
        await daemon.start()

    async def cut_clients(self) -> None:
        front = self._any().front
        assert front is not None
        front.cut()

    async def cut_an_answer(self) -> None:
        """To a client, in the middle of it."""
        front = self._any().front
        assert front is not None
        front.cut_after(self._chance.randrange(_BYTES_MAX))

    async def cut_database(self) -> None:
        line = self._any().line
        assert line is not None
        line.cut()

    async def cut_a_commit(self) -> None:
        """What the database answers does not arrive: it has committed, and the daemon cannot know."""
        line = self._any().line
        assert line is not None
        line.cut_after(self._chance.randrange(_BYTES_MAX))

    async def stop_database(self) -> None:
        database, failures = self._cluster.database, self._progress.failures
        assert database is not None
        await database.stop(self._chance.choice(_MODES))
        await self._progress.wait_for(
            lambda: self._progress.failures > failures, FURTHER_S, "failure without a database"
        )
        await database.start()

    async def freeze(self) -> None:
        await self._freeze(lambda: self.further("the thaw"))

    async def freeze_to_death(self) -> None:
        """Its place among the daemons is closed when it thaws: it goes on under another name."""

        async def meanwhile() -> None:
            until = monotonic() + _DEATH_S
            while monotonic() < until:
                await self.further("the thaw of one that is taken for dead")

        await self._freeze(meanwhile)

    async def _freeze(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(4 * FURTHER_S):
            self.counts[await self._play.around(self._any(), meanwhile)] += 1
