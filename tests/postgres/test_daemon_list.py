"""Who has a store open: seen from any of its daemons."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from covenant import Limits
from covenant.model.daemon import DaemonState
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon
from covenant.serve.verbs.about import list_daemons
from tests.cli.support import Client, serving
from tests.daemons import OPERATOR_TOKEN, start_daemon
from tests.postgres import store_url
from tests.postgres.support import sql


async def listed(daemon: Daemon) -> list[tuple[str, DaemonState, int]]:
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    reply = await list_daemons(daemon.exchange, operator, w.ListDaemons())
    return [(one.id, one.state, one.lanes) for one in reply.daemons]


async def test_daemons_of_one_store_see_each_other_live_and_end() -> None:
    store = store_url()
    first = await start_daemon(store, Limits())
    second = await start_daemon(store, Limits())
    alive = await listed(first)
    assert alive == await listed(second) and [row[1:] for row in alive] == [(DaemonState.ALIVE, 2)] * 2
    await second.stop()
    assert sorted(state for _, state, _ in await listed(first)) == [DaemonState.ALIVE, DaemonState.ENDED]
    await first.stop()


async def test_a_daemon_without_a_sign_of_life_is_shown_as_silent() -> None:
    store = store_url()
    dead = await start_daemon(store, Limits())
    looking = await start_daemon(store, Limits())
    (name,) = {row[0] for row in await listed(looking)} - {getattr(looking.store, "member").id}  # noqa: B009
    async with sql(store) as connection:
        await connection.execute("update daemon set seen = seen - interval '1 minute' where id = $1", name)
    assert dict(row[:2] for row in await listed(looking))[name] is DaemonState.SILENT
    await looking.stop()
    await dead.stop()


async def test_a_daemon_on_a_folder_is_alone(tmp_path: Path) -> None:
    daemon = await start_daemon(f"file:{tmp_path}/data", Limits())
    ((name, state, lanes),) = await listed(daemon)
    assert name and (state, lanes) == (DaemonState.ALIVE, 1)
    assert await listed(daemon) == [(name, state, lanes)]
    await daemon.stop()


def test_a_second_daemon_says_that_the_operators_token_is_elsewhere() -> None:
    store = store_url()
    with TemporaryDirectory(prefix="cov-") as short:  # a socket's path is short
        one, two = Path(short) / "one", Path(short) / "two"
        with serving(one, "--store", store) as (_, first), serving(two, "--store", store) as (_, second):
            assert first["token"] == f"{one}/operator.token (the operator's)"
            assert str(two) not in second["token"] and "--token" in second["token"]
            assert Client(two).refused("peers", "list") == "unauthenticated"
            assert Client(two, (one / "operator.token").read_text().strip()).json("peers", "list")
