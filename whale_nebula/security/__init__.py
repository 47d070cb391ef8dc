"""Security: identities, certificates, the permissions of each role, and an audit log of decisions.

>>> Identity("mt", "gpu").worker
'gpu/0'
"""

from whale_nebula.security.credentials import Credentials, CurrentCredentials, Prover
from whale_nebula.security.files import Files, Peer
from whale_nebula.security.identity import GATEWAY, OPERATOR, WORKER, Identity
from whale_nebula.security.issue import issue_ephemeral
from whale_nebula.security.trust import Trust, check_live

__all__ = [
    "GATEWAY",
    "OPERATOR",
    "WORKER",
    "Credentials",
    "CurrentCredentials",
    "Files",
    "Identity",
    "Peer",
    "Prover",
    "Trust",
    "check_live",
    "issue_ephemeral",
]
