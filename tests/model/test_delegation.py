"""Delegation on the rules alone: what is passed on is never wider than its source, in any field. (Contract 26.)

Each case changes the source in exactly one field. What is wider must be refused, and what is the same or narrower must
be granted: a rule that refused everything would keep the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec import structs
from tests.floors import reached, reaches
from tests.model.realm import BOB, CAL, DAN, ROOT, Realm

from covenant import AgentId
from covenant.model import command as c
from covenant.model import event as e
from covenant.model.peer import Capability, Demand, Grant, Scope, grant_key
from covenant.rules.grant import ACTIONS, PEER_ACTIONS, covers, spellings

TASK, OTHER_TASK = (f"{number:08x}-0000-4000-8000-000000000000" for number in (1, 2))
LEASE, OTHER_LEASE = (f"{number:08x}-0000-4000-8000-000000000000" for number in (3, 4))
SOURCE, WANTED, FIRST = (f"{number:08x}-1111-4111-8111-111111111111" for number in (5, 6, 7))
EXPIRES_MS: Final = 50_000
CHAIN_MAX: Final = 8  # links, the first grant among them

PINNED: Final = Scope(
    peer_pubkey_b58=CAL.pubkey, task_id=TASK, lease_id=LEASE, duplicate_risk="operator_accepted", max_uses=5
)
REPAIR: Final = Capability(SOURCE, BOB, "a2a.repair.*", ROOT, 1, PINNED, EXPIRES_MS, delegable=True)
READ: Final = Capability(SOURCE, BOB, "peers.list", ROOT, 1, delegable=True)


def passed_on(source: Capability, **changes: Any) -> Capability:
    """The source in the hands of Dan; changes of its scope are named as its fields are."""
    scope = {name: changes.pop(name) for name in list(changes) if name in Scope.__struct_fields__}
    return structs.replace(
        source,
        id=WANTED,
        subject=DAN,
        granted_by=BOB,
        parent=source.id,
        scope=structs.replace(source.scope, **scope),
        **changes,
    )


def verdict(source: Capability, wanted: Capability, by: AgentId | None = BOB) -> str | None:
    realm = Realm()
    realm.grant(source)
    return realm.told(c.GrantCapability(by, Grant(wanted, "signed")))


# --- one field at a time ---------------------------------------------------------------------------------------

WIDER: Final[dict[str, dict[str, Any]]] = {
    "the whole of which the family is a part": {"action": "a2a.*"},
    "no expiry": {"expires_ms": None},
    "a later expiry": {"expires_ms": EXPIRES_MS + 1},
    "any counterparty": {"peer_pubkey_b58": None},
    "another counterparty": {"peer_pubkey_b58": DAN.pubkey},
    "any task": {"task_id": None},
    "another task": {"task_id": OTHER_TASK},
    "any lease": {"lease_id": None},
    "another lease": {"lease_id": OTHER_LEASE},
    "any posture": {"duplicate_risk": None},
    "another posture": {"duplicate_risk": "idempotent"},
    "no bound on its uses": {"max_uses": None},
    "one use more": {"max_uses": 6},
    "a million uses": {"max_uses": 1_000_000},
}
WITHIN: Final[dict[str, dict[str, Any]]] = {
    "the same": {},
    "an action of the family": {"action": "a2a.repair.requeue"},
    "an earlier expiry": {"expires_ms": EXPIRES_MS - 1},
    "one use less": {"max_uses": 4},
    "one use": {"max_uses": 1},
    "not to be passed on any further": {"delegable": False},
}


@pytest.mark.parametrize("by", [BOB, None], ids=["holder", "operator"])
@pytest.mark.parametrize("changes", WIDER.values(), ids=WIDER)
def test_a_grant_that_is_wider_in_one_field_is_refused(changes: dict[str, Any], by: AgentId | None) -> None:
    """Contract 26: never wider, whoever passes it on."""
    assert verdict(REPAIR, passed_on(REPAIR, **changes), by) == "not_permitted"


@pytest.mark.parametrize("by", [BOB, None], ids=["holder", "operator"])
@pytest.mark.parametrize("changes", WITHIN.values(), ids=WITHIN)
def test_a_grant_that_is_no_wider_is_passed_on(changes: dict[str, Any], by: AgentId | None) -> None:
    """Contract 26."""
    assert verdict(REPAIR, passed_on(REPAIR, **changes), by) is None


@pytest.mark.parametrize("name", PINNED.__struct_fields__)
def test_each_field_of_a_scope_is_held_alone(name: str) -> None:
    """Contract 26: a source with this bound and no other; and a grant may add it to a source that has none. A field
    that is added to the scope and that no rule compares is found here."""
    if name == "version":
        assert PINNED.version == 1  # the only one there is: another is refused, see test_grants
        return
    bare = structs.replace(REPAIR, scope=Scope(), expires_ms=None)
    bound = structs.replace(bare, scope=Scope(**{name: getattr(PINNED, name)}))
    assert verdict(bound, passed_on(bound)) is None
    assert verdict(bound, passed_on(bound, **{name: None})) == "not_permitted"
    assert verdict(bare, passed_on(bare, **{name: getattr(PINNED, name)})) is None


def test_a_grant_without_an_end_is_passed_on_with_any() -> None:
    """Contract 26."""
    endless = structs.replace(REPAIR, expires_ms=None)
    assert verdict(endless, passed_on(endless)) is None
    assert verdict(endless, passed_on(endless, expires_ms=EXPIRES_MS)) is None


# --- actions ---------------------------------------------------------------------------------------------------

AGENTS: Final = (BOB, CAL)
EVERY_ACTION: Final = sorted(
    {
        *ACTIONS,
        *(start + name for start in PEER_ACTIONS for agent in AGENTS for name in (agent.display, agent.pubkey)),
        *(f"{start}*" for start in PEER_ACTIONS),
        *(f"{action[: action.index('.')]}.*" for action in ACTIONS),
        *(f"{action.rpartition('.')[0]}.*" for action in ACTIONS),
    }
)
EVERY_DEMAND: Final = (
    *(Demand(action, "label") for action in ACTIONS),
    *(Demand(start + agent.display, "label", agent) for start in PEER_ACTIONS for agent in AGENTS),
)


def allowed(action: str) -> set[str]:
    """Return the calls that a grant of this action lets in."""
    return {demand.action for demand in EVERY_DEMAND if action in spellings(demand)}


def test_no_action_is_passed_on_by_one_that_allows_less() -> None:
    """Contract 26: every pair of actions and families that there are."""
    with reaches(wider=300, family=20):
        for held in EVERY_ACTION:
            source = structs.replace(READ, action=held)
            for action in EVERY_ACTION:
                does = covers(source, passed_on(source, action=action))
                if not allowed(action) <= allowed(held):
                    reached("wider")
                    assert not does, (held, action)
                if held == action or (held.endswith(".*") and action.startswith(held[:-1])):
                    if held != action:
                        reached("family")
                    assert does, (held, action)


def test_an_action_that_is_not_in_the_family_is_refused() -> None:
    """Contract 26: by the command, not only by the comparison."""
    sends = structs.replace(READ, action="a2a.send.*")
    outside = [action for action in EVERY_ACTION if not action.startswith("a2a.send.")]
    assert len(outside) > 20
    assert {action: verdict(sends, passed_on(sends, action=action)) for action in outside} == dict.fromkeys(
        outside, "not_permitted"
    )
    assert verdict(sends, passed_on(sends, action=f"a2a.send.{CAL.display}")) is None


# --- the source ------------------------------------------------------------------------------------------------


def test_only_a_grant_that_may_be_passed_on_is() -> None:
    """Contract 26: a delegable one, of the caller's own, that is there."""
    fixed = structs.replace(REPAIR, delegable=False)
    assert verdict(fixed, passed_on(fixed)) == "not_permitted"
    assert verdict(fixed, passed_on(fixed), None) == "not_permitted"
    assert verdict(REPAIR, passed_on(REPAIR), CAL) == "unknown_grant"
    absent = structs.replace(passed_on(REPAIR), parent=OTHER_TASK)
    assert verdict(REPAIR, absent) == "unknown_grant"
    assert verdict(REPAIR, absent, None) == "unknown_grant"
    assert verdict(REPAIR, structs.replace(passed_on(REPAIR), parent=None)) == "not_permitted"


