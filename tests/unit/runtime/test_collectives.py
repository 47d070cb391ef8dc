"""Sums between the workers of one cluster: real processes, connected by TensorFlow."""

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.processes.conftest import forked_workers  # noqa: F401 - a fixture
from tests.processes.worker_runs import FinishedRun, wait_for_run
from whale_nebula.errors import OptionError, StateError
from whale_nebula.launch import spawn
from whale_nebula.runtime.replicas import collectives
from whale_nebula.runtime.replicas.collectives import (
    CollectiveKeys,
    Collectives,
    Group,
    apply_packed,
    can_open,
    group_into_buckets,
    open_collectives,
)

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "processes" / "workers" / "all_reduce.py"


def run_workers(workers: int, scenario: str) -> FinishedRun:
    """Run the worker script in all workers of one cluster."""
    child = ["-m", "whale_nebula.launch.child", str(SCRIPT), scenario]
    names = {f"c/{number}": "c" for number in range(workers)}
    with spawn(child, names, seed=5, cwd=ROOT) as job:
        return wait_for_run(job)


@pytest.fixture(scope="module")
def three_workers() -> FinishedRun:
    """Three workers that made variables before they met; the last one is killed while the others sum with it."""
    return run_workers(3, "killed")


@pytest.mark.grid
class TestThreeWorkers:
    def test_all_dtypes_are_summed(self, three_workers: FinishedRun) -> None:
        assert three_workers.get_common("right") == list(collectives.DTYPES)

    def test_sums_are_bit_identical_in_all_workers(self, three_workers: FinishedRun) -> None:
        assert len(three_workers.get_common("bits")) == len(collectives.DTYPES) - 1
        assert len(three_workers.get_common("half")) == 5

    def test_one_sum_can_be_called_repeatedly(self, three_workers: FinishedRun) -> None:
        assert three_workers.get_common("again") == [3.0 + 3 * turn for turn in range(20)]

    def test_sums_inside_a_function_survive_retracing(self, three_workers: FinishedRun) -> None:
        assert three_workers.get_common("inside") == [[36.0, 360.0], [36.0, 360.0]]

    def test_groups_that_share_a_worker_work_concurrently(self, three_workers: FinishedRun) -> None:
        assert three_workers.get_all("subsets") == [
            {"[0, 1]": 11.0, "[0]": 1.0},
            {"[0, 1]": 11.0, "[1, 2]": 110.0, "[1]": 10.0},
            {"[1, 2]": 110.0, "[2]": 100.0},
        ]

    def test_variables_created_before_opening_stay_usable(self, three_workers: FinishedRun) -> None:
        drawn, variable, row, seed = three_workers.get_common("early")
        assert [variable, row, seed] == [[3.0, 4.0], 0, 2]
        assert 3.0 <= drawn[0] <= 3.3

    def test_killed_mate_ends_the_wait_with_a_link_closed_error(self, three_workers: FinishedRun) -> None:
        message = [
            three_workers.reports[worker][name] for worker in ("c/0", "c/1") for name in ("failed", "failed again")
        ]
        assert {text.partition(":")[0] for text in message} == {"LinkClosedError"}, message
        assert any("'c/2' is gone" in text for text in message), message
        assert "failed" not in three_workers.reports["c/2"]


def test_absent_mate_raises_deadline_error_after_patience() -> None:
    found = run_workers(2, "absent")
    assert found.get_common("first") == 2.0
    message = found.reports["c/0"]["failed"]
    assert message.startswith("DeadlineError: NB-402 the sum 'last' of group 'last': not all workers"), message
    assert "took part within 1 s" in message
    assert set(found.result.codes.values()) == {0}


