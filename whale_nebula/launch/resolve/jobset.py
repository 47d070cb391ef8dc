"""The fourth resolver: a pod of a Kubernetes JobSet. Its manifest hands the pod's labels on as variables.

A pod's name in the network is made of them: `<jobset>-<replicated job>-<job>-<pod>.<subdomain>`.
"""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.config import Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.placement import Asked, Declined, Placement, one_worker, own_cluster, with_others

_NUMBERS = ("JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX", "JOBSET_REPLICAS", "JOBSET_PODS")
NEEDED = ("JOBSET_NAME", "JOBSET_REPLICATED_JOB", "JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX")


def from_jobset(config: Config, environ: Mapping[str, str], asked: Asked) -> Placement | Declined:
    """The pods of one replicated job are the workers of this cluster.

    `JOBSET_REPLICAS` says how many jobs it has, `JOBSET_PODS` how many pods each of them; both are one unless given.

    >>> environ = {"JOBSET_NAME": "a", "JOBSET_REPLICATED_JOB": "w", "JOBSET_JOB_INDEX": "0", "JOBSET_PODS": "2"}
    >>> from_jobset(Config(), {**environ, "JOB_COMPLETION_INDEX": "1"}, Asked(cluster="gpu"))
    Placement(here=('gpu/1',), addresses={'gpu/0': 'a-w-0-0.a:7101', 'gpu/1': 'a-w-0-1.a:7101'})
    """
    missing = [name for name in NEEDED if not environ.get(name)]
    if "JOBSET_NAME" in missing:
        return Declined("JOBSET_NAME is not set")
    if missing:
        raise ConfigError(
            f"JOBSET_NAME is set, and {missing[0]} is not",
            why="the manifest hands the labels of a pod on as variables, all of them",
            mend="take the block 'env' of deploy/jobset/gpu.yaml",
        )
    cluster = own_cluster(config, asked)
    name, job = environ["JOBSET_NAME"], environ["JOBSET_REPLICATED_JOB"]
    jobs, pods = _count(environ, "JOBSET_REPLICAS", 1), _count(environ, "JOBSET_PODS", 1)
    subdomain = environ.get("JOBSET_SUBDOMAIN") or name
    own = {
        f"{cluster}/{index * pods + pod}": f"{name}-{job}-{index}-{pod}.{subdomain}:{asked.port}"
        for index in range(jobs)
        for pod in range(pods)
    }
    at = _count(environ, "JOBSET_JOB_INDEX") * pods + _count(environ, "JOB_COMPLETION_INDEX")
    said = {name: environ.get(name) for name in _NUMBERS if environ.get(name)}
    number = one_worker(cluster, asked, len(own), at, said=", ".join(f"{name}={text}" for name, text in said.items()))
    return Placement((f"{cluster}/{number}",), with_others(config, cluster, own))


def _count(environ: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    text = environ.get(name) or str(otherwise)
    if not text.isdecimal() or int(text) > 100_000:
        raise ConfigError(f"{name}={text!r} is no number of Kubernetes'", where=name, mend=f"{name}={otherwise}")
    return int(text)