def revoked(realm: Realm, grant: Grant) -> None:
    realm.run(c.RevokeCapability(None, grant.capability.id, "taken away"))


def used_up(realm: Realm, grant: Grant) -> None:
    key, limit = grant_key(grant.capability.id), grant.capability.scope.max_uses
    assert limit is not None
    while isinstance(known := realm.state.get(key), Grant) and known.uses < limit:
        realm.happened(e.GrantUsed(key))


def expired(realm: Realm, grant: Grant) -> None:
    assert grant.capability.expires_ms is not None
    realm.ctx.now = grant.capability.expires_ms - 1  # the next command is decided when it ends


def ownerless(realm: Realm, grant: Grant) -> None:
    realm.happened(e.PeerRevoked(f"peer:{grant.capability.subject.pubkey}"))


def forged(realm: Realm, grant: Grant) -> None:
    realm.ctx.is_genuine = lambda one: one.capability.id != grant.capability.id


DEATHS: Final = (revoked, used_up, expired, ownerless, forged)
Death = Callable[[Realm, Grant], None]


def links(number: int, first: Capability = READ) -> tuple[Realm, list[Grant]]:
    """A grant of Bob's that was passed on to Cal, by Cal to Bob, and so on: so many grants, the first among them."""
    realm, holders = Realm(), (BOB, CAL)
    grants = [realm.grant(first)]
    for at in range(1, number):
        wanted = structs.replace(
            first,
            id=f"{at:08x}-2222-4222-8222-222222222222",
            subject=holders[at % 2],
            granted_by=holders[(at - 1) % 2],
            parent=grants[-1].capability.id,
        )
        grants.append(realm.grant(wanted, holders[(at - 1) % 2]))
    return realm, grants


