"""Codecs between given stages: none, the requested one, or the mildest that hides."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data
from tests.unit.planner.problems import draw_problem
from whale_nebula.codec.packing import PREFIX
from whale_nebula.hardware.measurements import BlockTime, blocks_path, read_blocks, save_blocks
from whale_nebula.passes.facts import ASSIGNS
from whale_nebula.planner.cluster_costs import WHOLE, Tensor, code_crossings
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.decision import Decision
from whale_nebula.planner.problem import Candidate, Chain, ClusterCosts, Options, Part, PinnedBlock, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.runtime import block_costs, decisions
from whale_nebula.runtime.run import current_run

CLUSTERS = {"clusters": {name: {"flops": "2M"} for name in ("a", "b", "c")}}
WIDTH, COUNT = 32, 4


def make_model(parts: Any = ()) -> keras.Model:
    """Dense layers, without scopes, or those of each part in a stage on its cluster."""
    keras.utils.set_random_seed(3)
    hidden = inputs = keras.Input((WIDTH,))
    for number in range(COUNT):
        here = next((name for name, begin, end in parts if begin <= number < end), None)
        with contextlib.nullcontext() if here is None else nb.stage(cluster=here):
            hidden = keras.layers.Dense(WIDTH, "relu")(hidden)
    found = keras.Model(inputs, hidden)
    found.compile(keras.optimizers.SGD(0.1), "mse")
    return found


def train_losses(found: keras.Model) -> list[float]:
    x, y = data(32, WIDTH), data(32, WIDTH, seed=1)
    return found.fit(x, y, 16, epochs=2, shuffle=False, verbose=0).history["loss"]


def plan_model(compress: str, line: str, train: bool = False) -> tuple[nb.Plan, Any, list[float]]:
    """The plan of a model without scopes, the decision, and the losses if it is trained."""
    nb.shutdown()
    nb.init(CLUSTERS, links=line)
    with nb.auto_parallel(compress=compress):
        found = make_model()
        plan = nb.plan(found, data(16, WIDTH), data(16, WIDTH))
        return plan, current_run().decisions[0], train_losses(found) if train else []


def list_codecs(plan: nb.Plan) -> set[tuple[str, str]]:
    return {(each.codec, each.backward_codec) for each in plan.boundaries}


def test_auto_parallel_compresses_only_on_request() -> None:
    plan, decision, _ = plan_model("none", "100kbit,1ms")
    assert list_codecs(plan) == {("none", "none")} and not decision.problem.chain.codecs


@pytest.mark.grid
def test_requested_codec_gives_the_losses_of_hand_written_stages() -> None:
    plan, decision, found = plan_model("fp16", "1mbit,1ms", train=True)
    assert list_codecs(plan) == {("fp16", "int8")}
    for each in plan.boundaries:
        (destination,) = each.destinations
        count, clusters = plan.micro_batch, [plan.stages[name].cluster for name in (each.source, destination)]
        for size, link in ((each.bytes, clusters), (each.backward_bytes, clusters[::-1])):
            predicted = plan.predicted.bytes["->".join(link)]  # counted for a whole batch, which has one prefix
            assert count * size - predicted in (0, (count - 1) * PREFIX)
    parts = [(decision.problem.clusters[part.cluster].name, part.begin, part.end) for part in decision.chosen.parts]
    nb.shutdown()
    nb.init(CLUSTERS, links="1mbit,1ms")
    with nb.cluster(), nb.pipeline(plan.micro_batch, schedule=plan.schedule), nb.compress(fp16=True):
        by_hand = make_model(parts)
    assert train_losses(by_hand) == pytest.approx(found, rel=1e-4)  # gradients are rounded by chance


@pytest.mark.parametrize("cut", [2, *(pytest.param(cut, marks=pytest.mark.grid) for cut in (1, 3, 4))])
def test_predicted_bytes_of_a_cut_match_the_plan(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a normalisation its input crosses alone, and what it makes of it is computed after the line."""

    def choose(problem: Any, *options: Any) -> SearchResult:
        parts = Part(0, 0, cut), Part(1, cut, len(problem.chain))
        found = score(problem, Shape(parts, 2))
        assert isinstance(found, Candidate)
        return SearchResult((found,))

    monkeypatch.setattr(decisions, "search", choose)
    nb.shutdown()
    nb.init(CLUSTERS, links="1mbit,1ms")
    inputs = keras.Input((8, WIDTH))
    hidden = keras.layers.Dense(WIDTH)(inputs)
    inner = keras.layers.Dense(4 * WIDTH)(keras.layers.LayerNormalization()(hidden))
    with nb.auto_parallel():
        found = keras.Model(inputs, keras.layers.Dense(2)(hidden + keras.layers.Dense(WIDTH)(inner)))
        found.compile("sgd", "mse")
        plan = nb.plan(found, np.zeros((16, 8, WIDTH)), np.zeros((16, 8, 2)))
    crossing = {"a->b": sum(each.step_bytes for each in plan.boundaries)}
    crossing["b->a"] = sum(each.backward_step_bytes or 0 for each in plan.boundaries)
    assert plan.predicted.bytes == pytest.approx(crossing, rel=0.02)


