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
from tests.processes.launchers import launching
from tests.processes.sites import HERE
from tests.processes.worker_runs import SEED, Ended, run, told_alone
from tests.processes.workers import fail
from tests.processes.workers.change_plan import PLANS, lesson
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.parts import describe_waiting
from whale_nebula.cli.main import main
from whale_nebula.faults import POINTS

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
DEATHS = ["c1/0:update.begun=kill@5"]
"""Who ends where, and after which step, or which time it comes there: by a kill, or by an error of its script, while
the others are within the next step.
"""
MORE_DEATHS = [
    "c1/0:batch@3",
    "c0/1:step.announced=kill@5",
    "c1/0:update.begun=kill@3",
    "c0/1:checkpoint.written=kill@1,c1/0:checkpoint.written=kill@1",
    "c1/0:agree.after=kill@1",
]
EPOCHS = 2


@pytest.fixture(scope="module")
def undisturbed() -> Ended:
    return run("resume", WORKERS, "-", "-", EPOCHS)


def told(found: Ended) -> dict[str, Any]:
    found.result.check()
    return {name: found.same(name) for name in ("history", "weights")}


@pytest.mark.parametrize("deaths", [DEATHS, pytest.param(MORE_DEATHS, marks=pytest.mark.grid)], ids=len)
def test_processes_that_die_again_and_again_come_to_the_same_end(
    undisturbed: Ended, tmp_path: Path, deaths: list[str]
) -> None:
    stood, saved = [0], 0
    for death in [*deaths, "-"]:
        found = run("resume", WORKERS, tmp_path, death, EPOCHS)
        assert (-9 in found.result.codes.values()) == ("kill" in death)
        resumed = [each.get("resumed") for each in found.told.values()]
        stood.append(max((each[0] for each in resumed if each), default=stood[-1]))
        assert stood[-1] >= saved
        saved = max(saved, found.result.saved or 0)
    assert stood == sorted(stood) and stood[-1] > 0 and saved >= stood[-1]
    assert told(found) == told(undisturbed)


ERRORS = [
    ("batch@3", 3),
    ("c0/0:begin@5", 5),
    ("epoch@6", 6),
    ("c0/1:forward.before=raise@3", 8),
    ("c0/1:update.begun=raise@1", 8),
    ("c1/0:step.announced=kill@2,c0/0:checkpoint.written=raise@1", 8),
]
"""Who ends by an error, and after which step the next start goes on: the scripts of all in one callback, or of one
while the others are in the next step. Of a step that is torn, or whose worker is killed, what was saved before is left.
"""


@pytest.mark.grid
@pytest.mark.parametrize("hosts", [(), ("piped",)], ids=["one folder", "a folder for each worker"])
def test_an_error_costs_no_step_unless_one_is_torn(undisturbed: Ended, tmp_path: Path, hosts: Sequence[str]) -> None:
    begins = []
    for death in [*(each for each, _ in ERRORS), "-"]:
        found = run("resume", WORKERS, tmp_path, death, EPOCHS, *hosts)
        begins.append((found.same("resumed") or [0])[0])
    assert begins == [0, *(step for _, step in ERRORS)]
    assert told(found) == told(undisturbed)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "workers", "copies", "deaths"),
    [
        ("apart", WORKERS, 2, ("c0/1:update.begun=kill@22", "c1/0:checkpoint.written=kill@1")),
        ("members", dict.fromkeys(["c0/0", "c0/1"], "c0"), 2, ("c0/1:checkpoint.written=kill@6",)),
    ],
)
def test_copies_that_die_come_to_the_same_end(
    tmp_path: Path, kind: str, workers: dict[str, str], copies: int, deaths: tuple[str, ...]
) -> None:
    """Each has numbers of its own; clusters meet, in fragments that are on their way, between savings."""

    def told_each(found: Ended) -> list[dict[str, Any]]:
        found.result.check()
        return [{name: each[name] for name in ("history", "weights")} for _, each in sorted(found.told.items())]

    epochs = 2 * EPOCHS
    expected = told_each(run("resume", workers, "-", "-", epochs, kind))
    assert len({str(each["history"]) for each in expected}) == copies
    stood = []
    for death in deaths:
        found = run("resume", workers, tmp_path, death, epochs, kind)
        assert -9 in found.result.codes.values()
        stood += [max(each["resumed"][0] for each in found.told.values() if each.get("resumed"))] if stood else [0]
    found = run("resume", workers, tmp_path, "-", epochs, kind)
    assert told_each(found) == expected
    assert all(each["resumed"][0] > 0 for each in found.told.values())


