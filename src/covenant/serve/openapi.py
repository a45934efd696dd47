"""The description of the HTTP surface: OpenAPI 3.1, made from the tables that the surface itself runs on.

Routes come from `places`, shapes from the structs of `wire`, statuses from `status`. What is written here by hand is
what none of them says: how large a number may be, what a text looks like, and the pages that are no verbs. A bound that
can be set stands at requests only: what was stored under another one is still shown.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from covenant.model.content import BLOCK_TYPES, ResourceContents
from covenant.model.limits import SPAN_MS_MAX, Limits
from covenant.serve import wire as w
from covenant.serve.described import described
from covenant.serve.http import Page, Receive, Response, Scope, Send, respond
from covenant.serve.places import PLACES, Place
from covenant.serve.status import HTTP_STATUS, RETRY_AFTER_S
from covenant.version import VERSION

Schema: TypeAlias = dict[str, Any]

PATH: Final = "/openapi.json"
SCHEMA_PREFIX: Final = "#/components/schemas/"
TAGS: Final = {
    "tasks": "Send work, lease it, look at it.",
    "results": "Answer a leased task; receive what was answered.",
    "leases": "What the holder of a task does besides answering.",
    "agents": "Which agents the A2A protocol reaches.",
    "runs": "Durable agents: how their runs stand, and what moves them.",
    "operation": "The queue, repair, the retry gate, the cache, history.",
    "peers": "Who is enrolled.",
    "capabilities": "Who may do what.",
    "audit": "What was done, by whom.",
    "service": "The daemon itself.",
}
_OF_A2A: Final = ("tasks", "results", "leases", "agents")

_UUID: Final = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_ID: Final[Schema] = {"pattern": f"^{_UUID}$"}
_TIME: Final[Schema] = {"minimum": 0, "maximum": 2**53 - 1}
_AGE: Final[Schema] = {"minimum": 0, "maximum": 2**53}
_SOMETHING: Final[Schema] = {"minLength": 1}

# What the structs do not say of their members, in requests and replies alike.
_SHAPES: Final[dict[str, dict[str, Schema]]] = {
    "AgentId": {
        "display": {"pattern": "^[A-Za-z0-9_.-]{1,128}@[A-Za-z0-9_.-]{1,128}$"},
        "pubkey": {"pattern": "^[1-9A-HJ-NP-Za-km-z]{32,44}$"},
    },
    "Task": {
        "id": {"pattern": f"^({_UUID})?$"},
        "intent_text": _SOMETHING,
        "task_kind": _SOMETHING,
        "parent": _ID,
        "deadline_ms": _TIME,
        "not_before_ms": _TIME,
    },
    "Idempotency": {"key": _SOMETHING},
    "Message": {"messageId": _SOMETHING, "parts": {"minItems": 1}},
    "Artifact": {"artifactId": _SOMETHING, "parts": {"minItems": 1}},
    "Result": {"task_id": _ID, "lease_id": _ID, "sequence": {"minimum": 1}},
    "Scope": {"version": {"const": 1}, "max_uses": {"minimum": 1, "maximum": 2**31}},
    "RepairRequest": {"task_id": _ID, "reason": _SOMETHING},
    "Requeue": {"lease_id": _ID},
    "ForceError": {"lease_id": _ID, "message": _SOMETHING},
    "RetryPolicy": {
        "min_lease_age_ms": {"minimum": 0, "maximum": SPAN_MS_MAX},
        "max_attempts": {"minimum": 0, "maximum": 2**31},
        "max_requeues": {"minimum": 0},
        "scan_limit": {"minimum": 0},
    },
}


def _bounds(limits: Limits) -> dict[str, Schema]:
    """What is not said of the members of requests, by their names."""
    return {
        "limit": {"minimum": 0, "maximum": limits.page_max},
        "wait_ms": {"minimum": 0, "maximum": 2**31},
        "current_generation": {"minimum": 0},
        "min_lease_age_ms": _AGE,
        "deadline_within_ms": _AGE,
        "not_before_ms": _TIME,
        "older_than_ms": _TIME,
        "expires_ms": _TIME,
        "before": _AGE,
        "after": {"minimum": 0, "maximum": 2**31},
        "if_generation": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "text": {"minLength": 1},
        "receipt": {"minLength": 1, "maxLength": limits.key_bytes_max},
        "task_id": _ID,
        "lease_id": _ID,
        "grant_id": _ID,
        "reason": {"minLength": 1, "maxLength": limits.text_bytes_max},
        "action": {"minLength": 1, "maxLength": 300},
        "leaf": {"minimum": 0},
        "key": {"minLength": 1, "maxLength": limits.key_bytes_max},
        "effect": {"minLength": 1, "maxLength": limits.key_bytes_max},
        "tasks": {"maxItems": limits.batch_max},
    }


def description(limits: Limits) -> Schema:
    """The whole document, for a daemon with these limits."""
    schemas = _schemas()
    requests = _requests(schemas, limits)
    paths: dict[str, Schema] = {}
    for place in PLACES:
        for method in (place.method, *place.also):
            paths.setdefault(place.path, {})[method.lower()] = _operation(place, method, requests)
    for path, page in _PAGES.items():
        paths[path] = {"get": page}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Covenant", "version": VERSION, "description": "The durable exchange between agents."},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {f"Error{status}": _error_response(status) for status in sorted(set(HTTP_STATUS.values()))},
            "schemas": {name: schema for name, schema in schemas.items() if name not in _request_names()},
        },
    }


def page(limits: Limits) -> Page:
    document = msgspec.json.encode(description(limits))

    async def openapi(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, Response(200, document))

    return openapi


# --- schemas -----------------------------------------------------------------------------------------------


def _schemas() -> dict[str, Schema]:
    kinds = [kind for place in PLACES for kind in (place.request, place.reply)]
    known: dict[type, type] = {}
    told = [described(kind, known) for kind in (*kinds, *BLOCK_TYPES.values())]
    _, schemas = msgspec.json.schema_components(told, ref_template=SCHEMA_PREFIX + "{name}")
    for block in (*BLOCK_TYPES.values(), ResourceContents):
        schemas[block.__name__]["additionalProperties"] = True  # they are kept, whatever they are
    for name, members in _SHAPES.items():
        properties = schemas[name]["properties"]
        for member, bound in members.items():
            properties[member] = _narrowed(properties[member], bound)
    return {**schemas, "Error": _error()}


def _request_names() -> set[str]:
    return {place.request.__name__ for place in PLACES}


def _narrowed(schema: Schema, bound: Schema) -> Schema:
    """A bound is about the value, not about its absence."""
    if "anyOf" not in schema:
        return {**schema, **bound}
    return {**schema, "anyOf": [part if part == {"type": "null"} else {**part, **bound} for part in schema["anyOf"]]}


def _requests(schemas: dict[str, Schema], limits: Limits) -> dict[type, Schema]:
    """What each request takes, without its envelope of IPC."""
    bounds = _bounds(limits)
    batch = {"minimum": 1, "maximum": limits.batch_max}
    requests: dict[type, Schema] = {}
    for place in PLACES:
        schema = schemas[place.request.__name__]
        known = {**bounds, "limit": batch} if place.request in (w.RecvTasks, w.RecvResults) else bounds
        properties = {
            name: _narrowed(member, known[name]) if name in known else member
            for name, member in schema["properties"].items()
            if name not in ("kind", "id")
        }
        required = [name for name in schema["required"] if name != "kind"]
        requests[place.request] = {"type": "object", "properties": properties, "required": required}
    return requests


def _error() -> Schema:
    return {
        "title": "Error",
        "description": "A refusal. Programs read `code`; members beside the three say more.",
        "type": "object",
        "properties": {
            "kind": {"const": "error"},
            "code": {"enum": sorted(HTTP_STATUS)},
            "message": {"type": "string"},
        },
        "required": ["kind", "code", "message"],
    }


def _error_response(status: int) -> Schema:
    codes = [code for code, known in HTTP_STATUS.items() if known == status]
    response: Schema = {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": _json({"$ref": f"{SCHEMA_PREFIX}Error", "properties": {"code": {"enum": codes}}}),
    }
    headers = {
        "WWW-Authenticate": status == 401,
        "Allow": status == 405,
        "Retry-After": any(code in RETRY_AFTER_S for code in codes),
    }
    if any(headers.values()):
        response["headers"] = {name: {"schema": {"type": "string"}} for name, told in headers.items() if told}
    return response


# --- operations --------------------------------------------------------------------------------------------


def _operation(place: Place, method: str, requests: dict[type, Schema]) -> Schema:
    request = requests[place.request]
    kind = str(place.request.__struct_config__.tag)
    operation: Schema = {
        "operationId": kind if method == place.method else f"{kind}_{method.lower()}",
        "tags": [_tag(place.path)],
        "summary": place.summary,
        "parameters": _parameters(place, request),
    }
    told = vars(place.request).get("__doc__")
    if told:
        operation["description"] = " ".join(told.split())
    if place.body is not None:
        operation["requestBody"] = _body(place, request)
    ok = {"description": "Done.", "content": _json({"$ref": SCHEMA_PREFIX + place.reply.__name__})}
    operation["responses"] = {"200": ok, **_refusals(HTTP_STATUS.values())}
    return operation


def _tag(path: str) -> str:
    first, _, rest = path[1:].partition("/")
    if first == "a2a":
        noun = rest.partition("/")[0]
        return noun if noun in _OF_A2A else "operation"
    return first if first in TAGS else "service"


def _parameters(place: Place, request: Schema) -> list[Schema]:
    """What is in the path, and in the query when there is no body for it."""
    required = request["required"]
    return [
        {
            "name": name,
            "in": "path" if name == place.parameter else "query",
            "required": name in required,
            "schema": _spelled(schema),
        }
        for name, schema in request["properties"].items()
        if name == place.parameter or (place.body != "*" and name != place.body)
    ]


def _spelled(schema: Schema) -> Schema:
    """In a path or a query there is no null: what is not meant is left out."""
    parts = [part for part in schema.get("anyOf", ()) if part != {"type": "null"}]
    return parts[0] if len(parts) == 1 else schema


def _body(place: Place, request: Schema) -> Schema:
    if place.body != "*":
        return {"required": True, "content": _json(request["properties"][place.body])}
    required = [name for name in request["required"] if name != place.parameter]
    members = {name: schema for name, schema in request["properties"].items() if name != place.parameter}
    schema = {"type": "object", "properties": members, "required": required}
    return {"required": bool(required), "content": _json(schema)}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _refusals(statuses: Any) -> Schema:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(set(statuses))}


# --- pages -------------------------------------------------------------------------------------------------


def _page(summary: str, media: str, schema: Schema, **more: Any) -> Schema:
    ok = {"description": "Done.", "content": {media: {"schema": schema}}}
    return {
        "operationId": more.pop("name"),
        "tags": ["service"],
        "summary": summary,
        "security": [],
        "responses": {"200": ok, **more.pop("refusals", {})},
        **more,
    }


def _kind(kind: str, **members: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **members},
        "required": ["kind", *members],
    }


_NOT_READY: Final = {
    "description": "It does not, and why.",
    "content": _json(_kind("not_ready", reason={"enum": ["draining", "store_unavailable"]})),
}
_SEQ: Final[Schema] = {"type": "integer", "minimum": 0}
_PAGES: Final[dict[str, Schema]] = {
    "/a2a/events": _page(
        "The caller's tasks as they change: server-sent events.",
        "text/event-stream",
        {"type": "string"},
        name="events",
        tags=["tasks"],
        security=[{"bearer": []}],
        parameters=[
            {"name": "Last-Event-ID", "in": "header", "required": False, "schema": _SEQ},
            {"name": "after", "in": "query", "required": False, "schema": _SEQ},
        ],
        refusals=_refusals((400, 401, 429, 500, 503, 507)),
    ),
    "/version": _page(
        "Version, realm and limits.", "application/json", {"$ref": f"{SCHEMA_PREFIX}VersionReply"}, name="version"
    ),
    "/healthz": _page("The process lives.", "application/json", _kind("healthy"), name="healthz"),
    "/readyz": _page("It takes work.", "application/json", _kind("ready"), name="readyz", refusals={"503": _NOT_READY}),
    "/metrics": _page("Numbers for Prometheus.", "text/plain", {"type": "string"}, name="metrics"),
    PATH: _page("This description.", "application/json", {"type": "object"}, name="openapi"),
    "/docs": _page("A page to try it.", "text/html", {"type": "string"}, name="docs"),
}
