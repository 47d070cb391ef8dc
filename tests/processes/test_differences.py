"""Differences of samples in two processes: both hold the same bits, and all is as in one process."""

from __future__ import annotations

import keras
import pytest

import whale_nebula as nb
from tests.processes import running, telling
from tests.processes.workers import differences


def test_two_processes_hold_the_same_samples_and_train_as_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = running.run("differences", 2, "c0", "c1")
    found.result.check()
    nb.shutdown()
    keras.utils.set_random_seed(running.SEED)
    with nb.init():
        differences.told("c0", "c1")
    expected = telling.told(capsys.readouterr().out)
    for name in ("losses", "outputs", "weights"):
        assert found.same(name) == expected[name]
    here, there = expected["held"]
    assert here == there and found.same("held") == [here]
    there, back = ("c0->c1", "c1->c0")
    first, second = found.all("sent")
    assert [step[there] for step in first] == [step[there] for step in expected["sent"]]
    assert [step[back] for step in second] == [step[back] for step in expected["sent"]]
    epochs = [sum(step[there][0] for step in first[each : each + 3]) for each in (0, 3, 6)]
    assert epochs[1] == epochs[2] < epochs[0] / 2
