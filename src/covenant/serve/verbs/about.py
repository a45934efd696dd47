"""What a caller can learn of the service, and of itself."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model.peer import Caller
from covenant.serve import wire as w
from covenant.version import VERSION


async def list_daemons(x: Exchange, caller: Caller, r: w.ListDaemons) -> w.Daemons:
    return w.Daemons(daemons=list(await x.under(caller, "audit.read", x.store.daemons)))


async def version(x: Exchange, caller: Caller, r: w.Version) -> w.VersionReply:
    return version_of(x)


def version_of(x: Exchange) -> w.VersionReply:
    return w.VersionReply(version=VERSION, realm=x.realm.pubkey, limits=x.store.limits)


async def whoami(x: Exchange, caller: Caller, r: w.Whoami) -> w.WhoamiReply:
    return w.WhoamiReply(agent=caller.agent, role=caller.role)
