"""A daemon, the operator's box straight into it, and a line to it for each way to reach it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant import Limits, Mailbox, OpenMailbox
from covenant.serve.daemon import Daemon
from covenant.store.clock import ManualClock
from tests.client.proxy import Proxy
from tests.daemons import Realmful, start_daemon


@pytest.fixture(params=["http", "unix"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def realm() -> Realmful:
    return Realmful()


@pytest.fixture
async def daemon(clock: ManualClock, realm: Realmful) -> AsyncIterator[Daemon]:
    daemon = await start_daemon("memory:", Limits(), clock)
    await realm.enroll(daemon)
    yield daemon
    await daemon.stop()


@pytest.fixture
async def box(daemon: Daemon, realm: Realmful) -> AsyncIterator[OpenMailbox]:
    """The operator's, over a line that never fails."""
    async with realm.open(daemon, "unix") as box:
        yield box


@pytest.fixture
async def proxy(daemon: Daemon, scheme: str) -> AsyncIterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="cov-") as folder:
        async with Proxy(daemon, Path(folder) / "sock" if scheme == "unix" else None).serving() as proxy:
            yield proxy


@pytest.fixture
async def far(proxy: Proxy, realm: Realmful) -> AsyncIterator[OpenMailbox]:
    """Bob's box, over the line."""
    async with Mailbox.open(proxy.url, token=realm.tokens["bob@lab"]) as far:
        yield far
