"""The list has every verb, command, query, operation and action that there is, once; and the docs show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import pytest
from msgspec.structs import fields

from covenant import AgentId
from covenant.rules.decide import DECIDE
from covenant.rules.grant import ACTIONS, PEER_ACTIONS
from covenant.rules.query import ANSWER
from covenant.serve import wire
from covenant.serve.a2a.calls import CALLS
from covenant.serve.a2a.paths import spot
from covenant.serve.a2a.proto import SERVICE
from covenant.serve.places import PLACES
from tests.authorization.page import BEGIN, PAGE, written
from tests.authorization.surfaces import surfaces_of
from tests.authorization.verbs import INTERNAL, OPEN, VERBS, Verb
from tests.authorization.world import PEERS, SAMPLES, Call

IDS = [verb.name.replace(" ", "-") for verb in VERBS]


def steps(verb: Verb) -> tuple[Any, ...]:
    agents = {display: AgentId.named(display) for display in PEERS}
    return verb.rule(Call(agents["alice@lab"], False, SAMPLES[verb.on[0]], "", agents["eve@lab"], agents))


def places(found: Iterable[str | None]) -> set[str]:
    return {place.partition("?")[0] for place in found if place is not None}


def test_every_command_and_query_is_in_the_list() -> None:
    """Or no caller can ask for it."""
    listed = {type(step) for verb in VERBS for step in steps(verb)}
    assert {rule.__name__ for rule in {*DECIDE, *ANSWER} - listed - set(INTERNAL)} == set()
    assert {rule.__name__ for rule in listed & set(INTERNAL)} == set()
    assert listed | set(INTERNAL) <= {*DECIDE, *ANSWER}


def test_every_place_of_http_is_in_the_list() -> None:
    there = {f"{method} {place.path}" for place in PLACES for method in (place.method, *place.also)}
    stream = {"GET /a2a/events"}  # the one that is not a verb with a reply
    assert there | stream == places(verb.http for verb in VERBS) | {place for place in OPEN if place in there}


def test_every_frame_of_ipc_is_in_the_list() -> None:
    kinds = {request.__struct_config__.tag for request in get_args(wire.AnyRequest)}
    assert kinds - {"authenticate"} == {verb.ipc for verb in VERBS if verb.ipc is not None}


def test_every_operation_of_a2a_is_in_the_list() -> None:
    listed = {verb.a2a for verb in VERBS if verb.a2a is not None}
    assert listed == set(CALLS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.a2a is not None], ids=lambda verb: verb.name)
def test_an_operation_is_where_rest_has_it(verb: Verb) -> None:
    assert verb.rest is not None
    method, _, path = verb.rest.partition(" ")
    assert spot(method, path).what == verb.a2a


def test_every_action_is_in_the_list() -> None:
    """An action that no verb demands would be a grant for nothing."""
    demanded = {verb.action.partition("<")[0] for verb in VERBS if verb.action is not None}
    assert demanded == {*ACTIONS, *PEER_ACTIONS}


def test_a_verb_has_one_row_and_each_row_says_how_it_is_called() -> None:
    assert [name for name, count in Counter(verb.name for verb in VERBS).items() if count > 1] == []
    for verb in VERBS:
        assert (verb.members is None) == (verb.http is None and verb.ipc is None), verb.name
        assert (verb.params is None) == (verb.a2a is None), verb.name
    assert sum(not surfaces_of(verb) for verb in VERBS) <= 7  # the same verbs, asked for in another way


def test_a_row_says_nothing_that_a_verb_without_an_action_cannot_mean() -> None:
    about_grants = ("carries", "free", "refusal", "asks_recipient", "from_run", "each")
    plain = {field.name: field.default for field in fields(Verb) if field.name in about_grants}
    for verb in VERBS:
        if verb.action is None:
            assert {name: value for name, value in plain.items() if getattr(verb, name) != value} == {}, verb.name


def test_the_docs_show_the_list() -> None:
    """`python -m tests.authorization.page` writes it there."""
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page
    assert page == written(page)
