"""Resources of a run on this host: temporary folders, credentials of a secured run, and gateway processes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from whale_nebula.config import Config
from whale_nebula.config.schema import Restarts, cluster_of
from whale_nebula.errors import AccountError, ConfigError, TransportError
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.placement import ANY, Placement, assign_ports, find_listen_addresses, host_of
from whale_nebula.security import Credentials, Files, Identity, issue_ephemeral
from whale_nebula.security.identity import check_name
from whale_nebula.security.tenant import Tenant

PREFIX = "whale-nebula-"
_LOCK = "in-use"


@contextlib.contextmanager
def make_private_folder(home: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder in `home`, by default the folder for temporary files, that only this user can enter; it is removed
    at the end. The folders of killed runs there are removed first.

    >>> with make_private_folder() as folder:
    ...     sorted(path.name for path in folder.iterdir())
    ['in-use']
    >>> folder.exists()
    False
    """
    place = Path(tempfile.gettempdir() if home is None else home)
    remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = os.open(folder / f".{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f".{_LOCK}", folder / _LOCK)  # so a file of this name is locked while this process runs
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


MEMORY = Path("/dev/shm")  # noqa: S108 - a folder is made in it that no other user may read


@contextlib.contextmanager
def open_memory_folder(home: Path = MEMORY) -> Iterator[str | None]:
    """A folder in an in-memory file system, which exists while the launcher runs and so outlives workers. None if this
    host has no such file system.
    """
    if not os.access(home, os.W_OK):
        yield None
        return
    with make_private_folder(home) as folder:
        yield str(folder)


def remove_abandoned(home: Path) -> None:
    """Remove the folders of this user's runs that have ended."""
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def configured_files(config: Config, workers: Iterable[str], path: str | None) -> dict[str, Files]:
    """The certificate files in the config for each worker, or the default ones next to it; none if it is insecure."""
    if config.security.insecure:
        return {}
    run, base = config.run_name, find_config_folder(path)
    return {worker: Files.from_config(config.security, Identity.of_worker(run, worker), base) for worker in workers}


def find_config_folder(path: str | None) -> Path:
    """The folder of a config's file; the current one if it has none."""
    return Path.cwd() if path is None else Path(os.path.abspath(path)).parent


def check_files(files: Mapping[str, Files], run: str) -> Tenant | None:
    """Validate all credentials and their owners before anything is started; returns the account that they name."""
    tenants: dict[Tenant | None, str] = {}
    for worker, each in files.items():
        credentials = Credentials.load(each)
        credentials.check_now()
        credentials.check_identity(Identity.of_worker(run, worker))
        tenants.setdefault(Tenant.from_certificate(credentials.peer), worker)
    if len(tenants) > 1:
        (one, first), (other, second), *_ = tenants.items()
        if one is not None and other is not None and one.mark == other.mark:
            why, mend = "the owner has changed its limits in between", "run whale-nebula login for all of them"
        else:
            why = f"{first} belongs to {one or 'no account'}, and {second} to {other or 'no account'}"
            mend = f"start each one separately: --worker {first.rpartition('/')[2]}"
        raise AccountError("the workers of one start belong to different accounts", why=why, mend=mend)
    return next(iter(tenants), None)


def choose_listen_addresses(config: Config, placement: Placement, report: Callable[[str], None]) -> dict[str, str]:
    """The addresses at which workers of this host listen. Only secured workers may listen on more interfaces than the
    config names.
    """
    own = config.clusters.get(cluster_of(placement.here[0]))
    found = find_listen_addresses(placement, is_configured=own is not None and bool(own.workers))
    for worker, listen in found.items():
        address = placement.addresses[worker]
        if listen != address and config.security.insecure:
            raise ConfigError(
                f"{address} is not an address of this host, so worker {worker} cannot listen there",
                why="it would listen on all interfaces, and with insecure: true anyone could connect",
                mend="start it on its own host, or use certificates: remove security.insecure",
            )
        if listen != address:
            report(f"{address} is not an address of this host: worker {worker} listens at {listen}")
    return found


def check_names(config: Config, workers: Iterable[str]) -> None:
    """Check that certificates can hold the names of the run and of its clusters."""
    if not config.security.insecure:
        check_name(config.run_name, "run")
        for cluster in dict.fromkeys(map(cluster_of, workers)):
            check_name(cluster, "cluster")


@contextlib.contextmanager
def issue_for_run(config: Config, workers: Iterable[str]) -> Iterator[dict[str, Files]]:
    """Create a temporary authority and a certificate for each worker, in a folder that only this user can read and that
    is deleted at the end. The authority's key is never written.
    """
    if config.security.insecure:
        yield {}
        return
    with make_private_folder() as folder:
        yield issue_ephemeral(config.run_name, workers, folder)


_START_SECONDS = 30.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_MOST_WAIT_SECONDS = 8.0  # workers retry a gateway that refuses connections for `gateway_grace`, 30 s
_COMMAND = (sys.executable, "-m", "whale_nebula.cli.main", "gateway", "--stdin")


def list_gateway_names(config: Config) -> list[str]:
    """The names of a config's gateways."""
    return [f"{cluster.name}/gateway" for cluster in config.clusters.values() if cluster.gateway is not None]


def check_gateways(config: Config, cluster: str) -> None:
    """Refuse a run in which a cluster without a gateway meets one with a gateway, which would reject its workers."""
    own = config.clusters.get(cluster)
    others = [each.name for each in config.clusters.values() if each.gateway is not None]
    if own is not None and own.gateway is None and others:
        raise ConfigError(
            f"cluster {cluster!r} has no gateway, but {' and '.join(map(repr, others))} "
            f"{'has' if len(others) == 1 else 'have'} one",
            why="all clusters need a gateway, or none: workers behind a gateway can be reached only through gateways",
            mend=f'clusters: {{{cluster}: {{gateway: "10.77.0.1:7100"}}}}; or remove "gateway" from the others',
        )


def place_gateways(config: Config, is_local: Callable[[str], bool]) -> Config:
    """The config with all its gateways on this machine, or without any unless every cluster names one.

    >>> from whale_nebula.config import load
    >>> found = load({"clusters": {"gpu": {"gateway": "10.0.0.1:7100"}, "npu": {}}})
    >>> place_gateways(found, lambda host: False).clusters["gpu"].gateway is None
    True
    """
    configured = {name: cluster.gateway for name, cluster in config.clusters.items()}
    addresses = {
        name: each if is_local(host_of(each)) else ANY for name, each in configured.items() if each is not None
    }
    chosen = assign_ports(Placement((), addresses)).addresses if len(addresses) == len(configured) else {}
    return replace(
        config, clusters={name: replace(each, gateway=chosen.get(name)) for name, each in config.clusters.items()}
    )


def create_gateway_settings(
    config: Config, placement: Placement, security: Mapping[str, Files], folder: Path
) -> dict[str, GatewaySettings]:
    """The settings of each gateway, by its name; audit logs are written to `folder`."""
    identities = {name: Identity.of_worker(config.run_name, name) for name in list_gateway_names(config)}
    listens = {name: str(config.clusters[cluster_of(name)].gateway) for name in identities}
    workers = dict(placement.addresses)
    return {
        name: GatewaySettings.for_run(config, identity, listens[name], workers, security.get(name), folder)
        for name, identity in identities.items()
    }


def start_gateway(settings: GatewaySettings) -> subprocess.Popen[bytes]:
    """Start a gateway process. It ends when its standard input closes, so it never outlives its parent."""
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C must end the workers first, which still need the gateway
    )
    if process.stdin is not None:
        process.stdin.write(settings.to_json().encode() + b"\n")
        process.stdin.flush()
    return process


