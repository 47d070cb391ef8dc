"""Start worker scripts of this folder as the processes of one run, and return what they printed.

They are connected as by `whale-nebula run --all`: over gRPC and mutual TLS, with their own authority, directly or
through a gateway for each cluster. In a worker, `act` runs the requested action.
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
from tests.processes.telling import told
from whale_nebula.launch import Job, Result, attach, spawn
from whale_nebula.launch.placement import free_port
from whale_nebula.launch.seeding import seed_all
from whale_nebula.launch.worker_output import Echo

HERE = Path(__file__).parent
DEADLINE, GRACE, SEED = 90.0, 60.0, 5
BEGINS = "begins: "


@dataclass(frozen=True)
class Ended:
    """How a run ended: what each worker told, in the order of the workers, and the launcher's result."""

    told: Mapping[str, Mapping[str, Any]]
    result: Result

    def all(self, name: str) -> list[Any]:
        """What each worker told under this name."""
        return [things[name] for things in self.told.values()]

    def same(self, name: str) -> Any:
        """What all workers told alike under this name."""
        first, *rest = self.all(name)
        assert all(other == first for other in rest), (name, first, rest)
        return first


@contextlib.contextmanager
def started(
    script: str,
    workers: int | Mapping[str, str],
    *arguments: object,
    gateways: bool = False,
    echo: Echo | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Job]:
    """Run a worker script once in each of the clusters c0, c1 ..., or as the workers with these clusters."""
    names = {f"c{number}/0": f"c{number}" for number in range(workers)} if isinstance(workers, int) else workers
    argv = ["-m", "whale_nebula.launch.child", str(HERE / "workers" / f"{script}.py"), *map(str, arguments)]
    with spawn(argv, names, seed=SEED, gateways=gateways, echo=echo, silence=deadline) as job:
        yield job


def ended(job: Job, deadline: float = DEADLINE) -> Ended:
    """Wait for the end; whoever fails to come to it is killed."""
    result = job.wait(deadline, grace=GRACE)
    assert not result.late, {name: outcome.err[-3000:] for name, outcome in result.outcomes.items()}
    for name, outcome in result.outcomes.items():
        print(f"---- {name} ended with {outcome.code}\n{outcome.err[-6000:]}")  # pytest shows it where a test fails
    return Ended({name: told(outcome.out) for name, outcome in result.outcomes.items()}, result)


def run(
    script: str,
    workers: int | Mapping[str, str],
    *arguments: object,
    gateways: bool = False,
    deadline: float = DEADLINE,
) -> Ended:
    """Start and wait."""
    with started(script, workers, *arguments, gateways=gateways, deadline=deadline) as job:
        return ended(job, deadline)


def beside(
    script: str, workers: int | Mapping[str, str], *arguments: object, alone: Callable[[], Any],
    deadline: float = DEADLINE, **options: Any,
) -> tuple[Ended, Any]:  # fmt: skip
    """Start, do meanwhile in this process what is to be compared, and wait: what both came to."""
    with started(script, workers, *arguments, deadline=deadline, **options) as job:
        nb.shutdown()
        expected = alone()
        found = ended(job, deadline)
    return found, expected


def told_alone(lesson: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """What a lesson of the workers tells in this process, which is seeded as they are; `options` are of `nb.init`."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()) as out, nb.init(**options):
        lesson(*arguments)
    return dict(told(out.getvalue()))


@contextlib.contextmanager
def training(workers: int, *arguments: object, steps: int) -> Iterator[Job]:
    """A run of `train` in which each worker has told of so many steps, and goes on."""
    trained, heard = threading.Event(), set()

    def echo(worker: str, stream: str, line: str) -> None:
        if f'"steps", {steps}' in line:
            heard.add(worker)
            if len(heard) == workers:
                trained.set()

    with started("train", workers, *arguments, echo=echo) as job:
        limit = time.monotonic() + DEADLINE
        while not trained.wait(0.2):
            assert time.monotonic() < limit
            assert all(map(psutil.pid_exists, job.pids.values())), ended(job, GRACE)
        yield job


def several(
    script: str, folder: Path, asked: Mapping[str, Sequence[object]], *, gateways: bool = False
) -> Mapping[str, Ended]:
    """Run what a worker script can do, one after the other, in the same two processes; how each ended, by its name."""
    words = [json.dumps([*map(str, words)]) for words in asked.values()]
    with started(script, 2, "several", folder, *words, gateways=gateways) as job:
        found = ended(job, DEADLINE * len(asked))
    parts = {name: _parts(outcome.out) for name, outcome in found.result.outcomes.items()}
    return {
        name: Ended(
            {worker: told(part[number] if number < len(part) else "") for worker, part in parts.items()}, found.result
        )
        for number, name in enumerate(asked)
    }


def _parts(out: str) -> list[str]:
    """What was written in each of several runs."""
    return [piece.partition("\n")[2] for piece in out.split(BEGINS)[1:]]


# ---------------------------------------------------------------------- in a worker
def act(lessons: Iterable[Callable[..., None]]) -> None:
    """Do what the arguments name, or several things, each in a run of its own: starting a process is dear."""
    named = {lesson.__name__: lesson for lesson in lessons}
    name, *arguments = sys.argv[1:]
    if name != "several":
        named[name](*arguments)
        return
    folder, *asked = arguments
    for words in asked:
        name, *arguments = json.loads(words)
        print(BEGINS + name, flush=True)
        reconnect(Path(folder))
        keras.utils.clear_session(free_memory=False)
        seed_all(SEED)  # as the launcher seeds who is run alone
        named[name](*arguments)


_number = itertools.count()
OPEN_SECONDS = 60.0


def reopen(folder: Path, **options: Any) -> nb.Run:
    """Leave the run that is open, if one is, and open another one, as `reconnect` prepares it."""
    reconnect(folder)
    return nb.init(**options)


def reconnect(folder: Path) -> None:
    """Leave the run that is open, if one is; in the next one both workers listen at other ports.

    Behind gateways they dial these again, and listen nowhere.
    """
    nb.shutdown()
    launched = attach()
    assert launched is not None
    (peer,) = launched.peers
    number = next(_number)
    own = f"127.0.0.1:{free_port()}"
    _tell(folder / f"run{number}-{launched.worker.replace('/', '-')}", own)
    theirs = _hear(folder / f"run{number}-{peer.replace('/', '-')}")
    again = launched if launched.gateway else dataclasses.replace(launched, listen=own, addresses={peer: theirs})
    whale_nebula.runtime.run.attach = lambda: again


def _tell(path: Path, text: str) -> None:
    """Write a file that is there only once it is whole."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _hear(path: Path) -> str:
    limit = time.monotonic() + OPEN_SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"nobody has written {path}"
        time.sleep(0.02)
    return path.read_text()
