"""The daemon: a store, an exchange, and the surfaces in front of it, with one beginning and one end.

Its end is orderly: no new leases are handed out, who waits is answered, what is under way is finished, and the journal
is flushed and signed. Killed instead, it loses nothing that it has acknowledged.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import ssl
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cryptography.x509 import DNSName, ExtensionNotFound, SubjectAlternativeName, load_pem_x509_certificate
from msgspec import Struct

from covenant.exchange.alerts import Alerts, Thresholds
from covenant.exchange.bounds import Bounds
from covenant.exchange.exchange import Exchange
from covenant.exchange.heads import SIGN_EVERY_MS
from covenant.exchange.pusher import Pusher
from covenant.exchange.realm import Realm
from covenant.exchange.scheduler import RetryPlan, Scheduler
from covenant.exchange.token import Keeper
from covenant.model.error import BadSetting, CovenantError
from covenant.model.limits import Limits
from covenant.model.repair import RetryPolicy
from covenant.model.view import QueueEntry
from covenant.rules.context import Ids
from covenant.rules.whereabouts import Address, Listening, check_public_url, is_loopback, joined, split
from covenant.serve import events, metrics, openapi, page
from covenant.serve.a2a.directory import Directory
from covenant.serve.a2a.operations import Operations
from covenant.serve.a2a.surface import Surface
from covenant.serve.connections import Connections
from covenant.serve.events import Events
from covenant.serve.home import KeptFile
from covenant.serve.http import Http
from covenant.serve.ipc import Ipc
from covenant.serve.listener import listen
from covenant.serve.metrics import Metrics
from covenant.serve.protocol import HttpProtocol
from covenant.serve.server import Server, config_for
from covenant.serve.why import reason_of
from covenant.store.clock import Clock, RandomIds, SystemClock
from covenant.store.engine import Store
from covenant.store.registry import engine_for

if TYPE_CHECKING:
    from covenant.serve.a2a.rpc import Rpc

DEFAULT_HTTP: Final = "127.0.0.1:8421"
_COLLECT_AFTER: Final = (50_000, 20, 50)  # objects made and not gone; then so many collections of each age

log = logging.getLogger("covenant.daemon")


class Settings(Struct, kw_only=True, frozen=True):
    """What a daemon is told when it starts."""

    store: str
    http: str | None = DEFAULT_HTTP
    grpc: str | None = None
    ipc: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False  # listen beyond this machine without TLS
    recv_gate: bool = False
    private_webhooks: bool = False  # which may be on this machine, or in its network
    limits: Limits = Limits()
    bounds: Bounds = Bounds()
    retry: RetryPlan | None = None
    alert_url: str | None = None
    alerts: Thresholds = Thresholds()
    public_url: str | None = None  # where clients reach HTTP, for the cards; else where it listens
    public_grpc: str | None = None  # HOST:PORT, the same of gRPC
    default_agent: str | None = None  # whom the root stands for in the A2A protocol; else the first that is published
    alerts_file: Path | None = None  # where it notes what was told, for the next daemon


class Daemon:
    def __init__(
        self,
        settings: Settings,
        realm: Realm,
        operator_token: str | Keeper,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self.settings = settings
        self._token = operator_token
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()
        store: Any = engine_for(settings.store, settings.limits, self._clock, ids)
        self._check_listening()
        self._check_public()
        self.store: Store = store
        self.exchange = Exchange(
            store,
            realm,
            self._clock,
            ids,
            settings.bounds,
            recv_gate=settings.recv_gate,
            private_webhooks=settings.private_webhooks,
        )
        self.pusher = Pusher(self.exchange, self._clock, private=settings.private_webhooks)
        self.http = Http(self.exchange)
        self.connections = Connections(settings.bounds)
        self._ipc = Ipc(self.exchange, settings.ipc, self.connections) if settings.ipc is not None else None
        self._scheduler = self._make_scheduler()
        self.alerts = self._make_alerts()
        self._events = Events(self.exchange, store, self.http.authenticate)
        self._names = _names_of(settings.tls_cert)
        self.directory = Directory(self.exchange, self.listening, settings.default_agent)
        self._rpc = None if settings.grpc is None else _make_rpc(self.exchange, self.directory)
        self._server: Server | None = None
        self.operations = Operations(self.exchange)
        self.http.door = Surface(self.http, self.operations, self.directory)
        self._add_pages()
        self._serving: asyncio.Task[None] | None = None
        self._jobs: list[asyncio.Task[None]] = []
        self.address: tuple[str, int] | None = None
        self._grpc_at: Address | None = None

    def _add_pages(self) -> None:
        """What is served besides the verbs."""
        numbers = Metrics(
            self.exchange,
            self._clock,
            {
                "waits": lambda: self.exchange.waits.total,
                "event_streams": lambda: self._events.count,
                "http_connections": lambda: 0 if self._server is None else len(self._server.server_state.connections),
                "ipc_connections": lambda: 0 if self._ipc is None else len(self._ipc.connections),
                "grpc_calls": lambda: 0 if self._rpc is None else self._rpc.count,
            },
            self.pusher,
        )
        self.http.on_request = numbers.note
        if self._ipc is not None:
            self._ipc.on_request = numbers.note
        if self._rpc is not None:
            self._rpc.on_request = numbers.note
        self.http.pages[events.PATH] = self._events.page
        self.http.pages[metrics.PATH] = numbers.page
        self.http.pages[openapi.PATH] = openapi.page(self.settings.limits)
        self.http.pages[page.PATH] = page.page

    def _check_listening(self) -> None:
        """Beyond this machine only with TLS, or when somebody has said that they know."""
        s = self.settings
        if (s.tls_cert is None) != (s.tls_key is None):
            raise BadSetting("--tls-cert and --tls-key go together", name="--tls-key")
        for name, address in (("--http", s.http), ("--grpc", s.grpc)):
            if address is None or is_loopback(split(address, name)[0]) or s.tls_cert is not None or s.insecure:
                continue
            raise BadSetting(
                f"{address} can be reached from other machines: give --tls-cert and --tls-key, or say --insecure",
                name=name,
            )
        if s.tls_cert is not None and s.http is None and s.grpc is None:
            raise BadSetting("--tls-cert is for HTTP and gRPC, and neither is served", name="--tls-cert")
        if s.default_agent is not None and s.http is None and s.grpc is None:
            raise BadSetting(
                "--default-agent is for A2A over HTTP and gRPC, and neither is served", name="--default-agent"
            )
        if s.tls_cert is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(s.tls_cert, s.tls_key)
            except OSError as failed:
                why = f"{s.tls_cert} and {s.tls_key} are no certificate and its key: {failed.strerror or failed}"
                raise BadSetting(why, name="--tls-cert") from failed

    def _check_public(self) -> None:
        s = self.settings
        for name, public, listening in (
            ("--public-url", s.public_url, s.http),
            ("--public-grpc", s.public_grpc, s.grpc),
        ):
            if public is not None and listening is None:
                raise BadSetting(f"{name} is the address of something that is not served", name=name)
        if s.public_url is not None:
            check_public_url(s.public_url, "--public-url")
        if s.public_grpc is not None:
            split(s.public_grpc, "--public-grpc")

    def _make_scheduler(self) -> Scheduler | None:
        plan = self.settings.retry
        if plan is None or not plan.policy.enabled:
            return None
        return Scheduler(self.exchange, plan, self._clock, self.exchange.operator)

    def _make_alerts(self) -> Alerts:
        s = self.settings
        policy = RetryPolicy() if s.retry is None else s.retry.policy
        notes = self.store.notes() or (None if s.alerts_file is None else KeptFile(s.alerts_file))
        return Alerts(self.store, self._clock, s.alerts, policy, self._command_for, s.alert_url, notes)

    def _command_for(self, entry: QueueEntry) -> str | None:
        return reason_of(entry, revoked=self.exchange.revoked_in([entry])).command

    @property
    def url(self) -> str | None:
        return None if self.address is None else f"{self._scheme}://{joined(*self.address)}"

    @property
    def grpc_address(self) -> str | None:
        return None if self._grpc_at is None else joined(*self._grpc_at)

    @property
    def _scheme(self) -> str:
        return "http" if self.settings.tls_cert is None else "https"

    def listening(self) -> Listening:
        """Where it is, as far as it knows itself."""
        s = self.settings
        return Listening(
            scheme=self._scheme,
            http=self.address,
            grpc=self._grpc_at,
            public_url=None if s.public_url is None else check_public_url(s.public_url, "--public-url"),
            public_grpc=s.public_grpc,
            names=self._names,
        )

    async def start(self) -> None:
        self.connections.make_room()
        listening = self._bind()
        try:
            if self._ipc is not None:
                self._ipc.claim()
            await self.exchange.open(self._token)
            if self._ipc is not None:
                await self._ipc.start()
            if self._rpc is not None:
                await self._start_grpc(self._rpc)
            if listening is not None:
                await self._start_http(listening)
        except BaseException:
            if listening is not None:
                listening.close()
            if self._ipc is not None:
                await self._ipc.stop()
            if self._rpc is not None:
                await self._rpc.stop()
            self.connections.hang_ups.close()
            await self.exchange.close()
            raise
        self._jobs.append(asyncio.create_task(self._sign_heads()))
        self._jobs.append(asyncio.create_task(self.connections.watch()))
        await self.alerts.start()
        self.pusher.start()
        if self._scheduler is not None:
            self._scheduler.start()

    def _bind(self) -> socket.socket | None:
        if self.settings.http is None:
            return None
        listening = _listen(self.settings.http, "--http", self.connections.backlog)
        self.address = listening.getsockname()[:2]
        return listening

    async def _start_grpc(self, rpc: Rpc) -> None:
        s = self.settings
        assert s.grpc is not None
        with _listen(s.grpc, "--grpc", 1) as tried:  # gRPC would not say why it cannot
            host = tried.getsockname()[0]
        try:
            port = await rpc.start(joined(host, split(s.grpc, "--grpc")[1]), s.tls_cert, s.tls_key)
        except RuntimeError as failed:
            raise BadSetting(f"cannot listen on {s.grpc}: {failed}", name="--grpc") from failed
        self._grpc_at = (host, port)

    async def _start_http(self, listening: socket.socket) -> None:
        protocol = partial(HttpProtocol, http=self.http, crowd=self.connections)
        backlog = self.connections.backlog
        s = self.settings
        self._server = Server(config_for(self.http, backlog, protocol, s.tls_cert, s.tls_key))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        starting = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((starting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            starting.cancel()
            self._serving.result()
            raise BadSetting("the HTTP server did not start", name="--http")

    async def stop(self) -> None:
        self.exchange.drain()
        self._events.end()
        for job in self._jobs:
            job.cancel()
        if self._scheduler is not None:
            await self._scheduler.stop()
        await self.alerts.stop()
        await self.pusher.stop()
        if self._rpc is not None:
            await self._rpc.stop()
        if self._server is not None and self._serving is not None:
            self._server.is_over.set()
            await asyncio.wait([self._serving])
        if self._ipc is not None:
            await self._ipc.stop()
        self.connections.hang_ups.close()
        await self.exchange.close()

    async def _sign_heads(self) -> None:
        """First what a killed predecessor left unsigned, then every second."""
        while True:
            try:
                await self.exchange.tell_refusals()
                await self.exchange.heads.sign()
            except CovenantError as failed:
                log.warning("the end of the chain could not be signed: %s", failed)
            await asyncio.sleep(SIGN_EVERY_MS / 1000)


def _make_rpc(exchange: Exchange, directory: Directory) -> Rpc:
    """What it needs is not for everybody: it comes with an extra."""
    try:
        from covenant.serve.a2a.rpc import Rpc
    except ImportError as missing:
        why = f"gRPC needs packages that are not installed ({missing.name}): pip install 'covenant-exchange[grpc]'"
        raise BadSetting(why, name="--grpc") from missing
    return Rpc(exchange, directory)


def _names_of(tls_cert: Path | None) -> frozenset[str]:
    """What this machine is surely called: by itself, and by whoever gave it a certificate."""
    names = {socket.gethostname()}
    if tls_cert is not None:
        with suppress(ExtensionNotFound, ValueError):
            extensions = load_pem_x509_certificate(tls_cert.read_bytes()).extensions
            names.update(extensions.get_extension_for_class(SubjectAlternativeName).value.get_values_for_type(DNSName))
    return frozenset(name.lower() for name in names)


def _listen(address: str, name: str, backlog: int) -> socket.socket:
    try:
        return listen(*split(address, name), backlog)
    except OSError as failed:
        number = failed.errno or 0  # its text has the address once more; that of a name which is not known has not
        why = os.strerror(number) if number in errno.errorcode else failed.strerror
        advice = f"; choose another with {name}" if number == errno.EADDRINUSE else ""
        raise BadSetting(f"cannot listen on {address}: {why}{advice}", name=name) from failed


def keep_memory_steady() -> None:
    """For a process that is a daemon and nothing else, once it has started. What was loaded stays: no collection needs
    to look at it again. What a request leaves behind goes by itself: few collections find anything."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
