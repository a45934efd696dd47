"""The options that many commands share, and the kinds of value that they take."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)?")
_DURATION_MS_MAX: Final = 100 * 365 * _UNIT_MS["d"]
FOR_EVER: Final = -1
PATIENCE_MS: Final = 10_000
RISKS: Final = ("idempotent", "operator-accepted")


class Spelled(click.Choice[str]):
    """A choice of words that may also be written as the wire writes them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(str(value).replace("_", "-"), param, ctx)


class Given:
    """What was said before and behind the name of a command."""

    def __init__(self) -> None:
        self.home: str | None = None
        self.url: str | None = None
        self.token: str | None = None
        self.token_from = ""
        self.as_json = False
        self.patience_ms = PATIENCE_MS


class Duration(click.ParamType[int]):
    """`90s`, `5m`, `36h`, `7d`, `2w`; in milliseconds. Without a unit it is in `bare`; or else refused, if not 0."""

    name = "duration"

    def __init__(self, bare: str | None = None, least_ms: int = 0) -> None:
        self._bare = bare
        self._least_ms = least_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _DURATION.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is not a duration like 90s, 5m, 36h or 7d", param, ctx)
        unit = found[2] or self._bare
        if unit is None and float(found[1]):
            self.fail(f"{value!r} needs a unit: 90s, 5m, 36h or 7d", param, ctx)
        ms = round(float(found[1]) * _UNIT_MS[unit or "ms"])
        if ms < self._least_ms:
            self.fail(f"{value!r} is too short", param, ctx)
        if ms > _DURATION_MS_MAX:
            self.fail(f"{value!r} is too long", param, ctx)
        return ms


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None and param.name is not None:
        setattr(ctx.find_root().obj, param.name, value)


def _kept(name: str, metavar: str, told: str, hidden: bool) -> Callable[[F], F]:
    return click.option(name, metavar=metavar, help=told, expose_value=False, callback=_keep, hidden=hidden)


def _timeout_option(hidden: bool) -> Callable[[F], F]:
    """Return the option `--timeout`. It has no default, which behind a command would override a value before it."""
    told = "How long the daemon may take to answer, beside a wait that was asked for. Default: 10s."
    function: Callable[[F], F] = click.option(
        "--timeout", "patience_ms", type=Duration("s", 1), help=told, expose_value=False, callback=_keep, hidden=hidden
    )
    return function


def home_option(hidden: bool = False) -> Callable[[F], F]:
    return _kept("--home", "DIR", "The daemon's folder (or COVENANT_HOME). Default: ~/.covenant.", hidden)


def connection(hidden: bool) -> Callable[[F], F]:
    """Where the daemon is, and whose token: understood before and behind the name of a command."""
    url = "The daemon: http://HOST:PORT or unix:PATH (or COVENANT_URL). Default: <home>/sock."
    token = "Whose call it is (or COVENANT_TOKEN). Default, over a socket: the operator's, from <home>/operator.token."

    def added(function: F) -> F:
        function = _timeout_option(hidden)(_kept("--token", "TOKEN", token, hidden)(function))
        return home_option(hidden)(_kept("--url", "URL", url, hidden)(function))

    return added


def json_option(function: F) -> F:
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        default=None,
        expose_value=False,
        callback=_keep,
        help="Answer with exactly one JSON object.",
    )(function)


def answers(function: F) -> F:
    """What every command has: the connection, `--json`, and the session as its first argument."""

    @functools.wraps(function)
    def with_session(*args: Any, **options: Any) -> Any:
        from covenant.cli.session import Session

        return function(Session(click.get_current_context().find_root().obj), *args, **options)

    return connection(hidden=True)(json_option(cast(F, with_session)))


def wait_option(told: str) -> Callable[[F], F]:
    """`--wait` for as long as it takes, `--wait 30` for seconds."""
    return click.option(
        "--wait", "wait_ms", type=Duration("s"), is_flag=False, flag_value=FOR_EVER, metavar="[SECONDS]", help=told
    )


def limit_option(default: int) -> Callable[[F], F]:
    return click.option(
        "-n", "--limit", type=click.IntRange(1, 1000), default=default, show_default=True, help="How many at most."
    )


cursor_option = click.option("--cursor", help="Go on where the page before ended.")
lease_guard = click.option("--lease-id", metavar="LEASE", help="Only if the task is still held under this lease.")
