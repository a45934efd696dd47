"""The operator: its token outlives every kill of the daemon, and one that was rotated away never comes back."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant import Limits
from covenant.exchange.exchange import Exchange
from covenant.exchange.token import digest_of
from covenant.model.command import RevokePeer, RotateToken
from covenant.model.error import NotPermitted, StoreUnavailable, Unauthenticated
from covenant.serve.home import Home, TokenFile
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.registry import engine_for


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@asynccontextmanager
async def opened(home: Home, keeper: TokenFile | str | None = None) -> AsyncIterator[Exchange]:
    """What a daemon does with its home, without the surfaces."""
    home.make()
    clock, ids = ManualClock(), CountingIds()
    store: Any = engine_for(f"file:{home.data}", Limits(), clock, ids)
    exchange = Exchange(store, home.realm(), clock, ids)
    try:
        await exchange.open(home.tokens if keeper is None else keeper)
        yield exchange
    finally:
        await exchange.close()


def written(home: Home) -> str:
    return home.token_file.read_text().strip()


def is_good(exchange: Exchange, token: str) -> bool:
    try:
        return exchange.authenticate(token).is_operator
    except Unauthenticated:
        return False


# --- the token ---------------------------------------------------------------------------------------------


async def test_a_first_start_writes_a_token_that_only_its_owner_reads(home: Home) -> None:
    async with opened(home) as exchange:
        assert is_good(exchange, written(home))
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in home.folder.glob("operator.token*")] == ["operator.token"]


async def test_a_token_that_was_laid_there_before_the_first_start_is_taken(home: Home) -> None:
    home.make()
    home.token_file.write_text("cov_chosen\n")
    home.token_file.chmod(0o600)
    async with opened(home) as exchange:
        assert is_good(exchange, "cov_chosen")
    assert written(home) == "cov_chosen"


async def test_an_empty_token_file_is_as_good_as_none(home: Home) -> None:
    home.make()
    home.token_file.touch(0o600)
    async with opened(home) as exchange:
        assert written(home) and is_good(exchange, written(home))


async def test_a_rotated_token_is_in_the_file_and_survives_a_restart(home: Home) -> None:
    async with opened(home) as exchange:
        old = written(home)
        _, new = await exchange.trust.rotate(exchange.authenticate(old), None)
        assert written(home) == new != old
    async with opened(home) as exchange:
        assert is_good(exchange, new) and not is_good(exchange, old)
    assert written(home) == new


async def test_a_token_that_was_rotated_away_is_not_let_in_again_by_an_old_file(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(home) as exchange:
        old = written(home)
        _, new = await exchange.trust.rotate(exchange.authenticate(old), None)
    home.token_file.write_text(old)
    async with opened(home) as exchange:
        fresh = written(home)
        assert fresh not in (old, new)
        assert [is_good(exchange, token) for token in (old, new, fresh)] == [False, False, True]
    assert "operator" in caplog.text and fresh not in caplog.text


async def test_a_token_file_that_was_lost_is_written_anew(home: Home) -> None:
    async with opened(home):
        lost = written(home)
    home.token_file.unlink()
    async with opened(home) as exchange:
        assert is_good(exchange, written(home)) and not is_good(exchange, lost)


class Watched(TokenFile):
    """Tells of each step before and after it is done."""

    def __init__(self, home: Home, step: Callable[[str], None]) -> None:
        super().__init__(home.token_file)
        self._step = step

    def lay_ready(self, token: str) -> None:
        self._step("nothing done")
        super().lay_ready(token)
        self._step("laid ready")

    def settle(self, token: str) -> None:
        self._step("committed")
        super().settle(token)
        self._step("settled")


async def test_a_kill_at_any_step_of_a_rotation_leaves_a_way_in_and_none_for_the_old_token(home: Home) -> None:
    left: dict[str, Home] = {}

    def keep(step: str) -> None:
        """The home as a kill at this moment would leave it."""
        if rotating:
            left[step] = Home(home.folder.with_name(step.replace(" ", "-")))
            shutil.copytree(home.folder, left[step].folder)

    rotating = False
    async with opened(home, Watched(home, keep)) as exchange:
        old = written(home)
        rotating = True
        _, new = await exchange.trust.rotate(exchange.authenticate(old), None)
    assert list(left) == ["nothing done", "laid ready", "committed", "settled"]
    for step, found in left.items():
        was_committed = step in ("committed", "settled")
        for _ in range(2):  # and it stays so
            async with opened(found) as exchange:
                assert written(found) == (new if was_committed else old), step
                assert is_good(exchange, written(found))
                assert is_good(exchange, old) is not was_committed
                assert is_good(exchange, new) is was_committed
            assert [file.name for file in found.folder.glob("operator.token*")] == ["operator.token"]


async def test_a_kill_at_any_step_of_the_first_start_leaves_a_way_in(home: Home) -> None:
    left: list[Home] = []

    def keep(step: str) -> None:
        left.append(Home(home.folder.with_name(step.replace(" ", "-"))))
        shutil.copytree(home.folder, left[-1].folder)

    async with opened(home, Watched(home, keep)):
        pass
    assert len(left) == 4
    for found in left:
        async with opened(found) as exchange:
            assert is_good(exchange, written(found))


async def test_a_token_that_cannot_be_kept_is_not_rotated(home: Home) -> None:
    async with opened(home) as exchange:
        old = written(home)
        (home.folder / "operator.token.next.making").mkdir()  # in the way of every write, also of root's
        with pytest.raises(StoreUnavailable, match=r"operator\.token"):
            await exchange.trust.rotate(exchange.authenticate(old), None)
        assert is_good(exchange, old)


async def test_of_two_rotations_at_once_one_is_refused_and_the_file_has_the_other(home: Home) -> None:
    async with opened(home) as exchange:
        operator = exchange.authenticate(written(home))
        done = await asyncio.gather(*(exchange.trust.rotate(operator, None) for _ in range(2)), return_exceptions=True)
        (good,) = [reply[1] for reply in done if isinstance(reply, tuple)]
        assert [type(reply) for reply in done if not isinstance(reply, tuple)] == [Unauthenticated]
        assert written(home) == good and is_good(exchange, good)


async def test_who_may_not_rotate_the_operators_token_touches_no_file(home: Home) -> None:
    async with opened(home) as exchange:
        _, token = await exchange.enroll(exchange.operator(), "bob@lab", None, ["peers.*"])
        before = sorted(home.folder.iterdir())
        with pytest.raises(NotPermitted):
            await exchange.trust.rotate(exchange.authenticate(token), "operator@local")
        assert sorted(home.folder.iterdir()) == before
        await exchange.trust.rotate(exchange.authenticate(token), None)  # its own is not the operator's
        assert is_good(exchange, written(home))


async def test_a_program_that_brings_a_token_which_was_rotated_away_is_told(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "covenant.exchange")
    async with opened(home, "cov_first") as exchange:
        _, new = await exchange.trust.rotate(exchange.authenticate("cov_first"), None)
    async with opened(home, "cov_first") as exchange:
        assert not is_good(exchange, "cov_first") and is_good(exchange, new)
    assert "not the operator's" in caplog.text


async def test_the_operator_is_known_without_its_token(home: Home) -> None:
    async with opened(home) as exchange:
        assert exchange.operator() == exchange.authenticate(written(home))
        _, new = await exchange.trust.rotate(exchange.operator(), None)
        assert exchange.operator().token == digest_of(new)


# --- trust that ends ---------------------------------------------------------------------------------------


async def _revoke(exchange: Exchange) -> Any:
    return await exchange.trust.revoke_peer(exchange.operator(), "bob@lab", "left")


async def _rotate(exchange: Exchange) -> Any:
    return await exchange.trust.rotate(exchange.operator(), "bob@lab")


@pytest.mark.parametrize("end_trust", [_revoke, _rotate])
async def test_lost_trust_is_told_although_nobody_waits_for_the_answer_any_more(
    home: Home, end_trust: Callable[[Exchange], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    async with opened(home) as exchange:
        bob, token = await exchange.enroll(exchange.operator(), "bob@lab", None, [])
        exchange.trust.watch(lost.append)
        committed, goes_on = asyncio.Event(), asyncio.Event()
        run = exchange.store.run

        async def slowly(command: Any) -> Any:
            reply = await run(command)
            committed.set()
            await goes_on.wait()
            return reply

        monkeypatch.setattr(exchange.store, "run", slowly)
        asking = asyncio.ensure_future(end_trust(exchange))
        await committed.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        goes_on.set()
    assert lost == [bob.pubkey]  # the end of the exchange waits for it
    assert exchange.store.caller_of(digest_of(token)) is None


@pytest.mark.parametrize("end_trust", [_revoke, _rotate])
async def test_trust_that_is_being_ended_has_ended_before_the_store_is_closed(
    home: Home, end_trust: Callable[[Exchange], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where whoever asked for it has gone, and the store comes to it only then."""
    async with opened(home) as exchange:
        _, token = await exchange.enroll(exchange.operator(), "bob@lab", None, [])
        begun, goes_on = asyncio.Event(), asyncio.Event()
        run = exchange.store.run

        async def slowly(call: Any) -> Any:
            if isinstance(getattr(call, "command", None), (RevokePeer, RotateToken)):
                begun.set()
                await goes_on.wait()
            return await run(call)

        monkeypatch.setattr(exchange.store, "run", slowly)
        asking = asyncio.ensure_future(end_trust(exchange))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        closing = asyncio.ensure_future(exchange.close())
        for _ in range(500):  # more turns than a close takes that waits for nobody
            await asyncio.sleep(0)
        assert not closing.done()
        goes_on.set()
        await closing
    async with opened(home) as exchange:
        with pytest.raises(Unauthenticated):
            exchange.authenticate(token)


async def test_a_refused_revocation_closes_nothing(home: Home) -> None:
    lost: list[str] = []
    async with opened(home) as exchange:
        exchange.trust.watch(lost.append)
        with pytest.raises(NotPermitted):
            await exchange.trust.revoke_peer(exchange.operator(), "operator@local", "try it")
    assert lost == []
