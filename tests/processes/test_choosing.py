"""`auto`, and steps that are left out, in two processes: the same at the same step, and as in one process."""

import keras
import pytest

import whale_nebula as nb
from tests.processes import running, telling
from tests.processes.workers import choosing
from whale_nebula.runtime import outlook


def test_both_sides_change_and_leave_out_at_the_same_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = running.run("choosing", 2, "c0", "c1")
    found.result.check()
    for name in ("_rate", "slowest"):  # as the worker sets them, and back again afterwards
        owner = outlook.Seen if name == "_rate" else outlook
        monkeypatch.setattr(owner, name, getattr(owner, name))
    nb.shutdown()
    keras.utils.set_random_seed(running.SEED)
    with nb.init(links="10gbit,0ms"):
        choosing.told("c0", "c1")
    expected = telling.told(capsys.readouterr().out)
    for name in ("auto", "free again", "left out"):
        assert found.same(name) == expected[name]
    slow, free, out = (expected[name]["notes"] for name in ("auto", "free again", "left out"))
    assert any("b0 c0->c1: none -> int4" in notes for notes in slow)
    assert any("b0 c1->c0: int4 -> none" in notes for notes in free)
    said = "left out: b0 c0->c1 has a NaN or an infinity in micro-batch 1 of stage 'c0'"
    assert [said in notes for notes in out] == [False, True, False, False]
    for outcome in found.result.outcomes.values():
        assert said in outcome.err
