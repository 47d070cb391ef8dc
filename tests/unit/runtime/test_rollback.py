"""The error of a failing step, and the rollback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from whale_nebula import errors
from whale_nebula.config import load
from whale_nebula.errors import (
    DataError,
    LinkClosedError,
    NebulaError,
    OptionError,
    PlanMismatchError,
    StageFailedError,
    VerificationError,
)
from whale_nebula.errors.text import remove_folders
from whale_nebula.ir.canonical import describe_first_difference, digest_lines
from whale_nebula.runtime.session.session import Session, describe_failure
from whale_nebula.runtime.step.rollback import Guard, Whereabouts
from whale_nebula.transport import MemoryNetwork


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


# -------------------- The report of an error to other processes: in a private run without anything that may cont
SECRET = "4711"
FORM = {"shape": [None, 4]}


def lookup() -> None:
    """TensorFlow says which value was out of range."""
    with tf.device("/CPU:0"):
        tf.raw_ops.ScatterNd(indices=[[4711]], updates=[1.0], shape=[3])


def chained(kind: type[NebulaError]) -> Callable[[], None]:
    def raises() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise kind(f"there is no {cause}", where="x", why="y", mend="z") from cause

    return raises


def unchained() -> None:
    try:
        raise ValueError(f"row {SECRET}")
    except ValueError as cause:
        raise OptionError(f"not read: {cause}") from None


def raised(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


HOLD_VALUES = {
    "ValueError": raised(ValueError(f"row {SECRET}")),
    "SystemExit": raised(SystemExit(f"row {SECRET}")),
    "KeyError": lambda: {}[SECRET],
    "InvalidArgumentError": lookup,
    "StageFailedError, NB-301": chained(StageFailedError),
    "DataError, NB-220": raised(DataError(f"line {SECRET} is empty")),
    "VerificationError, NB-310": raised(VerificationError(f"weights[3] = {SECRET}")),
    "OptionError, NB-104": unchained,
    "PlanError, NB-210": chained(errors.PlanError),
}


def failure_of(raises: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        raises()
    return caught.value


@pytest.mark.parametrize("name", HOLD_VALUES)
def test_an_error_that_may_hold_a_value_goes_as_type_and_code(name: str) -> None:
    failure = failure_of(HOLD_VALUES[name])
    assert any(SECRET in text for text in describe_failure(failure).values()), "there is something to keep"
    assert describe_failure(failure, private=True) == {"what": f"{name} (its text stays where it was raised)"}


@pytest.mark.parametrize("kind", [PlanMismatchError, LinkClosedError, OptionError, errors.CollectiveReadError])
def test_an_error_about_the_run_goes_whole(kind: type[NebulaError]) -> None:
    failure = kind("what", where="where", why="why", mend="mend")
    said = {"code": kind.code, "what": "what", "where": "where", "why": "why", "mend": "mend"}
    assert describe_failure(failure) == describe_failure(failure, private=True) == said


def test_a_link_that_is_lost_says_what_the_socket_said() -> None:
    try:
        raise OSError(104, "Connection reset by peer")
    except OSError as cause:
        failure = failure_of(raised(LinkClosedError(f"it failed: {cause}")))
    assert "reset" in describe_failure(failure, private=True)["what"]


@pytest.mark.parametrize("private", [False, True])
def test_no_folder_goes(private: bool) -> None:
    here, file = os.getcwd(), str(Path(__file__))
    failure = OptionError(f"in {file}", where=f"{file}:12", why=f"{here}/a b/c", mend=f"chmod 600 '{Path.home()}/k'")
    fields = describe_failure(failure, private=private)
    assert fields["where"] == f"{Path(file).name}:12" and fields["mend"] == "chmod 600 'k'"
    assert not any(here in text or str(Path.home()) + "/" in text for text in fields.values())


PATHS = [
    ("/srv/a/b.txt", "b.txt"),
    ("at ../a/b.py:3, then", "at b.py:3, then"),
    ("file:///srv/a.txt", "a.txt"),
    ("[Errno 2] No such file or directory: '/srv/my data/x'", "[Errno 2] No such file or directory: 'x'"),
    ("https://host:7/a/b", "https://host:7/a/b"),
    ("nebula://mt/npu/worker/0", "nebula://mt/npu/worker/0"),
    ("open '/home/ana maria/secret dir/x y.csv', not \"~/b c/d e/\"", "open 'x y.csv', not \"d e\""),
    ("['/srv/a', '/srv/b c/d'] and '/'", "['a', 'd'] and '/'"),
    ("gs://bucket/secret/x.csv: s3://b/k/, 'hdfs://nn:9/a b/c'", "x.csv: k, 'c'"),
    ("//srv/secret/x and // a comment and x//y and //host", "x and // a comment and x//y and //host"),
    ("cc -I/home/ana/x -L/srv/lib block-a/dense", "cc -Ix -Llib block-a/dense"),
    ("gpu/0 and encoder/.*/kernel and '.*/bias' and 5 / 3", "gpu/0 and encoder/.*/kernel and '.*/bias' and 5 / 3"),
]


@pytest.mark.parametrize(("text", "sent"), PATHS)
def test_a_path_is_a_name(text: str, sent: str) -> None:
    assert remove_folders(text, ["/srv/my data"]) == sent


@pytest.mark.parametrize("config", [{"results": "owner"}, {"weights": "own"}, {"inputs": {"x": FORM}}])
def test_a_run_is_private_where_something_stays_at_home(config: dict[str, object]) -> None:
    assert load(config).private and not load({}).private


PROGRAM = ["input x float32[?,4]", "%1 = Const {value=(4711,)} int32[1] @gpu", "returns %1"]


@pytest.mark.parametrize("private", [False, True])
def test_the_text_of_a_program_stays_in_a_private_run(private: bool) -> None:
    network = MemoryNetwork()
    names = ("gpu/0", "npu/0")
    links = {here: network.link(here, there, here, there) for here, there in (names, names[::-1])}
    sent: list[str] = []

    def agree(here: str, there: str, lines: list[str]) -> BaseException:
        link, post = links[here], links[here].post
        link.post = lambda message: (sent.append(json.dumps(message)), post(message))[1]  # type: ignore[method-assign]
        session = Session(here, {there: link}, 10.0, private=private)
        failure = failure_of(lambda: session.agree("p", digest_lines(lines), lines, describe_first_difference))
        sent.append(json.dumps(describe_failure(failure, private=private)))
        return failure

    with ThreadPoolExecutor(2) as pool:
        sides = (*names, PROGRAM), (*names[::-1], [PROGRAM[0], "%1 = Const {value=(4712,)} int32[1]", PROGRAM[2]])
        first, _ = (each.result() for each in [pool.submit(agree, *side) for side in sides])
    assert isinstance(first, PlanMismatchError)
    assert any(SECRET in text for text in sent) == (not private)
    shown = "\n".join([str(first), *getattr(first, "__notes__", [])])
    assert SECRET in shown and (not private or "their texts differ from line 2 on" in shown)