@contextlib.contextmanager
def run_gateways(
    config: Config,
    placement: Placement,
    security: Mapping[str, Files],
    *,
    restarts: Restarts | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """Run all gateways while the context is open; returns their processes, by their names. Their audit logs are deleted
    at its end. One that fails is restarted, as often as `restarts` allow.
    """
    with make_private_folder() as folder:
        processes: list[GatewayProcess] = []
        try:
            for name, settings in create_gateway_settings(config, placement, security, folder).items():
                processes.append(GatewayProcess(name, settings, restarts or Restarts(), report))
            for each in processes:
                each.await_start()
            yield {each.name: each.process for each in processes}
        finally:
            for each in processes:
                each.stop_watching()
            _end_processes([each.process for each in processes])


class GatewayProcess:
    """A gateway process. When it ends, until `stop_watching`, it is restarted as often as `restarts` allow, and
    `report` is called with a line.
    """

    def __init__(self, name: str, settings: GatewaySettings, restarts: Restarts, report: Callable[[str], None]) -> None:
        self.name = name
        self.process = start_gateway(settings)
        self._settings, self._restarts, self._report = settings, restarts, report
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"nebula-watch-{name}", daemon=True)

    def await_start(self) -> None:
        """Wait until the gateway listens; from then on it is watched."""
        _await_listening(self.name, self.process)
        self._thread.start()

    def stop_watching(self) -> None:
        """Stop watching the gateway, whose end is no failure from now on."""
        self._stop_event.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        for number in itertools.count():
            while self.process.poll() is None:
                if self._stop_event.wait(_LOOK_SECONDS):
                    return
            if number >= self._restarts.most:
                self._report(f"gateway {self.name} has exited, and is not restarted")
                return
            again = f"restart {number + 1} of {self._restarts.most} begins"
            self._report(f"gateway {self.name} has exited; {again}, and its workers wait for it")
            _close_pipes(self.process)
            if self._stop_event.wait(self._restarts.find_delay(number, _MOST_WAIT_SECONDS)):
                return
            self.process = start_gateway(self._settings)
            try:
                _await_listening(self.name, self.process)
            except TransportError as error:
                self._report(f"{error.what}: {error.why}")


def _await_listening(name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the line that a gateway prints once it listens."""
    output = process.stdout
    if output is None:
        return
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        ready = selector.select(_START_SECONDS)
    if not ready or not os.read(output.fileno(), 4096):
        why = "it has printed the reason" if ready else f"it printed nothing for {_START_SECONDS:g} s"
        mend = "check its address in the config, and whether another program listens there"
        raise TransportError(f"the gateway '{name}' did not start", why=why, mend=mend)


def _end_processes(processes: Collection[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    limit = time.monotonic() + _END_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))
        process.kill()
        process.wait()
        _close_pipes(process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
