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
        folder, names, clusters=clusters, elastic={"npu": {"min": 0}}, restarts=8, **{"patience": "60s", **options}
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
        rows = np.array_split(np.arange(begin, begin + apart.BATCH), len(names))
        present = [name for name in names if name != "npu" or step not in lost]
        if step == lost.stop:
            models["npu"].set_weights(shared)
            first = models[next(name for name in names if name != "npu")]
            for slot, value in zip(models["npu"].optimizer.variables, first.optimizer.variables, strict=True):
                slot.assign(value)
        for name in present:
            own = rows[list(names).index(name)]
            models[name].train_on_batch(x[own], y[own])
        if (step + 1) % apart.EVERY == 0:
            shared = [np.mean(each, 0) for each in zip(*(models[name].get_weights() for name in present), strict=True)]
            for name in present:
                models[name].set_weights(shared)
    return [weight.ravel() for weight in shared]


def check_run(found: Sites, lost_after: int) -> None:
    """Check the restarts, the report, and the weights of a run that lost npu after a step, and went on."""
    outputs = [site.last_output for site in found.sites.values()]
    assert found.wait_for_exit_codes() == dict.fromkeys(found.clusters, 0), outputs
    first, *others = (site.reports for name, site in found.sites.items() if name != "npu")
    starts = sorted((name, first[name]) for name in first if name.startswith("epoch "))
    (_, begun), (_, (resumed, clusters)) = starts
    assert begun == [0, sorted(found.clusters)] and clusters == sorted(found.clusters), starts
    assert resumed % apart.EVERY == 0 and resumed > lost_after, starts
    meetings = resumed // apart.EVERY - lost_after // apart.EVERY
    missed = found.get_common("missed")
    assert missed == {"npu": meetings} and f"npu missed {meetings}" in first["report"]
    for each, expected in zip(found.get_common("weights"), simulate(found.clusters, range(lost_after, resumed)), strict=True):
        np.testing.assert_allclose(each, expected, 1e-4, 1e-6)


@pytest.mark.parametrize("names", [("gpu", "npu")])
def test_killed_cluster_misses_meetings_and_returns(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Its launcher starts it again; the others only stop once, after a common step, when it has come."""
    with prepare_clusters(tmp_path, names) as found:
        start_clusters(found, {"killed": 6, "waits": 14})
        check_run(found, 6)
        assert "the run goes on without 'npu' (worker 'npu/0' is gone" in "".join(found["gpu"].err)
