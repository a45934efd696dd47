"""Trust on the rules alone: peers, their grants and their calls, decided and folded in memory."""

from __future__ import annotations

from typing import Final

from tests.a2a.stage import Stage

from covenant import AgentId
from covenant.model import command as c
from covenant.model import event as e
from covenant.model.error import CovenantError
from covenant.model.peer import Caller, Capability, Grant, Role

BOB, CAL, DAN, ROOT = (AgentId.named(label) for label in ("bob@lab", "cal@lab", "dan@lab", "operator@local"))
PEERS: Final = (BOB, CAL, DAN)


class Realm(Stage):
    """Three peers without a grant."""

    def __init__(self) -> None:
        super().__init__()
        for agent in PEERS:
            self.run(c.EnrollPeer(None, agent, Role.PEER, token_of(agent)))

    def grant(self, capability: Capability, by: AgentId | None = None) -> Grant:
        grant = Grant(capability, "signed")
        self.run(c.GrantCapability(by, grant))
        return grant

    def happened(self, event: e.Event) -> None:
        self.ctx.now += 1
        self.state.apply((event,), self.ctx.now)

    def may(self, agent: AgentId, action: str) -> bool:
        """Whether the agent is let in; a bounded grant loses a use by it."""
        return self.told(c.Call(Caller(agent, Role.PEER, token_of(agent)), c.UseRight(agent, action))) is None

    def told(self, command: c.Command | c.Call) -> str | None:
        """The code of the refusal, if there was one."""
        try:
            self.run(command)  # type: ignore[arg-type]  # a call is a command of somebody
        except CovenantError as refusal:
            return refusal.code
        return None


def token_of(agent: AgentId) -> str:
    return f"token of {agent}"
