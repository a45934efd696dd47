"""The page about replicas tells what happens: two real daemons on one database, and the official client."""

from __future__ import annotations

from bench.two_replicas import SCENARIOS, covenant

from tests.docs.support import page
from tests.postgres import store_url


async def test_what_is_done_by_way_of_one_daemon_holds_for_the_other() -> None:
    outcomes = await covenant(store_url())
    assert [outcome.partition(":")[0] for outcome in outcomes] == ["kept"] * len(SCENARIOS), outcomes


def test_the_page_shows_every_scenario() -> None:
    shown = page("replicas.md").read_text(encoding="utf-8")
    for title, (expected, _) in SCENARIOS.items():
        assert f"{title}\n  {'expected':26}  {expected}\n" in shown
    assert shown.count("\n  Covenant                    kept: ") == len(SCENARIOS)
