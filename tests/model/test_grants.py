"""Properties of the rules of trust: what a grant covers, that passing it on never widens it, and that what is
remembered of a check is what the check says. (Contract 26.)"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.floors import reached, reaches
from tests.model.realm import BOB, CAL, DAN, ROOT, Realm

from covenant import AgentId
from covenant.model import command as c
from covenant.model.error import BadAction
from covenant.model.peer import Capability, Demand, Grant, Role, Scope
from covenant.rules.grant import ACTIONS, PEER_ACTIONS, authorize, check_action, covers, fits, pin_of, recall, spellings

NAMES = [AgentId.named(name) for name in ("ann@lab", "bob@lab", "cal.x@lab.example")]
TASKS = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(3)]
RISKS = ["idempotent", "operator_accepted"]

plain_actions = st.sampled_from(ACTIONS)
peer_demands = st.builds(
    lambda start, agent, task, lease, risk: Demand(f"{start}{agent.display}", "label", agent, task, lease, risk),
    st.sampled_from(PEER_ACTIONS),
    st.sampled_from(NAMES),
    st.none() | st.sampled_from(TASKS),
    st.none() | st.sampled_from(TASKS),
    st.none() | st.sampled_from(RISKS),
)
plain_demands = st.builds(
    lambda action, agent, task, lease, risk: Demand(action, "label", agent, task, lease, risk),
    plain_actions,
    st.none() | st.sampled_from(NAMES),
    st.none() | st.sampled_from(TASKS),
    st.none() | st.sampled_from(TASKS),
    st.none() | st.sampled_from(RISKS),
)
demands = peer_demands | plain_demands
scopes = st.builds(
    Scope,
    peer_pubkey_b58=st.none() | st.sampled_from([agent.pubkey for agent in NAMES]),
    task_id=st.none() | st.sampled_from(TASKS),
    lease_id=st.none() | st.sampled_from(TASKS),
    duplicate_risk=st.none() | st.sampled_from(RISKS),
    max_uses=st.none() | st.integers(1, 3),
)
EVERY_ACTION: Final = [
    *ACTIONS,
    *(start + name for start in PEER_ACTIONS for agent in NAMES for name in (agent.display, agent.pubkey)),
    *("a2a.*", "a2a.send.*", "a2a.repair.*", "peers.*", "audit.*", "capabilities.*", "a2a.cancel.*"),
]
capabilities = st.builds(
    lambda action, scope, expires: Capability(TASKS[0], NAMES[0], action, NAMES[1], 1, scope, expires),
    st.sampled_from(EVERY_ACTION),
    scopes,
    st.sampled_from([None, 10, 11, 12]),
)


def allows(capability: Capability, demand: Demand, now: int = 0) -> bool:
    alive = capability.expires_ms is None or capability.expires_ms > now
    return alive and capability.action in spellings(demand) and fits(capability.scope, demand)


CALLS: Final = [
    *(Demand(start + agent.display, "label", agent) for start in PEER_ACTIONS for agent in NAMES),
    *(Demand(action, "label", agent) for action in ACTIONS for agent in (None, *NAMES)),
]
CALLS_OF: Final = {action: [call for call in CALLS if action in spellings(call)] for action in EVERY_ACTION}
LESS: Final = {
    action: [less for less in EVERY_ACTION if less.startswith(action.rstrip("*"))] for action in EVERY_ACTION
}
VALUES: Final[dict[str, list[Any]]] = {
    "peer_pubkey_b58": [None, *(agent.pubkey for agent in NAMES)],
    "task_id": [None, *TASKS],
    "lease_id": [None, *TASKS],
    "duplicate_risk": [None, *RISKS],
    "max_uses": [None, 1, 2, 3],
    "expires_ms": [None, 10, 11, 12],
}


def with_part(capability: Capability, part: str, value: Any) -> Capability:
    if part in Scope.__struct_fields__:
        return structs.replace(capability, scope=structs.replace(capability.scope, **{part: value}))
    return structs.replace(capability, **{part: value})


@st.composite
def passed_on(draw: st.DrawFn, source: Capability) -> Capability:
    """Another in one part at most; mostly one that is no wider."""
    part = draw(st.sampled_from(["nothing", "action", "less", "less", *VALUES]))
    if part == "less":
        return with_part(source, "action", draw(st.sampled_from(LESS[source.action])))
    if part == "action":
        return with_part(source, "action", draw(st.sampled_from(EVERY_ACTION)))
    if part == "nothing":
        return source
    return with_part(source, part, draw(st.sampled_from(VALUES[part])))


@st.composite
def calls_near(draw: st.DrawFn, capability: Capability) -> Demand:
    """A call of its action that has what its scope asks for, but for one part perhaps."""
    scope = capability.scope
    calls = CALLS_OF[capability.action]
    fitting = [call for call in calls if call.counterparty and call.counterparty.pubkey == scope.peer_pubkey_b58]
    call = draw(st.sampled_from(fitting or calls))
    call = structs.replace(call, task_id=scope.task_id, lease_id=scope.lease_id, duplicate_risk=scope.duplicate_risk)
    part = draw(st.sampled_from(["nothing", "task_id", "lease_id", "duplicate_risk"]))
    return call if part == "nothing" else structs.replace(call, **{part: draw(st.sampled_from(VALUES[part]))})


@reaches(passed_on=60, wider=12)
@settings(max_examples=700, deadline=None)
@given(st.data(), st.integers(8, 13))
def test_what_is_passed_on_allows_nothing_that_its_source_does_not(data: st.DataObject, now: int) -> None:
    source = data.draw(capabilities)
    wanted = data.draw(passed_on(source))
    demand = data.draw(calls_near(wanted))
    if not allows(wanted, demand, now):
        return
    if covers(source, wanted):
        reached("passed_on")
        assert allows(source, demand, now)
    elif not allows(source, demand, now):
        reached("wider")  # what the rule is there for


@given(capabilities)
def test_a_grant_covers_itself(capability: Capability) -> None:
    assert covers(capability, capability)
    check_action(capability.action)


@pytest.mark.parametrize("tail", ["bob\n@lab", "bob\x1b[31m@lab", "bob\0@lab", "bob\u202e@lab", "bob\xa0@lab"])
def test_an_action_has_no_characters_that_nobody_sees(tail: str) -> None:
    with pytest.raises(BadAction):
        check_action(f"a2a.send.{tail}")


def test_passing_on_twice_is_no_way_around() -> None:
    """Field by field: what the second covers, the first does."""
    for part, values in {"action": EVERY_ACTION, **VALUES}.items():
        one_of_each = [
            with_part(Capability(TASKS[0], NAMES[0], ACTIONS[0], NAMES[1], 1), part, value) for value in values
        ]
        pairs = [(one, other) for one in one_of_each for other in one_of_each if covers(one, other)]
        assert len(pairs) > len(values)  # more than each by itself
        for first, second in pairs:
            for third in (third for source, third in pairs if source is second):
                assert covers(first, third), (part, first, second, third)


@given(demands)
def test_a_check_tries_few_spellings_and_the_exact_one_first(demand: Demand) -> None:
    tried = list(spellings(demand))
    assert tried[0] == demand.action
    assert len(tried) <= 4
    for spelling in tried:
        check_action(spelling)


@reaches(fits=150, is_pinned=75)
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_grant_that_fits_lies_under_a_pin_that_the_check_looks_at(data: st.DataObject) -> None:
    capability = data.draw(capabilities)
    scope, demand = capability.scope, data.draw(calls_near(capability))
    peer = None if demand.counterparty is None else demand.counterparty.pubkey
    if fits(scope, demand):
        reached("fits")
        pin = pin_of(capability).rpartition(":")[2]
        if pin:
            reached("is_pinned")
        assert pin in (demand.task_id, demand.lease_id, peer, "")


def with_scope(scope: Scope) -> Capability:
    return Capability(TASKS[0], BOB, "a2a.repair.requeue", ROOT, 1, scope)


@pytest.mark.parametrize(
    "scope",
    [
        Scope(version=0),
        Scope(version=2),
        Scope(max_uses=0),
        Scope(max_uses=-1),
        Scope(max_uses=2**31 + 1),
        Scope(max_uses=True),
        Scope(task_id="no id"),
        Scope(task_id=TASKS[0].replace("0", "A")),
        Scope(lease_id="no id"),
        Scope(lease_id=TASKS[0].replace("0", "A")),
    ],
    ids=repr,
)
def test_a_scope_that_can_never_take_effect_is_refused(scope: Scope) -> None:
    """Contract 34; when it is given, to a peer that is there and to one that is being enrolled."""
    grant, zoe = Grant(with_scope(scope), "signed"), AgentId.named("zoe@lab")
    theirs = Grant(structs.replace(grant.capability, subject=zoe), "signed")
    realm = Realm()
    assert realm.told(c.GrantCapability(None, grant)) in ("malformed", "bad_id")
    assert realm.told(c.EnrollPeer(None, zoe, Role.PEER, "token", (theirs,))) in ("malformed", "bad_id")


@pytest.mark.parametrize(
    "scope", [Scope(), Scope(max_uses=1), Scope(max_uses=2**31), Scope(task_id=TASKS[1], lease_id=TASKS[2])], ids=repr
)
def test_a_scope_that_takes_effect_is_accepted(scope: Scope) -> None:
    """Contract 34."""
    assert Realm().told(c.GrantCapability(None, Grant(with_scope(scope), "signed"))) is None


def test_what_is_remembered_of_a_check_is_what_the_check_says() -> None:
    """Contract 26: a grant that does not cover every call of its action is looked for at each call."""
    fitting = Demand("a2a.repair.requeue", "label", CAL, TASKS[0], TASKS[1], "idempotent")
    others = [
        structs.replace(fitting, task_id=TASKS[2]),
        structs.replace(fitting, lease_id=TASKS[2]),
        structs.replace(fitting, duplicate_risk="operator_accepted"),
        structs.replace(fitting, counterparty=DAN),
        structs.replace(fitting, action="a2a.repair.force_error"),
    ]
    narrow = [
        Scope(task_id=TASKS[0]),
        Scope(lease_id=TASKS[1]),
        Scope(duplicate_risk="idempotent"),
        Scope(peer_pubkey_b58=CAL.pubkey),
        Scope(max_uses=1),
        Scope(),
    ]
    expires_ms = 5_000
    with reaches(covered=30, not_covered=30):
        for scope in narrow:
            for expiry in (None, expires_ms):
                realm = Realm()
                realm.grant(structs.replace(with_scope(scope), expires_ms=expiry))
                for now in (realm.ctx.now, expires_ms - 1, expires_ms):
                    realm.ctx.now = now
                    for demand in (fitting, *others, fitting):
                        found = authorize(BOB.pubkey, demand, realm.state, realm.ctx)
                        reached("not_covered" if found[0] is None else "covered")
                        assert recall(BOB.pubkey, demand, realm.state, realm.ctx) == found


def test_a_check_looks_at_few_grants_however_many_there_are() -> None:
    """Contract 26: whoever is passed many grants makes no check longer, and so holds nobody up."""
    demand = Demand(f"a2a.send.{CAL.display}", "label", CAL)
    sorts = [Scope(max_uses=9), Scope()]
    looked_at = {}
    for count in (1, 50):
        realm = Realm()
        for number in range(count):
            for sort, scope in enumerate(sorts):
                key = f"{number:08x}-{sort:04x}-4000-8000-000000000000"
                realm.grant(Capability(key, BOB, demand.action, ROOT, 1, scope, 50_000))
        seen: list[Grant] = []
        realm.ctx.is_genuine = lambda grant, seen=seen: not seen.append(grant)  # type: ignore[misc]
        assert authorize(BOB.pubkey, demand, realm.state, realm.ctx)[0] is not None
        looked_at[count] = len(seen)
    assert looked_at[1] == looked_at[50] == 1


def test_a_call_takes_the_grant_that_it_costs_least() -> None:
    """Contract 26: one that lasts before one that is over some day, and that before one that the call would use up."""
    action = f"a2a.send.{CAL.display}"
    demand = Demand(action, "label", CAL, TASKS[0])
    counted = Capability(f"{1:08x}-0000-4000-8000-000000000000", BOB, action, ROOT, 1, Scope(max_uses=1))
    passing = Capability(f"{2:08x}-0000-4000-8000-000000000000", BOB, "a2a.send.*", ROOT, 1, expires_ms=50_000)
    lasting = Capability(f"{3:08x}-0000-4000-8000-000000000000", BOB, "a2a.*", ROOT, 1)
    order = [lasting, passing, counted]
    for given_first in (order, order[::-1]):
        realm = Realm()
        for capability in given_first:
            realm.grant(capability)
        for capability in order:
            found, _ = authorize(BOB.pubkey, demand, realm.state, realm.ctx)
            assert found is not None and found.capability == capability
            realm.run(c.RevokeCapability(None, capability.id, "next"))
        assert authorize(BOB.pubkey, demand, realm.state, realm.ctx) == (None, "missing_capability")