@pytest.mark.parametrize(
    ("line", "expected"),
    [pytest.param("10gbit,0ms", {"none"}, marks=pytest.mark.grid), ("200kbit,1ms", {"int8", "int4"})],
)
def test_auto_compress_takes_the_mildest_codec_that_hides(line: str, expected: set[str]) -> None:
    plan, *_ = plan_model("auto", line)
    codecs = list_codecs(plan)
    assert codecs and {codec for codec, _ in codecs} <= expected and all(there == back for there, back in codecs)
    explanation = " ".join(plan.explain().split())
    assert all(
        (f"{e.source} to {e.destinations[0]} {e.codec}".replace("none", "uncompressed")) in explanation
        for e in plan.boundaries
    )


@pytest.mark.parametrize("seed", [21, 25, 59])
def test_chosen_codecs_are_the_mildest_within_the_slack(seed: int) -> None:
    problem = draw_problem(seed)
    found = search(replace(problem, options=replace(problem.options, slack=0.02))).candidates

    def by(shape: Shape, codecs: dict[int, int]) -> float:
        parts = tuple(replace(part, codec=codecs.get(place, part.codec)) for place, part in enumerate(shape.parts))
        scored = score(problem, replace(shape, parts=parts))
        return scored.seconds if isinstance(scored, Candidate) else np.inf

    assert any(part.codec for each in found for part in each.parts)
    for each in found:
        places = each.crossing_places
        every = itertools.product(range(4), repeat=len(places))
        best = min(by(each.shape, dict(zip(places, codecs, strict=True))) for codecs in every)
        assert each.seconds <= 1.02 * best * 1.0001
        milder = [by(each.shape, {place: codec}) for place in places for codec in range(each.parts[place].codec)]
        assert all(seconds > 1.02 * best * 0.9999 for seconds in milder)


def test_codec_seconds_come_from_measurements() -> None:
    tensors = [[], [Tensor("float32", (8, 64), True), Tensor("int32", (8,), False)]]
    _, fp16, int8, _ = code_crossings("auto", tensors, 8, {"int8": 1e-6})
    assert fp16.sent_bytes.tolist() == [0.0, (8 * 64 * 2 + 8 * 4 + 4) / 8] or fp16.sent_bytes[1] == pytest.approx(
        132.0, rel=0.01
    )
    assert int8.seconds[:, 1].tolist() == pytest.approx([1e-6 * 8 * 64 * 4 / 2 / 8] * 4)
    assert 0.0 < fp16.seconds[0, 1] < int8.seconds[0, 1]


