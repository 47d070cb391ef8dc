"""Processes that are killed and restarted end with the bits of an undisturbed run.

`make test` kills one, where some variables have the update and others not; `--grid` at every failpoint of every worker.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import worker_reports
from tests.processes.launchers import prepare_launchers
from tests.processes.sites import HERE
from tests.processes.worker_runs import SEED, FinishedRun, run_in_this_process, run_workers
from tests.processes.workers import fail
from tests.processes.workers.change_plan import PLANS, train_model
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.parts import describe_waiting
from whale_nebula.cli.main import main
from whale_nebula.faults import POINTS

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
FAULTS = ["c1/0:update.begun=kill@5"]
"""A worker, the place where it is killed or its script raises an error, and the step, or the number of times that the
place is reached. The others are within the next step.
"""
MORE_FAULTS = [
    "c1/0:batch@3",
    "c0/1:step.announced=kill@5",
    "c1/0:update.begun=kill@3",
    "c0/1:checkpoint.written=kill@1,c1/0:checkpoint.written=kill@1",
    "c1/0:agree.after=kill@1",
]
EPOCHS = 2


@pytest.fixture(scope="module")
def undisturbed() -> FinishedRun:
    return run_workers("resume", WORKERS, "-", "-", EPOCHS)


def read_result(found: FinishedRun) -> dict[str, Any]:
    found.result.check()
    return {name: found.get_common(name) for name in ("history", "weights")}


@pytest.mark.parametrize(
    "kills", [FAULTS, pytest.param(MORE_FAULTS, marks=[pytest.mark.grid, pytest.mark.timeout(900)])], ids=len
)
def test_repeated_kills_do_not_change_the_result(undisturbed: FinishedRun, tmp_path: Path, kills: list[str]) -> None:
    resumed_steps, saved = [0], 0
    for fault in [*kills, "-"]:
        found = run_workers("resume", WORKERS, tmp_path, fault, EPOCHS)
        assert (-9 in found.result.codes.values()) == ("kill" in fault)
        resumed = [each.get("resumed") for each in found.reports.values()]
        resumed_steps.append(max((each[0] for each in resumed if each), default=resumed_steps[-1]))
        assert resumed_steps[-1] >= saved
        saved = max(saved, found.result.saved or 0)
    assert resumed_steps == sorted(resumed_steps) and resumed_steps[-1] > 0 and saved >= resumed_steps[-1]
    assert read_result(found) == read_result(undisturbed)


ERRORS = [
    ("batch@3", 3),
    ("c0/0:begin@5", 5),
    ("epoch@6", 6),
    ("c0/1:forward.before=raise@3", 8),
    ("c0/1:update.begun=raise@1", 8),
    ("c1/0:step.announced=kill@2,c0/0:checkpoint.written=raise@1", 8),
]
"""A worker (or all), the place of its error, and the step after which the next start resumes. If a step was torn or a
worker killed, that is the last checkpoint.
"""


@pytest.mark.grid
@pytest.mark.parametrize("hosts", [(), ("piped",)], ids=["one folder", "a folder for each worker"])
def test_script_error_loses_no_completed_step(undisturbed: FinishedRun, tmp_path: Path, hosts: Sequence[str]) -> None:
    begins = []
    for fault in [*(each for each, _ in ERRORS), "-"]:
        found = run_workers("resume", WORKERS, tmp_path, fault, EPOCHS, *hosts)
        begins.append((found.get_common("resumed") or [0])[0])
    assert begins == [0, *(step for _, step in ERRORS)]
    assert read_result(found) == read_result(undisturbed)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "workers", "copies", "kills"),
    [
        ("apart", WORKERS, 2, ("c0/1:update.begun=kill@22", "c1/0:checkpoint.written=kill@1")),
        ("members", dict.fromkeys(["c0/0", "c0/1"], "c0"), 2, ("c0/1:checkpoint.written=kill@2",)),
    ],
)
def test_killed_copies_do_not_change_the_result(
    tmp_path: Path, kind: str, workers: dict[str, str], copies: int, kills: tuple[str, ...]
) -> None:
    """Each copy has its own results; clusters exchange fragments between checkpoints."""

    def read_each_result(found: FinishedRun) -> list[dict[str, Any]]:
        found.result.check()
        return [{name: each[name] for name in ("history", "weights")} for _, each in sorted(found.reports.items())]

    epochs = 2 * EPOCHS
    expected = read_each_result(run_workers("resume", workers, "-", "-", epochs, kind))
    assert len({str(each["history"]) for each in expected}) == copies
    resumed_steps = []
    for fault in kills:
        found = run_workers("resume", workers, tmp_path, fault, epochs, kind)
        assert -9 in found.result.codes.values()
        resumed_steps += (
            [max(each["resumed"][0] for each in found.reports.values() if each.get("resumed"))]
            if resumed_steps
            else [0]
        )
    found = run_workers("resume", workers, tmp_path, "-", epochs, kind)
    assert read_each_result(found) == expected
    assert all(each["resumed"][0] > 0 for each in found.reports.values())


def test_new_host_resumes_from_the_memory_of_another_host(undisturbed: FinishedRun, tmp_path: Path) -> None:
    """No checkpoint is on a disk, and the killed worker's host loses its memory."""
    memory = {worker: tmp_path / worker.replace("/", "-") for worker in WORKERS}

    def replace_host(worker: str, epoch: int) -> None:
        if epoch == 0 or worker == "c0/1":
            shutil.rmtree(memory[worker], ignore_errors=True)
            memory[worker].mkdir()

    with prepare_launchers(tmp_path, {"c0": 2, "c1": 1}) as found:
        found.script, found.before_start = str(HERE / "workers" / "resume.py"), replace_host
        for worker in WORKERS:
            found.start(worker, "c0/1:step.announced=kill@9", EPOCHS, "piped", memory=str(memory[worker]), seed=SEED)
        for worker, ended in found.wait_for_all().items():
            assert (ended.epoch, ended.result.culprit) == (1, None)
            last = worker_reports.parse_reports(ended.result.outcomes[worker].out)
            assert last["resumed"][0] > 0
            assert {name: last[name] for name in ("history", "weights")} == {
                name: undisturbed.get_common(name) for name in ("history", "weights")
            }


