"""Local SGD in one process, compared with a manual implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NestingError, NotYetError, OptionError
from whale_nebula.runtime.run import current_run
from whale_nebula.schedule.rounds import GRAIN

RNG = np.random.default_rng(0)
X = RNG.random((48, 8)).astype("float32")
Y = np.tanh(X @ RNG.random((8, 2)).astype("float32"))


def model(optimizer: Any = "sgd", *, dropout: float = 0.0, normed: bool = False, eager: bool = False) -> keras.Model:
    """Where it is trained without scopes it is `eager`: so few steps are not worth a trace."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, activation="tanh")(inputs)
    hidden = keras.layers.Dropout(dropout)(hidden)
    hidden = keras.layers.BatchNormalization()(hidden) if normed else hidden
    made = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    made.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.05}}), "mse", run_eagerly=eager
    )
    return made


def fit(made: keras.Model, **options: Any) -> keras.callbacks.History:
    return made.fit(X, Y, **{"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0, **options})


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)


def list_digests() -> set[int]:
    [each] = current_run().rounds._rounds_by_weights.values()
    return {rounds.digest() for rounds in each.values()}


def train_manually(every: int, optimizer: str) -> list[np.ndarray]:
    """Two models on a half of each batch; every so many steps both have their average."""
    pair = [model(optimizer, eager=True), model(optimizer, eager=True)]
    for step, begin in enumerate([*range(0, 48, 12)] * 2, start=1):
        for each, (first, last) in zip(pair, ((0, 6), (6, 12)), strict=True):
            each.train_on_batch(X[begin + first : begin + last], Y[begin + first : begin + last])
        if step % every == 0:
            mean = [(a + b) / 2 for a, b in zip(*(each.get_weights() for each in pair), strict=True)]
            for each in pair:
                each.set_weights(mean)
    return pair[0].get_weights()


def test_average_at_every_step_equals_the_uncut_run() -> None:
    expected = model(eager=True)
    fit(expected)
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1, outer="average"):
        fit(ours)
    close(ours.get_weights(), expected.get_weights())


@pytest.mark.parametrize(("optimizer", "every"), [("sgd", 4), pytest.param("adam", 2, marks=pytest.mark.grid)])
def test_local_sgd_equals_a_manual_implementation(every: int, optimizer: str) -> None:
    ours = model(optimizer)
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=every, outer="average", delay=0):
        fit(ours)
    close(ours.get_weights(), train_manually(every, optimizer))


def test_rows_are_divided_by_configured_speeds() -> None:
    workers = {"gpu": {"workers": [{"address": "h:1", "speed": 2.0}]}, "npu": {"workers": ["h:2"]}}
    with nb.init({"clusters": workers}):
        ours = model()

        @nb.function
        def step(x: Any, y: Any) -> Any:
            with nb.replica(sync_every=2, outer="average"):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((ours(x) - y) ** 2)
                gradients = tape.gradient(loss, ours.trainable_variables)
                ours.optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))
                return {"loss": loss, "rows": tf.shape(x)[0]}

        assert int(step(X[:12], Y[:12])["rows"]) == 8


def test_restored_model_trains_as_in_a_new_run(tmp_path: Path) -> None:
    """Also the copies of other clusters and the outer optimizer begin anew, and an exchange in flight has no effect."""
    keras.utils.clear_session(free_memory=False)
    saved, found = model("adam", eager=True), []
    saved.train_on_batch(X, Y)
    nb.save(tmp_path, saved)
    for trains_before in (True, False):
        nb.shutdown()
        keras.utils.clear_session(free_memory=False)
        ours = model("adam")
        with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2, outer="nesterov", delay=1):
            if trains_before:
                fit(ours, epochs=1)
            nb.restore(tmp_path, ours)
            fit(ours, epochs=1)
        found.append(ours.get_weights())
    close(*found)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("compress", "options"),
    [
        ({"topk": 0.25, "int8": True}, {"mode": "async", "staleness": 0}),
        ({"fp16": True}, {"fragments": 2, "delay": 1}),
    ],
    ids=str,
)
def test_clusters_share_identical_weights_with_any_options(compress: dict[str, Any], options: dict[str, Any]) -> None:
    ours = model()
    with nb.cluster(["gpu", "npu", "tpu"]), nb.compress(**compress), nb.replica(sync_every=3, **options):
        losses = fit(ours, epochs=6).history["loss"]
        ours.get_weights()
        assert len(list_digests()) == 1
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.grid
def test_compress_inside_replica_equals_compress_around_it() -> None:
    found = []
    for inside in (True, False):
        nb.shutdown()
        ours, squeeze = model(), nb.compress(int8=True)
        outer = nb.compress(fp16=True) if inside else squeeze
        with nb.cluster(["gpu", "npu"]), outer, nb.replica(sync_every=2):
            if inside:
                with squeeze:
                    fit(ours)
            else:
                fit(ours)
        ours.get_weights()  # so the last meeting is over, and all was sent
        [rounds] = current_run().rounds.list_rounds()
        sent = [{name: totals.bytes for name, totals in each.ends.count_sent().items()} for each in rounds.values()]
        found.append(({str(each.differences.encoding) for each in rounds.values()}, sent))
    assert found[0] == found[1] and found[0][0] == {"int8"}


