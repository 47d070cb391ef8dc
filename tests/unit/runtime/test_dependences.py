"""The inputs on which boundary tensors depend: as reported, and as observed when an input is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.codec.registry import CODECS
from whale_nebula.config import load
from whale_nebula.errors import ConfigError, ForbiddenCrossingError
from whale_nebula.plan.forbidden import check_forbidden

LOOK = {"x": np.arange(8.0, dtype="float32").reshape(4, 2) / 8, "y": np.float32([1, 3, 2, 0])}
SEEN: list[bytes] = []


@dataclass(frozen=True)
class OutputOptions(nb.codec.Precision):
    """Half precision that keeps what crosses."""

    name: ClassVar[str] = "seen"

    def parts(self, dims: Any, dtype: str) -> tuple[nb.codec.Part, ...]:
        return (nb.codec.Part("float16", dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        def keep(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            SEEN.append(array.tobytes())
            return array

        kept = tf.numpy_function(keep, [x], x.dtype)
        kept.set_shape(x.shape)
        return (tf.cast(kept, tf.float16),)

    def decode(self, parts: tuple[Any, ...], dims: Any, dtype: str) -> Any:
        return tf.cast(parts[0], dtype)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec is known to these tests alone."""
    monkeypatch.setitem(CODECS, OutputOptions.name, OutputOptions)


def variable(*shape: int) -> tf.Variable:
    return tf.Variable(np.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape).astype("float32"))


