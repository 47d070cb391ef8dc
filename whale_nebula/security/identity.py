"""The identity of a process: run, cluster, role and number, as one URI name in a certificate.

The syntax of names is strict, because they come from peers: no name is used as a path before it is validated here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from whale_nebula.errors import IdentityError, NotAllowedError

WORKER, GATEWAY, OPERATOR, AUDITOR = ROLES = ("worker", "gateway", "operator", "auditor")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}"
_INDEX = r"0|[1-9][0-9]{0,4}"
_URI = re.compile(rf"nebula://({_NAME})/({_NAME})/({'|'.join(ROLES)})/({_INDEX})")
_RUN = re.compile(rf"nebula://({_NAME})")
_CLUSTER = re.compile(rf"nebula://({_NAME})/({_NAME})")
_WORKER = re.compile(rf"({_NAME})/(?:({_INDEX})|({GATEWAY})|({OPERATOR}|{AUDITOR})-({_INDEX}))")


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """The identity of a process in a run; a cluster has one gateway, with index 0.

    >>> one = Identity("mt", "gpu", "worker", 0)
    >>> one.uri, one.worker, one.stem
    ('nebula://mt/gpu/worker/0', 'gpu/0', 'gpu-worker-0')
    >>> Identity.parse("nebula://mt/gpu/gateway/0").worker
    'gpu/gateway'
    """

    run: str
    cluster: str
    role: str = WORKER
    index: int = 0

    def __post_init__(self) -> None:
        check_name(self.run, "run")
        check_name(self.cluster, "cluster")
        if _URI.fullmatch(self.uri) is None or (self.role == GATEWAY and self.index):
            raise IdentityError(
                f"{self.uri!r} is not an identity",
                why=f"the role must be one of {', '.join(ROLES)}, the index a number, and 0 for a gateway",
                mend="nebula://<run>/<cluster>/worker/<index>",
            )

    @property
    def uri(self) -> str:
        """The name in the certificate."""
        return f"nebula://{self.run}/{self.cluster}/{self.role}/{self.index}"

    @property
    def worker(self) -> str:
        """The name within a run: "gpu/0", "gpu/gateway" or "gpu/operator-0"."""
        short = {WORKER: str(self.index), GATEWAY: GATEWAY}
        return f"{self.cluster}/{short.get(self.role, f'{self.role}-{self.index}')}"

    @property
    def dns(self) -> str:
        """The same as a host name, for TLS libraries that compare only those.

        >>> Identity("mt", "gpu").dns
        'd67186d6cb6874b399fa6e5213d5b47a.nebula'
        """
        return f"{hashlib.sha256(self.uri.encode()).hexdigest()[:32]}.nebula"

    @property
    def stem(self) -> str:
        """The stem of its files' names. Parsed from the right it is unambiguous."""
        return f"{self.cluster}-{self.role}-{self.index}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Parse the identity in a certificate.

        >>> Identity.parse("nebula://mt/../worker/0")
        Traceback (most recent call last):
        ...
        whale_nebula.errors.IdentityError: NB-420 'nebula://mt/../worker/0' is not an identity
          mend: nebula://<run>/<cluster>/worker/<index>
        """
        match = _URI.fullmatch(uri)
        if match is None:
            raise IdentityError(f"{uri[:200]!r} is not an identity", mend="nebula://<run>/<cluster>/worker/<index>")
        return cls(match[1], match[2], match[3], int(match[4]))

    @classmethod
    def of_worker(cls, run: str, worker: str) -> Identity:
        """The identity of the worker that a run calls "gpu/0".

        >>> Identity.of_worker("mt", "gpu/gateway").uri
        'nebula://mt/gpu/gateway/0'
        """
        match = _WORKER.fullmatch(worker)
        if match is None:
            raise IdentityError(f"{worker[:200]!r} is not the name of a worker", mend='"gpu/0", or "gpu/gateway"')
        cluster, index, gateway, other, number = match.groups()
        return cls(run, cluster, gateway or other or WORKER, int(index or number or 0))

    def __str__(self) -> str:
        return self.uri


def check_name(text: str, what: str) -> str:
    """Validate the name of a run or a cluster for use in a certificate."""
    if re.fullmatch(_NAME, text) is None:
        raise IdentityError(
            f"{text[:200]!r} is not a valid {what} name in a certificate",
            why="a name has at most 48 letters, digits, '.', '_' and '-', and begins with a letter or digit",
            mend=f"{what}: {re.sub('[^A-Za-z0-9]+', '-', text).strip('-')[:48] or what}",
        )
    return text


def command_options(identity: Identity) -> str:
    """The command-line options that name an identity.

    >>> command_options(Identity("mt", "gpu", "worker", 1)), command_options(Identity("mt", "gpu", "gateway"))
    ('--cluster gpu --index 1', '--cluster gpu --role gateway')
    """
    role = f" --role {identity.role}" * (identity.role != WORKER)
    return f"--cluster {identity.cluster}{role}" + f" --index {identity.index}" * (identity.index > 0)


def run_uri(run: str) -> str:
    """The name of a run's authority."""
    return f"nebula://{check_name(run, 'run')}"


