"""One run of the program: which daemon it asks, with whose token, and how it answers.

By default that is the daemon of one's own home, over its socket, as the operator.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from covenant.cli.option import FOR_EVER, Given
from covenant.cli.output import last_word, written
from covenant.cli.words import failure, json_text, now_ms, safe
from covenant.client.polls import polls
from covenant.client.remote import ADDRESS, OPERATOR_TOKEN, TOKEN_VARIABLE, has_host, without_ends
from covenant.exchange.realm import read_secret
from covenant.model.error import (
    BadSetting,
    CovenantError,
    MissingCapability,
    PeerConflict,
    ScopeMismatch,
    Unauthenticated,
    UnknownPeer,
    UnknownStore,
    Unreachable,
)
from covenant.serve.home import Home

if TYPE_CHECKING:
    from covenant.client.transport import Transport
    from covenant.serve import wire as w

URL_VARIABLE: Final = "COVENANT_URL"
_UNIX: Final = "unix:"

R = TypeVar("R")
T = TypeVar("T")


class Daemon:
    """A daemon as the CLI calls it: the connection, the token of every call, and the limit for an answer."""

    def __init__(self, transport: Transport, token: str, address: str, patience_ms: int) -> None:
        self._transport = transport
        self._token = token
        self._address = address
        self._patience_ms = patience_ms

    async def call(self, request: w.Request, reply: type[R], work_ms: int = 0) -> R:
        """Send a request and return the reply. Raises Unreachable if none comes within the limit.

        The limit is added to the wait that the request asks for, and to `work_ms`, the time that the work may take.
        """
        wait_ms: int = msgspec.structs.asdict(request).get("wait_ms", 0)
        try:
            async with asyncio.timeout((self._patience_ms + wait_ms + work_ms) / 1000):
                answer: R = await self._transport.call(self._token, request, reply)
        except TimeoutError:
            silent = f"the daemon at {self._address} does not answer; is it stopped?"
            raise Unreachable(silent, outcome="unknown") from None
        return answer


class Session:
    def __init__(self, given: Given) -> None:
        self.given = given

    # --- where and who ------------------------------------------------------------------------------------

    @property
    def home(self) -> Home:
        return Home(self.given.home)

    @property
    def address(self) -> str:
        """What was said on the command line goes before what the environment says."""
        if self.given.url is not None:
            return self.given.url
        told = None if self.given.home is not None else os.environ.get(URL_VARIABLE)
        return told or f"{_UNIX}{self.home.socket}"

    @property
    def is_at_home(self) -> bool:
        return self.address == f"{_UNIX}{self.home.socket}"

    def find_token(self) -> str:
        """Given, from the environment, or the operator's own; the operator's never goes to a URL unasked."""
        if self.given.token is not None:
            self.given.token_from = "--token"
            return without_ends(self.given.token)
        token = without_ends(os.environ.get(TOKEN_VARIABLE, ""))
        if token:
            self.given.token_from = TOKEN_VARIABLE
            return token
        socket = _socket_path(self.address)
        if socket is None:
            raise Unauthenticated(f"a daemon behind a URL wants a token: --token, or {TOKEN_VARIABLE}")
        return self._operator_token(Path(socket))

    def _operator_token(self, socket: Path) -> str:
        for file in (socket.with_name(OPERATOR_TOKEN), self.home.token_file):
            try:
                token = read_secret(file)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as failed:
                why = failure(failed).removeprefix(f"{file}: ")
                raise Unauthenticated(f"{file} cannot be read: {why}; give --token or set {TOKEN_VARIABLE}") from failed
            self.given.token_from = str(file)
            return token.decode(errors="replace").strip()
        if not socket.exists():
            raise Unreachable(f"no daemon at {socket}", outcome="not_sent")
        raise Unauthenticated(f"there is no {self.home.token_file}: --token, or {TOKEN_VARIABLE}")

    # --- asking -------------------------------------------------------------------------------------------

    def ask(self, request: w.Request, reply: type[R], work_ms: int = 0) -> R:
        async def once(daemon: Daemon) -> R:
            return await daemon.call(request, reply, work_ms)

        return self.run(once)

    def run(self, work: Callable[[Daemon], Awaitable[T]]) -> T:
        return asyncio.run(self._connected(work))

    async def _connected(self, work: Callable[[Daemon], Awaitable[T]]) -> T:
        transport = _transport(self.address)
        try:
            return await work(Daemon(transport, self.find_token(), self.address, self.given.patience_ms))
        finally:
            await transport.close()

    # --- answering ----------------------------------------------------------------------------------------

    def answer(self, reply: Any, tell: Callable[[], None]) -> None:
        """One JSON object for a program, or the telling of it for a person."""
        with written():
            if self.given.as_json:
                click.echo(json_text(reply))
            else:
                tell()

    def command(self, rest: str, with_token: bool = True) -> str:
        """What to type next, for the daemon that was asked now; without the token, as the operator at home."""
        words = ["covenant"]
        if self.given.home is not None:
            words += ["--home", shlex.quote(self.given.home)]
        if self.given.url is not None:
            words += ["--url", shlex.quote(self.given.url)]
        if with_token and self.given.token is not None:
            words += ["--token", "TOKEN"]
        return " ".join([*words, rest])

    def tell_more(self, rest: str, cursor: str | None, filtered: bool = False) -> None:
        """How to go on with a listing, if there is more of it."""
        if cursor is not None:
            note = " (and the same filters)" if filtered else ""
            click.echo(f"\nmore: {self.command(f'{rest} --cursor {cursor}')}{note}")

    def refuse(self, refusal: CovenantError) -> int:
        """Say no, on stderr and to a program that reads the answer; then the exit code."""
        if self.given.as_json:
            last_word(json_text(refusal.to_wire()))
        last_word(f"{click.style('error', fg='red')}: {safe(refusal.message)} ({refusal.code})", err=True)
        hint = self._hint(refusal)
        if hint:
            last_word(hint, err=True)
        return 2 if isinstance(refusal, BadSetting | UnknownStore) else 1

    def _hint(self, refusal: CovenantError) -> str | None:
        if refusal.details.get("outcome") == "not_sent" and self.is_at_home:
            home = "" if self.given.home is None else f" --home {shlex.quote(self.given.home)}"
            return f"start one with: covenant serve{home}"
        if isinstance(refusal, Unauthenticated) and self.given.token_from:
            return f"the token that was tried is from {self.given.token_from}"
        if isinstance(refusal, PeerConflict | UnknownPeer) and "pubkey" in refusal.details:
            back = f"peers enroll {refusal.details['display']} --key {refusal.details['pubkey']}"
            return f"to let it in again: {self.command(back, with_token=False)}"
        if isinstance(refusal, PeerConflict) and "display" in refusal.details:
            again = f"peers rotate {refusal.details['display']}"
            return f"the operator gives it a new token: {self.command(again, with_token=False)}"
        if isinstance(refusal, MissingCapability | ScopeMismatch) and "action" in refusal.details:
            words = f"capabilities grant NAME {shlex.quote(safe(refusal.details['action']))}"
            what = "it" if isinstance(refusal, MissingCapability) else "a wider one"
            return f"the operator gives {what}: {self.command(words, with_token=False)}"
        if isinstance(refusal, UnknownPeer):
            return f"who is enrolled: {self.command('peers list', with_token=False)}"
        return None


def _socket_path(address: str) -> str | None:
    if not address.startswith(_UNIX):
        return None
    return os.path.expanduser(address.removeprefix(_UNIX).removeprefix("//")) or None


def _transport(address: str) -> Transport:
    if path := _socket_path(address):
        from covenant.client.unix import UnixTransport

        return UnixTransport(path)
    if not address.startswith(("http://", "https://")) or not has_host(address):
        raise BadSetting(f"{address!r} is no address of a daemon: {ADDRESS}", name="--url")
    from covenant.client.http import HttpTransport

    return HttpTransport(address)


def moment(name: str, at_ms: int | None, in_ms: int | None) -> int | None:
    """A time that is given as such, or from now on."""
    if in_ms is None:
        return at_ms
    if at_ms is not None:
        raise click.UsageError(f"--{name}-ms and --{name}-in say the same: give one")
    return now_ms() + in_ms


def waits(wait_ms: int | None) -> Iterator[int]:
    """How long each of several requests waits, so that together they wait as long as was asked."""
    if wait_ms is None:
        yield 0
        return
    yield from polls(None if wait_ms == FOR_EVER else wait_ms)
