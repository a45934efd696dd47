"""A store whose daemon goes ahead as soon as it can, looked at when it is closed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from covenant import Mailbox, OpenMailbox
from covenant.store.postgres import ahead, stretch
from tests.postgres import misplaced, store_url
from tests.postgres.ahead.support import ALICE, BOB, every_record_is_what_the_log_tells
from tests.postgres.support import engine_of


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes ahead as soon as it can, and comes back when something wants it to."""
    monkeypatch.setattr(ahead, "WORTH", 1)
    monkeypatch.setattr(stretch, "IDLE_S", 60.0)
    monkeypatch.setattr(stretch, "LOOK_S", 0.0)


@pytest.fixture
def url() -> str:
    return store_url()


@pytest.fixture
async def box(url: str) -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open(url) as box:
        yield box
        assert await misplaced(engine_of(box)) == ([], [])
        assert await every_record_is_what_the_log_tells(engine_of(box))


@pytest.fixture
def alice(box: OpenMailbox) -> Mailbox:
    return box.of(ALICE)


@pytest.fixture
def bob(box: OpenMailbox) -> Mailbox:
    return box.of(BOB)