def cluster_uri(run: str, cluster: str) -> str:
    """The name of a cluster of a run in the certificate of an authority bound to that cluster."""
    return f"{run_uri(run)}/{check_name(cluster, 'cluster')}"


def find_cluster(uri: str) -> str | None:
    """The cluster of a URI; None if it is not the name of a cluster.

    >>> find_cluster("nebula://mt/gpu"), find_cluster("nebula://mt")
    ('gpu', None)
    """
    match = _CLUSTER.fullmatch(uri)
    return match[2] if match else None


def find_run(uri: str) -> str | None:
    """The run whose authority has this name; None if it is not the name of an authority."""
    match = _RUN.fullmatch(uri)
    return match[1] if match else None


class Call(StrEnum):
    """A request that one process can make to another."""

    OPEN_PAIR = "open pair"
    """Open a conversation with a worker, as a worker."""
    RELAY = "relay"
    """Have frames forwarded by a gateway: requested by its workers, and by other gateways."""
    HEALTH = "health"
    AUDIT_HEADS = "audit heads"
    """Store signed heads of an audit log at a peer."""
    REPORT = "audit report"
    """Read who has accessed an owner's data, at the owner's service."""


PERMISSIONS = frozenset(
    {
        (WORKER, Call.OPEN_PAIR),
        (WORKER, Call.RELAY),
        (WORKER, Call.HEALTH),
        (GATEWAY, Call.RELAY),
        (GATEWAY, Call.HEALTH),
        (GATEWAY, Call.AUDIT_HEADS),
        (OPERATOR, Call.HEALTH),
        (AUDITOR, Call.REPORT),
    }
)
_OWN_CLUSTER_CALLS = frozenset({(WORKER, Call.RELAY), (AUDITOR, Call.REPORT)})
"""Calls that are allowed only within one cluster."""
_SERVED_CALLS = {
    Call.OPEN_PAIR: (WORKER,),
    Call.RELAY: (GATEWAY,),
    Call.HEALTH: (WORKER, GATEWAY, OPERATOR),
    Call.AUDIT_HEADS: (GATEWAY,),
    Call.REPORT: (OPERATOR,),
}


def check_call(caller: Identity, call: Call, here: Identity) -> None:
    """Refuse a call that the caller may not make to this process."""
    if why := explain_refusal(caller, call, here):
        roles = [role for role in ROLES if (role, call) in PERMISSIONS]
        mend = f"call as {' or '.join(roles)}: whale-nebula certs issue --role {roles[-1]}"
        raise NotAllowedError(f"{caller.worker} is not allowed to call: {call}", where=here.worker, why=why, mend=mend)


def explain_refusal(caller: Identity, call: Call, here: Identity) -> str:
    """The reason why a caller may not make a call to this process; empty if it may.

    >>> worker = Identity("mt", "gpu")
    >>> [explain_refusal(worker, Call.RELAY, Identity("mt", cluster, GATEWAY)) for cluster in ("gpu", "npu")]
    ['', "only processes of cluster 'npu' may call it"]
    """
    if caller.run != here.run:
        return f"the caller belongs to run {caller.run!r}, and this process to {here.run!r}"
    if (caller.role, call) not in PERMISSIONS:
        return f"the role {caller.role} does not permit this call"
    if here.role not in _SERVED_CALLS[call]:
        return f"a {here.role} does not serve this call"
    if (caller.role, call) in _OWN_CLUSTER_CALLS and caller.cluster != here.cluster:
        return f"only processes of cluster {here.cluster!r} may call it"
    return "a process cannot call itself" if caller == here and call != Call.HEALTH else ""