# -------------------- Blocks of a step are measured by running: on copies, once for all equal ones, and never tw
ROWS = 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class PrintingLayer(keras.layers.Layer):
    """Does something on which no copy of a variable helps."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * tf.ensure_shape(
            tf.py_function(lambda each: call_log.append(1) or each, [x], x.dtype), x.shape
        )


call_log: list[int] = []


def decide(*layers: keras.layers.Layer, **config: Any) -> tuple[Decision, keras.Model]:
    """What is decided for a model of these layers and a head, in a run of its own."""
    nb.shutdown()
    nb.init({"clusters": {"gpu": {}, "npu": {}}, "measure": "60s", **config})
    model = keras.Sequential([keras.Input((48,)), *layers, keras.layers.Dense(2, name="head")])
    model.compile(keras.optimizers.Adam(), "mse")
    x, y = np.ones((ROWS, 48), "float32"), np.ones((ROWS, 2), "float32")
    with nb.auto_parallel():
        nb.plan(model, x, y)
    return current_run().decisions[0], model


def make_equal_layers() -> list[keras.layers.Layer]:
    """Three layers of the same form."""
    return [keras.layers.Dense(48, activation="relu", name=f"d{number}") for number in range(3)]


def test_equal_blocks_are_measured_once_and_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = decide(*make_equal_layers())
    assert first.grounds.measured == 1.0 and first.predicted.share_measured == 1.0
    cluster = first.problem.clusters[0]
    assert cluster.forward[:, 1].tolist() == cluster.forward[:, 2].tolist() and cluster.update[1] == cluster.update[2]
    kept = json.loads(blocks_path().read_text())["blocks"]
    # With three numbers of rows 2 forwards, 3 backwards, and all together in three ways; a few updates, and adding.
    # Were none alike, there would be 4 forwards and 4 backwards.
    assert len(kept) <= 3 * (2 + 3 + 3) + 6
    monkeypatch.setattr(block_costs, "time_calls", None)
    again, _ = decide(*make_equal_layers(), clusters={"gpu": {"cores": 1}, "npu": {"cores": 4}})
    one, four = again.problem.clusters
    assert np.array_equal(one.backward, cluster.backward)
    assert one.crossing == pytest.approx(4 * four.crossing) and one.message == pytest.approx(4 * four.message) != 0.0


def test_all_blocks_together_are_measured_with_all_rows_even_if_building_takes_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the fewest rows alone, a step of the whole batch would be predicted to take as often as long."""
    now, build = [0.0], block_costs._Bench._make_function
    monkeypatch.setattr(block_costs, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + now[0]))

    def build_slowly(*given: Any) -> Any:
        now[0] += 20.0
        return build(*given)

    monkeypatch.setattr(block_costs._Bench, "_make_function", build_slowly)
    decision, _ = decide(*make_equal_layers(), measure="30s")
    assert decision.grounds.measured == 0.0, "no block alone was measured"
    kept = json.loads(blocks_path().read_text())["blocks"]
    assert len(kept) == 3 * 3 + 1 + 2, "three functions with three numbers of rows; the update, adding and a call"


