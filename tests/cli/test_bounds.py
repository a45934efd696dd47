"""No option takes what the rules always refuse, and every bound stands in the help."""

from __future__ import annotations

import re
from typing import Any, Final

import click
import pytest

from covenant import Limits
from covenant.cli.bounds import BoundedText
from covenant.cli.words import size
from covenant.model.limits import SPAN_MS_MAX
from covenant.model.protocol import GENERATION_MAX
from tests.cli.support import Client
from tests.cli.test_usage import MISSING, commands

LIMITS: Final = Limits()
EXACT: Final = 2**53
PAGED: Final = (1, LIMITS.page_max)

NUMBERS: Final[dict[tuple[str, str], tuple[int, int | None]]] = {
    ("a2a cache list", "limit"): PAGED,
    ("a2a inputs", "after"): (0, LIMITS.messages_max),
    ("a2a results", "recent"): PAGED,
    ("a2a retry-stale", "max_attempts"): (1, 2**31),
    ("a2a retry-stale", "max_requeues"): (1, LIMITS.step_records_max),
    ("a2a retry-stale", "min_lease_age_ms"): (0, SPAN_MS_MAX),
    ("a2a retry-stale", "scan_limit"): PAGED,
    ("a2a say", "if_generation"): (0, GENERATION_MAX),
    ("a2a send", "deadline_ms"): (0, EXACT - 1),
    ("a2a send", "not_before_ms"): (0, EXACT - 1),
    ("a2a status", "deadline_within_ms"): (0, EXACT),
    ("a2a status", "limit"): PAGED,
    ("a2a status", "min_lease_age_ms"): (0, EXACT),
    ("agents list", "limit"): PAGED,
    ("audit export", "after"): (0, EXACT),
    ("audit recent", "before"): (1, EXACT),
    ("audit recent", "limit"): PAGED,
    ("capabilities grant", "expires_ms"): (0, EXACT - 1),
    ("capabilities list", "limit"): PAGED,
    ("peers list", "limit"): PAGED,
    ("runs list", "limit"): PAGED,
    ("runs show", "before"): (0, EXACT),
    ("runs show", "entries"): PAGED,
    ("runs show", "leaf"): (0, EXACT),
    ("serve", "queue_depth"): (1, None),  # a bound of its own: as many as one likes
}
TEXTS: Final[dict[tuple[str, str], int]] = {
    ("a2a cache forget", "reason"): LIMITS.text_bytes_max,
    ("a2a cancel", "reason"): LIMITS.text_bytes_max,
    ("a2a force-error", "message"): LIMITS.text_bytes_max,
    ("a2a force-error", "reason"): LIMITS.text_bytes_max,
    ("a2a post", "message"): LIMITS.text_bytes_max,
    ("a2a release", "reason"): LIMITS.text_bytes_max,
    ("a2a requeue", "reason"): LIMITS.text_bytes_max,
    ("a2a send", "key"): LIMITS.key_bytes_max,
    ("a2a send", "kind"): LIMITS.task_kind_bytes_max,
    ("capabilities revoke", "reason"): LIMITS.text_bytes_max,
    ("peers revoke", "reason"): LIMITS.text_bytes_max,
    ("runs cancel", "reason"): LIMITS.text_bytes_max,
    ("runs judge", "reason"): LIMITS.text_bytes_max,
    ("runs resume", "reason"): LIMITS.text_bytes_max,
    ("runs signal", "key"): LIMITS.key_bytes_max,
}


def options() -> list[tuple[str, click.Option]]:
    return [(path, one) for path, command in commands() for one in command.params if isinstance(one, click.Option)]


def test_every_number_has_the_range_of_the_rules() -> None:
    """A new option with a number needs its row here."""
    found = {
        (path, str(one.name)): (one.type.min, one.type.max) if isinstance(one.type, click.IntRange) else None
        for path, one in options()
        if isinstance(one.type, click.types.IntParamType)
    }
    assert found == NUMBERS


