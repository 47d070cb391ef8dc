"""A standby process that becomes a worker does what a new process does; where there is none, a new process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes.sites import HERE, prepare_sites
from tests.processes.worker_reports import parse_reports
from tests.unit.gateway.networks import wait_until
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.standby import Standbys
from whale_nebula.launch.worker_processes import EchoedOutput, start_workers

SOON = 60.0
WORKER = "gpu/0"
SCRIPT = str(HERE / "workers" / "start.py")


class Starts:
    """Consecutive starts of a worker with a standby process. `lines` are the launcher's."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self.standbys = Standbys([WORKER], self.lines.append)
        self._folder, self._epoch = folder, -1

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Start the worker, and let it end when a standby process was started, or cannot be; returns its process id and
        its reports.
        """
        self._epoch += 1
        workers = {WORKER: Identity(WORKER, "gpu", {}, seed=5)}
        argv = ["-m", "whale_nebula.launch.child", SCRIPT, str(self._folder / "go"), *words]
        with (
            start_workers(
                argv, workers, output=EchoedOutput(), epoch=self._epoch, env=env,
                start_process=self.standbys.start,
            ) as job,
            self.standbys.start_beside(job),
        ):  # fmt: skip
            wait_until(lambda: self.standbys.pids or self.lines, SOON)
            (self._folder / "go").touch()
            result = job.wait(SOON)
        (self._folder / "go").unlink()
        outcome = result.outcomes[WORKER]
        assert (outcome.code, outcome.status.code) == (3, 3), outcome.err
        return job.pids[WORKER], parse_reports(outcome.out)


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    found = Starts(tmp_path)
    yield found
    pids = found.standbys.pids.values()
    found.standbys.close()
    assert not any(map(psutil.pid_exists, pids))


def test_standby_process_becomes_a_worker_like_a_new_process(starts: Starts) -> None:
    pid, expected = starts.run()
    standby = starts.standbys.pids[WORKER]
    other, reports = starts.run()
    assert pid != other == standby and starts.standbys.pids[WORKER] != standby
    assert (expected.pop("identity"), reports.pop("identity")) == ([WORKER, 0, 5], [WORKER, 1, 5])
    assert reports == expected


def test_new_process_starts_if_the_standby_process_was_killed_or_has_another_environment(starts: Starts) -> None:
    starts.run()
    killed = psutil.Process(starts.standbys.pids[WORKER])
    killed.kill()
    wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE, SOON)
    second, _ = starts.run()
    standby = starts.standbys.pids[WORKER]
    third, reports = starts.run(env={"OMP_NUM_THREADS": "1"})
    assert standby not in (second, third) and not psutil.pid_exists(standby)
    assert reports["environment"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.grid
def test_script_that_changes_its_environment_has_no_standby_process(starts: Starts) -> None:
    starts.run("changes")
    assert not starts.standbys.pids and "the script changes OMP_NUM_THREADS before it imports" in starts.lines[0]


def test_standby_processes_end_with_their_launcher(tmp_path: Path) -> None:
    with prepare_sites(tmp_path, ["gpu"], restarts=1) as found:
        command = ["-m", "whale_nebula.cli.main", "run", "--config", found.write_config("gpu"), "--cluster", "gpu"]
        found.commands["gpu"] = [*command, "--standby", SCRIPT, str(tmp_path / "go")]
        found.restart("gpu")
        launcher = psutil.Process(found["gpu"].process.pid)
        found["gpu"].await_line('report: ["random"')
        before = launcher.children()
        wait_until(lambda: len(launcher.children()) > len(before), SOON)
        children = launcher.children()
        launcher.kill()
        left = psutil.wait_procs(children, SOON)[1]
        assert not left
