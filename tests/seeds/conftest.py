"""Two daemons of one store on PostgreSQL, for the tests of both pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.postgres import store_url
from tests.seeds.daemon import RealDaemon


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