def test_fragments_of_a_large_model_are_sent_in_turn() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(GRAIN // 4, activation="tanh")(inputs)
    ours = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    ours.compile("sgd", "mse")
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=4, fragments=2):
        fit(ours)
        sent = nb.last_report().run.links["gpu->npu"]
        assert nb.last_report().meetings.met == pytest.approx(2, abs=0.5)
    # A thread sends: what is due after the last step may not be counted yet when that step's report is made.
    turns = [4 * GRAIN, 4 * (ours.count_params() - GRAIN)] * 2
    assert sent.frames in (3, 4)
    assert sent.raw_bytes == sum(turns[: sent.frames])


def test_batch_norm_statistics_are_averaged() -> None:
    ours = model(normed=True)
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1, outer="average"):
        ours.fit(X[:12], Y[:12], batch_size=12, shuffle=False, verbose=0)
        found = ours.get_weights()[4]
    halves = []
    for begin in (0, 6):
        one = model(normed=True, eager=True)
        one.train_on_batch(X[begin : begin + 6], Y[begin : begin + 6])
        halves.append(one.get_weights()[4])
    close([found], [np.mean(halves, axis=0)])


def test_custom_loop_with_tf_variables_trains() -> None:
    weight = tf.Variable(np.zeros((8, 2), "float32"))

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2, outer="average"), nb.compress(fp16=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - y) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    losses = [float(step(X, Y)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    with nb.gathered():
        settled = weight.numpy()
    assert len(list_digests()) == 1
    assert weight.numpy().tobytes() == settled.tobytes()


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_single_cluster_trains_like_the_plain_run() -> None:
    expected = model(eager=True)
    fit(expected)
    ours = model()
    with nb.cluster(), nb.replica(sync_every=3):
        fit(ours)
        assert nb.last_report().meetings is None
    close(ours.get_weights(), expected.get_weights(), 1e-7)


@pytest.mark.grid
def test_replicas_and_stages_within_a_cluster_train_alike() -> None:
    expected = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2):
        fit(expected)
    weights = expected.get_weights()
    nb.shutdown()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    with nb.cluster(["gpu", "npu"]), nb.replica(2, sync_every=2), nb.pipeline(2):
        with nb.stage(name="front"):
            hidden = keras.layers.Dense(16, activation="tanh")(inputs)
        with nb.stage(name="back"):
            outputs = keras.layers.Dense(2)(hidden)
    ours = keras.Model(inputs, outputs)
    ours.compile(keras.optimizers.SGD(0.05), "mse")
    fit(ours)
    close(ours.get_weights(), weights)


def test_plan_and_report_describe_local_sgd() -> None:
    ours = model()
    with nb.init(links="10mbit,5ms"), nb.cluster(["gpu", "npu"]), nb.compress(int8=True), nb.replica(sync_every=4):
        text = nb.plan(ours, X[:12], Y[:12]).to_text()
        assert "each cluster trains a copy, differences are exchanged every 4 steps" in text
        assert "(gpu 6, npu 6)" in text
        assert "from gpu to npu, " in text
        fit(ours)
        report = nb.last_report()
    assert report.meetings is not None
    assert (report.meetings.others, report.meetings.steps) == (("npu",), 8)
    assert "meetings with npu" in str(report)
    assert report.run.links["gpu->npu"].ratio < 0.9
    assert "waiting for npu" in report.bottleneck


def test_stage_with_a_cluster_is_refused() -> None:
    inputs = keras.Input((8,))
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2), nb.stage(cluster="gpu"):
        outputs = keras.layers.Dense(2)(inputs)
    ours = keras.Model(inputs, outputs)
    ours.compile("sgd", "mse")
    with pytest.raises(OptionError, match=r"nb.stage\(name=\"gpu\"\)"):
        fit(ours)


