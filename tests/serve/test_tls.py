"""HTTP beyond this machine: with a certificate, or when somebody has said that they know."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covenant.exchange.realm import Realm
from covenant.model.error import BadSetting
from covenant.serve.daemon import Daemon, Settings
from tests.daemons import OPERATOR_TOKEN


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of its own making for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covenant")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


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