def test_memory_checkpoint_is_saved_when_the_run_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An error that would occur again ends the run despite remaining restarts. Newer parts wait for the next start."""
    script, folder = str(HERE / "workers" / "fail.py"), tmp_path / "saved"
    assert main(["run", "--all", "--clusters", "gpu,npu", "--restarts", "2", script, str(folder)]) == 1
    newest, found, *_ = Folder(str(folder)).scan()
    assert newest.step == fail.LAST_STEP and describe_waiting(newest.path).startswith("parts of gpu/0, npu/0: the next")
    assert 0 < found.step < fail.LAST_STEP and found.check() == ()
    assert f"step {found.step}, which was saved in memory, is saved in {folder}" in capfd.readouterr().err


_BEFORE = ("hello.", "certificate.", "failure.", "link.", "frames.", "connection.down")
FAILPOINTS = [name for name in POINTS if not name.startswith(_BEFORE)]


@pytest.mark.grid
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_kill_at_any_failpoint_does_not_change_the_result(
    undisturbed: FinishedRun, tmp_path: Path, worker: str, failpoint: str
) -> None:
    run_workers("resume", WORKERS, tmp_path, f"{worker}:{failpoint}=kill@2", EPOCHS)
    assert read_result(run_workers("resume", WORKERS, tmp_path, "-", EPOCHS)) == read_result(undisturbed)


# ------------------------------------------------------------------ other plans
SEPARATE_FOLDERS = ("split", "stages")
"""Each worker has its own folder, so that missing slices are received from others. `make test` covers this in
`test_elastic`, and layouts in `unit/checkpoint/test_slices`.
"""
PAIRS = itertools.permutations(PLANS, 2)


@pytest.mark.grid
@pytest.mark.parametrize("names", [SEPARATE_FOLDERS, *PAIRS], ids=" > ".join)
def test_run_resumes_with_another_plan(tmp_path: Path, names: Sequence[str]) -> None:
    expected = run_in_this_process(train_model, names[0], len(names))
    apart = ["apart"] * (names is SEPARATE_FOLDERS)
    before = None
    for epochs, name in enumerate(names, 1):
        found = run_workers("change_plan", WORKERS, name, epochs, tmp_path, *apart)
        found.result.check()
        assert epochs == 1 or found.get_common("began") == before
        before = found.get_common("ended")
        got = found.get_common("history")
        for what, values in expected["history"].items():
            np.testing.assert_allclose(got[what], values[:epochs], 1e-5)
    assert len(list(tmp_path.rglob("manifest*.json"))) % len(WORKERS if apart else "1") == 0
