"""Every verb on every surface that has it: let in, refused, without a token, and its rows in the audit.

`test_rules.py` proves the verdicts. These tests show that each surface asks those rules for the action that the list
names, and answers with the status that stands for their verdict.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Final, TypeAlias

import aiohttp
import grpc
import pytest
import pytest_asyncio

from covenant.exchange.bounds import Bounds
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.audit import AuditRow
from covenant.serve.daemon import Daemon, Settings
from tests.authorization.harness import action_for
from tests.authorization.surfaces import DONE, OK, SHOWN, Clients, Told, surfaces_of
from tests.authorization.verbs import LET_IN, OPEN, VERBS, Verb
from tests.authorization.verdict import MISSING, SCOPE, Cell, Held, Role, Width, parties, verdict
from tests.authorization.world import SAMPLES, Thing, World, token_of

Checks: TypeAlias = list[tuple[str, bool]]
OPERATOR: Final = "operator@local"
WORKING: Final = ("a2a.send.*", "a2a.respond.*", "a2a.cancel.*")
CARD: Final = {
    "name": "bob",
    "capabilities": {"streaming": True, "pushNotifications": True},
    "extended": {"description": "for those who are known"},
}
CALLED: Final = tuple((verb, surface) for verb in VERBS for surface in surfaces_of(verb))
SURFACES: Final = {"http": 70, "ipc": 70, "jsonrpc": 12, "rest": 12, "grpc": 12}


class Served(World):
    """A daemon with all its surfaces. alice and bob work, carol has no grant; the operator has those of its start."""

    def __init__(self, daemon: Daemon, realm: Realm, clients: Clients) -> None:
        super().__init__(daemon.store, realm.sign_grant)
        self.clients = clients
        self.peers[OPERATOR] = realm.operator
        self._visitors = count()

    async def settle(self) -> None:
        await super().settle()
        for display in (Role.SENDER, Role.RECIPIENT):
            for action in WORKING:
                await self.grant(self.peers[display], action)
        await self.store.run(c.PublishCard(None, self.peers["bob@lab"], CARD))

    async def told(self, surface: str, verb: Verb, role: str | None, token: str = "") -> tuple[Told, Thing, Checks]:
        """Return the answer to this caller, the thing that the call named, and the checks of grants in the audit.

        Without a role the caller is a newcomer, which has no grant.
        """
        thing = await self.make(verb.on[0])
        visitor = await self.enroll(f"v{next(self._visitors)}@lab")
        caller = visitor if role is None else self.peers[role]
        call = self.call(caller, thing, visitor, role == OPERATOR)
        (newest,) = await self.store.audit(1)
        told = await self.clients.call(surface, verb, call, token or token_of(caller.display))
        rows: list[AuditRow] = [row for row in await self.store.audit(20) if row.seq > newest.seq]
        checks = [(row.action or "", bool(row.passed)) for row in rows if row.kind == "capability_check"]
        return told, thing, checks

    async def told_under_a_lost_grant(self, surface: str, verb: Verb) -> tuple[Told, Thing, Checks]:
        """Return the same for carol while she holds the right grant, but its source was revoked."""
        dan, carol = self.peers["dan@lab"], self.peers[Role.THIRD]
        thing = SAMPLES[verb.on[0]]
        action, _ = self.check(verb, Role.THIRD, thing, False)
        source = await self.grant(dan, action)
        lost = await self.grant(carol, action, parent=source, granter=dan)
        await self.revoke(source)
        told = await self.told(surface, verb, Role.THIRD)
        await self.revoke(lost)
        return told

    def check(self, verb: Verb, role: str, thing: Thing, passed: bool) -> tuple[str, bool]:
        assert verb.action is not None
        other = self.peers[OPERATOR] if role == OPERATOR else self.counterparty(verb.action, role, thing)
        return action_for(verb.action, Width.EXACT, other), passed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    realm = Realm.throwaway()
    with tempfile.TemporaryDirectory(prefix="cov-") as folder:
        settings = Settings(
            store="memory:",
            http="127.0.0.1:0",
            grpc="127.0.0.1:0",
            ipc=Path(folder) / "sock",
            bounds=Bounds(refusals_per_min=100_000),
        )
        daemon = Daemon(settings, realm, token_of(OPERATOR))
        await daemon.start()
        channel = grpc.aio.insecure_channel(daemon.grpc_address)
        async with aiohttp.ClientSession() as session:
            served = Served(daemon, realm, Clients(daemon, session, channel))
            await served.settle()
            yield served
        await channel.close()
        await daemon.stop()


def caller_let_in(verb: Verb) -> str | None:
    """Return a role that the contract lets in; None is a newcomer."""
    if verb.action is None and verb.names is None and verb.only is None:
        return None
    thing = SAMPLES[verb.on[0]]
    for role in (Role.SENDER, Role.RECIPIENT, Role.OPERATOR):
        holds = role is Role.OPERATOR or (verb.action or "").startswith(tuple(action[:-1] for action in WORKING))
        if verdict(Cell(verb, role, verb.on[0], Held(Width.EXACT) if holds else None), thing) == verb.lets_in:
            return role
    raise AssertionError(f"nobody is let in: {verb.name}")


def is_free(verb: Verb, role: str | None) -> bool:
    return role is None or bool(parties(Role(role), SAMPLES[verb.on[0]]) & verb.free)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("verb", "surface"), CALLED, ids=[f"{s}-{v.name.replace(' ', '-')}" for v, s in CALLED])
async def test_each_surface_asks_the_rules(served: Served, verb: Verb, surface: str) -> None:
    """Contract 25-29: a caller that may is let in under the action of the list; one that may not gets the status that
    the surface has for the verdict; one without a token is refused."""
    role = caller_let_in(verb)
    told, thing, checks = await served.told(surface, verb, role)
    assert told == Told(OK, DONE[surface])
    asked = verb.action is not None and not is_free(verb, role)
    assert checks == ([served.check(verb, role or "", thing, True)] if asked else [])

    told, thing, checks = await served.told(surface, verb, role, "cov_of_nobody")
    assert (told, checks) == (Told("unauthenticated", shown("unauthenticated", surface)), [])

    refused = to_a_third_party(verb)
    if refused != LET_IN:
        told, thing, checks = await served.told(surface, verb, Role.THIRD)
        assert told == Told(refused, shown(refused, surface))
        assert checks == ([served.check(verb, Role.THIRD, thing, False)] if refused == MISSING else [])
    if refused == MISSING:
        told, thing, checks = await served.told_under_a_lost_grant(surface, verb)
        assert told == Told(SCOPE, shown(SCOPE, surface))
        assert checks == [served.check(verb, Role.THIRD, thing, False)]


def to_a_third_party(verb: Verb) -> str:
    """Return the verdict for a caller with a token and without a grant."""
    return verdict(Cell(verb, Role.THIRD, verb.on[0], None), SAMPLES[verb.on[0]])


def shown(code: str, surface: str) -> int | str:
    return code if surface == "ipc" else SHOWN[code][surface]


def test_every_surface_has_its_verbs() -> None:
    """No surface loses a verb unnoticed, and most verbs refuse some caller that has a token."""
    assert Counter(surface for _, surface in CALLED) == SURFACES
    refused = Counter(to_a_third_party(verb) for verb, _ in CALLED)
    assert refused.total() - refused[LET_IN] >= 110
    assert refused[MISSING] >= 30


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("place", OPEN)
async def test_what_is_open_needs_no_token(served: Served, place: str) -> None:
    assert await served.clients.status_without_token(place) == 200
