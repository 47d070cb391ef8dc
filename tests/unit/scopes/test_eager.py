"""Scopes without effect: stages in eager code, and scopes that are never entered."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes import hints
from whale_nebula.scopes.frames import open_frames
from whale_nebula.scopes.placement import parse_placement
from whale_nebula.site import Site


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_warned", set())


def test_stage_in_eager_code_warns_once_per_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with nb.cluster(), nb.stage(cluster="gpu") as frame:
                tf.constant(1.0) + 1.0
    assert [warning.category for warning in caught] == [NebulaWarning]
    assert (caught[0].filename, caught[0].lineno) == (__file__, frame.site.line)
    assert "stage 'gpu' runs uncut" in str(caught[0].message)
    assert "fit" in str(caught[0].message)


def test_program_warns_for_its_first_stage_only() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nb.cluster():
            with nb.stage(name="a") as first:
                pass
            with nb.stage(name="b"):
                pass
        with nb.stage(name="a") as other:
            pass
    assert [warning.lineno for warning in caught] == [first.site.line, other.site.line]


def test_used_stages_and_other_scopes_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nb.cluster(), nb.replica(), nb.pipeline(2), nb.compress(fp16=True):
            pass
        with nb.stage(), nb.compress(fp16=True) as frame:
            frame.touched = True


def test_exception_in_a_stage_is_raised_and_closes_all_scopes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), nb.stage():
            raise KeyError
        with pytest.raises(NebulaWarning), nb.cluster(), nb.stage():
            pass
    assert open_frames() == ()


def test_stage_in_a_plain_tf_function_warns_once_with_its_fix() -> None:
    sites: list[Site] = []

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with nb.stage() as frame:
            sites.append(frame.site)
            return x + 1.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert float(step(tf.constant(1.0))) == 2.0
        step(tf.constant([1.0, 2.0]))
    assert [(warning.filename, warning.lineno) for warning in caught] == [sites[0]]
    assert "use @nb.function instead of @tf.function" in str(caught[0].message)


def test_eager_stage_warns_again_in_a_tf_function() -> None:
    def forward(x: tf.Tensor) -> tf.Tensor:
        with nb.cluster(), nb.stage():
            return x + 1.0

    with pytest.warns(NebulaWarning, match="plain eager code"):
        forward(tf.constant(1.0))
    with pytest.warns(NebulaWarning, match=r"a plain tf\.function"):
        tf.function(forward)(tf.constant(1.0))


def test_captured_and_verified_steps_do_not_warn() -> None:
    @nb.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with nb.cluster(), nb.stage(cluster="a"):
            return x + 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(step(tf.constant(1.0))) == 2.0
        nb.plan(step, tf.constant(1.0))
        assert nb.verify(step, tf.constant(1.0))


@pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
def test_site_of_autograph_code_is_the_original_line() -> None:
    sites: list[Site] = []

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in range(2):
            x = x + 1.0
        with nb.stage() as frame:
            sites.append(frame.site)
        return x

    step(tf.constant(1.0))
    first = step.python_function.__code__.co_firstlineno
    assert sites == [Site(__file__, first + 4)]


def collect_warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", NebulaWarning)
        hints.warn_unscoped("small")
    return [str(each.message) for each in found]


def test_stage_without_with_warns_once_with_the_fix() -> None:
    nb.stage(cluster="gpu")
    (message,) = collect_warnings()
    assert message.startswith("NB-900 nb.stage(cluster='gpu') is never entered")
    assert "model 'small' runs uncut" in message
    assert "with nb.stage(cluster='gpu'):" in message
    assert collect_warnings() == []


def enter_scope_later() -> None:
    made = nb.pipeline(2)
    with nb.cluster(), made:
        pass


def enter_scope_conditionally() -> None:
    for used in (True, False):
        scope: Any = nb.cluster()
        if used:
            with scope:
                pass


def use_scope_as_decorator() -> None:
    with pytest.raises(nb.errors.ScopeError, match="is not a decorator"):
        nb.stage(cluster="gpu")(lambda x: x)


def use_scopes_in_placement() -> None:
    parse_placement({"a": nb.stage(cluster="gpu", name="head"), "a/wide": nb.split(2)})


@pytest.mark.parametrize(
    "write", [enter_scope_later, enter_scope_conditionally, use_scope_as_decorator, use_scopes_in_placement]
)
def test_entered_placed_or_refused_scopes_do_not_warn(write: Callable[[], None]) -> None:
    write()
    assert collect_warnings() == []


@pytest.mark.filterwarnings("error")
def test_model_without_scopes_does_not_warn() -> None:
    hints.warn_unscoped("small")
