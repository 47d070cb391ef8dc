"""The second resolver: `TF_CONFIG`, as TensorFlow's own strategies and many platforms write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whale_nebula.config import Config
from whale_nebula.config.addresses import address
from whale_nebula.config.place import Place
from whale_nebula.launch.resolve.placement import Asked, Declined, Placement, one_worker, own_cluster, with_others

VARIABLE = "TF_CONFIG"
WORKERS = ("chief", "master", "worker")
"""The jobs of TensorFlow that compute, in the order in which they are numbered. Other jobs are clusters of ours."""
_EXAMPLE = f'{VARIABLE}=\'{{"cluster": {{"worker": ["host:7101"]}}, "task": {{"type": "worker", "index": 0}}}}\''
_REFUSED = {"ps": "there are no parameter servers here", "evaluator": "evaluation is part of the script here"}


def from_tf_config(config: Config, environ: Mapping[str, str], asked: Asked) -> Placement | Declined:
    """Jobs that TensorFlow knows are the workers of one cluster; any other job is a cluster by its name.

    >>> text = '{"cluster": {"gpu": ["a:1"], "npu": ["b:1"]}, "task": {"type": "npu", "index": 0}}'
    >>> from_tf_config(Config(), {"TF_CONFIG": text}, Asked())
    Placement(here=('npu/0',), addresses={'gpu/0': 'a:1', 'npu/0': 'b:1'})
    """
    if environ.get(VARIABLE, "").strip() in ("", "{}"):
        return Declined(f"{VARIABLE} is {'empty' if environ.get(VARIABLE) else 'not set'}")
    place = _read(environ[VARIABLE])
    jobs = {job: [address(each) for each in hosts.items()] for job, hosts in place.key("cluster").named().items()}
    job, index = _task(place, jobs)
    names = [job for job in WORKERS if job in jobs]
    if names and set(names) != set(jobs):
        raise place.key("cluster").wrong(
            "jobs of TensorFlow stand beside clusters",
            why=f"{', '.join(names)} would be one cluster, by a name that is not given",
            mend='{"cluster": {"gpu": [...], "npu": [...]}, "task": {"type": "gpu", "index": 0}}',
        )
    if not names:
        own = {f"{job}/{number}": each for number, each in enumerate(jobs[job])}
        others = {f"{name}/{number}": each for name, hosts in jobs.items() for number, each in enumerate(hosts)}
        return Placement((f"{job}/{_asked(place, job, asked, len(own), index)}",), others)
    cluster = own_cluster(config, asked)
    addresses = [each for name in names for each in jobs[name]]
    before = sum(len(jobs[name]) for name in names[: names.index(job)])
    own = {f"{cluster}/{number}": each for number, each in enumerate(addresses)}
    number = one_worker(cluster, asked, len(own), before + index)
    return Placement((f"{cluster}/{number}",), with_others(config, cluster, own))


def _read(text: str) -> Place:
    place = Place(text, source=VARIABLE)
    try:
        value: Any = json.loads(text)
    except ValueError:
        raise place.wrong(f"{VARIABLE} is no JSON", mend=f"mend it, or unset {VARIABLE}") from None
    if not isinstance(value, dict):
        raise place.wrong(f"{VARIABLE} is {value!r:.80}, and no object", mend=_EXAMPLE)
    table = Place(value, source=VARIABLE).table()
    if not table.key("cluster").named():
        raise table.wrong(f"{VARIABLE} names no jobs", mend=f"{_EXAMPLE}, or unset {VARIABLE}")
    for job in table.key("cluster").named():
        if job in _REFUSED:
            raise table.key("cluster").key(job).wrong(
                f"{VARIABLE} has a job {job!r}", why=_REFUSED[job], mend=f"leave {job!r} out, or unset {VARIABLE}"
            )
    return table


def _task(place: Place, jobs: Mapping[str, list[str]]) -> tuple[str, int]:
    task = place.key("task").table(("type", "index", "trial"))
    job = task.key("type").choice(jobs)
    index = task.key("index")
    number = int(index.value) if isinstance(index.value, str) and index.value.isdecimal() else index.value
    most = len(jobs[job]) - 1
    return job, int(Place(number, index.path, index.source).number(least=0, most=most, whole=True))


def _asked(place: Place, job: str, asked: Asked, count: int, index: int) -> int:
    if asked.cluster not in (None, job):
        raise place.key("task").wrong(
            f"--cluster {asked.cluster} is asked for, and {VARIABLE} says {job!r}",
            mend=f"leave one of the two out: unset {VARIABLE}",
        )
    return one_worker(job, asked, count, index)
