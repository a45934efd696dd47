"""The table of verbs in `docs/trust.md`, made from the list. `python -m tests.authorization.page` writes it there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.authorization.verbs import VERBS, Party, Verb

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "trust.md"
BEGIN: Final = "<!-- the verbs: made by `python -m tests.authorization.page` -->\n"
END: Final = "<!-- the end of the verbs -->\n"
WORDS: Final = {
    Party.OPERATOR: "the operator",
    Party.SENDER: "its sender",
    Party.RECIPIENT: "its recipient",
    Party.ITSELF: "an agent whose own run gave the task",
    Party.ADDRESSED: "a sender to itself",
    Party.HOLDER: "its holder",
    Party.GRANTER: "its granter",
}


def table() -> str:
    head = "| verb | HTTP route, A2A operation | who may call it | grant that it takes | who needs none |\n"
    return head + "|---|---|---|---|---|\n" + "".join(_row(verb) for verb in VERBS if _place(verb))


def _row(verb: Verb) -> str:
    is_free = verb.action is None or (verb.only is not None and verb.only <= verb.free)
    action, free = ("none", "") if is_free else (f"`{verb.action}`", _words(verb.free) or "nobody")
    return f"| {verb.name} | {_place(verb)} | {_callers(verb)} | {action} | {free} |\n"


def _place(verb: Verb) -> str:
    """Return the route of HTTP, the operation of the A2A protocol, or both; the frame of IPC if there is neither."""
    places = [place.partition("?")[0] for place in (verb.http, verb.a2a) if place is not None]
    return ", ".join(f"`{place}`" for place in places) or (f"`{verb.ipc}` on IPC" if verb.ipc else "")


def _callers(verb: Verb) -> str:
    """Return those who see what the verb names, and may do this to it."""
    sees = frozenset(Party) if verb.names is None else verb.names.seen_by
    may = sees if verb.only is None else sees & verb.only
    return "everybody" if may == frozenset(Party) else _words(may)


def _words(parties: Iterable[Party]) -> str:
    return ", ".join(WORDS[party] for party in sorted(parties, key=list(Party).index))


def written(page: str) -> str:
    """Return the page with the table made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
