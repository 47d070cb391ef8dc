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
from whale_nebula.runtime.step.rollback import Guard, OpLocations
from whale_nebula.transport import MemoryNetwork


def fail_assertion() -> None:
    tf.debugging.assert_equal(1, 2, message="not the same")


def divide_by_zero_in_function() -> None:
    tf.function(lambda: 1 // tf.identity(0))()


def make_guard() -> tuple[Guard, tf.Variable, tf.Variable]:
    seed, weight = tf.Variable(1.0), tf.Variable(1.0)
    return Guard({"seed": seed, "weight": weight}, ["seed", "gone"]), seed, weight


def test_rollback_restores_variables_that_the_forward_wrote() -> None:
    guarded, seed, weight = make_guard()
    with pytest.raises(ZeroDivisionError), guarded.roll_back_on_failure():
        seed.assign(2.0)
        weight.assign(2.0)
        raise ZeroDivisionError
    assert (float(seed), float(weight)) == (1.0, 2.0)


def test_rollback_restores_nothing_after_an_update_has_begun() -> None:
    guarded, seed, _ = make_guard()
    with pytest.raises(ZeroDivisionError), guarded.roll_back_on_failure():
        seed.assign(2.0)
        guarded.begin()
        raise ZeroDivisionError
    assert float(seed) == 2.0


def test_skipped_update_is_rolled_back() -> None:
    guarded, seed, weight = make_guard()
    seed.assign(2.0)
    guarded.roll_back_if_skipped(lambda: weight.assign(5.0))()
    assert (float(seed), float(weight)) == (1.0, 1.0)
    guarded.roll_back_if_skipped(lambda: weight.assign(5.0), is_skipped=False)()
    assert float(weight) == 5.0


def test_skipped_update_that_fails_is_rolled_back() -> None:
    guarded, _, weight = make_guard()

    def update() -> None:
        weight.assign(5.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded.roll_back_if_skipped(update)()
    assert float(weight) == 1.0


def test_skipped_update_restores_own_variables_only() -> None:
    own, other = tf.Variable(1.0), tf.Variable(1.0)
    guarded = Guard({"own": own, "other": other}, [], held_paths={"own"})

    def update() -> None:
        own.assign(2.0)
        other.assign(2.0)

    guarded.roll_back_if_skipped(update)()
    assert (float(own), float(other)) == (1.0, 2.0)


def test_failure_names_stage_phase_and_micro_batch() -> None:
    guarded, *_ = make_guard()
    message = "the forward of stage 'a' failed in phase 1, micro-batch 2"
    with pytest.raises(StageFailedError, match=message) as caught, guarded.explain_stage_failure("a", 1, 2, "forward"):
        divide_by_zero_in_function()
    error = caught.value
    assert (error.stage, error.phase, error.micro_batch, error.torn) == ("a", 1, 2, False)
    assert error.why == "Integer division by zero"
    assert "op " in error.where


@pytest.mark.parametrize(
    ("phases", "message"), [(1, "failed in micro-batch 2"), (2, "failed in phase 0, micro-batch 2")]
)
def test_failure_names_the_phase_only_among_several(phases: int, message: str) -> None:
    guarded = Guard({}, [], locations=OpLocations(phases=phases))
    with pytest.raises(StageFailedError, match=message), guarded.explain_stage_failure("a", 0, 2, "forward"):
        divide_by_zero_in_function()


def test_python_errors_of_the_user_are_not_wrapped() -> None:
    guarded, *_ = make_guard()
    with pytest.raises(KeyError), guarded.explain_stage_failure("a", 0, 0, "forward"):
        raise KeyError("mine")


def test_failure_in_a_later_phase_tears_the_step() -> None:
    guarded, *_ = make_guard()
    guarded.begin()
    with (
        pytest.raises(StageFailedError, match="checkpoint") as caught,
        guarded.explain_stage_failure("a", 1, 0, "forward"),
    ):
        fail_assertion()
    assert caught.value.torn


@pytest.mark.parametrize("begun", [False, True])
def test_failure_outside_micro_batches_tears_the_step_only_in_an_update(begun: bool) -> None:
    guarded, *_ = make_guard()
    if begun:
        guarded.begin()
    with pytest.raises(StageFailedError) as caught, guarded.explain_phase_failure("update" if begun else "prologue", 0):
        fail_assertion()
    assert caught.value.torn is begun
    assert caught.value.micro_batch is None


def test_op_in_a_branch_is_located_at_the_line_of_the_branch() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.debugging.assert_greater(tf.compat.v1.placeholder(tf.float32), 100.0)
    line = OpLocations(graph).find_line("assert_greater/Assert/AssertGuard/Assert")
    assert line.startswith(f"{__file__}:")
    assert OpLocations(graph).find_line("elsewhere/Assert") == ""


# -------------------- The report of an error to other processes: in a private run without anything that may cont
SECRET = "4711"
FORM = {"shape": [None, 4]}


def fail_in_scatter() -> None:
    """TensorFlow says which value was out of range."""
    with tf.device("/CPU:0"):
        tf.raw_ops.ScatterNd(indices=[[4711]], updates=[1.0], shape=[3])


def make_chained_raiser(kind: type[NebulaError]) -> Callable[[], None]:
    def raise_error() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise kind(f"there is no {cause}", where="x", why="y", mend="z") from cause

    return raise_error


def raise_unchained() -> None:
    try:
        raise ValueError(f"row {SECRET}")
    except ValueError as cause:
        raise OptionError(f"not read: {cause}") from None


def make_raiser(error: BaseException) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


ERRORS_WITH_VALUES = {
    "ValueError": make_raiser(ValueError(f"row {SECRET}")),
    "SystemExit": make_raiser(SystemExit(f"row {SECRET}")),
    "KeyError": lambda: {}[SECRET],
    "InvalidArgumentError": fail_in_scatter,
    "StageFailedError, NB-301": make_chained_raiser(StageFailedError),
    "DataError, NB-220": make_raiser(DataError(f"line {SECRET} is empty")),
    "VerificationError, NB-310": make_raiser(VerificationError(f"weights[3] = {SECRET}")),
    "OptionError, NB-104": raise_unchained,
    "PlanError, NB-210": make_chained_raiser(errors.PlanError),
}


def catch_failure(raises: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        raises()
    return caught.value


@pytest.mark.parametrize("name", ERRORS_WITH_VALUES)
def test_error_that_may_contain_values_is_sent_as_type_and_code(name: str) -> None:
    failure = catch_failure(ERRORS_WITH_VALUES[name])
    assert any(SECRET in text for text in describe_failure(failure).values()), "there is something to keep"
    assert describe_failure(failure, private=True) == {"what": f"{name} (its text stays where it was raised)"}


@pytest.mark.parametrize("kind", [PlanMismatchError, LinkClosedError, OptionError, errors.CollectiveReadError])
def test_error_about_the_run_is_sent_completely(kind: type[NebulaError]) -> None:
    failure = kind("what", where="where", why="why", mend="mend")
    fields = {"code": kind.code, "what": "what", "where": "where", "why": "why", "mend": "mend"}
    assert describe_failure(failure) == describe_failure(failure, private=True) == fields


def test_lost_link_error_contains_the_socket_error() -> None:
    try:
        raise OSError(104, "Connection reset by peer")
    except OSError as cause:
        failure = catch_failure(make_raiser(LinkClosedError(f"it failed: {cause}")))
    assert "reset" in describe_failure(failure, private=True)["what"]


@pytest.mark.parametrize("private", [False, True])
def test_sent_errors_contain_no_folders(private: bool) -> None:
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
def test_remove_folders_keeps_file_names(text: str, sent: str) -> None:
    assert remove_folders(text, ["/srv/my data"]) == sent


@pytest.mark.parametrize("config", [{"results": "owner"}, {"weights": "own"}, {"inputs": {"x": FORM}}])
def test_run_with_local_data_or_results_is_private(config: dict[str, object]) -> None:
    assert load(config).private and not load({}).private


PROGRAM = ["input x float32[?,4]", "%1 = Const {value=(4711,)} int32[1] @gpu", "returns %1"]


@pytest.mark.parametrize("private", [False, True])
def test_private_run_does_not_send_the_program_text(private: bool) -> None:
    network = MemoryNetwork()
    names = ("gpu/0", "npu/0")
    links = {here: network.link(here, there, here, there) for here, there in (names, names[::-1])}
    sent: list[str] = []

    def agree(here: str, there: str, lines: list[str]) -> BaseException:
        link, post = links[here], links[here].post
        link.post = lambda message: (sent.append(json.dumps(message)), post(message))[1]  # type: ignore[method-assign]
        session = Session(here, {there: link}, 10.0, private=private)
        failure = catch_failure(lambda: session.agree("p", digest_lines(lines), lines, describe_first_difference))
        sent.append(json.dumps(describe_failure(failure, private=private)))
        return failure

    with ThreadPoolExecutor(2) as pool:
        sides = (*names, PROGRAM), (*names[::-1], [PROGRAM[0], "%1 = Const {value=(4712,)} int32[1]", PROGRAM[2]])
        first, _ = (each.result() for each in [pool.submit(agree, *side) for side in sides])
    assert isinstance(first, PlanMismatchError)
    assert any(SECRET in text for text in sent) == (not private)
    shown = "\n".join([str(first), *getattr(first, "__notes__", [])])
    assert SECRET in shown and (not private or "their texts differ from line 2 on" in shown)
