"""The placement of a run's workers: the result of a resolver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.config import Config
from whale_nebula.errors import ConfigError
from whale_nebula.errors.suggestions import did_you_mean

PORT = 7101
"""Where workers listen unless something says otherwise; the next one of the same host at the next."""
ANY = "127.0.0.1:0"
"""An address of this machine whose port is still to be chosen."""


def nowhere(host: str) -> bool:
    """No host is this one."""
    return False


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for; `local` says whether a host is this one."""

    cluster: str | None = None
    worker: int | None = None
    port: int = PORT
    local: Callable[[str], bool] = nowhere


@dataclass(frozen=True)
class Placement:
    """The workers that start on this host, and the addresses of all workers of the run."""

    here: tuple[str, ...]
    addresses: Mapping[str, str]

    def __post_init__(self) -> None:
        for said in same_address(self.addresses):
            why = "each worker listens at a port of its own"
            raise ConfigError(said, why=why, mend="give one of them another port")

    @property
    def clusters(self) -> tuple[str, ...]:
        """The clusters of the run, in order."""
        return tuple(dict.fromkeys(map(cluster_of, self.addresses)))


def same_address(addresses: Mapping[str, str]) -> Iterator[str]:
    """Each worker that would listen where another one does, in words. A port that is still to be chosen is nobody's.

    >>> list(same_address({"gpu/0": "a:7101", "gpu/1": ANY, "npu/0": "a:7101", "npu/1": ANY}))
    ['gpu/0 and npu/0 have the same address, a:7101']
    """
    taken: dict[str, str] = {}
    for worker, address in addresses.items():
        other = taken.setdefault(address, worker)
        if other != worker and address != ANY:
            yield f"{other} and {worker} have the same address, {address}"


class Declined(NamedTuple):
    """A resolver has nothing to say, and why."""

    why: str


Resolver = Callable[[Config, Mapping[str, str], Asked], Placement | Declined]


def cluster_of(worker: str) -> str:
    """The cluster of a worker.

    >>> cluster_of("gpu/0")
    'gpu'
    """
    return worker.rpartition("/")[0]


def host_of(address: str) -> str:
    """The host in an address.

    >>> host_of("10.0.0.1:7101"), host_of("[::1]:7101")
    ('10.0.0.1', '::1')
    """
    return address.rpartition(":")[0].strip("[]")


def own_cluster(config: Config, asked: Asked) -> str:
    """The cluster that is meant: the one that is asked for, or the only one."""
    names = list(config.clusters)
    if asked.cluster is not None:
        if names and asked.cluster not in names:
            raise ConfigError(
                f"the config has no cluster {asked.cluster!r}", mend=f"--cluster: {did_you_mean(asked.cluster, names)}"
            )
        return asked.cluster
    if len(names) > 1:
        raise ConfigError(
            "which cluster is this host in?",
            why=f"the config has {', '.join(names)}",
            mend=f"--cluster {names[0]}; or --all, to start all of them on this machine",
        )
    return names[0] if names else "local"


def one_worker(cluster: str, asked: Asked, count: int, otherwise: int | None, *, said: str = "") -> int:
    """Which of a cluster's workers this is: the one that is asked for, else what the environment says, by the
    variables in `said`.
    """
    number = asked.worker if asked.worker is not None else otherwise
    if number is None or not 0 <= number < count:
        what = "which worker is this?" if number is None else f"cluster {cluster!r} has no worker {number}"
        choice = "--worker 0" if count == 1 else f"--worker 0 ... --worker {count - 1}"
        told = said if asked.worker is None else ""
        mend = f"set them as the platform does, or {choice}" if told else choice
        raise ConfigError(what, where=told, why=f"cluster {cluster!r} has {count}", mend=mend)
    return number


def with_others(config: Config, cluster: str, own: Mapping[str, str]) -> dict[str, str]:
    """The workers of a cluster whose addresses were found, and those of all others, whose addresses the config has."""
    found: dict[str, str] = {}
    for each in config.clusters.values():
        if each.name == cluster:
            found |= own
        elif not each.workers:
            raise ConfigError(
                f"nothing says where the workers of cluster {each.name!r} are",
                why=f"this host is in {cluster!r}, and must know them",
                mend=f'clusters: {{{each.name}: {{workers: ["host:{PORT}"]}}}}',
            )
        else:
            found |= {f"{each.name}/{number}": worker.address for number, worker in enumerate(each.workers)}
    return found or dict(own)