def trained(forward: Callable[[Any, Any], Any], *weights: tf.Variable) -> Callable[..., Any]:
    """A step that trains weights by a gradient."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def head() -> Callable[..., Any]:
    a, b = variable(2, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(x @ a)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean((tf.squeeze(hidden @ b, 1) - y) ** 2)

    return trained(forward, a, b)


def labels_are_sent() -> Callable[..., Any]:
    """The labels are made one-hot where the model begins."""
    a = variable(2, 4)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden, wanted = x @ a, tf.one_hot(tf.cast(y, tf.int32), 4)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean((hidden - wanted) ** 2)

    return trained(forward, a)


def labels_are_hidden() -> Callable[..., Any]:
    """The labels are a column of an activation."""
    a, b = variable(2, 3), variable(4, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.concat([x @ a, y[:, tf.newaxis]], 1)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean(hidden @ b)

    return trained(forward, a, b)


def labels_are_kept() -> Callable[..., Any]:
    """A variable of the first stage brings the labels of the step before."""
    a, memory = variable(2, 3), tf.Variable(tf.zeros([4]), trainable=False)

    def step(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x @ a + memory[:, tf.newaxis]
            memory.assign(y)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean(hidden)

    return step


def at_home() -> Callable[..., Any]:
    """The middle is elsewhere; inputs and labels are in one cluster."""
    a, b, c = variable(2, 3), variable(3, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(x @ a)
        with nb.stage(cluster="npu"):
            middle = tf.tanh(hidden @ b)
        with nb.stage(cluster="gpu", name="head"):
            return tf.reduce_mean((tf.squeeze(middle @ c, 1) - y) ** 2)

    return trained(forward, a, b, c)


def tied() -> Callable[..., Any]:
    """A table that both stages look up: the numbers of rows go along with the gradients of these."""
    table, b = variable(4, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(tf.reduce_sum(x) + tf.zeros([4, 1])) * tf.gather(table, [0, 1, 2, 3])
        with nb.stage(cluster="npu"):
            found = tf.gather(table, tf.cast(y, tf.int32)) + hidden
            return tf.reduce_mean(found @ b)

    return trained(forward, table, b)


def sizes_alone() -> Callable[..., Any]:
    """Of the labels only their number is asked for."""
    a = variable(2, 3)

    def step(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x @ a / tf.cast(tf.shape(y)[0], tf.float32)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean(hidden)

    return step


Depends = Mapping[str, str]
NUMBERS = "losses, metrics and other numbers"
X, BACK = {"x": "derived"}, {"x": "gradient", "y": "gradient"}
CASES: Mapping[Callable[[], Callable[..., Any]], Mapping[str, Depends]] = {
    head: {
        "input x in gpu": {"x": "itself"},
        "input y in npu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradient of b0 npu>gpu": BACK,
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    labels_are_sent: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": X,
        "b1 gpu>npu": {"y": "itself"},
        "gradient of b0 npu>gpu": BACK,
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    labels_are_hidden: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": {"x": "derived", "y": "itself"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    labels_are_kept: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": {"x": "derived", "y": "derived"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    at_home: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradient of b0 npu>gpu": BACK,
        "b1 npu>gpu": X,
        "gradient of b1 gpu>npu": BACK,
        f"{NUMBERS} gpu>npu": {"x": "number", "y": "number"},
    },
    tied: {
        "input x in gpu": {"x": "itself"},
        "input y in npu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradients of tied variables npu>gpu": {"y": "itself"},
        "gradients of tied variables gpu>npu": {"x": "gradient"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    sizes_alone: {
        "input x in gpu": {"x": "itself"},
        "b0 gpu>npu": X,
        f"{NUMBERS} npu>gpu": {"x": "number"},
    },
}


def cut(make: Callable[[], Callable[..., Any]]) -> Any:
    step = make()

    @nb.function
    def train(x: Any, y: Any) -> Any:
        with nb.cluster(), nb.compress("seen", backward="seen"):
            return step(x, y)

    return train


def planned(make: Callable[[], Callable[..., Any]]) -> nb.Plan:
    return nb.plan(cut(make), *map(tf.constant, LOOK.values()))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_what_crosses_depends_on_these_inputs(make: Callable[[], Callable[..., Any]]) -> None:
    found = {
        f"{each.name} {f'{each.source}>' if each.source else 'in '}{each.destination}": dict(each.depends)
        for each in planned(make).crossings
    }
    assert found == CASES[make]


@pytest.mark.parametrize(
    "make",
    [pytest.param(labels_are_sent, marks=pytest.mark.grid), labels_are_hidden, at_home, sizes_alone],
    ids=lambda make: make.__name__,
)
def test_it_changes_with_these_inputs_and_with_no_other(make: Callable[[], Callable[..., Any]]) -> None:
    plan = planned(make)
    crossings = {each.name: each.depends for each in plan.crossings}
    names = [each.name for each in plan.boundaries]
    names += [f"gradient of {each.name}" for each in plan.boundaries[::-1] if each.backward]
    told: list[list[bytes]] = []
    for changed in ("", "x", "y"):
        SEEN.clear()
        values = {name: value[::-1].copy() if name == changed else value for name, value in LOOK.items()}
        cut(make)(*map(tf.constant, values.values()))
        told.append(list(SEEN))
    assert [len(each) for each in told] == [len(names)] * 3
    for place, name in enumerate(names):
        differs = {which for which, each in zip("xy", told[1:], strict=True) if each[place] != told[0][place]}
        assert differs == set(crossings.get(name, ())), name


def by_python(put: Any, take: Any) -> Any:
    kept: list[Any] = []
    with tf.control_dependencies([tf.numpy_function(lambda y: (kept.append(y), y)[1], [put], tf.float32)]):
        return tf.numpy_function(lambda x: kept[-1] + 0 * x[:, 0], [take], tf.float32)


def by_a_file(put: Any, take: Any) -> Any:
    with tf.control_dependencies([tf.io.write_file("kept", tf.io.serialize_tensor(put))]):
        return tf.io.parse_tensor(tf.io.read_file("kept"), tf.float32)


def by_a_staging_area(put: Any, take: Any) -> Any:
    with tf.control_dependencies([tf.raw_ops.Stage(values=[put], shared_name="kept")]):
        return tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name="kept")[0]


def by_a_name(put: Any, take: Any) -> Any:
    def handle() -> Any:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4], shared_name="kept")

    tf.raw_ops.AssignVariableOp(resource=handle(), value=put)
    return tf.raw_ops.ReadVariableOp(resource=handle(), dtype=tf.float32)


@pytest.mark.parametrize("apart", [False, True], ids=["in one cluster", "in two clusters"])
@pytest.mark.parametrize("way", [by_python, by_a_file, by_a_staging_area, by_a_name])
def test_what_the_graph_does_not_show_may_be_all_that_its_cluster_was_given(
    way: Callable[[Any, Any], Any], apart: bool
) -> None:
    a = variable(2, 3)

    def step(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x @ a + tf.reshape(way(x[:, 0] if apart else y, x), [4, 1])
        with nb.stage(cluster="npu"):
            wanted = tf.reshape(way(y, x), [4, 1]) if apart else 0.0
            return tf.reduce_mean(hidden - wanted)

    [found] = [each.depends for each in planned(lambda: step).crossings if each.name == "b0"]
    assert set(found) == ({"x"} if apart else {"x", "y"})


@pytest.mark.parametrize(("rules", "said"), [(["x -> tpu", "labels -> npu"], "labels -> npu"), (["* -> npu"], "")])
def test_a_rule_about_no_input_of_a_step_that_trains_is_told(rules: list[str], said: str) -> None:
    config = load({"forbid": rules})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_forbidden("train", [], config.forbid, ["x", "y"], trains=True)
    assert [str(each.message).count(said) for each in told] == [1] * bool(said)


RULES: Mapping[str, tuple[Callable[[], Callable[..., Any]], Any, str]] = {
    "a gradient tells": (at_home, "y -> npu", "gradient of b1, gpu -> npu: a gradient that depends on y"),
    "and so does a number": (at_home, {"input": "y", "cluster": "npu", "allow": "gradient"}, "single numbers"),
    "unless both may": (at_home, {"input": "y", "cluster": "npu", "allow": ["gradient", "number"]}, ""),
    "any input": (
        at_home,
        {"input": "*", "cluster": "npu", "allow": ["gradient", "number"]},
        "computed from x and weights",
    ),
    "what is hidden": (
        labels_are_hidden,
        {"input": "y", "cluster": "npu", "allow": "derived"},
        "b0, gpu -> npu: y itself",
    ),
    "who reads it": (head, "y -> npu", "input y, in npu: y itself"),
    "sizes": (sizes_alone, "y -> npu", ""),
}


@pytest.mark.parametrize(("make", "rule", "said"), RULES.values(), ids=RULES)
def test_a_step_that_breaks_a_rule_is_refused(make: Callable[[], Callable[..., Any]], rule: Any, said: str) -> None:
    nb.init({"forbid": [rule]})
    step, values = cut(make), [tf.constant(value) for value in LOOK.values()]
    marked = "forbidden: " in nb.plan(step, *values).to_text()
    assert marked == bool(said)
    if said:
        with pytest.raises(ForbiddenCrossingError, match=said):
            step(*values)
    else:
        step(*values)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("y to npu", "is not a rule of the form"),
        ("y ->", "is not a rule of the form"),
        ({"input": "y"}, "is not a string"),
        ({"input": "y", "cluster": "npu", "allow": "labels"}, "'labels' is not a valid value"),
        ("y -> nbu", "unknown cluster 'nbu'"),
        ({"input": "y", "cluster": "npu", "except": "number"}, "unknown key 'except'"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"clusters": {"gpu": {}, "npu": {}}, "forbid": [rule]})
