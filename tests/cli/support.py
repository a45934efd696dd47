"""The real program, in processes of its own: one that serves, and others that are asked to do something."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from tests.cli.forks import Forks

PROGRAM: Final = (sys.executable, "-m", "covenant")
PATIENCE_S: Final = 30.0


def environment(**more: str) -> dict[str, str]:
    """As on a machine where nothing was set up."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVENANT_")}
    return {**kept, "COLUMNS": "100", **more}


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        answer = json.loads(lines[0])
        assert isinstance(answer, dict)
        return answer


def run(*arguments: str, **env: str) -> Done:
    """The program from its very start to its end."""
    done = subprocess.run(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@functools.cache
def _forks() -> Forks:
    forks = Forks()
    atexit.register(forks.close)
    return forks


class Client:
    """`covenant --home <home>`, as often as one likes."""

    def __init__(self, home: Path, token: str | None = None) -> None:
        self.home = home
        self._options = ["--home", str(home), *(() if token is None else ("--token", token))]

    def __call__(self, *arguments: str, code: int = 0, stdin: str | None = None, **env: str) -> Done:
        done = Done(*_forks().run([*self._options, *arguments], stdin or "", environment(**env)))
        assert done.code == code, done
        assert "\x1b" not in done.out + done.err  # colours are for a terminal
        return done

    def text(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        return self(*arguments, code=code, stdin=stdin).out

    def json(self, *arguments: str, code: int = 0, stdin: str | None = None) -> Any:
        return self(*arguments, "--json", code=code, stdin=stdin).json

    def refused(self, *arguments: str) -> str:
        """The code of the refusal, which stands on both streams."""
        done = self(*arguments, "--json", code=1)
        answer = done.json
        assert answer["kind"] == "error" and answer["message"]
        assert f"({answer['code']})" in done.err.splitlines()[0]
        return str(answer["code"])

    @contextmanager
    def running(self, *arguments: str) -> Iterator[Process]:
        with process(*self._options, *arguments) as running:
            yield running


class Process:
    """One that goes on by itself, and is killed when it keeps somebody waiting for too long."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen

    def read_until(self, text: str, stream: str = "stdout") -> str:
        """What it says up to the line with this text."""
        said: IO[str] = getattr(self._popen, stream)
        lines = []
        with self._impatiently():
            for line in said:
                lines.append(line)
                if text in line:
                    return "".join(lines)
        raise AssertionError(f"it ended without {text!r}: {''.join(lines)} {self.rest()}")

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def rest(self) -> Done:
        """What else it says until it ends; little enough that no stream gets stuck."""
        assert self._popen.stdout is not None and self._popen.stderr is not None
        with self._impatiently():
            out, err = self._popen.stdout.read(), self._popen.stderr.read()
            return Done(self._popen.wait(), out, err)

    @contextmanager
    def _impatiently(self) -> Iterator[None]:
        watchdog = threading.Timer(PATIENCE_S, self._popen.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()


@contextmanager
def process(*arguments: str, **env: str) -> Iterator[Process]:
    with subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1", **env),
    ) as popen:
        try:
            yield Process(popen)
        finally:
            if popen.poll() is None:
                popen.kill()


LAST_LINE: Final = "a2a status"


def fields(block: str) -> dict[str, str]:
    """What the block of a daemon that is ready says: where it listens, where things are."""
    pairs = (
        line.split(None, 1) for line in block.splitlines() if line.startswith("  ") and "covenant" not in line[:12]
    )
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


@contextmanager
def serving(home: Path, *options: str) -> Iterator[tuple[Process, dict[str, str]]]:
    """A daemon that is ready, and what it says of itself."""
    with process("serve", "--home", str(home), "--http", "127.0.0.1:0", *options) as daemon:
        yield daemon, fields(daemon.read_until(LAST_LINE))
