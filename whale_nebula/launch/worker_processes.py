"""Start the workers of this host by a placement, with the addresses of all others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whale_nebula.config import Config, load
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError
from whale_nebula.launch import gateways as gateway_processes
from whale_nebula.launch.attach import VARIABLE, Identity
from whale_nebula.launch.heartbeat import ENDING_SECONDS, SILENCE_SECONDS
from whale_nebula.launch.job import Job, LimitEnforcer, Reader
from whale_nebula.launch.placement import Placement, free_ports
from whale_nebula.launch.worker_output import CapturedOutput, Echo, PictureReader, Relay, Sink, TerminalScreen
from whale_nebula.security.files import Files


@dataclass(frozen=True)
class Output:
    """Destination of the workers' output: the `sinks` of standard output ("out") and standard error ("err"), those
    whose lines begin with the worker's name, and the terminal on which workers may draw.
    """

    sinks: Mapping[str, Sink] = field(default_factory=lambda: {"out": Sink(1), "err": Sink(2)})
    labelled_sinks: frozenset[str] = frozenset()
    terminal_screen: TerminalScreen | None = None

    def create_reader(self, worker: str, process: subprocess.Popen[bytes], picture: int | None) -> Reader:
        """A reader that forwards a worker's output and, from the pipe `picture`, its drawings."""
        relay = Relay(worker, process, self.sinks, dict.fromkeys(self.labelled_sinks, f"[{worker}] "))
        if picture is None or self.terminal_screen is None:
            return relay
        return PictureReader(worker, relay, picture, self.terminal_screen.screen)


def derive_seed(config: Config) -> int:
    """The seed that launchers set in every worker: that of the config, otherwise one derived from the run's name, as
    hosts cannot communicate yet.

    >>> derive_seed(Config(seed=7)), derive_seed(Config(run="mt")) == derive_seed(Config(run="mt"))
    (7, True)
    """
    return zlib.crc32(config.run_name.encode()) if config.seed is None else config.seed


def create_identities(
    placement: Placement,
    config: Config,
    security: Mapping[str, Files],
    *,
    listen: Mapping[str, str] | None = None,
    path: str | None = None,
    gateways: bool = True,
    **common_fields: Any,
) -> dict[str, Identity]:
    """The identity of each worker of this host, without the fields that depend on its process.

    `security` has the certificate files of each, or is empty if the config is insecure; `listen` has the addresses of
    those that do not listen at their own; `path` is the config's; `common_fields` are fields that are the same for all.
    """
    return {
        worker: Identity(
            worker=worker,
            cluster=cluster_of(worker),
            peers={name: cluster_of(name) for name in placement.addresses if name != worker},
            addresses={name: each for name, each in placement.addresses.items() if name != worker},
            run_id=config.run_name,
            seed=derive_seed(config),
            listen=(listen or placement.addresses)[worker],
            security=security.get(worker),
            insecure=config.security.insecure,
            gateway=config.gateway_of(cluster_of(worker)) if gateways else None,
            patience=config.patience,
            config=None if path is None else os.path.abspath(path),
            device=_find_device(config, worker),
            **common_fields,
        )
        for worker in placement.here
    }


def _find_device(config: Config, worker: str) -> str | None:
    """The configured device of a worker, by its cluster and its index there."""
    cluster, _, number = worker.rpartition("/")
    found = config.clusters.get(cluster)
    listed = found.workers[int(number) : int(number) + 1] if found is not None and number.isdecimal() else ()
    return listed[0].device if listed else None


