"""google-adk's side of the plays: `RemoteA2aAgent` under an `InMemoryRunner`, as its own documentation has it.

Run by the interpreter of the clients' environment, which has nothing of ours: `python play_adk.py BASE_URL TOKEN`.
Prints one JSON object: what an app around the agent sees of each play.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
from a2a.client import ClientConfig, ClientFactory
from a2a.types import CancelTaskRequest
from google.adk.agents.remote_a2a_agent import RemoteA2aAgent
from google.adk.runners import InMemoryRunner
from google.genai import types

CARD = "/agents/writer/.well-known/agent-card.json"


class App:
    """One agent, and one conversation with it."""

    def __init__(self, base: str, token: str, play: str, streaming: bool) -> None:
        self.http = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}", "X-Play": play}, timeout=60)
        self.factory = ClientFactory(ClientConfig(httpx_client=self.http, streaming=streaming))
        self.agent = RemoteA2aAgent("writer", f"{base}{CARD}", a2a_client_factory=self.factory)
        self.runner = InMemoryRunner(agent=self.agent, app_name="plays")
        self.session_id = ""

    async def turn(self, text: str) -> AsyncIterator[dict[str, Any]]:
        """The events of one turn, to its end."""
        if not self.session_id:
            self.session_id = (await self.runner.session_service.create_session(app_name="plays", user_id="u")).id
        content = types.Content(role="user", parts=[types.Part(text=text)])
        async for event in self.runner.run_async(user_id="u", session_id=self.session_id, new_message=content):
            metadata = event.custom_metadata or {}
            response = metadata.get("a2a:response") or {}
            parts = (event.content.parts or []) if event.content else []
            yield {
                "text": "".join(part.text or "" for part in parts),
                "asked": [dict(part.function_call.args or {}) for part in parts if part.function_call],
                "state": response.get("status", {}).get("state"),
                "error": event.error_message,
                "task": metadata.get("a2a:task_id"),
            }

    async def close(self) -> None:
        await self.runner.close()
        await self.http.aclose()


def shown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a turn has brought, and the state in which it ended."""
    return {
        "texts": [event["text"] for event in events if event["text"]],
        "asked": [asked for event in events for asked in event["asked"]],
        "state": next((event["state"] for event in reversed(events) if event["state"]), None),
        "errors": [event["error"] for event in events if event["error"]],
    }


async def converse(base: str, token: str, play: str, *turns: str) -> list[dict[str, Any]]:
    app = App(base, token, play, streaming=play.startswith("stream"))
    try:
        return [shown([event async for event in app.turn(text)]) for text in turns]
    finally:
        await app.close()


async def cancel(base: str, token: str, play: str) -> list[dict[str, Any]]:
    """ADK has no call for it: the app cancels with the SDK under it, while the turn goes on."""
    app = App(base, token, play, streaming=True)
    events = []
    try:
        async for event in app.turn("wait"):
            events.append(event)
            if event["text"] == "waiting":
                client = app.factory.create(await app.agent._resolve_agent_card())
                await client.cancel_task(CancelTaskRequest(id=event["task"]))
        return [shown(events)]
    finally:
        await app.close()


CONVERSATIONS = {
    "send": ["echo hello"],
    "send, fail": ["fail"],
    "send, ask": ["ask", "blue"],
    "stream": ["chunks"],
    "stream, ask": ["ask", "blue", "echo again"],
    "stream, fail": ["fail"],
    "stream, reject": ["reject"],
}


async def main(base: str, token: str) -> dict[str, Any]:
    told = {play: await converse(base, token, play, *turns) for play, turns in CONVERSATIONS.items()}
    told["stream, cancel"] = await cancel(base, token, "stream, cancel")
    return told


if __name__ == "__main__":
    told = asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 120))
    print(json.dumps({"client": f"google-adk {version('google-adk')}", "plays": told}))
