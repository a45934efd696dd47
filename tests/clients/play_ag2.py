"""ag2's side of the plays: an `Agent` whose model is a remote A2A agent, over both of its bindings with headers.

Run by the interpreter of the clients' environment, which has nothing of ours: `python play_ag2.py BASE_URL TOKEN`.
Prints one JSON object: what an app around the agent sees of each play.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

from ag2 import Agent, MemoryStream
from ag2.a2a import A2AConfig
from ag2.a2a.events import A2ATaskStatusUpdate
from ag2.a2a.tasks import cancel_task, get_task


class App:
    """One agent; a human who answers its questions with these answers, and cancels when it says `waiting`."""

    def __init__(self, config: A2AConfig, *answers: str) -> None:
        self.config = config
        self.answers = list(answers)
        self.asked: list[str] = []
        self.state = ""
        self.agent = Agent("app", config=config, hitl_hook=self.answer)

    async def answer(self, event: Any) -> str:
        self.asked.append(event.content)
        return self.answers.pop(0)

    async def turn(self, text: str) -> dict[str, Any]:
        stream = MemoryStream()
        stream.where(A2ATaskStatusUpdate).subscribe(self._note)
        try:
            reply = await self.agent.ask(text, stream=stream)
            outcome = {"text": reply.body, "reason": reply.response.finish_reason}
        except Exception as failed:
            outcome = {"failed": type(failed).__name__}
        return {**outcome, "asked": self.asked, "state": self.state}

    async def _note(self, event: A2ATaskStatusUpdate) -> None:
        status = event.update.status
        self.state = type(status).DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[status.state].name
        if any(part.text == "waiting" for part in status.message.parts):
            await cancel_task(self.config, event.update.task_id)
            await get_task(self.config, event.update.task_id)


TURNS = {"echo": "echo hello", "chunks": "chunks", "ask": "ask", "fail": "fail", "reject": "reject", "cancel": "wait"}


async def main(base: str, token: str) -> dict[str, Any]:
    told = {}
    for binding in ("jsonrpc", "rest"):
        for way in ("stream", "send"):
            for name, text in TURNS.items():
                play = f"{way} by {binding}, {name}"
                if way == "send" and name in ("chunks", "cancel"):  # it sees those only in a stream
                    continue
                headers = {"Authorization": f"Bearer {token}", "X-Play": play}
                url = f"{base}/agents/writer"
                config = A2AConfig(url, prefer=binding, streaming=way == "stream", headers=headers)
                told[play] = [await App(config, "blue").turn(text)]
    return told


if __name__ == "__main__":
    plays = asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 120))
    print(json.dumps({"client": f"ag2 {version('ag2')}", "plays": plays}))