def next_link(last: Grant) -> c.GrantCapability:
    wanted = structs.replace(
        last.capability, id=WANTED, subject=DAN, granted_by=last.capability.subject, parent=last.capability.id
    )
    return c.GrantCapability(last.capability.subject, Grant(wanted, "signed"))


DEATHS_OF_A_LINK: Final = [pytest.param(death, at, id=f"{death.__name__}-{at}") for death in DEATHS for at in range(3)]
MORTAL: Final = structs.replace(READ, scope=Scope(max_uses=3), expires_ms=EXPIRES_MS)


@pytest.mark.parametrize(("death", "at"), DEATHS_OF_A_LINK)
def test_a_grant_whose_source_is_dead_is_not_passed_on(death: Death, at: int) -> None:
    """Contract 26: neither the last link of the chain nor any before it may be revoked, used up, expired, of a revoked
    peer, or forged."""
    alive, grants = links(3, MORTAL)
    assert alive.told(next_link(grants[-1])) is None
    dead, grants = links(3, MORTAL)
    death(dead, grants[at])
    assert dead.told(next_link(grants[-1])) == "not_permitted"


@pytest.mark.parametrize(("death", "at"), DEATHS_OF_A_LINK)
def test_a_grant_ends_with_each_one_that_it_comes_from(death: Death, at: int) -> None:
    """Contract 26: a revocation holds for all that was passed on."""
    realm, grants = links(3, MORTAL)
    realm.run(next_link(grants[-1]))
    assert realm.may(DAN, MORTAL.action)
    death(realm, grants[at])
    assert not realm.may(DAN, MORTAL.action)