def test_a_host_that_is_new_goes_on_from_the_copy_in_the_memory_of_another(undisturbed: Ended, tmp_path: Path) -> None:
    """Nothing is on a disk, and what the host of the worker that is killed had in its memory is gone."""
    memory = {worker: tmp_path / worker.replace("/", "-") for worker in WORKERS}

    def replace_host(worker: str, epoch: int) -> None:
        if epoch == 0 or worker == "c0/1":
            shutil.rmtree(memory[worker], ignore_errors=True)
            memory[worker].mkdir()

    with launching(tmp_path, {"c0": 2, "c1": 1}) as found:
        found.script, found.before = str(HERE / "workers" / "resume.py"), replace_host
        for worker in WORKERS:
            found.start(worker, "c0/1:step.announced=kill@9", EPOCHS, "piped", memory=str(memory[worker]), seed=SEED)
        for worker, ended in found.ended().items():
            assert (ended.epoch, ended.result.culprit) == (1, None)
            last = worker_reports.told(ended.result.outcomes[worker].out)
            assert last["resumed"][0] > 0
            assert {name: last[name] for name in ("history", "weights")} == {
                name: undisturbed.same(name) for name in ("history", "weights")
            }


def test_what_is_in_memory_is_saved_as_a_run_ends_by_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error that would come again ends it, whatever restarts are left. What is newer waits for the next start."""
    script, folder = str(HERE / "workers" / "fail.py"), tmp_path / "saved"
    assert main(["run", "--all", "--clusters", "gpu,npu", "--restarts", "2", script, str(folder)]) == 1
    newest, found = Folder(str(folder)).scan()
    assert newest.step == fail.LAST and describe_waiting(newest.path).startswith("parts of gpu/0, npu/0: the next")
    assert 0 < found.step < fail.LAST and found.check() == ()
    assert f"step {found.step}, which was saved in memory, is saved in {folder}" in capfd.readouterr().err


_BEFORE = ("hello.", "certificate.", "failure.", "link.", "frames.", "connection.down")
PLACES = [name for name in POINTS if not name.startswith(_BEFORE)]


@pytest.mark.grid
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_death_at_any_place_costs_no_bit(undisturbed: Ended, tmp_path: Path, worker: str, place: str) -> None:
    run("resume", WORKERS, tmp_path, f"{worker}:{place}=kill@2", EPOCHS)
    assert told(run("resume", WORKERS, tmp_path, "-", EPOCHS)) == told(undisturbed)


# ------------------------------------------------------------------ other plans than before
APART = ("split", "stages")
"""With a folder for each worker, as on hosts of their own: what one lacks is sent by another. `make test` changes plans
so in `test_elastic`, and pieces of every layout in `unit/checkpoint/test_slices`.
"""
PAIRS = itertools.permutations(PLANS, 2)


@pytest.mark.grid
@pytest.mark.parametrize("names", [APART, *PAIRS], ids=" > ".join)
def test_a_run_goes_on_by_another_plan(tmp_path: Path, names: Sequence[str]) -> None:
    expected = told_alone(lesson, names[0], len(names))
    apart = ["apart"] * (names is APART)
    before = None
    for epochs, name in enumerate(names, 1):
        found = run("change_plan", WORKERS, name, epochs, tmp_path, *apart)
        found.result.check()
        assert epochs == 1 or found.same("began") == before
        before = found.same("ended")
        got = found.same("history")
        for what, values in expected["history"].items():
            np.testing.assert_allclose(got[what], values[:epochs], 1e-5)
    assert len(list(tmp_path.rglob("manifest*.json"))) % len(WORKERS if apart else "1") == 0
