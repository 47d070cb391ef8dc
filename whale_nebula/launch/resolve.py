"""Resolve the placement of a run's workers: a chain of resolvers, of which the first that recognises its environment
decides.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from whale_nebula.config import Cluster, Config
from whale_nebula.config.place import Place, read_address
from whale_nebula.errors import ConfigError
from whale_nebula.launch.placement import (
    ANY,
    Declined,
    Placement,
    PlacementRequest,
    Resolver,
    add_other_clusters,
    choose_cluster,
    host_of,
    select_worker,
)


def from_localhost(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Placement | Declined:
    """One worker of one cluster on this machine.

    >>> from_localhost(Config(), {}, PlacementRequest())
    Placement(here=('local/0',), addresses={'local/0': '127.0.0.1:0'})
    """
    if len(config.clusters) > 1:
        return Declined("the config has several clusters; --all starts them all on this machine")
    cluster = choose_cluster(config, request)
    worker = f"{cluster}/{select_worker(cluster, request, 1, 0)}"
    return Placement((worker,), {worker: ANY})


_NUMBERS = ("JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX", "JOBSET_REPLICAS", "JOBSET_PODS")
JOBSET_VARIABLES = ("JOBSET_NAME", "JOBSET_REPLICATED_JOB", "JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX")


def from_jobset(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Placement | Declined:
    """The pods of one replicated job are the workers of this cluster.

    `JOBSET_REPLICAS` is its number of jobs, `JOBSET_PODS` the number of pods of each; both default to 1.

    >>> environ = {"JOBSET_NAME": "a", "JOBSET_REPLICATED_JOB": "w", "JOBSET_JOB_INDEX": "0", "JOBSET_PODS": "2"}
    >>> from_jobset(Config(), {**environ, "JOB_COMPLETION_INDEX": "1"}, PlacementRequest(cluster="gpu"))
    Placement(here=('gpu/1',), addresses={'gpu/0': 'a-w-0-0.a:7101', 'gpu/1': 'a-w-0-1.a:7101'})
    """
    missing = [name for name in JOBSET_VARIABLES if not environ.get(name)]
    if "JOBSET_NAME" in missing:
        return Declined("JOBSET_NAME is not set")
    if missing:
        why = "the manifest must pass all of these labels of the pod as environment variables"
        mend = "copy the block 'env' of deploy/jobset/gpu.yaml"
        raise ConfigError(f"JOBSET_NAME is set, but {missing[0]} is not", why=why, mend=mend)
    cluster = choose_cluster(config, request)
    name, job = environ["JOBSET_NAME"], environ["JOBSET_REPLICATED_JOB"]
    jobs, pods = _read_index(environ, "JOBSET_REPLICAS", 1), _read_index(environ, "JOBSET_PODS", 1)
    subdomain = environ.get("JOBSET_SUBDOMAIN") or name
    own = {
        f"{cluster}/{index * pods + pod}": f"{name}-{job}-{index}-{pod}.{subdomain}:{request.port}"
        for index in range(jobs)
        for pod in range(pods)
    }
    at = _read_index(environ, "JOBSET_JOB_INDEX") * pods + _read_index(environ, "JOB_COMPLETION_INDEX")
    variables = ", ".join(f"{name}={environ[name]}" for name in _NUMBERS if environ.get(name))
    number = select_worker(cluster, request, len(own), at, variables=variables)
    return Placement((f"{cluster}/{number}",), add_other_clusters(config, cluster, own))


def _read_index(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal() or int(text) > 100_000:
        raise ConfigError(f"{name}={text!r} is not a Kubernetes index", where=name, mend=f"{name}={default}")
    return int(text)


def from_config(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Placement | Declined:
    """The workers that the config lists: of this cluster the requested one starts here, by default those whose
    addresses belong to this host.

    >>> from whale_nebula.config import load
    >>> config = load({"clusters": {"gpu": {"workers": ["a:7101"]}, "npu": {"workers": ["b:7101"]}}})
    >>> from_config(config, {}, PlacementRequest(cluster="npu"))
    Placement(here=('npu/0',), addresses={'gpu/0': 'a:7101', 'npu/0': 'b:7101'})
    """
    if not any(cluster.workers for cluster in config.clusters.values()):
        return Declined("the config lists no workers" if config.clusters else "no config is given")
    name = choose_cluster(config, request)
    cluster = config.clusters[name]
    if not cluster.workers:
        return Declined(f"the config lists no workers of {name!r}")
    own = {f"{name}/{number}": worker.address for number, worker in enumerate(cluster.workers)}
    here = tuple(f"{name}/{number}" for number in _list_local(cluster, request))
    return Placement(here, add_other_clusters(config, name, own))


def _list_local(cluster: Cluster, request: PlacementRequest) -> list[int]:
    count = len(cluster.workers)
    if request.worker is not None or count == 1:
        return [select_worker(cluster.name, request, count, 0)]
    found = [number for number, worker in enumerate(cluster.workers) if request.is_local(host_of(worker.address))]
    if not found:
        why = f"none of {', '.join(worker.address for worker in cluster.workers)} is an address of this host"
        mend = f"--worker 0 ... --worker {count - 1}"
        raise ConfigError(f"cannot determine which worker of {cluster.name!r} runs on this host", why=why, mend=mend)
    return found


VARIABLE = "TF_CONFIG"
WORKERS = ("chief", "master", "worker")
"""The jobs of TensorFlow that compute, in the order in which they are numbered. Other job names are our clusters."""
_EXAMPLE = f'{VARIABLE}=\'{{"cluster": {{"worker": ["host:7101"]}}, "task": {{"type": "worker", "index": 0}}}}\''
_REFUSED = {"ps": "parameter servers are not supported", "evaluator": "evaluation is part of the training script"}


def from_tf_config(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Placement | Declined:
    """TensorFlow's own job names are the workers of one cluster; any other job is a cluster of that name.

    >>> text = '{"cluster": {"gpu": ["a:1"], "npu": ["b:1"]}, "task": {"type": "npu", "index": 0}}'
    >>> from_tf_config(Config(), {"TF_CONFIG": text}, PlacementRequest())
    Placement(here=('npu/0',), addresses={'gpu/0': 'a:1', 'npu/0': 'b:1'})
    """
    if environ.get(VARIABLE, "").strip() in ("", "{}"):
        return Declined(f"{VARIABLE} is {'empty' if environ.get(VARIABLE) else 'not set'}")
    place = _parse_tf_config(environ[VARIABLE])
    jobs = {
        job: [read_address(each) for each in hosts.read_items()]
        for job, hosts in place.get("cluster").read_entries().items()
    }
    job, index = _read_task(place, jobs)
    names = [job for job in WORKERS if job in jobs]
    if names and set(names) != set(jobs):
        why = f"{', '.join(names)} would form one cluster, which has no name here"
        mend = '{"cluster": {"gpu": [...], "npu": [...]}, "task": {"type": "gpu", "index": 0}}'
        raise place.get("cluster").make_error("TensorFlow jobs and clusters are mixed", why=why, mend=mend)
    if not names:
        if request.cluster not in (None, job):
            raise place.get("task").make_error(
                f"--cluster {request.cluster} contradicts {VARIABLE}, which has {job!r}",
                mend=f"remove --cluster, or unset {VARIABLE}",
            )
        everyone = {f"{name}/{number}": each for name, hosts in jobs.items() for number, each in enumerate(hosts)}
        return Placement((f"{job}/{select_worker(job, request, len(jobs[job]), index)}",), everyone)
    cluster = choose_cluster(config, request)
    addresses = [each for name in names for each in jobs[name]]
    before = sum(len(jobs[name]) for name in names[: names.index(job)])
    own = {f"{cluster}/{number}": each for number, each in enumerate(addresses)}
    number = select_worker(cluster, request, len(own), before + index)
    return Placement((f"{cluster}/{number}",), add_other_clusters(config, cluster, own))


def _parse_tf_config(text: str) -> Place:
    place = Place(text, source=VARIABLE)
    try:
        value: Any = json.loads(text)
    except ValueError:
        raise place.make_error(f"{VARIABLE} is not JSON", mend=f"fix it, or unset {VARIABLE}") from None
    if not isinstance(value, dict):
        raise place.make_error(f"{VARIABLE} is {value!r:.80}, not an object", mend=_EXAMPLE)
    table = Place(value, source=VARIABLE).read_table()
    if not table.get("cluster").read_entries():
        raise table.make_error(f"{VARIABLE} names no jobs", mend=f"{_EXAMPLE}, or unset {VARIABLE}")
    for job, hosts in table.get("cluster").read_entries().items():
        if job in _REFUSED:
            mend = f"remove {job!r}, or unset {VARIABLE}"
            raise hosts.make_error(f"{VARIABLE} has a job {job!r}", why=_REFUSED[job], mend=mend)
    return table


def _read_task(place: Place, jobs: Mapping[str, list[str]]) -> tuple[str, int]:
    task = place.get("task").read_table(("type", "index", "trial"))
    job = task.get("type").read_choice(jobs)
    index = task.get("index")
    number = int(index.value) if isinstance(index.value, str) and index.value.isdecimal() else index.value
    most = len(jobs[job]) - 1
    return job, int(Place(number, index.path, index.source).read_number(least=0, most=most, integer=True))


_MOST = 100_000
_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_node_list(text: str) -> list[str]:
    """The names of a node list, in order.

    >>> expand_node_list("gpu[01-03,07]"), expand_node_list("a,b[1-2]c[0,5]")
    (['gpu01', 'gpu02', 'gpu03', 'gpu07'], ['a', 'b1c0', 'b1c5', 'b2c0', 'b2c5'])
    """
    parts = _PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise _slurm_error(text)
    found: list[str] = []
    for part in parts:
        found += itertools.islice(_expand_nodes(text, part), _MOST + 1 - len(found))
        if len(found) > _MOST:
            raise _slurm_error(text)
    return found


def _expand_nodes(text: str, part: str) -> Iterator[str]:
    pieces = _BRACKETS.split(part)
    fixed, ranges = pieces[::2], [_expand_range(text, each) for each in pieces[1::2]]
    for numbers in itertools.product(*ranges):
        yield "".join(a + b for a, b in itertools.zip_longest(fixed, numbers, fillvalue=""))


def _expand_range(text: str, ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low or high - low >= _MOST:
            raise _slurm_error(text)
        found += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return found


def parse_task_counts(text: str) -> list[int]:
    """The number of tasks of each node.

    >>> parse_task_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for each in text.split(","):
        match = _TASKS.fullmatch(each)
        if match is None or int(match[2] or 1) > _MOST:
            raise _slurm_error(text, "2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm_error(text: str, example: str = "gpu[01-04,07]") -> ConfigError:
    why = f"the expected form is {example}"
    mend = "list the workers in the config: --config clusters.yaml --cluster gpu --worker 0"
    return ConfigError(f"cannot parse Slurm's {text[:80]!r}", why=why, mend=mend)


def from_slurm(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Placement | Declined:
    """The tasks of a step are the workers of this cluster, in their order.

    >>> environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> from_slurm(Config(), {**environ, "SLURM_PROCID": "1"}, PlacementRequest(cluster="gpu"))
    Placement(here=('gpu/1',), addresses={'gpu/0': 'n1:7101', 'gpu/1': 'n1:7102', 'gpu/2': 'n2:7101'})
    """
    if not environ.get("SLURM_JOB_ID"):
        return Declined("SLURM_JOB_ID is not set")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return Declined("SLURM_JOB_NODELIST is not set")
    cluster = choose_cluster(config, request)
    addresses = [
        f"{node}:{request.port + number}"
        for node, count in zip(*_read_nodes(listed, environ), strict=True)
        for number in range(count)
    ]
    if "SLURM_STEP_NODELIST" not in environ and len(addresses) > 1 and request.worker is None:
        why = "a batch script runs on its first node only"
        mend = "srun whale-nebula run ..."
        raise ConfigError(f"this process is not one of the job's {len(addresses)} tasks", why=why, mend=mend)
    own = {f"{cluster}/{number}": each for number, each in enumerate(addresses)}
    task, variables = environ.get("SLURM_PROCID", "0"), f"SLURM_PROCID={environ.get('SLURM_PROCID', '')}"
    number = select_worker(cluster, request, len(own), int(task) if task.isdecimal() else None, variables=variables)
    return Placement((f"{cluster}/{number}",), add_other_clusters(config, cluster, own))


def _read_nodes(listed: str, environ: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """The nodes with their numbers of tasks, by default 1."""
    names = expand_node_list(listed)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    counts = parse_task_counts(text) if text else [1] * len(names)
    if len(counts) != len(names):
        what = f"Slurm lists {len(names)} nodes, but tasks for {len(counts)}"
        mend = "list the workers in the config: --config clusters.yaml --cluster gpu --worker 0"
        raise ConfigError(what, where=f"{listed}, {text}", mend=mend)
    return names, counts


CHAIN: Mapping[str, Resolver] = {
    "config": from_config,
    "TF_CONFIG": from_tf_config,
    "Slurm": from_slurm,
    "Kubernetes JobSet": from_jobset,
    "localhost": from_localhost,
}


class Resolved(NamedTuple):
    """A placement, the resolver that found it, and the reasons of the resolvers that did not."""

    placement: Placement
    source: str
    declined: Mapping[str, str]

    def explain(self) -> str:
        """A line on each resolver that was tried, and whether it has found the placement.

        >>> print(resolve(Config(), {}, PlacementRequest()).explain())
        config: no, no config is given
        TF_CONFIG: no, TF_CONFIG is not set
        Slurm: no, SLURM_JOB_ID is not set
        Kubernetes JobSet: no, JOBSET_NAME is not set
        localhost: yes, it provides the addresses of the workers
        """
        lines = [f"{name}: no, {why}" for name, why in self.declined.items()]
        return "\n".join([*lines, f"{self.source}: yes, it provides the addresses of the workers"])


def resolve(config: Config, environ: Mapping[str, str], request: PlacementRequest) -> Resolved:
    """Try all resolvers until one recognises the environment."""
    declined: dict[str, str] = {}
    for name, resolver in CHAIN.items():
        found = resolver(config, environ, request)
        if not isinstance(found, Declined):
            return Resolved(found, name, declined)
        declined[name] = found.why
    raise ConfigError(
        "cannot determine the addresses of the workers",
        why="\n".join(f"{name}: {why}" for name, why in declined.items()),
        mend='clusters: {gpu: {workers: ["10.77.0.1:7101"]}, npu: {workers: ["10.77.0.2:7101"]}}',
    )
