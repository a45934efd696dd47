"""The program with its imports behind it: each call is a process of its own, forked from one that has done the slow
part.

Most of the time that `python -m covenant` takes goes into imports, and these tests call it a hundred times. A forked
call has its own arguments, environment, streams and exit code; what is tested of a start is tested with a real one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Final, NoReturn

PATIENCE_S: Final = 30
_MESSAGE_MAX: Final = 1 << 16
_LATE: Final = (
    "client.http",
    "client.unix",
    "serve.daemon",
    "store.journal.backup",
    "store.journal.log",
    "store.journal.repair",
)


class Forks:
    """The end of the tests: hands over a call, and waits for what comes of it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])

    def run(self, arguments: list[str], stdin: str, env: dict[str, str]) -> tuple[int, str, str]:
        call = json.dumps({"arguments": arguments, "env": env}).encode()
        stream = tempfile.TemporaryFile
        with stream("w+") as given, stream("w+") as out, stream("w+") as err:
            given.write(stdin)
            given.seek(0)
            socket.send_fds(self._line, [call], [given.fileno(), out.fileno(), err.fileno()])
            code = json.loads(self._line.recv(_MESSAGE_MAX))
            return code, _whole(out), _whole(err)

    def close(self) -> None:
        self._line.close()
        self._server.wait(PATIENCE_S)


def _whole(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()


def serve(line: socket.socket) -> None:
    """The other end: a child for each call, one after the other."""
    main = importlib.import_module("covenant.cli.main")
    for name in (*(f"cli.{command}" for command in main.COMMANDS), *_LATE):
        importlib.import_module(f"covenant.{name}")
    while True:
        call, streams, _, _ = socket.recv_fds(line, _MESSAGE_MAX, 3)
        if not call:
            return
        child = os.fork()
        if child == 0:
            line.close()
            _be_the_program(main, json.loads(call), streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        line.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _be_the_program(main: Any, call: dict[str, Any], streams: list[int]) -> NoReturn:
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    os.environ.clear()
    os.environ.update(call["env"])
    sys.argv = ["covenant", *call["arguments"]]
    signal.alarm(PATIENCE_S)
    main.main()
    raise AssertionError("main ends with an exit code")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours)