class TestInOneProcess:
    def test_opening_after_tensorflow_has_started_is_refused(self) -> None:
        tf.constant(1.0)
        assert not can_open(0, 2)
        with pytest.raises(StateError, match="cannot be opened"):
            open_collectives(0, ["127.0.0.1:1"] * 2)

    def test_group_of_unknown_tasks_is_refused(self) -> None:
        tasks = Collectives(0, ("127.0.0.1:1",) * 3, 1.0)
        for members in ([1, 2], [0, 3], []):
            with pytest.raises(OptionError, match="are not tasks of this cluster"):
                tasks.group(members, "all")

    def test_group_of_one_returns_its_own_tensors(self) -> None:
        alone = Collectives(1, ("127.0.0.1:1",) * 3, 1.0).group([1], "alone")
        assert alone.sum([tf.constant([1, 2])])[0].numpy().tolist() == [1, 2]
        assert alone.sum([]) == []

    @pytest.mark.parametrize("dtype", [tf.string, tf.bool, tf.complex64])
    def test_dtype_that_cannot_be_summed_is_refused(self, dtype: Any) -> None:
        alone = Collectives(0, ("127.0.0.1:1",), 1.0).group([0], "alone")
        with pytest.raises(OptionError, match="cannot be summed"):
            alone.sum([tf.zeros([2], dtype)])

    def test_unknown_shape_is_refused(self) -> None:
        alone = Collectives(0, ("127.0.0.1:1",), 1.0).group([0], "alone")
        with pytest.raises(OptionError, match="cannot be summed"):
            tf.function(lambda x: alone.sum([x])).get_concrete_function(tf.TensorSpec([None]))

    def test_key_collision_of_two_names_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_nebula.tf.collectives.hash_key", lambda text: 1)
        keys = CollectiveKeys()
        assert keys.find_number("one") == keys.find_number("one") == 1
        with pytest.raises(StateError, match="the collectives 'other' and 'one' have the same key"):
            keys.find_number("other")


class TestPieces:
    @pytest.mark.parametrize("members", [2, 3])
    def test_reduce_scatter_gives_each_member_its_piece(self, members: int) -> None:
        """Pieces that do not come out even: all members exchange what they have of each."""
        tensors = [(tf.reshape(tf.range(10.0), [5, 2]), 0), (tf.reshape(tf.range(8.0), [2, 4]), 1)]
        groups = [Group(Collectives(n, ("",) * members, 1.0), tuple(range(members)), "g") for n in range(members)]
        packed_tensors: list[Any] = []
        for own, group in enumerate(groups):
            group._scatter_packed(
                [(tensor * (own + 1.0), axis) for tensor, axis in tensors], lambda t: packed_tensors.append(t) or t
            )
        pieces = [
            group._scatter_packed(tensors, lambda packed, own=own: tf.stack([each[own] for each in packed_tensors]))
            for own, group in enumerate(groups)
        ]
        for (tensor, axis), *found in zip(tensors, *pieces, strict=True):
            joined = tf.concat(found, axis)
            assert joined.numpy().tolist() == (tensor * sum(range(1, members + 1))).numpy().tolist()


class TestPacking:
    def test_buckets_contain_each_tensor_once(self) -> None:
        dtypes = ["float32", "int32", "float32", "float32", "int32"]
        found = group_into_buckets(dtypes, [10, 10, 50, 6, 10], limit=20)
        assert sorted(number for bucket in found for number in bucket) == [0, 1, 2, 3, 4]
        assert found == [[0], [1, 4], [2], [3]]

    def test_unpacked_tensors_have_their_original_shapes(self) -> None:
        tensors = [tf.reshape(tf.range(6.0), [2, 3]), tf.constant(7.0), tf.zeros([0, 2])]
        asked = []
        found = apply_packed(tensors, [0, 1, 2], lambda packed: asked.append(packed.shape.as_list()) or packed * 2)
        assert asked == [[7]]
        assert [tensor.shape.as_list() for tensor in found] == [[2, 3], [], [0, 2]]
        assert found[0].numpy().tolist() == [[0, 2, 4], [6, 8, 10]]
        assert float(found[1]) == 14
