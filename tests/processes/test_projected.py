"""A learned basis in two processes: each has one of the variables, and all is as in one process, bit for bit."""

from __future__ import annotations

import keras
import pytest

import whale_nebula as nb
from tests.processes import running, telling
from tests.processes.workers import projected


def test_two_processes_train_the_basis_that_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = running.run("projected", 2, "c0", "c1")
    found.result.check()
    nb.shutdown()
    keras.utils.set_random_seed(running.SEED)
    with nb.init(links="10gbit,0ms"):
        projected.told("c0", "c1")
    expected = telling.told(capsys.readouterr().out)
    for name in ("losses", "outputs", "names", "weights"):
        assert found.same(name) == expected[name]
    assert found.same("names")[:2] == ["projected/bottleneck_c0_down", "projected/bottleneck_c0_c1_up"]
    sent = {link: count for part in found.all("sent") for link, count in part.items() if count[0]}
    assert sent == expected["sent"]
