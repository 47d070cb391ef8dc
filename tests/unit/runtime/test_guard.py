"""The error of a failing step, and the rollback."""

import pytest
import tensorflow as tf

from whale_nebula.errors import StageFailedError
from whale_nebula.runtime.step.rollback import Guard, Whereabouts


def failing() -> None:
    tf.debugging.assert_equal(1, 2, message="not the same")


def in_a_function() -> None:
    tf.function(lambda: 1 // tf.identity(0))()


def guard() -> tuple[Guard, tf.Variable, tf.Variable]:
    seed, weight = tf.Variable(1.0), tf.Variable(1.0)
    return Guard({"seed": seed, "weight": weight}, ["seed", "gone"]), seed, weight


def test_what_the_forward_wrote_is_put_back() -> None:
    kept, seed, weight = guard()
    with pytest.raises(ZeroDivisionError), kept.undone():
        seed.assign(2.0)
        weight.assign(2.0)
        raise ZeroDivisionError
    assert (float(seed), float(weight)) == (1.0, 2.0)


def test_nothing_is_put_back_once_an_update_has_begun() -> None:
    kept, seed, _ = guard()
    with pytest.raises(ZeroDivisionError), kept.undone():
        seed.assign(2.0)
        kept.begin()
        raise ZeroDivisionError
    assert float(seed) == 2.0


def test_an_update_that_is_left_out_leaves_no_trace() -> None:
    kept, seed, weight = guard()
    seed.assign(2.0)
    kept.without_trace(lambda: weight.assign(5.0))()
    assert (float(seed), float(weight)) == (1.0, 1.0)
    kept.without_trace(lambda: weight.assign(5.0), out=False)()
    assert float(weight) == 5.0


def test_an_update_that_fails_while_it_is_left_out_leaves_none_either() -> None:
    kept, _, weight = guard()

    def update() -> None:
        weight.assign(5.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kept.without_trace(update)()
    assert float(weight) == 1.0


def test_variables_of_others_are_not_touched() -> None:
    own, other = tf.Variable(1.0), tf.Variable(1.0)
    kept = Guard({"own": own, "other": other}, [], own={"own"})

    def update() -> None:
        own.assign(2.0)
        other.assign(2.0)

    kept.without_trace(update)()
    assert (float(own), float(other)) == (1.0, 2.0)


def test_a_piece_is_named() -> None:
    kept, *_ = guard()
    said = "the forward of stage 'a' failed in phase 1, micro-batch 2"
    with pytest.raises(StageFailedError, match=said) as caught, kept.piece("a", 1, 2, "forward"):
        in_a_function()
    error = caught.value
    assert (error.stage, error.phase, error.micro_batch, error.torn) == ("a", 1, 2, False)
    assert error.why == "Integer division by zero"
    assert "op " in error.where


@pytest.mark.parametrize(("phases", "said"), [(1, "failed in micro-batch 2"), (2, "failed in phase 0, micro-batch 2")])
def test_a_phase_is_said_where_there_are_several(phases: int, said: str) -> None:
    kept = Guard({}, [], whereabouts=Whereabouts(phases=phases))
    with pytest.raises(StageFailedError, match=said), kept.piece("a", 0, 2, "forward"):
        in_a_function()


def test_the_users_own_errors_pass() -> None:
    kept, *_ = guard()
    with pytest.raises(KeyError), kept.piece("a", 0, 0, "forward"):
        raise KeyError("mine")


def test_a_later_phase_that_fails_tears_the_step() -> None:
    kept, *_ = guard()
    kept.begin()
    with pytest.raises(StageFailedError, match="checkpoint") as caught, kept.piece("a", 1, 0, "forward"):
        failing()
    assert caught.value.torn


@pytest.mark.parametrize("begun", [False, True])
def test_what_runs_once_is_torn_only_in_an_update(begun: bool) -> None:
    kept, *_ = guard()
    if begun:
        kept.begin()
    with pytest.raises(StageFailedError) as caught, kept.once("update" if begun else "prologue", 0):
        failing()
    assert caught.value.torn is begun
    assert caught.value.micro_batch is None


def test_an_op_of_a_branch_stands_where_the_branch_does() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.debugging.assert_greater(tf.compat.v1.placeholder(tf.float32), 100.0)
    line = Whereabouts(graph).line("assert_greater/Assert/AssertGuard/Assert")
    assert line.startswith(f"{__file__}:")
    assert Whereabouts(graph).line("elsewhere/Assert") == ""
