"""The fixtures of every test: a mailbox for each engine, on a clock and ids that the test owns.

A test that asks for `box` runs once for each engine. One that asks for `reopen` runs only on the engines that keep what
they acknowledged, and one that asks for `crash` only on those whose folder can be copied from under a living process.

Two marks of a module change on which engines its tests run:

- `rules_only`: what its tests look at is decided before an engine is asked, or by a codec that all share. They run in
  memory, on PostgreSQL and on a daemon over HTTP; those that ask for `reopen` or `crash` run wherever these do.
- `write_ahead`: the order of commits, what repeats them and what a crash leaves of them is what its tests look at. They
  run on PostgreSQL twice, in the plain mode and with commits that go into the log ahead of the tables from the first
  one on. Everywhere else the plain mode alone runs: `tests/postgres/test_differential`, `tests/model` and
  `tests/postgres/ahead` compare both modes over all commands.

A case on a daemon has a daemon of its own: its start, three enrolments and its stop take 7 ms, and a daemon that tests
share would cost them their clock, their ids and every listing of an operator.
"""

from __future__ import annotations

import ipaddress
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, settings

from covenant import Limits, Mailbox, OpenMailbox
from covenant.serve.daemon import Daemon
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.postgres import ahead
from tests.daemons import Realmful, start_daemon
from tests.haste import hurry
from tests.patience import SHORT
from tests.postgres import store_for

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has put this in the background, and programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

hurry()
ManualClock.early_seed = 1  # timers fire early, too, so that a callee that does not check the time fails

# How fast a machine is, is no property of what is tested.
settings.register_profile("covenant", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("covenant")

ENGINES: Final[tuple[str, ...]] = ("memory:", "file:{folder}", "postgresql:{folder}", "http:{folder}", "unix:{folder}")
REMOTE: Final = ("http", "unix")
DURABLE: Final = tuple(engine for engine in ENGINES if engine != "memory:")
IN_PROCESS: Final = ("memory:", "file:{folder}", "postgresql:{folder}", "postgresql-ahead:{folder}")
RULES_ONLY: Final = ("memory:", "postgresql:{folder}", "http:{folder}")
WRITE_AHEAD: Final = "postgresql-ahead:{folder}"
IN_A_FOLDER: Final = tuple(engine for engine in ENGINES if engine.startswith("file:"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" not in metafunc.fixturenames:
        return
    engines = ENGINES
    if "reopen" in metafunc.fixturenames:
        engines = DURABLE
    if "crash" in metafunc.fixturenames:
        engines = IN_A_FOLDER
    elif metafunc.definition.get_closest_marker("write_ahead"):
        engines = (*engines, WRITE_AHEAD)
    elif engines is ENGINES and metafunc.definition.get_closest_marker("rules_only"):
        engines = RULES_ONLY
    if "in_process" in metafunc.fixturenames:
        engines = tuple(engine for engine in engines if engine in IN_PROCESS)
    metafunc.parametrize("engine", engines, ids=[engine.partition(":")[0] for engine in engines])


@pytest.fixture
def in_process() -> None:
    """Whoever asks for this runs only where the store is opened by the program itself."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limits() -> Limits:
    """The bounds in force; a test that needs others parametrises this name."""
    return Limits()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limits of `tests.patience` run out soon, for a test in which one of them does."""
    for name, value in SHORT.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def open_url(
    clock: ManualClock, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[str], Awaitable[OpenMailbox]]]:
    """Opens a store by its URL. On PostgreSQL it is in the plain mode, unless the module is marked `write_ahead`: then
    there is a second case, whose scheme is `postgresql-ahead`, that goes ahead of the tables at once."""
    ids = CountingIds()
    realm = Realmful()
    running: list[Daemon] = []
    async with AsyncExitStack() as stack:

        async def open_it(url: str) -> OpenMailbox:
            scheme, _, folder = url.partition(":")
            if scheme in REMOTE:
                if running:
                    await running.pop().stop()  # the box was closed; its daemon goes with it
                daemon = await start_daemon(f"file:{folder}", limits, clock, ids)
                running.append(daemon)
                await realm.enroll(daemon)
                opened: OpenMailbox = await realm.open(daemon, scheme, ids)
            else:
                if scheme == "postgresql-ahead":
                    monkeypatch.setattr(ahead, "WORTH", 1)
                if scheme.startswith("postgresql"):
                    url = await store_for(folder)
                opened = await Mailbox.open(url, clock=clock, ids=ids, limits=limits)
            stack.push_async_callback(opened.close)
            return opened

        yield open_it
    for daemon in running:
        await daemon.stop()


@pytest.fixture
async def box(engine: str, folder: Path, open_url: Callable[[str], Awaitable[OpenMailbox]]) -> OpenMailbox:
    """The operator's box."""
    return await open_url(engine.format(folder=folder))


@pytest.fixture
def alice(box: OpenMailbox) -> Mailbox:
    """The one who sends."""
    return box.of("alice@lab")


@pytest.fixture
def bob(box: OpenMailbox) -> Mailbox:
    """The one who works."""
    return box.of("bob@lab")


@pytest.fixture
def carol(box: OpenMailbox) -> Mailbox:
    """The one whom it does not concern."""
    return box.of("carol@lab")


@pytest.fixture
async def reopen(
    engine: str, folder: Path, box: OpenMailbox, open_url: Callable[[str], Awaitable[OpenMailbox]]
) -> Callable[[], Awaitable[OpenMailbox]]:
    """Close the box in an orderly way and open its store again."""
    current = box

    async def close_and_open() -> OpenMailbox:
        nonlocal current
        await current.close()
        current = await open_url(engine.format(folder=folder))
        return current

    return close_and_open


@pytest.fixture
async def crash(
    engine: str, folder: Path, box: OpenMailbox, open_url: Callable[[str], Awaitable[OpenMailbox]]
) -> Callable[[], Awaitable[OpenMailbox]]:
    """Open what the folder holds at this very moment, as if the process had died."""

    async def open_what_is_left() -> OpenMailbox:
        left = folder.with_name("left")
        shutil.copytree(folder, left)
        return await open_url(engine.format(folder=left))

    return open_what_is_left


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of its own making for 127.0.0.1 and a name, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covenant")])
    now = datetime.now(UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("covenant.test")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file
