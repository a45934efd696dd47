"""The peers of a test, and two daemons of one store on PostgreSQL, for the tests of both pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import pytest

from tests.postgres import store_url
from tests.seeds.daemon import Peer, RealDaemon


class House(Protocol):
    """What each page's own fixture `house` has: a daemon, which all tests of the page share."""

    @property
    def daemon(self) -> RealDaemon: ...


@pytest.fixture
def alice(house: House) -> Peer:
    """A newly enrolled peer."""
    return house.daemon.enroll()


@pytest.fixture
def bob(house: House) -> Peer:
    """Another one."""
    return house.daemon.enroll()


@pytest.fixture
def operator(house: House) -> Peer:
    return house.daemon.operator


class Pair(NamedTuple):
    one: RealDaemon
    two: RealDaemon


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    store = store_url()
    one = RealDaemon(store)
    one.start()
    two = RealDaemon(store, one.operator.token)
    two.start()
    yield Pair(one, two)
    two.close()
    one.close()
