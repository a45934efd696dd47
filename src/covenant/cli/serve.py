"""`covenant serve`: a daemon in the foreground, from its options to its orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from covenant.cli.log import FORMATS, start_logging
from covenant.cli.option import Given, home_option
from covenant.cli.session import Session
from covenant.exchange.scheduler import plan_from
from covenant.model.error import BadSetting
from covenant.model.limits import Limits
from covenant.rules.secret import without_passwords
from covenant.serve.daemon import DEFAULT_HTTP, Daemon, Settings, keep_memory_steady
from covenant.serve.home import Home
from covenant.version import VERSION

_OFF: Final = "off"
_SOCKET_BYTES_MAX: Final = 107  # of a path in sockaddr_un
_INTERRUPTED: Final = 130

log = logging.getLogger("covenant.serve")


@click.command()
@home_option()
@click.option("--store", metavar="URL", help="Where the data is. Default: file:<home>/data.")
@click.option(
    "--http", default=DEFAULT_HTTP, show_default=True, metavar="HOST:PORT|off", help="Port 0 takes a free one."
)
@click.option(
    "--grpc",
    metavar="HOST:PORT",
    help="The A2A protocol over gRPC. Default: off. Port 0 takes a free one.",
)
@click.option("--ipc", metavar="PATH|off", help="The Unix socket. Default: <home>/sock.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="For HTTP and gRPC.")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its key.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@click.option("--recv-gate", is_flag=True, help="A recipient must have a grant of a2a.recv.<sender> to be sent tasks.")
@click.option("--private-webhooks", is_flag=True, help="Let clients have webhooks on this machine and in its network.")
@click.option("--queue-depth", type=click.IntRange(1), metavar="N", help="Refuse more ready tasks for one recipient.")
@click.option("--public-url", metavar="URL", help="Where A2A clients reach HTTP, for the agents' cards.")
@click.option("--public-grpc", metavar="HOST:PORT", help="The same for gRPC. Default: the host of --public-url.")
@click.option("--default-agent", metavar="NAME", help="Whom A2A clients reach at the root. Default: the first one.")
@click.option("--alert-url", metavar="URL", help="Post there what an operator should hear of.")
@click.option("--log", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="How stderr reads.")
@click.pass_obj
def serve(given: Given, /, form: str, **options: Any) -> None:
    """Run a daemon until it is told to end.

    The first start makes the home with a key and the operator's token. SIGTERM or Ctrl-C ends it in order, a second
    one at once. The retry scheduler is off unless COVENANT_A2A_AUTO_RETRY_SCHEDULER is 1.
    """
    if given.url is not None or given.token is not None:
        raise click.UsageError("--url and --token are for those who talk to a daemon")
    session = Session(given)
    home = session.home
    settings = settings_of(home, options, os.environ)
    start_logging(form)
    home.make()
    daemon = Daemon(settings, home.realm(), home.tokens)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(daemon, session))


def settings_of(home: Home, options: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The one place where options and environment become settings."""
    ipc = _ipc(home, options["ipc"])
    http = None if options["http"] == _OFF else options["http"]
    if http is None and ipc is None:
        raise BadSetting("with --http off and --ipc off nobody can reach the daemon", name="--ipc")
    depth = options["queue_depth"]
    limits = Limits() if depth is None else Limits(queue_depth_max=depth)
    return Settings(
        store=f"file:{home.data}" if options["store"] is None else options["store"],
        http=http,
        grpc=options["grpc"],
        ipc=ipc,
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        insecure=options["insecure"],
        recv_gate=options["recv_gate"],
        private_webhooks=options["private_webhooks"],
        limits=limits,
        retry=plan_from(environ, limits),
        alert_url=options["alert_url"],
        public_url=options["public_url"],
        public_grpc=options["public_grpc"],
        default_agent=options["default_agent"],
        alerts_file=home.alerts_file,
    )


def _ipc(home: Home, told: str | None) -> Path | None:
    if told == _OFF:
        return None
    path = home.socket if told is None else Path(told).expanduser().absolute()
    if len(os.fsencode(path)) > _SOCKET_BYTES_MAX:
        raise BadSetting(f"{path} is too long for a socket: at most {_SOCKET_BYTES_MAX} bytes", name="--ipc")
    return path


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(daemon: Daemon, session: Session) -> None:
    told_to_end = _listen_to_signals()
    await daemon.start()
    keep_memory_steady()
    click.echo(_greeting(daemon, session))
    sys.stdout.flush()
    log.info("ready")
    await told_to_end.wait()
    log.info("ending: what is under way is finished first")
    await daemon.stop()
    log.info("ended")


def _listen_to_signals() -> asyncio.Event:
    told_to_end = asyncio.Event()

    def end() -> None:
        if told_to_end.is_set():
            log.warning("ended at once, by a second signal")
            os._exit(_INTERRUPTED)
        told_to_end.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return told_to_end


def _greeting(daemon: Daemon, session: Session) -> str:
    """Where it is, and what to type next."""
    settings, home = daemon.settings, session.home
    told = _client_options(daemon, session)
    return "\n".join(
        (
            f"Covenant {VERSION} is ready.",
            "",
            f"  http   {daemon.url or 'off'}",
            *([] if daemon.grpc_address is None else [f"  grpc   {daemon.grpc_address}"]),
            f"  ipc    {settings.ipc or 'off'}",
            f"  data   {without_passwords(settings.store)}",
            f"  realm  {daemon.exchange.realm.pubkey}",
            f"  token  {_token_place(home)}",
            "",
            "Next, in another terminal:",
            "",
            f"  covenant{told} peers enroll bob --grant 'a2a.respond.*'",
            f"  covenant{told} a2a send bob 'draft the brief'",
            f"  covenant{told} a2a status",
        )
    )


def _token_place(home: Home) -> str:
    if home.token_file.exists():
        return f"{home.token_file} (the operator's)"
    return "the operator's is where this store was first opened; copy it here, or say --token"


def _client_options(daemon: Daemon, session: Session) -> str:
    """How a client finds this daemon, where that is not the usual way."""
    told = session.given.home
    home = "" if told is None else f" --home {shlex.quote(told)}"
    ipc = daemon.settings.ipc
    if ipc is None:
        return f"{home} --url {daemon.url} --token TOKEN"
    token = "" if session.home.token_file.exists() else " --token TOKEN"
    url = "" if ipc == session.home.socket else f" --url {shlex.quote(f'unix:{ipc}')}"
    return f"{home}{url}{token}"
