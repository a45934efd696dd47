"""Nothing that a client can say brings the daemon down, or gets an answer that is not described."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from covenant import AgentId
from covenant.exchange.bounds import Bounds
from covenant.exchange.realm import Realm
from covenant.serve.daemon import Daemon, Settings
from covenant.serve.places import PLACES
from covenant.serve.status import HTTP_STATUS
from tests.daemons import OPERATOR_TOKEN, Realmful
from tests.serve.test_openapi import DOCUMENT, NOWHERE, Described, idempotent, task_for

T = TypeVar("T")

QUICK_CASES: Final = 4  # of each operation, kind of data and caller: about 600 in all
SOAK_CASES: Final = 64  # about 10,000
FRAMES: Final = 100_000
FRAMES_OF_A_CONNECTION: Final = 200
SEED: Final = 20240229
PATIENCE_S: Final = 30
CALLERS: Final = ("operator", "alice@lab")


def settings_for(folder: Path) -> Settings:
    socket = Path(tempfile.mkdtemp(prefix="cov-")) / "sock"
    bounds = Bounds(wait_ms_max=5, requests_per_s=10**6, burst=10**6)
    return Settings(store=f"file:{folder / 'data'}", http="127.0.0.1:0", ipc=socket, bounds=bounds)


class House:
    """A daemon and tokens that are good, whatever was done to them."""

    def __init__(self, folder: Path) -> None:
        self.daemon = Daemon(settings_for(folder), Realm.throwaway(), OPERATOR_TOKEN)
        self.realm = Realmful()

    async def open(self) -> None:
        await self.daemon.start()
        await self.realm.enroll(self.daemon)
        self.realm.tokens["operator"] = OPERATOR_TOKEN

    async def token(self, who: str) -> str:
        x = self.daemon.exchange
        try:
            x.authenticate(self.realm.tokens[who])
        except Exception:
            await self._let_in_again(who)
        return self.realm.tokens[who]

    async def _let_in_again(self, who: str) -> None:
        operator = self.daemon.exchange.realm.operator.pubkey
        peer: Any = self.daemon.store.state.records[f"peer:{operator}"]  # type: ignore[attr-defined]
        caller = self.daemon.store.caller_of(peer.token)
        assert caller is not None
        if who != "operator" and self.daemon.store.agent_of(who) is None:
            _, token = await self.daemon.exchange.enroll(caller, who, AgentId.named(who).pubkey, ["a2a.*"])
        else:
            _, token = await self.daemon.exchange.rotate(caller, None if who == "operator" else who)
        self.realm.tokens[who] = token


# --- HTTP --------------------------------------------------------------------------------------------------


class Running:
    """A house on a loop of its own, for clients that block."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.house = self.call(self._open(folder))

    async def _open(self, folder: Path) -> House:
        house = House(folder)
        await house.open()
        return house

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self.call(self.house.daemon.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path)
    yield started
    started.close()


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The daemon has nothing to be sorry for."""
    caplog.set_level(logging.ERROR)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


class Salt:
    """Puts what exists in the place of what was made up, now and then: behind an unknown id there is nothing."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Any]] = {}

    def learn(self, answer: Any) -> None:
        if isinstance(answer, dict):
            for name, value in answer.items():
                if isinstance(value, str) and (name.endswith("id") or name == "cursor"):
                    self._known.setdefault(name, deque(maxlen=50)).append(value)
                self.learn(value)
            if {"display", "pubkey"} <= answer.keys():
                self._known.setdefault("recipient", deque(maxlen=50)).append(answer)
        elif isinstance(answer, list):
            for value in answer:
                self.learn(value)

    def into(self, members: Any, chance: random.Random) -> None:
        if isinstance(members, list):
            for value in members:
                self.into(value, chance)
        elif isinstance(members, dict):
            for name, value in members.items():
                known = self._known.get("id" if name == "grant_id" else name)
                if known and chance.random() < 0.7:
                    members[name] = chance.choice(known)
                else:
                    self.into(value, chance)


class Fuzz:
    """Schemathesis makes the cases and says them; what comes back is compared with the description."""

    def __init__(self, running: Running) -> None:
        self.count = 0
        self.statuses: set[int] = set()
        self._running = running
        self._url = str(running.house.daemon.url)
        self._described = Described(DOCUMENT)
        self._salt = Salt()
        self._session = requests.Session()

    def say(self, who: str, case: Case, chance: random.Random) -> None:
        for members in (case.path_parameters, case.query, case.body):
            self._salt.into(members, chance)
        token = self._running.call(self._running.house.token(who))
        headers = {"Authorization": f"Bearer {token}"}
        response = case.call(base_url=self._url, headers=headers, session=self._session, timeout=PATIENCE_S)
        self.count += 1
        self.statuses.add(response.status_code)
        said = f"{case.as_curl_command()}\n{response.status_code} {response.text}"
        assert response.status_code < 500 or response.status_code in (503, 507), said
        if "application/json" in response.headers["content-type"]:
            answer = response.json()
            self._described.check(case.method, case.operation.path, response.status_code, answer)
            self._salt.learn(answer)

    def run(self, who: str, cases: int, is_same_every_time: bool) -> None:
        rules = settings(
            max_examples=cases,
            derandomize=is_same_every_time,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for operation in operations():
            takes_something = (
                bool(operation.definition.raw.get("parameters")) or "requestBody" in operation.definition.raw
            )
            for mode in (
                (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if takes_something else (GenerationMode.POSITIVE,)
            ):

                @rules
                @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
                def one(case: Case, chance: random.Random) -> None:
                    self.say(who, case, chance)

                one()


def operations() -> list[Any]:
    """All but the stream, which does not end."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found = [operation.ok() for operation in schema.get_all_operations()]
    return [operation for operation in found if operation.path != "/a2a/events"]


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("who", CALLERS)
def test_no_answer_lies_outside_the_description(running: Running, who: str) -> None:
    fuzz = Fuzz(running)
    fuzz.run(who, QUICK_CASES, is_same_every_time=True)
    assert fuzz.count >= 250
    assert {200, 400, 404} <= fuzz.statuses


@pytest.mark.soak
@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("who", CALLERS)
def test_no_answer_lies_outside_the_description_in_a_long_run(running: Running, who: str) -> None:
    fuzz = Fuzz(running)
    fuzz.run(who, SOAK_CASES, is_same_every_time=False)
    assert fuzz.count >= 5000
    assert {200, 400, 404, 409} <= fuzz.statuses
