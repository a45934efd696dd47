"""HTTP beyond this machine: with a certificate, or when somebody has said that they know."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from covenant.exchange.realm import Realm
from covenant.mailbox import Mailbox
from covenant.model.error import BadSetting, Unreachable
from covenant.serve.daemon import Daemon, Settings
from tests.daemons import OPERATOR_TOKEN
from tests.until import until


def daemon_with(**settings: Any) -> Daemon:
    return Daemon(Settings(store="memory:", **settings), Realm.throwaway(), OPERATOR_TOKEN)


async def test_a_daemon_with_a_certificate_speaks_tls_and_nothing_else(certified: tuple[Path, Path]) -> None:
    cert, key = certified
    daemon = daemon_with(http="127.0.0.1:0", tls_cert=cert, tls_key=key)
    await daemon.start()
    assert daemon.url is not None and daemon.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
        for _ in range(2):
            async with session.get(f"{daemon.url}/whoami", headers=headers) as response:
                assert (response.status, (await response.json())["role"]) == (200, "operator")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{daemon.url}/whoami", headers=headers)
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{daemon.url.replace('https', 'http')}/whoami", headers=headers)
    await daemon.stop()


async def test_a_client_says_what_is_wrong_with_a_certificate(certified: tuple[Path, Path]) -> None:
    cert, key = certified
    for settings, scheme, why in (
        ({"tls_cert": cert, "tls_key": key}, "https", "its certificate is not trusted here: self-signed"),
        ({}, "https", "it speaks no TLS"),
    ):
        daemon = daemon_with(http="127.0.0.1:0", **settings)
        await daemon.start()
        address = f"{scheme}://{str(daemon.url).partition('://')[2]}"
        with pytest.raises(Unreachable, match=why) as refused:
            await Mailbox.open(address, token=OPERATOR_TOKEN)
        assert refused.value.details["outcome"] == "not_sent"
        await daemon.stop()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
def test_beyond_this_machine_without_tls_is_refused(address: str, certified: tuple[Path, Path]) -> None:
    with pytest.raises(BadSetting, match="--insecure"):
        daemon_with(http=address)
    cert, key = certified
    daemon_with(http=address, tls_cert=cert, tls_key=key)
    daemon_with(http=address, insecure=True)


def test_a_certificate_goes_with_its_key(certified: tuple[Path, Path]) -> None:
    with pytest.raises(BadSetting, match="--tls-key"):
        daemon_with(http="127.0.0.1:0", tls_cert=certified[0])


@pytest.mark.parametrize("name", ["--tls-cert", "--default-agent"])
def test_a_setting_of_http_and_grpc_is_refused_where_neither_is_served(
    name: str, certified: tuple[Path, Path], tmp_path: Path
) -> None:
    """Contract 34: it would never take effect."""
    cert, key = certified
    given = {"tls_cert": cert, "tls_key": key} if name == "--tls-cert" else {"default_agent": "bob@lab"}
    with pytest.raises(BadSetting, match=f"{name} is for .*, and neither is served") as refused:
        daemon_with(http=None, grpc=None, ipc=tmp_path / "sock", **given)
    assert refused.value.details["name"] == name
    daemon_with(http="127.0.0.1:0", grpc=None, **given)
    daemon_with(http=None, grpc="127.0.0.1:0", **given)


@pytest.mark.parametrize("more", [1, 10_000])
async def test_who_hangs_up_while_it_waits_is_noticed_behind_tls_too(certified: tuple[Path, Path], more: int) -> None:
    """Also where it has said more than is taken in meanwhile."""
    cert, key = certified
    daemon = daemon_with(http="127.0.0.1:0", tls_cert=cert, tls_key=key)
    await daemon.start()
    assert daemon.address is not None
    waits = daemon.exchange.waits
    _, writer = await asyncio.open_connection(*daemon.address, ssl=ssl.create_default_context(cafile=str(cert)))
    head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR_TOKEN}\r\n\r\n".encode()
    writer.write(b"GET /a2a/tasks/next?wait_ms=25000 " + head)
    await until(lambda: waits.total == 1)
    writer.write((b"GET /whoami " + head) * more)
    for _ in range(20):
        await asyncio.sleep(0)  # as much of it goes out as is taken
    writer.transport.abort()
    async with asyncio.timeout(10):
        await until(lambda: waits.total == 0)
    await daemon.stop()