def test_measured_updates_write_all_variables_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam writes a variable by what it reads from slots that it has just written."""
    seen, list_all = [], block_costs.list_subgraphs
    monkeypatch.setattr(block_costs, "list_subgraphs", lambda *given: seen.append(given) or list_all(*given))
    decide(*make_equal_layers())
    program, ops = seen[0]
    found = {each.block: set(each.fragment.ops) for each in list_all(program, ops) if each.kind == "update"}
    written = {
        op.index: program.variable_ops[op.inputs[0].op].path
        for op in program.graph.ops
        if op.type in ASSIGNS and not program.variable_ops[op.inputs[0].op].spec.scalar
    }
    assert len(written) == 3 * 2 * (3 + 1), "a kernel, a bias and two slots of each, in four layers"
    assert found.pop(WHOLE) >= written.keys()
    for index, path in written.items():
        assert sum(index in own for own in found.values()) == 1, path


def test_block_times_of_another_machine_are_ignored() -> None:
    save_blocks({"a": BlockTime(1.0, 0.1, "2026-01-02")})
    save_blocks({"b": BlockTime(2.0, 0.1, "2026-01-03")})
    assert sorted(read_blocks()) == ["a", "b"]
    document = json.loads(blocks_path().read_text())
    for text in (json.dumps({**document, "machine": "another"}), json.dumps({**document, "format": "0"}), "{", "[]"):
        blocks_path().write_text(text)
        assert read_blocks() == {}
    save_blocks({"c": BlockTime(3.0, 0.1, "2026-01-04")})
    assert read_blocks() == {"c": BlockTime(3.0, 0.1, "2026-01-04")}


def test_measuring_leaves_variables_unchanged_and_skips_side_effects() -> None:
    call_log.clear()
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(48), keras.layers.Dropout(0.5), PrintingLayer()]
    decision, model = decide(*layers)
    fresh = keras.models.clone_model(model)
    for variable, other in zip(model.non_trainable_variables, fresh.non_trainable_variables, strict=True):
        if "seed" not in variable.path:
            np.testing.assert_array_equal(variable.numpy(), other.numpy())
    begun = {float(np.abs(each.numpy()).sum()) for each in model.optimizer.variables}
    assert begun == {0.0, float(np.float32(1e-3))}  # slots, the count of steps, and the learning rate
    assert not call_log and 0.0 < decision.grounds.measured < 1.0
    assert np.isfinite(decision.problem.clusters[0].backward).all()


@pytest.mark.parametrize(
    "config",
    [{"measure": "0s"}, {"clusters": {"gpu": {"flops": "1G"}, "npu": {"flops": "1G", "memory_rate": "1GB/s"}}}],
    ids=["none is asked for", "the config says flops"],
)
def test_blocks_are_not_measured_when_disabled_or_configured(config: dict[str, Any]) -> None:
    decision, _ = decide(*make_equal_layers(), **config)
    assert decision.grounds.measured == 0.0 and not blocks_path().exists()
    assert decision.emulated and 0.0 < decision.seconds_here < decision.chosen.seconds  # without the call of a stage
    assert (decision.grounds.configured > 0.5) == ("clusters" in config)
    usual, slow = (cluster.update.sum() for cluster in decision.problem.clusters)
    assert slow == pytest.approx(usual * (20 if "clusters" in config else 1))


@pytest.mark.grid
def test_configured_and_measured_clusters_can_be_mixed() -> None:
    decision, _ = decide(*make_equal_layers(), clusters={"gpu": {"flops": "1G"}, "npu": {}})
    assert 0.0 < decision.grounds.measured < 1.0
    assert decision.problem.clusters[0].forward.sum() != decision.problem.clusters[1].forward.sum()


# -------------------- Costs of a stage beyond its blocks: calls, and crossings
CALL, MESSAGE, BYTE, STEP = 1e-3, 1e-4, 1e-8, 5e-3


def make_problem() -> Problem:
    """Three blocks; two tensors of 1,000 bytes a row cross at each cut, and one comes back."""
    ones, cuts = np.ones(3), np.array([0.0, 1000, 1000, 0])
    chain = Chain(
        ("a", "b", "c"), ones, ones, ones, ones, ones, cuts, cuts / 2, 0 * cuts, np.ones(4, bool),
        sent_tensors=np.array([0.0, 2, 2, 0]), returned_tensors=np.array([0.0, 1, 1, 0]),
    )  # fmt: skip
    seconds = np.stack([np.zeros(3), np.full(3, 1e-3)])
    cluster = ClusterCosts(
        "gpu", 1, seconds, 2 * seconds, np.zeros(3), CALL, fused_ratio=0.5, crossing=BYTE, message=MESSAGE, step=STEP
    )
    return Problem(chain, (cluster, replace(cluster, name="npu")), 8)


def test_last_stage_costs_one_fused_call() -> None:
    costs = Costs(make_problem(), 4)
    assert costs.part_seconds(Part(0, 0, 1)) == pytest.approx((2e-3 + CALL, 4e-3 + CALL))
    assert costs.part_seconds(Part(1, 1, 3)) == pytest.approx((0.5 * (4e-3 + CALL), 0.5 * 8e-3))


def test_crossing_tensors_take_time_at_both_ends() -> None:
    costs = Costs(make_problem(), 4)
    there, back = 2 * MESSAGE + 2 * 1000 * BYTE, MESSAGE + 2 * 500 * BYTE
    assert costs.part_handling(Part(0, 0, 1)) == pytest.approx((there, back))
    assert costs.part_handling(Part(0, 1, 2)) == pytest.approx((2 * there, 2 * back))  # in the middle


def test_seconds_matrix_matches_the_costs_of_parts() -> None:
    costs = Costs(make_problem(), 4)
    for begin, end in ((0, 1), (0, 3), (1, 2), (1, 3)):
        part = Part(0, begin, end)
        whole = sum(costs.part_seconds(part)) + sum(costs.part_handling(part))
        assert costs.seconds(0)[begin, end] == pytest.approx(whole)


def test_compute_seconds_exclude_crossings() -> None:
    problem = make_problem()
    found = score(problem, Shape((Part(0, 0, 1), Part(1, 1, 3)), 4))
    free_clusters = tuple(replace(cluster, crossing=0.0, message=0.0, step=0.0) for cluster in problem.clusters)
    uncrossed = score(replace(problem, clusters=free_clusters), found.shape)  # type: ignore[union-attr]
    assert found.compute == uncrossed.compute  # type: ignore[union-attr]
    assert found.seconds > uncrossed.seconds + STEP  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_matrix_matches_the_bytes_of_parts(recompute: bool) -> None:
    problem = draw_problem(5)
    costs = Costs(problem, 4, recompute)
    for number, shards in ((1, 1), (3, 1), (4, 2)):
        found = costs.bytes(number, shards)
        for begin, end in zip(*np.nonzero(costs.ranges), strict=True):
            assert found[begin, end] == pytest.approx(costs.part_bytes(Part(0, begin, end, 1, shards), number, number))


def test_part_memory_is_the_maximum_of_backward_and_update() -> None:
    none, ones = np.zeros(3), np.ones(2)
    chain = Chain(
        ("a", "b"), 100 * ones, 200 * ones, 100 * ones, 10 * ones, 4 * ones, np.array([0.0, 5, 0]), none, none,
        np.ones(3, bool), largest_gradient=60 * ones, deferred_inputs=7 * ones,
    )  # fmt: skip
    cluster = ClusterCosts("gpu", 2, np.ones((2, 2)), np.ones((2, 2)), ones)

    def part_bytes_of(count: int, part: Part, *numbers: int, slots: float = 200.0) -> float:
        problem = Problem(replace(chain, slots=slots * ones), (cluster,), 8 * count)
        return Costs(problem, count).part_bytes(part, *numbers)

    first, last, both = Part(0, 0, 1), Part(0, 1, 2), Part(0, 0, 2)
    # 8 rows: a block keeps 80; an update has the gradients, as many more where there are slots, and the largest
    assert part_bytes_of(1, both, 1) == 600 + 200 + 200 + 60
    assert part_bytes_of(1, both, 1, slots=0.0) == 200 + max(200 + 60, 160 + 100 + 32, 80 + 200 + 32)
    # an update of a stage has its gradients and temporary tensors: two with slots, unless they are counted
    large = replace(chain, gradients=1e4 * ones, largest_gradient=1e4 * ones)
    for counted, number in ((None, 2), (1, 1)):
        costs = Costs(Problem(replace(large, update_temporaries=counted), (cluster,), 8), 1)
        assert costs.part_bytes(Part(0, 0, 1, shards=2), 1) == 150 + (1 + number) * 5e3
    # a second backward finds sums; all that it has made is there while they are added
    assert part_bytes_of(8, first, 3) == 300 + 3 * 80 + 2 * 100 + 60
    assert part_bytes_of(3, first, 3) == 300 + max(3 * 80 + 100 + 32, 2 * 80 + 2 * 100 + 60)
    # the last one keeps nothing from a call to the next but what has come, and what comes later reads
    assert part_bytes_of(8, last, 1, 3, 2) == 300 + max(2 * 7 * 8 + 3 * 40 + max(80 + 32 + 200, 200 + 60), 260)


def test_table_rows_take_memory_and_forbid_replicas() -> None:
    problem = make_problem()
    beside = np.array([0.0, 5e6, 0.0])
    with_table = replace(problem, chain=replace(problem.chain, object_bytes=beside))
    more = Costs(with_table, 4).bytes(1) - Costs(problem, 4).bytes(1)
    begin, end = np.ogrid[:4, :4]
    np.testing.assert_allclose(more, np.where((begin <= 1) & (end >= 2), 5e6, 0.0))
    assert Costs(with_table, 4).part_bytes(Part(0, 1, 2, shards=2), 1) < 3e6
    clusters = tuple(replace(cluster, workers=2) for cluster in problem.clusters)
    free, tied = (search(replace(each, clusters=clusters)).candidates for each in (problem, with_table))
    assert any(part.replicas > 1 for each in free for part in each.parts if part.begin <= 1 < part.end)
    assert tied and not any(part.replicas > 1 for each in tied for part in each.parts if part.begin <= 1 < part.end)
    small = tuple(replace(cluster, memory=4e6 if cluster.name == "gpu" else 6e6) for cluster in problem.clusters)
    best = search(replace(with_table, clusters=small)).candidates
    assert {part.cluster for each in best for part in each.parts if part.begin <= 1 < part.end} == {1}


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_bound_blocks_stay_in_the_cluster_of_their_inputs(share: float) -> None:
    """The first and the last one in npu, which does all of it if it has the memory, although gpu is as fast."""
    problem = make_problem()
    chain = replace(problem.chain, weights=np.full(3, 1e5))
    bound = replace(
        problem, chain=chain, options=Options(micro_batch=8), pinned_blocks=(PinnedBlock(0, (1,)), PinnedBlock(2, (1,)))
    )
    memory = share * Costs(bound, 8).part_bytes(Part(1, 0, 3), 8)
    clusters = tuple(replace(cluster, memory=memory) for cluster in problem.clusters)
    found = search(replace(bound, clusters=clusters)).candidates
    ways = [[part.cluster for part in each.parts] for each in found]
    assert ways and all(way[0] == way[-1] == 1 for way in ways)
    assert [1, 0, 1] in ways and ([1] in ways) == (share == 1.0)


def test_stages_that_share_a_worker_share_its_memory() -> None:
    """The first and the last of eight blocks are bound to npu, which is far faster, and holds four of them."""
    ones, cuts = np.ones(8), np.array([0.0, *[1000.0] * 7, 0.0])
    chain = Chain(
        tuple("abcdefgh"), 1e6 * ones, ones, ones, ones, ones, cuts, cuts / 2, 0 * cuts, np.ones(9, bool)
    )  # fmt: skip
    seconds = np.stack([np.zeros(8), np.full(8, 1e-3)])
    slow = ClusterCosts("gpu", 1, 5 * seconds, 10 * seconds, np.zeros(8), memory=5.5e6)
    fast = replace(slow, name="npu", forward=seconds, backward=2 * seconds, memory=4.5e6)
    bound = (PinnedBlock(0, (1,)), PinnedBlock(7, (1,)))
    found = search(Problem(chain, (slow, fast), 8, options=Options(micro_batch=1), pinned_blocks=bound)).candidates
    assert found and [part.cluster for part in found[0].parts] == [1, 0, 1]
    assert max(found[0].memory) <= 5.5e6