def test_a_grant_is_passed_on_until_its_last_moment() -> None:
    """Contract 26: it is dead at its expiry, and alive a millisecond before."""
    for now, code in ((EXPIRES_MS - 1, None), (EXPIRES_MS, "not_permitted")):
        realm = Realm()
        realm.grant(REPAIR)
        realm.ctx.now = now - 1
        assert realm.told(c.GrantCapability(BOB, Grant(passed_on(REPAIR), "signed"))) == code


def test_a_chain_has_a_last_link() -> None:
    """Contract 26: eight grants, the first among them; each of them is worth something, and a ninth is refused."""
    realm, grants = links(CHAIN_MAX - 1)
    assert realm.told(next_link(grants[-1])) is None
    assert realm.may(DAN, READ.action)
    realm, grants = links(CHAIN_MAX)
    assert realm.told(next_link(grants[-1])) == "not_permitted"
    assert not realm.may(DAN, READ.action)


def test_a_peer_is_passed_so_many_grants_for_one_thing_and_no_more() -> None:
    """Contract 26, 32: a check may look at each of them, also when what they came from is over. One that is pinned to
    another task is found by its pin, and does not count."""
    sends = Capability(SOURCE, BOB, "a2a.send.*", ROOT, 1, delegable=True)
    realm = Realm()
    realm.grant(sends)

    def passed(number: int, **changes: Any) -> str | None:
        grant = structs.replace(passed_on(sends, **changes), id=f"{number:08x}-3333-4333-8333-333333333333")
        return realm.told(c.GrantCapability(BOB, Grant(grant, "signed")))

    assert {passed(number) for number in range(100)} == {None}
    assert passed(100) == "too_large"
    tasks = [f"{number:08x}-4444-4444-8444-444444444444" for number in range(150)]
    assert {passed(1000 + number, task_id=task) for number, task in enumerate(tasks)} == {None}
    assert realm.told(c.RevokeCapability(BOB, f"{7:08x}-3333-4333-8333-333333333333", "done")) is None
    assert [passed(101), passed(102)] == [None, "too_large"]


def test_a_chain_that_no_command_made_is_worth_nothing() -> None:
    """Contract 26: one in the store that is too long, whose first grant is missing, or that comes back to itself."""

    def let_in(*parents: int | None) -> bool:
        """Whether Dan's grant, the last of these, is worth something; the others are Bob's, numbered from 1."""
        realm = Realm()
        for number, parent in enumerate(parents, start=1):
            holder = DAN if number == len(parents) else BOB
            above = None if parent is None else f"{parent:08x}-2222-4222-8222-222222222222"
            own = f"{number:08x}-2222-4222-8222-222222222222"
            link = structs.replace(READ, id=own, subject=holder, parent=above)
            realm.happened(e.Granted(grant_key(own), Grant(link, "signed")))
        return realm.may(DAN, READ.action)

    assert let_in(None, *range(1, CHAIN_MAX))
    assert not let_in(None, *range(1, CHAIN_MAX + 1))
    assert not let_in(None, 7)
    assert not let_in(1)


def test_a_use_of_what_was_passed_on_is_one_of_its_source() -> None:
    """Contract 26: two grants of three uses from one of three uses are three uses together."""
    realm, grants = links(1, MORTAL)
    realm.run(next_link(grants[0]))
    second = structs.replace(passed_on(MORTAL), id=FIRST, subject=CAL)
    realm.grant(second, BOB)
    assert [realm.may(DAN, "peers.list"), realm.may(CAL, "peers.list"), realm.may(DAN, "peers.list")] == [True] * 3
    assert not realm.may(DAN, "peers.list")
    assert not realm.may(CAL, "peers.list")
    assert not realm.may(BOB, "peers.list")
