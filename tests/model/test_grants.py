"""Properties of the rules of trust: what a grant covers, and that passing it on never widens it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covenant import AgentId
from covenant.model.error import BadAction
from covenant.model.peer import Capability, Demand, Scope
from covenant.rules.grant import ACTIONS, PEER_ACTIONS, check_action, covers, fits, pin_of, spellings

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
actions = (
    plain_actions
    | st.builds(lambda start, agent: start + agent.display, st.sampled_from(PEER_ACTIONS), st.sampled_from(NAMES))
    | st.builds(lambda start, agent: start + agent.pubkey, st.sampled_from(PEER_ACTIONS), st.sampled_from(NAMES))
    | st.sampled_from(["a2a.*", "a2a.send.*", "a2a.repair.*", "peers.*", "audit.*", "capabilities.*", "a2a.cancel.*"])
)
capabilities = st.builds(
    lambda action, scope, expires: Capability(TASKS[0], NAMES[0], action, NAMES[1], 1, scope, expires),
    actions,
    scopes,
    st.none() | st.integers(10, 12),
)


def allows(capability: Capability, demand: Demand, now: int = 0) -> bool:
    alive = capability.expires_ms is None or capability.expires_ms > now
    return alive and capability.action in spellings(demand) and fits(capability.scope, demand)


@settings(max_examples=1000, deadline=None)
@given(capabilities, capabilities, demands, st.integers(0, 20))
def test_what_is_passed_on_allows_nothing_that_its_source_does_not(
    source: Capability, wanted: Capability, demand: Demand, now: int
) -> None:
    if covers(source, wanted) and allows(wanted, demand, now):
        assert allows(source, demand, now)


@given(capabilities)
def test_a_grant_covers_itself(capability: Capability) -> None:
    assert covers(capability, capability)
    check_action(capability.action)


@pytest.mark.parametrize("tail", ["bob\n@lab", "bob\x1b[31m@lab", "bob\0@lab", "bob\u202e@lab", "bob\xa0@lab"])
def test_an_action_has_no_characters_that_nobody_sees(tail: str) -> None:
    with pytest.raises(BadAction):
        check_action(f"a2a.send.{tail}")


@given(capabilities, capabilities, capabilities)
def test_passing_on_twice_is_no_way_around(first: Capability, second: Capability, third: Capability) -> None:
    if covers(first, second) and covers(second, third):
        assert covers(first, third)


@given(demands)
def test_a_check_tries_few_spellings_and_the_exact_one_first(demand: Demand) -> None:
    tried = list(spellings(demand))
    assert tried[0] == demand.action
    assert len(tried) <= 4
    for spelling in tried:
        check_action(spelling)


@settings(max_examples=1000, deadline=None)
@given(scopes, demands)
def test_a_grant_that_fits_lies_under_a_pin_that_the_check_looks_at(scope: Scope, demand: Demand) -> None:
    peer = None if demand.counterparty is None else demand.counterparty.pubkey
    if fits(scope, demand):
        assert pin_of(scope) in (demand.task_id, demand.lease_id, peer, "")