def test_every_bounded_text_has_the_bound_of_the_rules() -> None:
    found = {(path, str(one.name)): one.type.bytes_max for path, one in options() if isinstance(one.type, BoundedText)}
    assert found == TEXTS
    reasons = {(path, str(one.name)) for path, one in options() if one.name in ("reason", "message", "key", "kind")}
    others = {("audit recent", "kind"), ("peers enroll", "key")}  # a word of a list, and a public key
    assert reasons == set(TEXTS) | others


def test_every_bound_stands_in_the_help() -> None:
    told = 0
    for path, command in commands():
        context = click.Context(command, info_name=path)
        shown = " ".join(command.get_help(context).split())
        for one in command.params:
            bound: tuple[int, int | None] | None = NUMBERS.get((path, str(one.name)))
            if bound is not None:
                least, most = bound
                assert (f"{least}<=x<={most}" if most is not None else f"x>={least}") in shown, (path, one.name)
                told += 1
            if isinstance(one.type, BoundedText):
                assert f"At most {size(one.type.bytes_max)}." in shown, (path, one.name)
                told += 1
    assert told == len(NUMBERS) + len(TEXTS)


CALLS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("a2a send", "deadline_ms"): ("bounded", "x", "--not-before-ms", "4000000000000"),
    ("a2a send", "not_before_ms"): ("bounded", "x"),
    ("a2a send", "key"): ("bounded", "x", "--not-before-ms", "4000000000000"),
    ("a2a send", "kind"): ("bounded", "x", "--not-before-ms", "4000000000000"),
    ("a2a say", "if_generation"): (MISSING, "x"),
    ("a2a inputs", "after"): (MISSING,),
    ("runs show", "before"): (MISSING, "--entries"),
    ("runs show", "entries"): (MISSING,),
    ("runs show", "leaf"): (MISSING, "--entries"),
    ("a2a cache forget", "reason"): (MISSING,),
    ("a2a cancel", "reason"): (MISSING,),
    ("a2a force-error", "message"): (MISSING, "--reason", "x"),
    ("a2a force-error", "reason"): (MISSING, "--message", "x"),
    ("a2a post", "message"): (MISSING, "--lease-id", MISSING),
    ("a2a release", "reason"): (MISSING,),
    ("a2a requeue", "reason"): (MISSING, "--duplicate-risk", "idempotent"),
    ("capabilities revoke", "reason"): (MISSING,),
    ("peers revoke", "reason"): ("nobody-at-all",),
    ("runs cancel", "reason"): (MISSING,),
    ("runs judge", "reason"): (MISSING, "effect", "done"),
    ("runs resume", "reason"): (MISSING,),
    ("runs signal", "key"): (MISSING, "name", "1"),
    ("capabilities grant", "expires_ms"): ("bounded", "a2a.send.bounded"),
}
NAMES: Final = {(path, str(one.name)): max(one.opts, key=len) for path, one in options()}
ROWS: Final = [row for row in (*NUMBERS, *TEXTS) if row[0] not in ("serve", "audit export")]


@pytest.fixture(scope="module")
def bounded(request: pytest.FixtureRequest) -> Client:
    covenant = Client(request.getfixturevalue("served").home)
    covenant("peers", "enroll", "bounded")
    return covenant


def code_of(covenant: Client, row: tuple[str, str], value: Any) -> str:
    call = (*row[0].split(), *CALLS.get(row, ()), NAMES[row], str(value), "--json")
    for code in (0, 1):
        try:
            answer = covenant(*call, code=code).json
        except AssertionError:
            continue
        return str(answer.get("code", "done"))
    raise AssertionError(call)


@pytest.mark.parametrize("row", ROWS, ids=[f"{path} {name}" for path, name in ROWS])
def test_what_an_option_takes_is_not_refused_for_its_size(bounded: Client, row: tuple[str, str]) -> None:
    """The largest that the help names passes the rules, and one more does not pass the program."""
    most: Any = NUMBERS[row][1] if row in NUMBERS else "x" * TEXTS[row]
    assert code_of(bounded, row, most) not in ("too_large", "malformed", "bad_setting", "internal")
    more = most + 1 if isinstance(most, int) else most + "x"
    wrong = bounded(*row[0].split(), *CALLS.get(row, ()), NAMES[row], str(more), code=2)
    assert re.search(r"is not in the range|at most .* are taken", wrong.err), wrong
