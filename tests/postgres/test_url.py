"""The URL of a store: what is Covenant's own in it, and what nobody else may read."""

from __future__ import annotations

import pytest

from covenant import Mailbox
from covenant.model.error import UnknownStore
from covenant.store.postgres.connection import safe


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@db/x?lanes=2", "postgresql://ann:***@db/x?lanes=2"),
        ("postgresql://db/x?user=ann&password=secret&lanes=2", "postgresql://db/x?user=ann&password=***&lanes=2"),
        ("postgresql://db/x?sslpassword=secret", "postgresql://db/x?sslpassword=***"),
        ("postgresql://ann:secret@db/x?Password=secret", "postgresql://ann:***@db/x?Password=***"),
        ("postgresql://db/x?schema=password", "postgresql://db/x?schema=password"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert safe(url) == shown


async def test_a_refused_url_does_not_tell_its_password() -> None:
    with pytest.raises(UnknownStore) as refused:
        await Mailbox.open("postgresql://db/x?password=secret&schema=Not-A-Name")
    assert "secret" not in f"{refused.value} {refused.value.details}"
