"""Start the workers of this host as a placement says, with the addresses of all others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale_nebula.config import Config
from whale_nebula.launch.identity import Identity
from whale_nebula.launch.job import Job, Reader
from whale_nebula.launch.processes import Board, Relay, Shown, Sink, start
from whale_nebula.launch.pulse import ENDING_SECONDS, SILENCE_SECONDS
from whale_nebula.launch.resolve import Placement, cluster_of
from whale_nebula.security.files import Files

RUN = "run"
"""The name of a run whose config names none."""


@dataclass(frozen=True)
class Output:
    """Where the workers' output goes, whether a line of it begins with its worker's name, and who may draw below it."""

    sinks: Mapping[str, Sink] = field(default_factory=lambda: {"out": Sink(1), "err": Sink(2)})
    named: frozenset[str] = frozenset()
    board: Board | None = None

    def reader(self, worker: str, process: subprocess.Popen[bytes], picture: int | None) -> Reader:
        """Hand on what a worker writes and, by the pipe `picture`, draws."""
        relay = Relay(worker, process, self.sinks, dict.fromkeys(self.named, f"[{worker}] "))
        if picture is None or self.board is None:
            return relay
        return Shown(worker, relay, picture, self.board.screen)


def run_name(config: Config) -> str:
    """What the run is called, in certificates too."""
    return config.run or RUN


def seed_of(config: Config) -> int:
    """The seed from which every process starts. Hosts cannot ask each other yet: what all know is the run's name.

    >>> seed_of(Config(seed=7)), seed_of(Config(run="mt")) == seed_of(Config(run="mt"))
    (7, True)
    """
    return zlib.crc32(run_name(config).encode()) if config.seed is None else config.seed


def identities(
    placement: Placement,
    config: Config,
    security: Mapping[str, Files],
    *,
    listen: Mapping[str, str] | None = None,
    path: str | None = None,
    gateways: bool = True,
    everywhere: bool = False,
) -> dict[str, Identity]:
    """What each worker of this host is told, but for what belongs to its process.

    `security` has the files of each of them, or is empty where the config is insecure; `listen` says where one listens
    that does not at its address; `path` is the config's; `everywhere` says that these are all workers of the run.
    """
    return {
        worker: Identity(
            worker=worker,
            cluster=cluster_of(worker),
            peers={name: cluster_of(name) for name in placement.addresses if name != worker},
            addresses={name: each for name, each in placement.addresses.items() if name != worker},
            run_id=run_name(config),
            seed=seed_of(config),
            listen=(listen or placement.addresses)[worker],
            security=security.get(worker),
            insecure=config.security.insecure,
            gateway=gateway_of(config, cluster_of(worker)) if gateways else None,
            patience=config.patience,
            config=None if path is None else os.path.abspath(path),
            everywhere=everywhere,
            device=_device(config, worker),
        )
        for worker in placement.here
    }


def _device(config: Config, worker: str) -> str | None:
    """What the config says of the device of a worker, which is called after its cluster and its place there."""
    cluster, _, number = worker.rpartition("/")
    found = config.clusters.get(cluster)
    listed = found.workers[int(number) : int(number) + 1] if found is not None and number.isdigit() else ()
    return listed[0].device if listed else None


def gateway_of(config: Config, cluster: str) -> str | None:
    """Where a cluster's gateway is, if it has one."""
    found = config.clusters.get(cluster)
    return None if found is None else found.gateway


def start_placed(
    argv: Sequence[str],
    workers: Mapping[str, Identity],
    *,
    output: Output | None = None,
    notice: Callable[[str], None] = lambda text: None,
    silence: float = SILENCE_SECONDS,
    ending: float = ENDING_SECONDS,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Job:
    """Start one process for each of these workers. `argv`, `env` and `cwd` are those of `spawn`."""
    output = output or Output()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    pulses: dict[str, int] = {}
    pictures: dict[str, int] = {}
    terminal = None if output.board is None else output.board.fd
    leash, hold = os.pipe()
    try:
        for worker, identity in workers.items():
            drawn = contextlib.nullcontext() if terminal is None else _pipe_to(worker, pictures)
            with _pipe_to(worker, pulses) as pulse, drawn as picture:
                told = replace(identity, leash=leash, launcher=os.getpid(), pulse=pulse)
                told = replace(told, drawing=picture, terminal=terminal)
                processes[worker] = start(argv, told, env, cwd)
        readers = {each: output.reader(each, process, pictures.pop(each, None)) for each, process in processes.items()}
        return Job(processes, hold, readers, pulses=pulses, silence=silence, ending=ending, notice=notice)
    except BaseException:
        for fd in (hold, *pulses.values(), *pictures.values()):
            os.close(fd)
        for process in processes.values():
            process.kill()
            process.communicate()
        raise
    finally:
        os.close(leash)


@contextlib.contextmanager
def _pipe_to(worker: str, ends: dict[str, int]) -> Iterator[int]:
    """The worker's end of a new pipe, closed here once the worker has it; our end is kept."""
    ends[worker], theirs = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
