"""The ends of `bench link`: this one, or both on this machine as processes of their own, so that neither's CPU time is
counted for the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from whale_nebula.cli import exits
from whale_nebula.cli.telling import remark, tell
from whale_nebula.config import Config
from whale_nebula.errors import ConfigError, DeadlineError, NebulaError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.launch import gateways, secured
from whale_nebula.launch.hosts import is_local, listening, settled
from whale_nebula.launch.identity import SecurityFiles
from whale_nebula.launch.line import LineFound, Seat, measure
from whale_nebula.launch.line.seat import others
from whale_nebula.launch.placed import run_name
from whale_nebula.launch.resolve import Asked, Placement, everything, resolve
from whale_nebula.security import Credentials, Files, Identity

_HERE_PATIENCE = 60.0
_COMMAND = ["-m", "whale_nebula.cli.main", "bench", "link", "--told"]


def this_end(config: Config, path: str, cluster: str, to: str | None, seconds: float) -> Iterator[LineFound]:
    """Measure from this host, as the first worker of its cluster."""
    seat = seat_of(config, path, cluster, to)
    addresses = ", ".join(f"{there} at {seat.gateway or where}" for there, where in seat.peers.items())
    remark(f"{seat.here} measures the line to {addresses}; it must be started there, too")
    yield from measure(seat, seconds=seconds, patience=config.patience, tell=remark)


def seat_of(config: Config, path: str, cluster: str, to: str | None) -> Seat:
    """Where this end is, and where the others are."""
    placement = resolve(config, os.environ, Asked(cluster, 0, local=is_local)).placement
    here, gateway = f"{cluster}/0", config.clusters[cluster].gateway if cluster in config.clusters else None
    peers = {there: placement.addresses[there] for there in others(list(placement.addresses), cluster, to)}
    if not peers:
        clusters = [name for name in placement.clusters if name != cluster]
        mend = f"--to: {did_you_mean(to, clusters)}" if to and clusters else "clusters: {gpu: ..., npu: ...}"
        raise ConfigError("there is nobody at the other end", where=path, why=f"{cluster} is alone", mend=mend)
    gateways.check(config, cluster)
    credentials = _credentials(secured.configured(config, [here], path).get(here))
    if credentials is not None:
        credentials.check_is(Identity.of_worker(run_name(config), here))
    return Seat(
        run_name(config),
        here,
        peers,
        None if gateway else _listen(config, here, placement),  # then both ends dial
        gateway,
        credentials,
        everyone=tuple(placement.addresses),
    )


def _listen(config: Config, here: str, placement: Placement) -> str:
    """Where this end listens; more widely than the config says only who asks for certificates."""
    address = placement.addresses[here]
    found = listening(Placement((here,), placement.addresses))[here]
    if found != address and config.security.insecure:
        why, mend = "it would listen everywhere, and to everybody", f"start it on the host of {here}"
        raise ConfigError(f"{address} is no address of this host", why=why, mend=mend)
    if found != address:
        remark(f"{address} is no address of this host: {here} listens at {found}")
    return found


def _credentials(files: SecurityFiles | None) -> Credentials | None:
    return None if files is None else Credentials.of(Files.from_dict(asdict(files)))


# ---------------------------------------------------------------------- both ends on this machine
def both_here(config: Config, clusters: Sequence[str], seconds: float) -> list[LineFound]:
    """One process for each cluster; gives what was found between each two."""
    known = list(config.clusters) or list(clusters)
    if len(known) < 2:
        raise ConfigError(
            "a line has two ends", why="two clusters must be named", mend="bench link --all --clusters gpu,npu"
        )
    workers = [f"{cluster}/0" for cluster in known]
    everybody = everything(config, clusters, is_local)
    placement = settled(Placement(tuple(workers), {each: everybody.addresses[each] for each in workers}))
    with secured.for_one_run(config, workers) as files:
        told = {
            here: {
                "run": run_name(config),
                "here": here,
                "addresses": dict(placement.addresses),
                "files": asdict(files[here]) if here in files else None,
                "seconds": seconds,
                "aloud": here == workers[0],
            }
            for here in workers
        }
        answers = _answers(told, _HERE_PATIENCE + len(workers) ** 2 * (30 * seconds + 10))
    found = {(each.first, each.second): each for answer in answers for each in map(LineFound.from_json, answer)}
    return [found[pair] for pair in sorted(found)]


def _answers(told: dict[str, dict[str, Any]], limit: float) -> list[list[str]]:
    """Start the ends, and wait for what they print; they end with this process, whatever happens."""
    with contextlib.ExitStack() as held:
        running = [held.enter_context(_end(each)) for each in told.values()]
        outputs = [_output(worker, process, limit) for worker, process in zip(told, running, strict=True)]
    return [json.loads(output) for output in outputs]


@contextlib.contextmanager
def _end(told: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *_COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdin is not None:
                process.stdin.write(json.dumps(told) + "\n")
                process.stdin.flush()
            yield process
        finally:
            process.kill()


def _output(worker: str, process: subprocess.Popen[str], limit: float) -> str:
    """What an end prints. Its standard input stays open, because it ends when that is closed."""
    late = threading.Timer(limit, process.kill)
    late.start()
    try:
        output = process.stdout.read() if process.stdout is not None else ""
        code = process.wait()
    finally:
        late.cancel()
    if code != exits.DONE:
        raise DeadlineError(f"the end {worker} on this machine has failed, with {code}", why="its words stand above")
    return output


def be_told() -> int:
    """Be an end that another process has started: it says where in one line, and holds the pipe open."""
    said = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_launcher, name="nebula-leash", daemon=True).start()
    here, addresses = said["here"], said["addresses"]
    credentials = None if said["files"] is None else Credentials.of(Files.from_dict(said["files"]))
    peers = {worker: where for worker, where in addresses.items() if worker != here}
    seat = Seat(said["run"], here, peers, addresses[here], credentials=credentials)
    say: Callable[[str], None] = remark if said["aloud"] else _nothing
    try:
        found = list(measure(seat, seconds=float(said["seconds"]), patience=_HERE_PATIENCE, tell=say))
    except NebulaError as error:
        tell(error, as_json=False)
        return exits.FAILED
    print(json.dumps([each.to_json() for each in found]), flush=True)
    return exits.DONE


def _leave_with_launcher() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(exits.ORPHANED)


def _nothing(text: str) -> None:
    """The other end says it."""
