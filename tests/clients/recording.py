"""The form of a recorded request and its answer, the same in every run.

Ids of the daemon become `{id-1}` …, by the order in which they were answered first; those that a client made up become
`{own-1}` …, by the order in which it used them; its token becomes `{token}`. An answer is kept by what its client needs
of it: status, media type, and of each task, message or event the kind and the state. A client that polls is recorded
with its last poll; what it was answered before is a task that is not over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

KEPT: Final = (
    "authorization",
    "content-type",
    "accept",
    "a2a-version",
    "a2a-extensions",
    "idempotency-key",
    "last-event-id",
)
STREAM: Final = "text/event-stream"
_GOES_ON: Final = ("TASK_STATE_SUBMITTED", "TASK_STATE_WORKING")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")
_PLACE: Final = re.compile(r"\{((?:id|own)-[0-9]+|token)\}")


class Names:
    """The ids of one play, and what they are called in its recording."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._ids: list[str] = []
        self._own: list[str] = []

    def hear(self, answer: Any) -> None:
        for found in _ids_in(answer):
            if found not in self._ids:
                self._ids.append(found)

    def written(self, text: str) -> str:
        """Return the text as it is recorded."""
        text = text.replace(self._token, "{token}")
        return _UUID.sub(lambda match: self._name_of(match[0]), text)

    def _name_of(self, found: str) -> str:
        if found in self._ids:
            return f"{{id-{self._ids.index(found) + 1}}}"
        if found not in self._own:
            self._own.append(found)
        return f"{{own-{self._own.index(found) + 1}}}"

    def said(self, text: str, own: str) -> str:
        """Return the text as it is sent again; `own` stands before the ids that the client made up."""

        def fill(match: re.Match[str]) -> str:
            name, _, number = match[1].partition("-")
            if name == "token":
                return self._token
            return self._ids[int(number) - 1] if name == "id" else f"{own}-{number}"

        return _PLACE.sub(fill, text)


def _ids_in(told: Any) -> Iterator[str]:
    if isinstance(told, list):
        for inner in told:
            yield from _ids_in(inner)
    elif isinstance(told, dict):
        names = ("id", "taskId", "contextId") if "status" in told else ("taskId", "contextId")
        for name in names:
            if isinstance(told.get(name), str):
                yield told[name]
        for inner in told.values():
            yield from _ids_in(inner)


def inner(answer: Any) -> Any:
    """Return an answer without the envelope of JSON-RPC."""
    if isinstance(answer, dict) and "jsonrpc" in answer:
        return answer.get("result", {"error": answer.get("error")})
    return answer


def outline(answer: Any) -> Any:
    """Return the part of an answer that a client needs."""
    told = inner(answer)
    if not isinstance(told, dict):
        return None
    if "supportedInterfaces" in told:
        return {"card": [one["protocolBinding"] for one in told["supportedInterfaces"]]}
    if "error" in told:
        return {"error": told["error"]["code"]}
    if "status" in told:
        return {"state": told["status"]["state"]}
    for kind in ("task", "statusUpdate"):
        if kind in told:
            return {kind: told[kind]["status"]["state"]}
    if "artifactUpdate" in told:
        return {"artifactUpdate": "".join(part.get("text", "") for part in told["artifactUpdate"]["artifact"]["parts"])}
    return {"message": True} if "message" in told else sorted(told)


def reply_outline(answer: Any) -> Any:
    """Return the outline of an answer that is no stream: how far an open task is depends on time."""
    told = outline(answer)
    for kind in ("task", "state"):
        if isinstance(told, dict) and told.get(kind) in _GOES_ON:
            return {kind: "not over"}
    return told


def is_poll(noted: dict[str, Any]) -> bool:
    """Return whether this request only reads one task."""
    is_read = noted["method"] == "GET" and "/tasks/" in noted["path"]
    return is_read or noted.get("body", {}).get("method") == "GetTask"


class Events:
    """Reads the events of a stream out of its bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self.told: list[Any] = []

    def feed(self, chunk: bytes) -> None:
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in whole:
            data = b"\n".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
            if data:
                self.told.append(json.loads(data))
