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
from whale_nebula.errors import ConfigError, ForbiddenCrossingError, NebulaWarning
from whale_nebula.plan.forbidden import check_forbidden

BATCH = {"x": np.arange(8.0, dtype="float32").reshape(4, 2) / 8, "y": np.float32([1, 3, 2, 0])}
RECORDED: list[bytes] = []


@dataclass(frozen=True)
class RecordingCodec(nb.codec.Precision):
    """Half precision that keeps what crosses."""

    name: ClassVar[str] = "seen"

    def parts(self, dims: Any, dtype: str) -> tuple[nb.codec.Part, ...]:
        return (nb.codec.Part("float16", dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        def keep(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            RECORDED.append(array.tobytes())
            return array

        kept = tf.numpy_function(keep, [x], x.dtype)
        kept.set_shape(x.shape)
        return (tf.cast(kept, tf.float16),)

    def decode(self, parts: tuple[Any, ...], dims: Any, dtype: str) -> Any:
        return tf.cast(parts[0], dtype)


@pytest.fixture(autouse=True)
def register_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec is known to these tests alone."""
    monkeypatch.setitem(CODECS, RecordingCodec.name, RecordingCodec)


def variable(*shape: int) -> tf.Variable:
    return tf.Variable(np.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape).astype("float32"))


def make_training_step(forward: Callable[[Any, Any], Any], *weights: tf.Variable) -> Callable[..., Any]:
    """A step that trains weights by a gradient."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def make_labels_at_the_head() -> Callable[..., Any]:
    a, b = variable(2, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(x @ a)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean((tf.squeeze(hidden @ b, 1) - y) ** 2)

    return make_training_step(forward, a, b)


def send_labels() -> Callable[..., Any]:
    """The labels are made one-hot where the model begins."""
    a = variable(2, 4)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden, wanted = x @ a, tf.one_hot(tf.cast(y, tf.int32), 4)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean((hidden - wanted) ** 2)

    return make_training_step(forward, a)


def hide_labels_in_activation() -> Callable[..., Any]:
    """The labels are a column of an activation."""
    a, b = variable(2, 3), variable(4, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.concat([x @ a, y[:, tf.newaxis]], 1)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean(hidden @ b)

    return make_training_step(forward, a, b)


def keep_labels_in_variable() -> Callable[..., Any]:
    """A variable of the first stage brings the labels of the step before."""
    a, memory = variable(2, 3), tf.Variable(tf.zeros([4]), trainable=False)

    def step(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x @ a + memory[:, tf.newaxis]
            memory.assign(y)
        with nb.stage(cluster="npu"):
            return tf.reduce_mean(hidden)

    return step


def keep_ends_at_home() -> Callable[..., Any]:
    """The middle is elsewhere; inputs and labels are in one cluster."""
    a, b, c = variable(2, 3), variable(3, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(x @ a)
        with nb.stage(cluster="npu"):
            middle = tf.tanh(hidden @ b)
        with nb.stage(cluster="gpu", name="head"):
            return tf.reduce_mean((tf.squeeze(middle @ c, 1) - y) ** 2)

    return make_training_step(forward, a, b, c)


def tie_table() -> Callable[..., Any]:
    """A table that both stages look up: the numbers of rows go along with the gradients of these."""
    table, b = variable(4, 3), variable(3, 1)

    def forward(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = tf.tanh(tf.reduce_sum(x) + tf.zeros([4, 1])) * tf.gather(table, [0, 1, 2, 3])
        with nb.stage(cluster="npu"):
            found = tf.gather(table, tf.cast(y, tf.int32)) + hidden
            return tf.reduce_mean(found @ b)

    return make_training_step(forward, table, b)


def use_label_count() -> Callable[..., Any]:
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
    make_labels_at_the_head: {
        "input x in gpu": {"x": "itself"},
        "input y in npu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradient of b0 npu>gpu": BACK,
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    send_labels: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": X,
        "b1 gpu>npu": {"y": "itself"},
        "gradient of b0 npu>gpu": BACK,
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    hide_labels_in_activation: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": {"x": "derived", "y": "itself"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    keep_labels_in_variable: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": {"x": "derived", "y": "derived"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    keep_ends_at_home: {
        "input x in gpu": {"x": "itself"},
        "input y in gpu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradient of b0 npu>gpu": BACK,
        "b1 npu>gpu": X,
        "gradient of b1 gpu>npu": BACK,
        f"{NUMBERS} gpu>npu": {"x": "number", "y": "number"},
    },
    tie_table: {
        "input x in gpu": {"x": "itself"},
        "input y in npu": {"y": "itself"},
        "b0 gpu>npu": X,
        "gradients of tied variables npu>gpu": {"y": "itself"},
        "gradients of tied variables gpu>npu": {"x": "gradient"},
        f"{NUMBERS} npu>gpu": {"x": "number", "y": "number"},
    },
    use_label_count: {
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


def make_plan(make: Callable[[], Callable[..., Any]]) -> nb.Plan:
    return nb.plan(cut(make), *map(tf.constant, BATCH.values()))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_reported_dependences_of_crossings(make: Callable[[], Callable[..., Any]]) -> None:
    found = {
        f"{each.name} {f'{each.source}>' if each.source else 'in '}{each.destination}": dict(each.depends)
        for each in make_plan(make).crossings
    }
    assert found == CASES[make]


@pytest.mark.parametrize(
    "make",
    [pytest.param(send_labels, marks=pytest.mark.grid), hide_labels_in_activation, keep_ends_at_home, use_label_count],
    ids=lambda make: make.__name__,
)
def test_crossings_change_only_with_the_reported_inputs(make: Callable[[], Callable[..., Any]]) -> None:
    plan = make_plan(make)
    crossings = {each.name: each.depends for each in plan.crossings}
    names = [each.name for each in plan.boundaries]
    names += [f"gradient of {each.name}" for each in plan.boundaries[::-1] if each.backward]
    recorded: list[list[bytes]] = []
    for changed in ("", "x", "y"):
        RECORDED.clear()
        values = {name: value[::-1].copy() if name == changed else value for name, value in BATCH.items()}
        cut(make)(*map(tf.constant, values.values()))
        recorded.append(list(RECORDED))
    assert [len(each) for each in recorded] == [len(names)] * 3
    for place, name in enumerate(names):
        differs = {which for which, each in zip("xy", recorded[1:], strict=True) if each[place] != recorded[0][place]}
        assert differs == set(crossings.get(name, ())), name


def pass_by_python(put: Any, take: Any) -> Any:
    kept: list[Any] = []
    with tf.control_dependencies([tf.numpy_function(lambda y: (kept.append(y), y)[1], [put], tf.float32)]):
        return tf.numpy_function(lambda x: kept[-1] + 0 * x[:, 0], [take], tf.float32)


def pass_by_file(put: Any, take: Any) -> Any:
    with tf.control_dependencies([tf.io.write_file("kept", tf.io.serialize_tensor(put))]):
        return tf.io.parse_tensor(tf.io.read_file("kept"), tf.float32)


def pass_by_staging_area(put: Any, take: Any) -> Any:
    with tf.control_dependencies([tf.raw_ops.Stage(values=[put], shared_name="kept")]):
        return tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name="kept")[0]


def pass_by_shared_name(put: Any, take: Any) -> Any:
    def handle() -> Any:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4], shared_name="kept")

    tf.raw_ops.AssignVariableOp(resource=handle(), value=put)
    return tf.raw_ops.ReadVariableOp(resource=handle(), dtype=tf.float32)


@pytest.mark.parametrize("apart", [False, True], ids=["in one cluster", "in two clusters"])
@pytest.mark.parametrize("way", [pass_by_python, pass_by_file, pass_by_staging_area, pass_by_shared_name])
def test_opaque_ops_depend_on_all_inputs_of_their_cluster(way: Callable[[Any, Any], Any], apart: bool) -> None:
    a = variable(2, 3)

    def step(x: Any, y: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x @ a + tf.reshape(way(x[:, 0] if apart else y, x), [4, 1])
        with nb.stage(cluster="npu"):
            wanted = tf.reshape(way(y, x), [4, 1]) if apart else 0.0
            return tf.reduce_mean(hidden - wanted)

    [found] = [each.depends for each in make_plan(lambda: step).crossings if each.name == "b0"]
    assert set(found) == ({"x"} if apart else {"x", "y"})


@pytest.mark.parametrize(("rules", "message"), [(["x -> tpu", "labels -> npu"], "labels -> npu"), (["* -> npu"], "")])
def test_rule_about_an_unknown_input_warns(rules: list[str], message: str) -> None:
    config = load({"forbid": rules})
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        check_forbidden("train", [], config.forbid, ["x", "y"], trains=True)
    assert [str(each.message).count(message) for each in recorded] == [1] * bool(message)


def test_rule_for_a_step_without_inputs_warns() -> None:
    with pytest.warns(NebulaWarning, match="the step has no inputs; these rules match nothing: y -> npu"):
        check_forbidden("train", [], load({"forbid": ["y -> npu"]}).forbid, [], trains=True)


RULES: Mapping[str, tuple[Callable[[], Callable[..., Any]], Any, str]] = {
    "gradient": (keep_ends_at_home, "y -> npu", "gradient of b1, gpu -> npu: a gradient that depends on y"),
    "number": (
        keep_ends_at_home,
        {"input": "y", "cluster": "npu", "allow": "gradient"},
        "single numbers",
    ),
    "both allowed": (keep_ends_at_home, {"input": "y", "cluster": "npu", "allow": ["gradient", "number"]}, ""),
    "any input": (
        keep_ends_at_home,
        {"input": "*", "cluster": "npu", "allow": ["gradient", "number"]},
        "computed from x and weights",
    ),
    "hidden labels": (
        hide_labels_in_activation,
        {"input": "y", "cluster": "npu", "allow": "derived"},
        "b0, gpu -> npu: y itself",
    ),
    "reader": (make_labels_at_the_head, "y -> npu", "input y, in npu: y itself"),
    "sizes": (use_label_count, "y -> npu", ""),
}


@pytest.mark.parametrize(("make", "rule", "message"), RULES.values(), ids=RULES)
def test_step_that_breaks_a_rule_is_refused(make: Callable[[], Callable[..., Any]], rule: Any, message: str) -> None:
    nb.init({"forbid": [rule]})
    step, values = cut(make), [tf.constant(value) for value in BATCH.values()]
    marked = "forbidden: " in nb.plan(step, *values).to_text()
    assert marked == bool(message)
    if message:
        with pytest.raises(ForbiddenCrossingError, match=message):
            step(*values)
    else:
        step(*values)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("y to npu", "is not a rule of the form"),
        ("y ->", "is not a rule of the form"),
        ({"input": "y"}, "is not a string"),
        ({"input": "y", "cluster": "npu", "allow": "labels"}, "'labels' is not a valid value"),
        ("y -> nbu", "unknown cluster 'nbu'"),
        ({"input": "y", "cluster": "npu", "except": "number"}, "unknown key 'except'"),
    ],
)
def test_invalid_rule_is_refused(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"clusters": {"gpu": {}, "npu": {}}, "forbid": [rule]})
