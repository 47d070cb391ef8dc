"""Start worker scripts of this folder as the processes of one run, and return what they printed.

They are connected as by `whale-nebula run --all`: over gRPC and mutual TLS, with their own authority, directly or
through a gateway for each cluster. In a worker, `run_selected` runs the requested function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import psutil

import whale_nebula as nb
import whale_nebula.runtime.run
from tests.processes.worker_reports import parse_reports
from whale_nebula.launch import Job, Result, attach, spawn
from whale_nebula.launch.placement import free_port
from whale_nebula.launch.seeding import seed_all
from whale_nebula.launch.worker_output import Echo

HERE = Path(__file__).parent
DEADLINE, GRACE, SEED = 180.0, 60.0, 5
SCENARIO_PREFIX = "begins: "


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: the reports of each worker, in the order of the workers, and the launcher's result."""

    reports: Mapping[str, Mapping[str, Any]]
    result: Result

    def get_all(self, name: str) -> list[Any]:
        """The value that each worker has reported under this name."""
        return [report[name] for report in self.reports.values()]

    def get_common(self, name: str) -> Any:
        """The value that all workers have reported under this name."""
        first, *rest = self.get_all(name)
        assert all(other == first for other in rest), (name, first, rest)
        return first


def list_workers(workers: int | Mapping[str, str]) -> Mapping[str, str]:
    """The workers with their clusters: those given, or one in each of so many clusters."""
    return {f"c{number}/0": f"c{number}" for number in range(workers)} if isinstance(workers, int) else workers


@contextlib.contextmanager
def start_workers(
    script: str,
    workers: int | Mapping[str, str],
    *arguments: object,
    gateways: bool = False,
    echo: Echo | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Job]:
    """Run a worker script once in each of the clusters c0, c1 ..., or as the workers with these clusters."""
    names = list_workers(workers)
    argv = ["-m", "whale_nebula.launch.child", str(HERE / "workers" / f"{script}.py"), *map(str, arguments)]
    with spawn(argv, names, seed=SEED, gateways=gateways, echo=echo, silence=deadline) as job:
        yield job


def wait_for_run(job: Job, deadline: float = DEADLINE) -> FinishedRun:
    """Wait for the end of a run; kill workers that do not end in time."""
    result = job.wait(deadline, grace=GRACE)
    assert not result.late, {name: outcome.err[-3000:] for name, outcome in result.outcomes.items()}
    for name, outcome in result.outcomes.items():
        print(f"---- {name} ended with {outcome.code}\n{outcome.err[-6000:]}")  # pytest shows it where a test fails
    return FinishedRun({name: parse_reports(outcome.out) for name, outcome in result.outcomes.items()}, result)


def run_workers(
    script: str,
    workers: int | Mapping[str, str],
    *arguments: object,
    gateways: bool = False,
    deadline: float = DEADLINE,
) -> FinishedRun:
    """Start workers, and wait for the end of the run."""
    with start_workers(script, workers, *arguments, gateways=gateways, deadline=deadline) as job:
        return wait_for_run(job, deadline)


def run_workers_and_reference(
    script: str, workers: int | Mapping[str, str], *arguments: object, alone: Callable[[], Any],
    deadline: float = DEADLINE, **options: Any,
) -> tuple[FinishedRun, Any]:  # fmt: skip
    """Start workers, compute the reference in this process meanwhile, and wait; returns both results."""
    with start_workers(script, workers, *arguments, deadline=deadline, **options) as job:
        nb.shutdown()
        expected = alone()
        found = wait_for_run(job, deadline)
    return found, expected


def run_in_this_process(function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Run a function of a worker in this process, with the workers' seed; returns its reports. `options` are those of
    `nb.init`.
    """
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as out, nb.init(**options):
        function(*arguments)
    return dict(parse_reports(out.getvalue()))


@contextlib.contextmanager
def start_training(workers: int, *arguments: object, steps: int) -> Iterator[Job]:
    """Start a run of the worker script `train`; yields it when each worker has reported this number of steps."""
    have_trained, trained = threading.Event(), set()

    def echo(worker: str, stream: str, line: str) -> None:
        if f'"steps", {steps}' in line:
            trained.add(worker)
            if len(trained) == workers:
                have_trained.set()

    with start_workers("train", workers, *arguments, echo=echo) as job:
        limit = time.monotonic() + DEADLINE
        while not have_trained.wait(0.2):
            assert time.monotonic() < limit
            assert all(map(psutil.pid_exists, job.pids.values())), wait_for_run(job, GRACE)
        yield job


def run_scenarios(
    script: str, folder: Path, scenarios: Mapping[str, Sequence[object]], *, gateways: bool = False
) -> Mapping[str, FinishedRun]:
    """Run scenarios of a worker script one after the other in the same two processes; returns the results by name."""
    words = [json.dumps([*map(str, words)]) for words in scenarios.values()]
    with start_workers(script, 2, "scenarios", folder, *words, gateways=gateways) as job:
        found = wait_for_run(job, DEADLINE * len(scenarios))
    parts = {name: _split_output(outcome.out) for name, outcome in found.result.outcomes.items()}
    return {
        name: FinishedRun(
            {worker: parse_reports(part[number] if number < len(part) else "") for worker, part in parts.items()},
            found.result,
        )
        for number, name in enumerate(scenarios)
    }


def _split_output(out: str) -> list[str]:
    """The output of each scenario."""
    return [piece.partition("\n")[2] for piece in out.split(SCENARIO_PREFIX)[1:]]


# ---------------------------------------------------------------------- in a worker
def run_selected(functions: Iterable[Callable[..., None]]) -> None:
    """Run the function that the arguments name; or several, each in its own run, because starting processes is slow."""
    by_name = {function.__name__: function for function in functions}
    name, *arguments = sys.argv[1:]
    if name != "scenarios":
        by_name[name](*arguments)
        return
    folder, *scenarios = arguments
    for words in scenarios:
        name, *arguments = json.loads(words)
        print(SCENARIO_PREFIX + name, flush=True)
        reconnect(Path(folder))
        keras.utils.clear_session(free_memory=False)
        seed_all(SEED)  # as the launcher does
        by_name[name](*arguments)


_run_numbers = itertools.count()
OPEN_SECONDS = 60.0


def open_next_run(folder: Path, **options: Any) -> nb.Run:
    """Close the open run, if any, and open the next one, prepared by `reconnect`."""
    reconnect(folder)
    return nb.init(**options)


def reconnect(folder: Path) -> None:
    """Close the open run, if any, and choose other ports for the next one; with gateways no ports are needed."""
    nb.shutdown()
    launched = attach()
    assert launched is not None
    (peer,) = launched.peers
    number = next(_run_numbers)
    own = f"127.0.0.1:{free_port()}"
    _write_atomically(folder / f"run{number}-{launched.worker.replace('/', '-')}", own)
    theirs = _wait_for_file(folder / f"run{number}-{peer.replace('/', '-')}")
    again = launched if launched.gateway else dataclasses.replace(launched, listen=own, addresses={peer: theirs})
    whale_nebula.runtime.run.attach = lambda: again


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _wait_for_file(path: Path) -> str:
    limit = time.monotonic() + OPEN_SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"another worker has not written {path}"
        time.sleep(0.02)
    return path.read_text()
