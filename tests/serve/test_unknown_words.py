"""A word that nothing reads is refused, in a query, a body and a frame of every verb. (Contract 34.)

`GET /a2a/queue?min_lease_ag_ms=1` would else list everything, and `POST /a2a/compact {"older_than": 1}` let go of more
than was meant.
"""

from __future__ import annotations

import msgspec
import pytest

from covenant.model.error import Malformed
from covenant.serve import wire as w
from covenant.serve.places import PLACES, Place
from covenant.serve.routes import ROUTES, Route, find, read_as

ABSENT = "00000000-0000-4000-8000-000000000000"
BODIES = {
    w.SendTask: b'{"recipient":{"display":"bob@lab"},"intent_text":"x"}',
    w.PostResult: b'{"task_id":"%b","status":"ok"}' % ABSENT.encode(),
    w.CommitRun: b'{"number":1}',
    w.Repair: b'{"task_id":"%b","command":{"action":"requeue","duplicate_risk":"idempotent"},"reason":"x"}'
    % ABSENT.encode(),
}
ALL = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.method} {place.path}")


def route_of(place: Place, method: str | None = None) -> tuple[Route, str | None]:
    return find(method or place.method, place.path.replace(f"{{{place.parameter}}}", ABSENT))


@ALL
def test_an_unknown_parameter_of_a_query_is_refused(place: Place) -> None:
    route, parameter = route_of(place)
    with pytest.raises(Malformed, match="nonsense"):
        route.request(parameter, b"nonsense=1", BODIES.get(place.request, b""))


@ALL
def test_an_unknown_member_of_a_body_is_refused(place: Place) -> None:
    if place.body not in (None, "*"):
        return  # what it carries is read as the first protocol reads it: its unknown members are ignored
    for method in (place.method, *place.also):
        route, parameter = route_of(place, method)
        with pytest.raises(Malformed, match="nonsense" if place.body else "no body"):
            route.request(parameter, b"", b'{"nonsense":1}')


@ALL
def test_an_unknown_member_of_a_frame_is_refused(place: Place) -> None:
    tag = str(place.request.__struct_config__.tag)
    with pytest.raises(Malformed, match="nonsense"):
        read_as(place.request, {"kind": tag, "nonsense": 1}, strict=True)


def test_a_body_without_members_is_none() -> None:
    route, _ = find("POST", "/a2a/tasks/next")
    assert route.request(None, b"wait_ms=5", b"{}") == w.RecvTask(wait_ms=5)
    assert {method for methods in ROUTES.values() for method in methods} == {"GET", "POST", "DELETE"}


def test_what_a_request_carries_ignores_its_unknown_members() -> None:
    sent = msgspec.json.decode(
        b'{"kind":"send_a2a_task","task":' + BODIES[w.SendTask][:-1] + b',"later":1}}', type=w.SendTask
    )
    assert sent.task.intent_text == "x"
