"""Connections to the database, and what their failures mean."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from msgspec import Struct

from covenant.model.error import BadSetting, CovenantError, StoreFull, StoreUnavailable, UnknownStore
from covenant.rules.secret import without_passwords

SCHEMA: Final = "covenant"
COMMAND_S: Final = 12.0  # then a connection is taken for lost: a machine may have gone without a word
IDLE_S: Final = 10  # of silence on a line; then its other end is probed,
PROBE_S: Final = 3  # so often,
PROBES: Final = 3  # and so many times in vain, until the line counts as cut
UNHEARD_MS: Final = 20_000  # likewise for what was sent and not acknowledged
LANES: Final = 2
LANES_MAX: Final = 32
_GOODBYE_S: Final = 2.0
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,40}")
_PORT: Final = re.compile(r":([0-9]+)(?=,|$)")
_PORT_MAX: Final = 65535
_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_SETTINGS: Final = {
    "application_name": "covenant",
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    # A daemon that was frozen in the middle of a transaction must not hold what others need.
    "idle_in_transaction_session_timeout": "5s",
    "synchronous_commit": "on",
    # A line that was cut without a word is noticed at both ends, also where nobody speaks.
    "tcp_keepalives_idle": str(IDLE_S),
    "tcp_keepalives_interval": str(PROBE_S),
    "tcp_keepalives_count": str(PROBES),
    "tcp_user_timeout": str(UNHEARD_MS),
    "jit": "off",
    # Every statement goes by an index, whatever the statistics say: a plan made while a table was small stays good.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}
_PROBING: Final = {
    "TCP_KEEPIDLE": IDLE_S,
    "TCP_KEEPINTVL": PROBE_S,
    "TCP_KEEPCNT": PROBES,
    "TCP_USER_TIMEOUT": UNHEARD_MS,
}

# It may well work when it is tried again: others were at the same records.
RETRIED: Final = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    asyncpg.UniqueViolationError,
)
_SHUT_OUT: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,  # a wrong password is one of them
    asyncpg.InvalidCatalogNameError,
    asyncpg.TooManyConnectionsError,
)
# The connection is gone, or the server is: what was under way has to be looked for.
LOST: Final = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver's, between the server's last word and the end of the line
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InvalidTransactionStateError,
)
LANE_CLOSED: Final = "CV001"
LOG_AHEAD: Final = "CV005"


class Where(Struct, frozen=True):
    """A store URL, taken apart: what the driver is told, and what is ours."""

    dsn: str
    schema: str = SCHEMA
    lanes: int = LANES

    @classmethod
    def of(cls, url: str) -> Where:
        try:
            parts = urlsplit(url)
        except ValueError as wrong:
            raise UnknownStore(f"this is no database URL: {wrong}") from None
        ours: dict[str, str] = {}
        theirs: list[tuple[str, str]] = []
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in ("schema", "lanes"):
                ours[name] = value
            else:
                theirs.append((name, value))
        schema, lanes = ours.get("schema", SCHEMA), ours.get("lanes", str(LANES))
        if not _NAME.fullmatch(schema):
            raise UnknownStore("a schema is named by small letters, digits and _", url=without_passwords(url))
        if not lanes.isdigit() or not 0 < int(lanes) <= LANES_MAX:
            raise BadSetting(f"lanes is a number from 1 to {LANES_MAX}", name="lanes")
        if any(int(port) > _PORT_MAX for port in _PORT.findall(parts.netloc.rpartition("@")[2])):
            shown = without_passwords(url)  # some event loops would take another port instead
            raise UnknownStore(f"{shown} is no database URL: a port is at most {_PORT_MAX}", url=shown)
        for name, value in theirs:
            if name in _FILES and not os.path.exists(value):
                raise BadSetting(f"there is no file {value}", name=name)
        return cls(urlunsplit(parts._replace(query=urlencode(theirs, safe="/"))), schema, int(lanes))


async def connect(where: Where, command_s: float | None = COMMAND_S, /, **settings: str) -> asyncpg.Connection[Any]:
    try:
        connection = await asyncpg.connect(
            where.dsn,
            timeout=10,
            command_timeout=command_s,
            server_settings={**_SETTINGS, "search_path": f'"{where.schema}"', **settings},
        )
    except (ValueError, asyncpg.ClientConfigurationError) as wrong:
        why, shown = str(wrong).splitlines()[0], without_passwords(where.dsn)
        raise UnknownStore(f"{shown} is no database URL: {why}", url=shown) from wrong
    _probe(connection)
    return connection


def _probe(connection: asyncpg.Connection[Any]) -> None:
    """Have this end of the line probed as the server does its own."""
    line = connection._transport.get_extra_info("socket")
    if line.family == socket.AF_UNIX:
        return
    with socket.socket(fileno=os.dup(line.fileno())) as same:  # loops differ in what they let do with theirs
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBING.items():
            if hasattr(socket, name):  # not every system has all of them
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@asynccontextmanager
async def borrowed(where: Where, **settings: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection for one piece of work, whose failures are told in our words."""
    try:
        connection = await connect(where, None, **settings)
        try:
            yield connection
        except BaseException:
            connection.terminate()
            raise
        await connection.close(timeout=_GOODBYE_S)
    except (*LOST, asyncpg.PostgresError) as failed:
        raise told(failed, "not_stored") from failed


def told(failed: BaseException, outcome: str) -> CovenantError:
    """A failure of the database, in our words."""
    if isinstance(failed, CovenantError):
        return failed
    if isinstance(failed, (asyncpg.DiskFullError, asyncpg.OutOfMemoryError)):
        return StoreFull(f"the database has no room: {failed}", outcome=outcome)
    what = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
    if isinstance(failed, _SHUT_OUT):
        return StoreUnavailable(f"the database does not let us in: {what}", outcome=outcome)
    if isinstance(failed, asyncpg.InsufficientPrivilegeError):
        return StoreUnavailable(f"a right is missing, the owner of the schema has to grant it: {what}", outcome=outcome)
    return StoreUnavailable(f"the database does not answer as it should: {what}", outcome=outcome)
