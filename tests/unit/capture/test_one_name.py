"""One name for two stages on two clusters is refused where both are in one program, whatever their block."""

from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.capture import built
from tests.unit.capture.built import X, Y, two_stages
from whale_nebula.errors import StageIdentityError
from whale_nebula.scopes.frames import begin_step


@pytest.mark.parametrize("first", [{"cluster": "a", "name": "s"}, {"cluster": "s"}])
def test_a_functional_model_without_a_block(first: dict[str, Any]) -> None:
    model = two_stages(first, {"cluster": "b", "name": "s"})
    with pytest.raises(StageIdentityError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    assert error.what.startswith(f"stage 's' is on cluster 'b' at {built.__file__}:")
    assert f", and on '{first['cluster']}' at {built.__file__}:" in error.what
    assert error.mend == "give the second a name of its own: nb.stage(cluster='b', name='s_2')"


def test_what_the_mend_says_are_two_stages() -> None:
    model = two_stages({"cluster": "a", "name": "s"}, {"cluster": "b", "name": "s_2"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a", "s_2": "b"}


def test_one_that_names_no_cluster_continues_the_stage() -> None:
    nb.init({"clusters": {"a": {}, "b": {}}})
    model = two_stages({"name": "s"}, {"name": "s"})
    assert list(nb.plan(model, X, Y).stages) == ["s"]
    with begin_step():  # as the first stage of a script, whatever tests ran before
        model = two_stages({"name": "s"}, {"name": "s"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a"}


def test_two_models_may_use_one_name_as_they_like() -> None:
    for cluster in ("a", "b"):
        model = two_stages({"cluster": cluster, "name": "s"}, {"cluster": "c"})
        assert [stage.cluster for stage in nb.plan(model, X, Y).stages.values()] == [cluster, "c"]


def test_two_blocks_of_one_step_are_one_program() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a", name="s"):
            x = x * 2.0
        with nb.cluster(), nb.stage(cluster="b", name="s"):
            return x + 1.0

    with pytest.raises(StageIdentityError, match="stage 's' is on cluster 'b'"):
        step(tf.ones([2, 2]))
