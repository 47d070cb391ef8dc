"""Reports of a step over emulated lines: predictions and measurements, a timeline, event files, a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.report.sample_reports import make_full_report
from whale_nebula.report.records import EXCHANGE, ONCE
from whale_nebula.runtime.step.results import find_scalar_results
from whale_nebula.runtime.tensorboard import EventFiles

ROWS, WIDTH = 8, 16


def make_training_step(phases: int = 1) -> Callable[[Any], Any]:
    """Gradient descent through two stages, once or twice in a step."""
    kernels = [tf.Variable(tf.ones([WIDTH, WIDTH]) / WIDTH) for _ in range(2)]

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2):
            for _ in range(phases):
                with tf.GradientTape() as tape:
                    with nb.stage(cluster="gpu"):
                        hidden = tf.tanh(x @ kernels[0])
                    with nb.stage(cluster="npu"):
                        loss = tf.reduce_mean(tf.square(hidden @ kernels[1]))
                for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
                    kernel.assign_sub(0.1 * gradient)
        return {"loss": loss, "hidden": hidden}

    return step


def run_steps(steps: int, phases: int = 1) -> nb.Report:
    step = make_training_step(phases)
    for _ in range(steps):
        step(tf.ones([ROWS, WIDTH]))
    return nb.last_report()


@pytest.fixture(scope="module")
def second_and_third_reports() -> Iterator[tuple[nb.Report, nb.Report, list[tf.compat.v1.Event]]]:
    """The second and the third step of a run over a line, and nothing else of it."""
    nb.shutdown()
    with nb.init(links="100mbit,1ms"):
        step = make_training_step()
        reports = []
        for _ in range(3):
            step(tf.ones([ROWS, WIDTH]))
            reports.append(nb.last_report())
    return reports[1], reports[2]


def test_prediction_starts_after_two_measured_steps(second_and_third_reports) -> None:
    assert second_and_third_reports[0].prediction is None
    assert "the cause is simulated after two measured steps" in second_and_third_reports[0].bottleneck
    assert second_and_third_reports[1].prediction is not None


def test_report_has_predictions_next_to_measurements(second_and_third_reports) -> None:
    report = second_and_third_reports[1]
    assert report.predicted_seconds == report.prediction.seconds > 0.002  # the line's delay, there and back
    assert report.prediction.stages.keys() == report.stages.keys()
    assert {name: link.bytes for name, link in report.prediction.links.items()} == {
        name: link.bytes for name, link in report.links.items()
    }
    for name, link in report.links.items():
        assert link.seconds == pytest.approx(8 * link.bytes / 100e6)
        assert report.prediction.links[name].seconds == pytest.approx(link.seconds)
    assert report.bottleneck in str(report)


def test_exchange_time_is_separated_from_the_update(second_and_third_reports) -> None:
    report = second_and_third_reports[1]
    # what the step returns goes over the line, there and back at the same time
    assert report.basis.exchange_seconds == pytest.approx(0.001, rel=0.1)
    assert 0.0 < report.basis.once < report.predicted_seconds - report.basis.exchange_seconds
    own = [span for span in report.timeline() if span.lane == ONCE]
    (waited,) = [span for span in own if span.what == EXCHANGE]
    (update,) = [span for span in own if span.what == "update"]
    assert update.start <= waited.start and waited.end <= update.end
    assert waited.end - waited.start >= 0.001


def test_timeline_has_lanes_of_stages_links_and_once(second_and_third_reports) -> None:
    report = second_and_third_reports[1]
    lanes = {span.lane for span in report.timeline()}
    assert lanes == {"gpu", "npu", "gpu->npu", "npu->gpu", ONCE}
    for link, way in {"gpu->npu": "forward", "npu->gpu": "backward"}.items():
        sent = [span for span in report.timeline() if span.lane == link]
        assert [span.what for span in sent] == [f"{way} 0", f"{way} 1", "scalar"]
        assert sum(span.bytes for span in sent) == report.links[link].bytes
        assert all(0.0 <= span.start < span.end <= report.step_seconds for span in sent)
    # a micro-batch leaves gpu before it reaches npu
    at = {(span.lane, span.what): span for span in report.timeline()}
    assert at["gpu", "forward 1"].end <= at["gpu->npu", "forward 1"].start < at["npu", "fused 1"].start
    assert {name: stage.cluster for name, stage in report.stages.items()} == {"gpu": "gpu", "npu": "npu"}
    assert report.stages["npu"].in_flight == 1


def test_report_has_scalar_results_by_name(second_and_third_reports) -> None:
    assert list(second_and_third_reports[1].scalars) == ["loss"]
    assert 0.0 < second_and_third_reports[1].scalars["loss"] < second_and_third_reports[0].scalars["loss"]


def test_step_of_two_phases_is_predicted() -> None:
    with nb.init(links="100mbit,1ms"):
        report = run_steps(3, phases=2)
    assert len(report.basis.phases) == 2
    assert report.predicted_seconds > 2 * 0.002
    assert {span.phase for span in report.timeline()} == {0, 1}
    assert {name: link.bytes for name, link in report.prediction.links.items()} == {
        name: link.bytes for name, link in report.links.items()
    }


def test_codec_times_are_measured_predicted_and_drawn() -> None:
    kernels = [tf.Variable(tf.ones([WIDTH, WIDTH]) / WIDTH) for _ in range(2)]

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2):
            with tf.GradientTape() as tape:
                with nb.stage(cluster="gpu"), nb.compress(int8=True):
                    hidden = tf.tanh(x @ kernels[0])
                with nb.stage(cluster="npu"):
                    loss = tf.reduce_mean(tf.square(hidden @ kernels[1]))
            for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
                kernel.assign_sub(0.1 * gradient)
        return loss

    with nb.init(links="100mbit,1ms"):
        for _ in range(3):
            step(tf.ones([64 * ROWS, WIDTH]))
        report = nb.last_report()
    coded = {lane: [s.what for s in report.spans if s.lane == lane and "code" in s.what] for lane in ("gpu", "npu")}
    assert sorted(coded["gpu"]) == ["decode backward 0", "decode backward 1", "encode forward 0", "encode forward 1"]
    assert sorted(coded["npu"]) == ["decode forward 0", "decode forward 1", "encode backward 0", "encode backward 1"]
    for name, stage in report.stages.items():
        taken = sum(span.end - span.start for span in report.spans if span.lane == name and "code" in span.what)
        assert stage.codec_seconds == pytest.approx(taken) and taken > 0.0
        assert report.prediction.stages[name].codec_seconds > 0.0
        computed = [span for span in report.spans if span.lane == name and "code" not in span.what]
        assert stage.compute_seconds == pytest.approx(sum(span.end - span.start for span in computed))
    ends = {span.what: span for span in report.spans if span.lane == "gpu"}
    there = {span.what: span for span in report.spans if span.lane == "gpu->npu"}
    assert ends["forward 0"].end <= ends["encode forward 0"].start
    assert ends["encode forward 0"].end <= there["forward 0"].end
    assert "encodes and decodes" in str(report) and "D decode" in str(report.timeline())
    (phase,) = report.basis.phases
    assert all(work.coding > 0.0 and work.coding_back > 0.0 for work in phase.works)


def test_step_with_unknown_sizes_is_not_predicted() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="gpu"):
                rows = tf.shape(x)[0]
                hidden = tf.reshape(x, [rows, tf.size(x) // rows])
            with nb.stage(cluster="npu"):
                return tf.reduce_mean(hidden)

    with nb.init(links="100mbit,1ms"):
        for _ in range(3):
            step(tf.ones([ROWS, WIDTH]))
        report = nb.last_report()
    assert report.links["gpu->npu"].payload_bytes == 4 * ROWS * WIDTH
    assert report.prediction is None
    assert report.bottleneck.endswith(
        "; the cause is unknown, because the sizes of some tensors are known only at run time"
    )


def test_step_with_free_links_has_no_prediction() -> None:
    report = run_steps(2)
    assert report.prediction is None
    assert report.bottleneck.startswith("with free links a step runs as one function")
    assert [stage.cluster for stage in report.stages.values()] == ["gpu", "npu"]


def test_names_of_scalar_results() -> None:
    with tf.Graph().as_default():
        one, many = tf.constant(1.0), tf.zeros([3])
        indexed = tf.IndexedSlices(many, tf.constant([0, 1, 2]))
        found = find_scalar_results((many, indexed, {"b": one, "a": (many, one)}, tf.constant("text"), tf.constant(7)))
        assert (found.names, found.places) == (("2/a/1", "2/b", "4"), (4, 5, 7))
        assert find_scalar_results(one).names == ("result",)
    assert dict(find_scalar_results(one).from_results([tf.constant(0.5)])) == {"result": 0.5}


def read_events(folder: Path) -> list[Any]:
    (path,) = folder.glob("events*")
    records = tf.data.TFRecordDataset(str(path))
    return [tf.compat.v1.Event.FromString(record.numpy()) for record in records]


def test_event_files_contain_all_numbers(second_and_third_reports, tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "logs")
    for report in second_and_third_reports:
        files.step(report)
    files.close()
    found = {
        (value.tag, event.step): tf.make_ndarray(value.tensor).item()
        for event in read_events(tmp_path / "logs")
        for value in event.summary.value
    }
    report = second_and_third_reports[1]
    assert found["step/loss", 3] == pytest.approx(report.scalars["loss"])
    assert found["step/link gpu->npu/bytes", 3] == report.links["gpu->npu"].bytes
    assert found["step/stage npu/wait_seconds", 2] == pytest.approx(
        second_and_third_reports[0].stages["npu"].wait_seconds
    )
    assert found["step/predicted_seconds", 3] == pytest.approx(report.predicted_seconds)
    assert ("step/predicted_seconds", 2) not in found


def test_event_files_contain_boundaries_and_measured_errors(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "logs")
    files.step(replace(make_full_report(), worker="local/0"))
    files.close()
    found = {
        value.tag: tf.make_ndarray(value.tensor).item()
        for event in read_events(tmp_path / "logs")
        for value in event.summary.value
    }
    there = make_full_report().boundaries["b0 gpu->npu"]
    assert found["fit/boundary b0 gpu->npu/bytes"] == there.wire_bytes
    assert found["fit/boundary b0 gpu->npu/ratio"] == pytest.approx(there.ratio)
    assert found["fit/boundary b0 gpu->npu/error"] == pytest.approx(there.error)
    assert "fit/boundary b0 npu->gpu/bytes" in found and "fit/boundary b0 npu->gpu/error" not in found
    assert found["fit/stage gpu/codec_seconds"] == 0.0


def test_tensorboard_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(nb.errors.ConfigError, match="cannot create the folder"):
        nb.init(tensorboard=tmp_path / "file")


def test_tf_profile_contains_stage_names(tmp_path: Path) -> None:
    with nb.init(links="1gbit,0ms"):
        step = make_training_step()
        step(tf.ones([ROWS, WIDTH]))
        tf.profiler.experimental.start(str(tmp_path))
        step(tf.ones([ROWS, WIDTH]))
        tf.profiler.experimental.stop()
    (path,) = tmp_path.rglob("*.xplane.pb")
    profile = path.read_bytes()
    names = [b"whale_nebula", b"gpu: forward", b"gpu: backward", b"npu: fused", b"once a step: update"]
    assert [name for name in names if name not in profile] == []
