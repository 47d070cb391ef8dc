"""Clusters that train apart and are lost: the others go on, and a lost cluster joins a later meeting.

The weights at the end are those of local SGD by plain Keras models in which the clusters miss the same meetings.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.sites import HERE, Sites, insert_line, prepare_sites
from tests.processes.workers import apart
from whale_nebula.launch.placement import free_port

DEADLINE = 400.0
pytestmark = pytest.mark.timeout(DEADLINE)
MAY_MISS = {"npu", "tpu"}


@contextlib.contextmanager
def prepare_clusters(folder: Path, names: Sequence[str], **options: Any) -> Iterator[Sites]:
    """Sites with a launcher for each cluster, in folders of their own, of which some may miss meetings."""
    clusters = {name: {"workers": [f"127.0.0.1:{free_port()}"]} for name in names}
    elastic = {name: {"min": 0} for name in names if name in MAY_MISS}
    with prepare_sites(
        folder, names, clusters=clusters, **{"elastic": elastic, "restarts": 8, "patience": "120s", **options}
    ) as found:
        found.has_separate_folders = True
        yield found


def start_clusters(found: Sites, plan: dict[str, Any], configs: Mapping[str, dict[str, Any]] | None = None) -> None:
    for name in found.clusters:
        config = found.write_config(name, (configs or {}).get(name, {}))
        command = ["-m", "whale_nebula.cli.main", "run", "--config", config, "--cluster", name]
        script = [str(HERE / "workers" / "apart.py"), str(found.folder / f"saved-{name}"), json.dumps(plan)]
        found.commands[name] = [*command, *script]
        found.restart(name)


def simulate(names: Sequence[str], lost: Mapping[str, range]) -> list[np.ndarray]:
    """The weights at the end by a plain Keras model for each cluster. Each `lost` cluster trains nothing in a range of
    steps, and returns with the shared weights and the slots of the first cluster that was present.
    """

    def list_present(step: int) -> list[str]:
        return [name for name in names if step not in lost.get(name, range(0))]

    models = {name: apart.make_model() for name in names}
    x, y = apart.draw_rows()
    shared = models[names[0]].get_weights()
    for step in range(apart.STEPS * apart.EPOCHS):
        begin = step % apart.STEPS * apart.BATCH
        rows = dict(zip(names, np.array_split(np.arange(begin, begin + apart.BATCH), len(names)), strict=True))
        for name in (name for name, steps in lost.items() if step == steps.stop):
            models[name].set_weights(shared)
            first = models[list_present(step - 1)[0]]
            for slot, value in zip(models[name].optimizer.variables, first.optimizer.variables, strict=True):
                slot.assign(value)
        present = list_present(step)
        for name in present:
            models[name].train_on_batch(x[rows[name]], y[rows[name]])
        if (step + 1) % apart.EVERY == 0:
            shared = [np.mean(each, 0) for each in zip(*(models[name].get_weights() for name in present), strict=True)]
            for name in present:
                models[name].set_weights(shared)
    return [weight.ravel() for weight in shared]


def check_run(found: Sites, last_meetings: Mapping[str, int], absent: Sequence[str]) -> None:
    """Check who was `absent` in each start, the report, and the weights of a run that went on without clusters after
    their last meetings.
    """
    codes = found.wait_for_exit_codes()
    assert codes == dict.fromkeys(found.clusters, 0), [site.last_output for site in found.sites.values()]
    stayed = found[next(name for name in found.clusters if name not in MAY_MISS)].reports
    begun = [stayed[name] for name in sorted(stayed) if name.startswith("epoch ")]
    everyone = sorted(found.clusters)
    assert [each for _, each in begun] == [[n for n in everyone if n not in names.split()] for names in absent], begun
    lost = {
        name: range(last, next(step for step, clusters in begun[1:] if name in clusters))
        for name, last in last_meetings.items()
    }
    assert all(steps and steps.stop % apart.EVERY == 0 for steps in lost.values()), begun
    missed = {name: len(steps) // apart.EVERY for name, steps in lost.items()}
    assert found.get_common("missed") == missed
    assert all(f"{name} missed {count}" in stayed["report"] for name, count in missed.items())
    for own, theirs in zip(found.get_common("weights"), simulate(found.clusters, lost), strict=True):
        np.testing.assert_allclose(own, theirs, 1e-4, 1e-6)


@pytest.mark.grid
def test_cluster_that_returns_waits_for_rounds_that_are_longer_than_the_patience(tmp_path: Path) -> None:
    """The only restart is that of the killed worker."""
    with prepare_clusters(tmp_path, ("gpu", "npu"), restarts=1, patience="45s") as found:
        start_clusters(found, {"killed": {"npu": 6}, "pause": {"gpu": [7, 12.0]}, "waits": {14: ["npu"]}})
        check_run(found, {"npu": 4}, ["", ""])
        assert sum("restart 1 of 1" in line for line in found["npu"].err) == 1, found["npu"].last_output


@pytest.mark.parametrize("how", ["fails", pytest.param("killed", marks=pytest.mark.grid)])
def test_clusters_resume_from_memory_after_the_end_of_one(tmp_path: Path, how: str) -> None:
    """Without `restarts`, and without a checkpoint on a disk: the launchers save what was in memory."""
    with prepare_clusters(tmp_path, ("gpu", "npu"), elastic={}, restarts=0) as found:
        plan = {how: {"npu": 18}, "every": 1000}
        start_clusters(found, plan)
        codes = found.wait_for_exit_codes()
        assert 0 not in codes.values(), codes
        for site in found.sites.values():
            assert "which was saved in memory, is saved in" in site.last_output
        start_clusters(found, {"every": 1000})
        check_run(found, {}, [""])
        ((resumed, _),) = [found["gpu"].reports["epoch 0"]]
        assert resumed in (8, 16)


THREE = ("gpu", "npu", "tpu")
CASES = {
    "two clusters": (("gpu", "npu"), {"npu": 6}, {14: ["npu"]}, ["", ""]),
    "one of three": (THREE, {"npu": 6}, {14: ["npu"]}, ["", ""]),
    "the first of two": (("npu", "xpu"), {"npu": 6}, {14: ["npu"]}, ["", ""]),
    "both in turn": (("gpu", "npu"), {"npu": 6, "gpu": 17}, {18: ["npu"]}, ["", "npu", ""]),
    "one of three, and the decider": (THREE, {"npu": 6, "gpu": 17}, {18: ["npu"]}, ["", "npu", ""]),
    "the decider of three": (THREE, {"gpu": 6}, {}, ["", ""]),
    "two of three at once": (THREE, {"npu": 6, "tpu": 6}, {14: ["npu", "tpu"]}, ["", ""]),
    "two in turn, which return together": (THREE, {"npu": 6, "tpu": 10}, {14: ["npu", "tpu"]}, ["", ""]),
    "one while another returns": (THREE, {"npu": 6, "tpu": 17}, {14: ["npu"], 25: ["tpu"]}, ["", "tpu", ""]),
    "the first of three": (("tpu", "gpu", "npu"), {"npu": 6}, {14: ["npu"]}, ["", ""]),
    "one of four": (("gpu", "npu", "tpu", "xpu"), {"npu": 6}, {14: ["npu"]}, ["", ""]),
    "two of four": (("gpu", "npu", "tpu", "xpu"), {"npu": 6, "tpu": 10}, {14: ["npu", "tpu"]}, ["", ""]),
}
SAMPLE = ("two clusters", "one of three")


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.grid] * (each not in SAMPLE)) for each in CASES]
)
def test_killed_clusters_miss_meetings_and_return(tmp_path: Path, case: str) -> None:
    """Their launchers start them again; the others leave once, after a common step, when they have come. If the decider
    is killed, all that are present resume from a checkpoint.
    """
    names, killed, waits, absent = CASES[case]
    with prepare_clusters(tmp_path, names) as found:
        start_clusters(found, {"killed": killed, "waits": waits})
        last = {name: step // apart.EVERY * apart.EVERY for name, step in killed.items() if name in MAY_MISS}
        check_run(found, last, absent)
        for stayed in (found[name] for name in names if name not in killed):
            warned = [line for line in stayed.err if "the run goes on without" in line]
            assert all(any(f"'{name}'" in line for line in warned) for name in last), stayed.last_output


@pytest.mark.grid
@pytest.mark.parametrize("names", [("gpu", "npu"), THREE], ids=["two clusters", "three clusters"])
def test_cut_off_cluster_does_not_go_on_and_returns(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The line between the decider and one of the others is cut, not those between the others."""
    with prepare_clusters(tmp_path, names, patience="20s") as found, insert_line(found, "gpu") as (line, configs):
        start_clusters(found, {"cut": [6, str(tmp_path / "cut")], "waits": {14: ["npu"]}}, {"npu": configs["npu"]})
        for site in found.sites.values():
            site.await_line('"steps", 6')
        line.cut()
        (tmp_path / "cut").touch()
        found["gpu"].await_line("the run goes on without 'npu' (no message from worker 'npu/0'")
        found["npu"].await_line("restart 1 of 8")
        assert found["npu"].reports["steps"] == 7  # it did not pass the meeting after the next step
        line.restore()
        check_run(found, {"npu": 4}, ["", ""])
