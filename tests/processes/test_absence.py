"""Clusters that train apart and are lost: the others go on, and a lost cluster joins a later meeting.

The weights at the end are those of local SGD by plain Keras models in which the cluster misses the same meetings.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.sites import HERE, Sites, insert_line, prepare_sites
from tests.processes.workers import apart
from whale_nebula.launch.placement import free_port

DEADLINE = 400.0
pytestmark = pytest.mark.timeout(DEADLINE)


@contextlib.contextmanager
def prepare_clusters(folder: Path, names: Sequence[str], **options: Any) -> Iterator[Sites]:
    """Sites with a launcher for each cluster, in folders of their own, of which npu may miss meetings."""
    clusters = {name: {"workers": [f"127.0.0.1:{free_port()}"]} for name in names}
    with prepare_sites(
        folder, names, clusters=clusters, elastic={"npu": {"min": 0}}, restarts=8, **{"patience": "120s", **options}
    ) as found:
        found.has_separate_folders = True
        yield found


def start_clusters(found: Sites, plan: dict[str, Any], configs: dict[str, dict[str, Any]] | None = None) -> None:
    for name in found.clusters:
        config = found.write_config(name, (configs or {}).get(name, {}))
        command = ["-m", "whale_nebula.cli.main", "run", "--config", config, "--cluster", name]
        script = [str(HERE / "workers" / "apart.py"), str(found.folder / f"saved-{name}"), json.dumps(plan)]
        found.commands[name] = [*command, *script]
        found.restart(name)


def simulate(names: Sequence[str], lost: range) -> list[np.ndarray]:
    """The weights at the end by a plain Keras model for each cluster, if npu trains nothing in a range of steps, and
    returns with the shared weights and the slots of the first cluster.
    """
    models = {name: apart.make_model() for name in names}
    x, y = apart.draw_rows()
    shared = models[names[0]].get_weights()
    for step in range(apart.STEPS * apart.EPOCHS):
        begin = step % apart.STEPS * apart.BATCH
        rows = dict(zip(names, np.array_split(np.arange(begin, begin + apart.BATCH), len(names)), strict=True))
        present = [name for name in names if name != "npu" or step not in lost]
        if step == lost.stop:
            models["npu"].set_weights(shared)
            first = models[next(name for name in names if name != "npu")]
            for slot, value in zip(models["npu"].optimizer.variables, first.optimizer.variables, strict=True):
                slot.assign(value)
        for name in present:
            models[name].train_on_batch(x[rows[name]], y[rows[name]])
        if (step + 1) % apart.EVERY == 0:
            shared = [np.mean(each, 0) for each in zip(*(models[name].get_weights() for name in present), strict=True)]
            for name in present:
                models[name].set_weights(shared)
    return [weight.ravel() for weight in shared]


def check_run(found: Sites, last_meeting: int, starts: int = 2) -> None:
    """Check the starts, the report, and the weights of a run that went on without npu after npu's last meeting."""
    codes = found.wait_for_exit_codes()
    assert codes == dict.fromkeys(found.clusters, 0), [site.last_output for site in found.sites.values()]
    stayed = found[next(name for name in found.clusters if name != "npu")].reports
    begun = [stayed[name] for name in sorted(stayed) if name.startswith("epoch ")]
    resumed, clusters = begun[-1]
    assert begun[0] == [0, sorted(found.clusters)] and clusters == sorted(found.clusters), begun
    assert resumed % apart.EVERY == 0 and resumed > last_meeting and len(begun) == starts, begun
    missed = (resumed - last_meeting) // apart.EVERY
    assert found.get_common("missed") == {"npu": missed} and f"npu missed {missed}" in stayed["report"]
    expected = simulate(found.clusters, range(last_meeting, resumed))
    for own, theirs in zip(found.get_common("weights"), expected, strict=True):
        np.testing.assert_allclose(own, theirs, 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("names", "plan", "starts"),
    [
        pytest.param(("gpu", "npu"), {"killed": {"npu": 6}}, 2, id="two clusters"),
        pytest.param(("npu", "tpu"), {"killed": {"npu": 6}}, 2, marks=pytest.mark.grid, id="the first of two"),
        pytest.param(("gpu", "npu"), {"killed": {"npu": 6, "gpu": 17}}, 3, marks=pytest.mark.grid, id="both in turn"),
    ],
)
def test_killed_cluster_misses_meetings_and_returns(
    tmp_path: Path, names: tuple[str, ...], plan: dict[str, Any], starts: int
) -> None:
    """Its launcher starts it again; the others leave once, after a common step, when it has come. If another one is
    killed meanwhile, it resumes without npu.
    """
    with prepare_clusters(tmp_path, names) as found:
        start_clusters(found, {**plan, "waits": 18 if starts == 3 else 14})
        check_run(found, 4, starts)
        stayed = found[next(name for name in names if name != "npu")]
        assert "the run goes on without 'npu' (" in "".join(stayed.err)


@pytest.mark.grid
def test_cut_off_cluster_does_not_go_on_and_returns(tmp_path: Path) -> None:
    with (
        prepare_clusters(tmp_path, ("gpu", "npu"), patience="20s") as found,
        insert_line(found, "gpu") as (line, configs),
    ):
        start_clusters(found, {"cut": [6, str(tmp_path / "cut")], "waits": 14}, configs)
        for site in found.sites.values():
            site.await_line('"steps", 6')
        line.cut()
        (tmp_path / "cut").touch()
        found["gpu"].await_line("the run goes on without 'npu' (no message from worker 'npu/0'")
        found["npu"].await_line("restart 1 of 8")
        assert found["npu"].reports["steps"] == 7  # it did not pass the meeting after the next step
        line.restore()
        check_run(found, 4)
