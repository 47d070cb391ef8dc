"""Errors: their codes, and their text."""

import copy
import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula import errors
from whale_nebula.errors import BatchCoupledError, NebulaError, NestingError, StageFailedError
from whale_nebula.errors.text import closest

WORDS = ["micro_batch", "schedule", "in_flight", "recompute", "coupled"]
CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, NebulaError) and kind.__module__ == errors.__name__
]
# which hundred a branch of the tree has its codes in
HUNDREDS = {
    errors.ScopeError: "1",
    errors.CaptureError: "2",
    errors.PlanError: "2",
    errors.RunError: "3",
    errors.TransportError: "4",
    errors.ConfigError: "5",
}


def test_codes_of_a_branch_share_the_hundred() -> None:
    for branch, hundred in HUNDREDS.items():
        assert {kind.code[3] for kind in CLASSES if issubclass(kind, branch)} == {hundred}


@pytest.mark.parametrize("kind", CLASSES)
def test_error_has_a_fix_and_survives_copying_and_pickling(
    kind: type[NebulaError],
) -> None:
    error = kind("something")
    assert error.mend
    assert "\n  mend: " in str(error)
    assert kind is NebulaError or "usual_mend" in vars(kind) or "usual_mends" in vars(kind)

    error = kind("what it is", where="a.py:3", why="because", mend="do this")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)

    error = kind("something", why="because", mend="do this")
    anew = kind(f"Error encountered:\n\n{error}")
    assert str(anew) == f"Error encountered:\n\n{error}"
    assert anew.mend == error.mend


def test_error_text_indents_the_fix() -> None:
    error = NebulaError("cut", where=None, why=None, mend="with a:\n    b")
    assert str(error) == "NB-000 cut\n  mend: with a:\n            b"
    assert (error.where, error.why) == ("", "")


def test_batch_coupled_error_has_op_line_and_all_fixes() -> None:
    error = BatchCoupledError("coupled", op="loss/MatMul", line="a.py:7")
    assert (error.op, error.line, error.where) == ("loss/MatMul", "a.py:7", "loss/MatMul, a.py:7")
    for way in ("micro_batch=1", "nb.loss_weight", 'coupled="allow"'):
        assert way in error.mend
    assert BatchCoupledError("coupled", mends=("a", "b")).mend == "a\nor b"
    assert BatchCoupledError("coupled", mend="a").mends == ("a",)


def test_stage_failed_error_has_torn_flag() -> None:
    whole = StageFailedError("x", stage="encoder", phase=1, micro_batch=0)
    torn = StageFailedError("x", stage="encoder", torn=True)
    assert whole.where == "stage 'encoder', phase 1, micro-batch 0"
    assert not whole.torn and "as they were before" in whole.why
    assert torn.torn and "torn" in torn.why and "checkpoint" in torn.mend


def test_keras_raises_nebula_errors_unchanged() -> None:
    import keras

    error = NestingError("a stage in a stage", where="a.py:3", why="they follow", mend="dedent it")

    class FailingLayer(keras.layers.Layer):
        def call(self, inputs: object) -> object:
            raise error

    with pytest.raises(NestingError) as caught:
        FailingLayer()(keras.ops.ones((1, 1)))
    assert caught.value is error
    with pytest.raises(NestingError) as caught:
        FailingLayer()(keras.Input((1,)))
    assert str(caught.value).endswith(str(error))
    assert str(caught.value).count("mend:") == 1
    assert caught.value.mend == error.mend


@given(st.sampled_from(WORDS), st.integers(0, 7))
def test_closest_finds_a_word_with_a_missing_letter(word: str, place: int) -> None:
    assert closest(word[:place] + word[place + 1 :], WORDS) == word
