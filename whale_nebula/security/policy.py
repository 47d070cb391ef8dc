"""Who may call what. What is not in the table is denied.

>>> print(table())
               worker    gateway   operator
open pair      yes       -         -
relay          yes       yes       -
health         yes       yes       yes
audit heads    -         yes       -
"""

from __future__ import annotations

from enum import StrEnum

from whale_nebula.errors import NotAllowedError
from whale_nebula.security.identity import GATEWAY, OPERATOR, ROLES, WORKER, Identity


class Call(StrEnum):
    """What one process can ask of another."""

    OPEN_PAIR = "open pair"
    """Talk to a worker, as a worker."""
    RELAY = "relay"
    """Have frames handed on by a gateway: asked by its workers, and by other gateways."""
    HEALTH = "health"
    AUDIT_HEADS = "audit heads"
    """Leave signed heads of an audit log."""


ALLOWED = frozenset(
    {
        (WORKER, Call.OPEN_PAIR),
        (WORKER, Call.RELAY),
        (WORKER, Call.HEALTH),
        (GATEWAY, Call.RELAY),
        (GATEWAY, Call.HEALTH),
        (GATEWAY, Call.AUDIT_HEADS),
        (OPERATOR, Call.HEALTH),
    }
)
_OWN_CLUSTER = frozenset({(WORKER, Call.RELAY)})
"""Allowed only where the caller and the called are of one cluster."""
_SERVES = {Call.OPEN_PAIR: (WORKER,), Call.RELAY: (GATEWAY,), Call.AUDIT_HEADS: (GATEWAY,)}


def allowed(caller: Identity, call: Call, here: Identity) -> bool:
    """Whether a caller may make a call to this process.

    >>> allowed(Identity("mt", "gpu"), Call.RELAY, Identity("mt", "gpu", GATEWAY))
    True
    >>> allowed(Identity("mt", "gpu"), Call.RELAY, Identity("mt", "npu", GATEWAY))
    False
    """
    return refusal(caller, call, here) == ""


def check(caller: Identity, call: Call, here: Identity) -> None:
    """`allowed`, or an error that says why not."""
    why = refusal(caller, call, here)
    if why:
        raise NotAllowedError(f"{caller.worker} may not: {call}", where=here.worker, why=why, mend=_mend(call))


def refusal(caller: Identity, call: Call, here: Identity) -> str:
    """Why a caller may not make a call to this process; empty if it may."""
    if caller.run != here.run:
        return f"it is of run {caller.run!r}, and this is {here.run!r}"
    if (caller.role, call) not in ALLOWED:
        return f"its role is {caller.role}"
    if here.role not in _SERVES.get(call, ROLES):
        return f"a {here.role} does not serve that"
    if (caller.role, call) in _OWN_CLUSTER and caller.cluster != here.cluster:
        return f"only those of cluster {here.cluster!r} may"
    return "a process does not call itself" if caller == here and call != Call.HEALTH else ""


def _mend(call: Call) -> str:
    roles = [role for role in ROLES if (role, call) in ALLOWED]
    return f"call as {' or '.join(roles)}: whale-nebula certs issue --role {roles[-1]}"


def table() -> str:
    """The rules as text, a column for each role of a caller."""
    rows = [("", *ROLES), *((call, *("yes" if (role, call) in ALLOWED else "-" for role in ROLES)) for call in Call)]
    return "\n".join(f"{row[0]:<15}" + "".join(f"{cell:<10}" for cell in row[1:]).rstrip() for row in rows)
