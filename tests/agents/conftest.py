"""A house for each way to have one: in this process without and with a disk, and a daemon behind a socket or HTTP; and
for each way to go on: where the function stands, or from its first line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from covenant import Limits, Mailbox
from covenant.store.clock import ManualClock
from tests.agents.house import COLD, WARM, House
from tests.daemons import Realmful, start_daemon, url_of

SERVED: Final = ("unix", "http")
ENGINES: Final = ("memory", "file", *SERVED)
WAYS: Final = (("memory", WARM), ("memory", COLD), ("unix", COLD))  # where nothing else is asked for
Open = Callable[..., Awaitable[House]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "open_house" not in metafunc.fixturenames:
        return
    ways: Sequence[tuple[str, int]] = WAYS
    if "served" in metafunc.fixturenames or "everywhere" in metafunc.fixturenames:
        places = SERVED if "served" in metafunc.fixturenames else ENGINES
        ways = [(place, warm_max) for place in places for warm_max in (WARM, COLD)]
    ids = [f"{place}-{'warm' if warm_max else 'cold'}" for place, warm_max in ways]
    metafunc.parametrize(("place", "warm_max"), ways, ids=ids)


@pytest.fixture
def everywhere() -> None:
    """Whoever asks for this runs on every engine, here and behind a daemon."""


@pytest.fixture
def served() -> None:
    """Whoever asks for this runs only behind a daemon."""


@pytest.fixture
async def open_house(place: str, warm_max: int, folder: Path, clock: ManualClock) -> AsyncIterator[Open]:
    """A house with limits of one's own. Opened again, it is the next process in the same folder."""
    closing: list[Callable[[], Awaitable[Any]]] = []
    realm = Realmful()

    async def close() -> None:
        while closing:
            await closing.pop()()

    async def open_it(limits: Limits | None = None) -> House:
        await close()
        if place in ("memory", "file"):
            url = "memory:" if place == "memory" else f"file:{folder}"
            box = await Mailbox.open(url, clock=clock, limits=limits)
            closing.append(box.close)
            return House(box, clock, warm_max, box._engine)
        daemon = await start_daemon(f"file:{folder}", limits or Limits(), clock)
        closing.append(daemon.stop)
        await realm.enroll(daemon)
        box = await realm.open(daemon, place)
        closing.append(box.close)
        return House(box, clock, warm_max, daemon.store, url_of(daemon, place), realm.tokens, url_of(daemon, "http"))

    yield open_it
    await close()


@pytest.fixture
async def house(open_house: Open) -> House:
    return await open_house()
