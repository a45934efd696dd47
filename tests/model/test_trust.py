"""The commands of trust on the rules alone: granting, revoking, and enrolling again. (Contract 25, 26.)"""

from __future__ import annotations

from typing import Any, Final

import pytest
from msgspec import structs
from tests.model.realm import BOB, CAL, DAN, ROOT, Realm, token_of

from covenant import AgentId, Limits
from covenant.model import command as c
from covenant.model.peer import Capability, Demand, Grant, Role, Scope
from covenant.rules.decide import decide
from covenant.rules.grant import authorize, demand_for, fits

IDS: Final = [f"{number:08x}-1111-4111-8111-111111111111" for number in range(4)]
TASK, LEASE, OTHER = (f"{number:08x}-0000-4000-8000-000000000000" for number in range(3))
REASON: Final = "because"


def capability(number: int = 0, subject: AgentId = BOB, granter: AgentId = ROOT) -> Capability:
    return Capability(IDS[number], subject, "peers.list", granter, 1)


def grant(wanted: Capability, by: AgentId | None = None) -> c.GrantCapability:
    return c.GrantCapability(by, Grant(wanted, "signed"))


def enroll(agent: AgentId, by: AgentId | None = None) -> c.EnrollPeer:
    return c.EnrollPeer(by, agent, Role.PEER, token_of(agent))


PINS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "peer_pubkey_b58": (CAL.pubkey, {"counterparty": DAN}, {"counterparty": None}),
    "task_id": (TASK, {"task_id": OTHER}, {"task_id": None}),
    "lease_id": (LEASE, {"lease_id": OTHER}, {"lease_id": None}),
    "duplicate_risk": ("idempotent", {"duplicate_risk": "operator_accepted"}, {"duplicate_risk": None}),
}


@pytest.mark.parametrize("name", PINS)
def test_each_pin_is_compared_with_the_call(name: str) -> None:
    """Contract 26: a call that lacks what the grant is pinned to is not covered either."""
    value, another, none = PINS[name]
    call = Demand("a2a.repair.requeue", "label", CAL, TASK, LEASE, "idempotent")
    scope = structs.replace(Scope(), **{name: value})
    assert fits(scope, call)
    assert not fits(scope, structs.replace(call, **another))
    assert not fits(scope, structs.replace(call, **none))


def test_a_grant_that_has_ended_already_is_not_given() -> None:
    """Contract 34."""
    realm = Realm()
    at_once = structs.replace(capability(), expires_ms=realm.ctx.now + 1)
    assert realm.told(grant(at_once)) == "malformed"  # decided in this very millisecond
    later = structs.replace(capability(), expires_ms=realm.ctx.now + 2)
    assert realm.told(grant(later)) is None
    assert realm.may(BOB, "peers.list") is False  # it ended in the next one


def test_a_grant_is_given_once_and_to_a_peer_that_is_there() -> None:
    """Contract 26."""
    realm = Realm()
    assert realm.told(grant(capability(0, AgentId.named("nobody@lab")))) == "unknown_peer"
    assert realm.told(grant(capability(0))) is None
    assert realm.told(grant(capability(0, DAN))) == "malformed"
    realm.run(c.RevokePeer(None, CAL.pubkey, REASON))
    assert realm.told(grant(capability(1, CAL))) == "unknown_peer"


def test_the_granter_and_the_operator_revoke_and_nobody_else() -> None:
    """Contract 26: who holds it sees it, and may not; to whom it is nothing it is unknown."""
    for by, code in ((BOB, "not_permitted"), (DAN, "unknown_grant"), (CAL, None), (None, None)):
        realm = Realm()
        realm.grant(capability(0, BOB, CAL))
        revoke = c.RevokeCapability(by, IDS[0], REASON)
        assert realm.told(revoke) == code
        assert realm.may(BOB, "peers.list") is (code is not None)
        order = realm.state.order
        assert realm.told(revoke) == code
        assert realm.state.order == order, "again changes nothing"


def test_a_revoked_peer_is_enrolled_again_when_its_last_grant_has_ended() -> None:
    """Contract 25, 26: what it had ends in steps, one after the other, and none of it is there when it comes back."""
    realm = Realm()
    realm.ctx.limits = Limits(step_records_max=1)
    for number in range(3):
        realm.grant(capability(number))
    commit = decide(c.RevokePeer(None, BOB.pubkey, REASON), realm.state, realm.ctx)
    refused = 0
    while commit.then:
        realm.state.apply(commit.events, realm.ctx.now)
        left = realm.state.all_grants(BOB.pubkey, 0, 10)
        assert realm.told(enroll(BOB)) == ("peer_conflict" if left else None)
        if not left:
            break
        refused += 1
        assert len(left) == 4 - refused
        (step,) = commit.then
        commit = decide(step, realm.state, realm.ctx)
    assert refused == 3
    assert realm.state.all_grants(BOB.pubkey, 0, 10) == []
    assert not realm.may(BOB, "peers.list")


def test_only_the_operator_enrolls_again_whom_it_revoked() -> None:
    """Contract 25: whoever else may enroll a peer enrolls new ones."""
    realm = Realm()
    realm.run(c.RevokePeer(None, BOB.pubkey, REASON))
    assert realm.told(enroll(BOB, CAL)) == "not_permitted"
    assert realm.told(enroll(AgentId.named("zoe@lab"), CAL)) is None
    assert realm.told(enroll(BOB)) is None
    assert realm.told(enroll(BOB)) == "peer_conflict"
    assert realm.told(enroll(AgentId("bob@lab", CAL.pubkey))) == "peer_conflict"


def test_a_key_that_is_no_peer_has_no_right() -> None:
    """Contract 25, 26: also where the operator needs no grant."""
    realm = Realm()
    nobody = AgentId.named("nobody@lab").pubkey
    demand = demand_for("peers.list", "peers:list")
    assert authorize(nobody, demand, realm.state, realm.ctx) == (None, "missing_capability")


def test_of_bounded_grants_the_narrowest_is_used_first() -> None:
    """Contract 26: in whatever order they were given."""
    for actions in (("peers.list", "peers.*"), ("peers.*", "peers.list")):
        realm = Realm()
        for number, action in enumerate(actions):
            realm.grant(structs.replace(capability(number), action=action, scope=Scope(max_uses=1)))
        assert realm.may(BOB, "peers.list")
        assert [grant.capability.action for grant in realm.state.all_grants(BOB.pubkey, 0, 10)] == ["peers.*"]
        assert realm.may(BOB, "peers.list")
        assert not realm.may(BOB, "peers.list")