def start(
    argv: Sequence[str],
    identity: Identity,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a new process (no fork) in its own process group, so that it can be killed with its children. Files that a
    worker of an account writes are readable by its user only.
    """
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, **(env or {}), VARIABLE: identity.to_json()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=identity.descriptors,
        process_group=0,
        umask=-1 if identity.tenant is None else 0o077,
    )


def start_workers(
    argv: Sequence[str],
    workers: Mapping[str, Identity],
    *,
    output: Output | None = None,
    notice: Callable[[str], None] = lambda text: None,
    silence: float = SILENCE_SECONDS,
    ending: float = ENDING_SECONDS,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    epoch: int = 0,
    start_process: Callable[..., subprocess.Popen[bytes]] | None = None,
    enforcer: LimitEnforcer | None = None,
) -> Job:
    """Start a process for each of these workers. `argv`, `env` and `cwd` are those of `spawn`; `epoch` is the number of
    earlier starts; `start_process` replaces `start`; `notice` is called with a line on each worker that is killed; the
    `enforcer` enforces limits. `silence` and `ending` are the seconds of `HeartbeatMonitor`.
    """
    output = output or Output()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    heartbeat_pipes: dict[str, int] = {}
    pictures: dict[str, int] = {}
    terminal = None if output.terminal_screen is None else output.terminal_screen.fd
    launcher_pipe, held_end = os.pipe()
    try:
        for worker, identity in workers.items():
            drawn = contextlib.nullcontext() if terminal is None else _open_pipe(worker, pictures)
            with _open_pipe(worker, heartbeat_pipes) as heartbeat_pipe, drawn as picture:
                attached = replace(
                    identity, launcher=os.getpid(), epoch=epoch, launcher_pipe=launcher_pipe,
                    heartbeat_pipe=heartbeat_pipe, drawing=picture, terminal=terminal,
                )  # fmt: skip
                processes[worker] = (start_process or start)(argv, attached, env, cwd)
                if enforcer is not None:
                    enforcer.admit(processes[worker].pid)
        readers = {
            each: output.create_reader(each, process, pictures.pop(each, None)) for each, process in processes.items()
        }
        return Job(
            processes, held_end, readers, heartbeat_pipes=heartbeat_pipes, silence=silence, ending=ending,
            notice=notice, enforcer=enforcer,
        )  # fmt: skip
    except BaseException:
        for fd in (held_end, *heartbeat_pipes.values(), *pictures.values()):
            os.close(fd)
        for process in processes.values():
            process.kill()
            process.communicate()
        raise
    finally:
        os.close(launcher_pipe)


@contextlib.contextmanager
def _open_pipe(worker: str, ends: dict[str, int]) -> Iterator[int]:
    """The worker's end of a new pipe, closed here once the worker has inherited it; our end is kept."""
    ends[worker], theirs = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)


@dataclass(frozen=True)
class EchoedOutput(Output):
    """Output that is kept for the job's result, and echoed line by line."""

    echo: Echo | None = None

    def create_reader(self, worker: str, process: subprocess.Popen[bytes], picture: int | None) -> Reader:
        """A reader that retains a worker's output."""
        return CapturedOutput(worker, process, self.echo)


@contextlib.contextmanager
def spawn(
    argv: Sequence[str],
    workers: Mapping[str, str],
    *,
    run_id: str = "local",
    seed: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    echo: Echo | None = None,
    gateways: bool = False,
    silence: float = SILENCE_SECONDS,
) -> Iterator[Job]:
    r"""Start one process per worker of the same script; `workers` gives the cluster of each by its name.

    `argv` is what follows `python` on a command line: a script and its arguments, or `-c` and code. Each process reads
    its identity by `attach()`. `env` is added to this process's environment. `echo` is called with every line of
    output. With `gateways` each cluster has one, and clusters reach each other through them. A worker without a
    heartbeat for `silence` seconds is considered frozen. The certificates are issued for this run only.

    >>> with spawn(["-c", "print('hello')"], {"gpu/0": "gpu", "npu/0": "npu"}) as job:
    ...     result = job.wait(deadline=60)
    >>> result.outcomes["npu/0"].out
    'hello\n'
    """
    if not workers:
        raise ConfigError("a job needs at least one worker", mend='workers={"gpu/0": "gpu", "npu/0": "npu"}')
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(free_ports(len(workers) + gateways * len(set(workers.values()))))
        addresses = (f"127.0.0.1:{port}" for port in ports)
        placement = Placement(tuple(workers), {worker: next(addresses) for worker in workers})
        clusters: dict[str, dict[str, Any]] = {}
        for worker, cluster in workers.items():
            clusters.setdefault(cluster, {"workers": []})["workers"].append(placement.addresses[worker])
        if gateways:
            clusters = {name: {**each, "gateway": next(addresses)} for name, each in clusters.items()}
        config = load({"run": run_id, "clusters": clusters, **({} if seed is None else {"seed": seed})})
        owners = [*workers, *gateway_processes.list_gateway_names(config)]
        security = stack.enter_context(gateway_processes.issue_for_run(config, owners))
        if gateways:
            stack.enter_context(gateway_processes.run_gateways(config, placement, security))
        worker_identities = create_identities(placement, config, security, has_one_launcher=True)
        yield stack.enter_context(
            start_workers(argv, worker_identities, output=EchoedOutput(echo=echo), silence=silence, env=env, cwd=cwd)
        )
