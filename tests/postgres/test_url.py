"""The URL and the settings of a store: what nobody else may read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from covenant import Limits, Mailbox
from covenant.model.error import BadSetting, StoreUnavailable, UnknownStore
from covenant.rules.secret import without_passwords
from tests.postgres import store_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@db/x?lanes=2", "postgresql://ann:***@db/x?lanes=2"),
        ("postgresql://db/x?user=ann&password=secret&lanes=2", "postgresql://db/x?user=ann&password=***&lanes=2"),
        ("postgresql://db/x?sslpassword=secret", "postgresql://db/x?sslpassword=***"),
        ("postgresql://ann:secret@db/x?Password=secret", "postgresql://ann:***@db/x?Password=***"),
        ("postgresql://db/x?schema=password", "postgresql://db/x?schema=password"),
        ("postgresql://ann:se@cr:et@one:1,two:2/x", "postgresql://ann:***@one:1,two:2/x"),
        ("postgresql://ann@db:5432/x?host=/a@b", "postgresql://ann@db:5432/x?host=/a@b"),
        ("mysql://ann:secret@[db/x", "mysql://ann:***@[db/x"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert without_passwords(url) == shown


async def test_a_bound_that_is_not_kept_is_refused() -> None:
    with pytest.raises(BadSetting, match="retention_ms") as refused:
        await Mailbox.open(store_url(), limits=Limits(retention_bytes=1_000_000))
    assert refused.value.details["name"] == "retention_bytes"


@pytest.mark.parametrize("hosts", ["db:65536", "ann:secret@one:5432,two:99999"])
async def test_a_port_that_is_none_is_refused(hosts: str) -> None:
    with pytest.raises(UnknownStore, match="a port is at most 65535") as refused:
        await Mailbox.open(f"postgresql://{hosts}/x")
    assert "secret" not in f"{refused.value} {refused.value.details}"


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey", "sslcrl"])
async def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"there is no file {tmp_path}/no.pem") as refused:
        await Mailbox.open(f"postgresql://db/x?sslmode=verify-full&{name}={tmp_path}/no.pem")
    assert refused.value.details["name"] == name


async def test_a_refused_url_does_not_tell_its_password() -> None:
    with pytest.raises(UnknownStore) as refused:
        await Mailbox.open("postgresql://db/x?password=secret&schema=Not-A-Name")
    assert "secret" not in f"{refused.value} {refused.value.details}"


async def test_who_is_not_let_in_is_told_so() -> None:
    parts = urlsplit(store_url())
    elsewhere = parts._replace(path="/nowhere")
    stranger = parts._replace(netloc=f"nobody:x@{parts.netloc.rpartition('@')[2]}")
    for url in (elsewhere, stranger):
        with pytest.raises(StoreUnavailable, match=r"does not let us in: .*no(where|body)"):
            await Mailbox.open(urlunsplit(url))