def test_batch_with_fewer_rows_than_clusters_is_used_by_all() -> None:
    ours, expected = model(), model(eager=True)
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1, outer="average"):
        ours.fit(X[:1], Y[:1], verbose=0)
    expected.fit(X[:1], Y[:1], verbose=0)
    close(ours.get_weights(), expected.get_weights())


def test_evaluate_outside_the_scopes_uses_the_averaged_weights() -> None:
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1000):
        fit(ours)
    found = ours.evaluate(X, Y, verbose=0)
    plain = model(eager=True)
    plain.set_weights(ours.get_weights())
    np.testing.assert_allclose(found, plain.evaluate(X, Y, verbose=0), rtol=1e-5)


def test_another_model_with_the_same_weights_uses_the_averaged_ones() -> None:
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1000):
        fit(ours)
    found = keras.Model(ours.inputs, ours.layers[1].output).predict(X, verbose=0)
    kernel, bias = ours.get_weights()[:2]
    close(found, np.tanh(X @ kernel + bias))


def test_values_assigned_between_steps_hold_in_all_clusters() -> None:
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=1000):
        fit(ours)
        before = ours.get_weights()
        ours.optimizer.learning_rate = 0.0
        fit(ours)
        close(ours.get_weights(), before, 1e-7)
        ours.optimizer.learning_rate = 0.05
        fit(ours)
        ours.layers[1].set_weights([np.zeros((8, 16)), np.zeros(16)])
        assert not ours.get_weights()[0].any()


@pytest.mark.grid
def test_fit_outside_the_scopes_trains_the_shared_weights() -> None:
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2, outer="average"):
        fit(ours)
    fit(ours)
    trained = ours.get_weights()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2, outer="average"):
        ours.optimizer.learning_rate = 0.0
        fit(ours)
        close(ours.get_weights(), trained)


def test_scopes_without_a_step_or_a_second_cluster_warn() -> None:
    ours, warning = model(), nb.errors.NebulaWarning
    with pytest.warns(warning, match="contains no step"), nb.cluster(["gpu", "npu"]), nb.replica(sync_every=7):
        tf.function(lambda x: x * 2.0)(X)
    with pytest.warns(warning, match="has no effect"), nb.cluster(), nb.replica(sync_every=7):
        fit(ours)


def test_verify_is_refused() -> None:
    with (
        nb.cluster(["gpu", "npu"]),
        nb.replica(sync_every=2),
        pytest.raises(OptionError, match="cannot compare a step"),
    ):
        nb.verify(model(), X, Y)


def test_second_step_that_trains_the_same_weights_is_refused() -> None:
    ours = model()

    def make_step(variables: list[Any]) -> Any:
        @nb.function
        def step(x: Any, y: Any) -> Any:
            with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((ours(x) - y) ** 2)
                for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                    variable.assign_sub(0.1 * gradient)
                return loss

        return step

    values = [each.value for each in ours.trainable_variables]
    make_step(values)(X, Y)
    with pytest.raises(NotYetError, match="some of the same weights"):
        make_step(values[:1])(X, Y)


def test_changed_options_take_effect_at_the_next_fit() -> None:
    ours = model()
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=4):
        fit(ours)
    with nb.cluster(["gpu", "npu"]), nb.compress(int8=True), nb.replica(sync_every=2, outer="nesterov"):
        fit(ours)
        [known] = current_run().rounds._rounds_by_weights.values()
        assert [(each.table.every, each.outer, str(each.differences.encoding)) for each in known.values()] == [
            (2, nb.outer.Nesterov(), "int8")
        ] * 2
        assert len(list_digests()) == 1


def test_optimizer_ema_and_float64_weights_are_refused() -> None:
    averaged = model()
    averaged.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    wide = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, dtype="float64")])
    wide.compile("sgd", "mse")
    for ours, message in ((averaged, "use_ema"), (wide, "float64")):
        with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=4), pytest.raises(NotYetError, match=message):
            fit(ours)


def test_set_weights_keeps_the_seed_of_each_cluster() -> None:
    ours = model(dropout=0.5)
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=4):
        fit(ours)
        ours.set_weights(ours.get_weights())
        fit(ours)
    [copies] = current_run().rounds.copies.copies_by_cluster.values()
    [seed] = [each for each in ours.variables if "seed_generator_state" in each.path]
    assert int(copies[id(seed.value)].numpy()[0]) != int(seed.numpy()[0])


@pytest.mark.filterwarnings("ignore:.*contains no step")
def test_nested_replica_scopes_are_refused() -> None:
    with nb.cluster(), nb.replica(sync_every=2), pytest.raises(NestingError):
        nb.replica(2).__enter__()
