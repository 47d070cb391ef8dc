"""Parts of local SGD: flat variables, differences with error feedback, rounds over memory links."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.runtime.sessions import sessions
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.errors import DeadlineError, RemoteFailureError, RemoteProtocolError
from whale_nebula.ir.outer_optimizer import Average, Nesterov, Outer
from whale_nebula.launch.worker_exit import ExitAgreement, WorkerExit
from whale_nebula.runtime.local_sgd.async_mode import Server
from whale_nebula.runtime.local_sgd.one_bit import compress_signs, restore_signs
from whale_nebula.runtime.local_sgd.step import LeaveRequests
from whale_nebula.runtime.local_sgd.sync_rounds import Rounds
from whale_nebula.runtime.local_sgd.topology import Differences, Ends, FlatVariables
from whale_nebula.schedule.rounds import GRAIN, Timetable
from whale_nebula.transport import MemoryNetwork

WAYS = ["none", "fp16", "int8", "int4", "topk(0.1) >> int8", "topk(0.1)", "int4, zstd", "topk(0.9), zstd"]
CLUSTERS = ("a", "b", "c")


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype("float32")


class TestFlat:
    @given(st.data())
    def test_ranges_are_read_and_added_as_in_one_array(self, data: st.DataObject) -> None:
        shapes = [(2, 3), (), (5,), (1, 4)]
        flat = FlatVariables(
            [tf.Variable(numbers(int(np.prod(shape)), n).reshape(shape)) for n, shape in enumerate(shapes)]
        )
        oracle = flat.read((0, flat.total))
        begin = data.draw(st.integers(0, flat.total))
        end = data.draw(st.integers(begin, flat.total))
        more = numbers(end - begin, 9)
        flat.add((begin, end), more)
        oracle[begin:end] += more
        np.testing.assert_array_equal(flat.read((0, flat.total)), oracle)

    def test_read_numbers_are_a_copy(self) -> None:
        flat = FlatVariables([tf.Variable([1.0, 2.0])])
        before = flat.read((0, 2))
        flat.write((0, 2), np.float32([5.0, 6.0]))
        assert before.tolist() == [1.0, 2.0]

    def test_float16_variables_are_added_in_float32(self) -> None:
        half = tf.Variable(tf.cast([1.5, 2.5], tf.float16))
        flat = FlatVariables([half])
        flat.add((1, 2), np.float32([1.0]))
        assert half.dtype == tf.float16
        assert half.numpy().tolist() == [1.5, 3.5]


class TestDifferences:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("size", [1, 100, GRAIN, 3 * GRAIN + 17])
    def test_decoded_numbers_equal_those_that_encode_returns(self, way: str, size: int) -> None:
        data, there = Differences(parse_encoding(way)).encode(0, numbers(size))
        np.testing.assert_array_equal(Differences(parse_encoding(way)).decode(data, size), there)

    @pytest.mark.parametrize("way", WAYS[1:])
    def test_encoding_error_is_added_to_the_next_difference(self, way: str) -> None:
        ours, gone = Differences(parse_encoding(way)), numbers(2 * GRAIN)
        once = np.linalg.norm(Differences(parse_encoding(way)).encode(0, gone)[1] - gone)
        total = sum(ours.encode(0, gone)[1] for _ in range(60))
        assert np.linalg.norm(total - 60 * gone) < 20 * once  # 60 times as much, if it were lost each time

    def test_fragments_have_separate_residues(self) -> None:
        ours = Differences(parse_encoding("int4"))
        ours.encode(0, numbers(GRAIN))
        _, alone = Differences(parse_encoding("int4")).encode(1, numbers(GRAIN, 2))
        np.testing.assert_array_equal(ours.encode(1, numbers(GRAIN, 2))[1], alone)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("size", [100, 2 * GRAIN + 17])
    def test_payload_of_another_size_is_refused(self, way: str, size: int) -> None:
        data, _ = Differences(parse_encoding(way)).encode(0, numbers(size))
        data = np.asarray(data)
        for wrong in (data[:0], data[:4], data[:-1], np.concatenate([data, data[:4]])):
            with pytest.raises(RemoteProtocolError):
                Differences(parse_encoding(way)).decode(wrong, size)


class ClusterGroup:
    """Clusters in one process, each with a variable of its own."""

    def __init__(self, table: Timetable, outer: Outer, way: str, size: int = 2 * GRAIN + 100) -> None:
        network = MemoryNetwork()
        lead_workers = {name: f"{name}/0" for name in CLUSTERS}
        self.start = numbers(size)
        self.rounds: list[Rounds] = []
        for name, worker in lead_workers.items():
            others = {other: peer for other, peer in lead_workers.items() if other != name}
            links = {peer: network.link(worker, peer, name, other) for other, peer in others.items()}
            shares = {"a": 0.5, "b": 0.25, "c": 0.25}
            flat, ends = FlatVariables([tf.Variable(self.start)]), Ends(worker, name, lead_workers, links, 10.0)
            self.rounds.append(
                Rounds(flat, ends, Differences(parse_encoding(way)), table=table, outer=outer, shares=shares)
            )
        for each in self.rounds:
            each.begin()

    def step(self, draw_moves: Sequence[np.ndarray]) -> None:
        for each, move in zip(self.rounds, draw_moves, strict=True):
            each.flat.add((0, each.flat.total), move)
        for each in self.rounds:
            each.send_due()
        for each in self.rounds:
            each.apply_due()

    def settle(self) -> None:
        for each in self.rounds:
            each.send_remaining()
        for each in self.rounds:
            each.receive_remaining()

    @property
    def held(self) -> list[np.ndarray]:
        return [each.flat.read((0, each.flat.total)) for each in self.rounds]

    def close(self) -> None:
        for each in self.rounds:
            each.close()


@pytest.fixture
def open_groups() -> Iterator[list[ClusterGroup]]:
    made: list[ClusterGroup] = []
    yield made
    for each in made:
        each.close()


def make_clusters(open_groups: list[ClusterGroup], table: Timetable, outer: Outer, way: str = "none") -> ClusterGroup:
    open_groups.append(ClusterGroup(table, outer, way))
    return open_groups[-1]


def draw_moves(step: int, size: int) -> list[np.ndarray]:
    return [0.1 * numbers(size, 10 * step + n) for n in range(len(CLUSTERS))]


class TestRounds:
    def test_exchange_at_every_step_gives_the_weighted_mean(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(1, 1, 0), Average())
        expected = clusters.start.copy()
        for step in range(3):
            each = draw_moves(step, expected.size)
            clusters.step(each)
            expected += 0.5 * each[0] + 0.25 * each[1] + 0.25 * each[2]
            for held in clusters.held:
                np.testing.assert_allclose(held, expected, rtol=1e-5, atol=1e-6)

    def test_clusters_diverge_between_rounds_and_agree_after_them(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(3, 1, 0), Average())
        clusters.step(draw_moves(0, clusters.start.size))
        a, b, _ = clusters.held
        assert not np.allclose(a, b)
        for step in (1, 2):
            clusters.step(draw_moves(step, clusters.start.size))
        a, b, c = clusters.held
        assert a.tobytes() == b.tobytes() == c.tobytes()

    @pytest.mark.parametrize(
        ("outer", "table", "way"),
        [
            pytest.param(*case, marks=[pytest.mark.grid] if number % 4 else [])
            for number, case in enumerate(
                itertools.product(
                    [Average(), Nesterov()],
                    [Timetable(4, 1, 0), Timetable(4, 3, 2), Timetable(6, 2, 5)],
                    ["none", "int4", "topk(0.1) >> int8"],
                )
            )
        ],
        ids=str,
    )
    def test_shared_weights_are_equal_in_all_clusters_at_every_step(
        self, open_groups: list[ClusterGroup], table: Timetable, outer: Outer, way: str
    ) -> None:
        clusters = make_clusters(open_groups, table, outer, way)
        seen = set()
        for step in range(14):
            clusters.step(draw_moves(step, clusters.start.size))
            digests = {each.digest() for each in clusters.rounds}
            assert len(digests) == 1
            seen |= digests
        assert len(seen) > 2
        clusters.settle()
        assert len({held.tobytes() for held in clusters.held}) == 1

    def test_steps_during_an_exchange_are_kept(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(2, 1, 1), Average())
        all_moves = [draw_moves(step, clusters.start.size) for step in range(3)]
        for each in all_moves:
            clusters.step(each)
        shared = clusters.start + sum(
            share * (all_moves[0][n] + all_moves[1][n]) for n, share in enumerate((0.5, 0.25, 0.25))
        )
        for n, held in enumerate(clusters.held):
            np.testing.assert_allclose(held, shared + all_moves[2][n], rtol=1e-4, atol=1e-5)

    def test_settle_without_new_steps_exchanges_nothing(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(4, 1, 1), Average())
        clusters.settle()
        clusters.step(draw_moves(0, clusters.start.size))
        clusters.settle()
        round_count = [each.round_count for each in clusters.rounds]
        clusters.settle()
        assert [each.round_count for each in clusters.rounds] == round_count

    def test_restart_continues_from_the_replaced_weights(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(1, 1, 0), Nesterov(), "int4")
        for step in range(2):
            clusters.step(draw_moves(step, clusters.start.size))
        fresh = numbers(clusters.start.size, 77)
        for each in clusters.rounds:
            each.flat.write((0, each.flat.total), fresh)
            each.restart()
        clusters.step([np.zeros_like(fresh)] * 3)
        for held in clusters.held:
            np.testing.assert_allclose(held, fresh, atol=1e-6)

    def test_difference_of_another_size_is_refused_with_its_sender(self, open_groups: list[ClusterGroup]) -> None:
        clusters = make_clusters(open_groups, Timetable(1, 1, 0), Average())
        a, b, c = clusters.rounds
        one = np.zeros(1, np.float32).view(np.uint8)
        for each in (a, b):
            each.send_due()
        c.ends.send_fragment(1, 0, one, 4)
        with pytest.raises(RemoteProtocolError, match=r"received 4 bytes of weights instead of \d+(.|\n)*'c/0'"):
            a.apply_due()

    def test_failed_cluster_ends_an_exchange_in_which_another_is_awaited(self, open_groups: list[ClusterGroup]) -> None:
        """What has arrived from a cluster before it failed is used."""
        a, b, c = make_clusters(open_groups, Timetable(1, 1, 0), Average()).rounds
        a.send_due()
        c.send_due()
        c.ends.links["a/0"].fail({"what": "it has ended"}, last=True)
        threading.Timer(1.0, b.send_due).start()
        a.apply_due()
        a.send_due()
        begin = time.monotonic()
        with pytest.raises(RemoteFailureError, match="it has ended"):
            a.apply_due()
        assert time.monotonic() - begin < a.ends.patience / 2


def open_server() -> Server:
    """The server of two clusters, with three weights."""
    links = {"b/0": MemoryNetwork().link("a/0", "b/0", "a", "b")}
    ends = Ends("a/0", "a", {"a": "a/0", "b": "b/0"}, links, 10.0)
    server = Server(ends, parse_encoding("none"), {"a": 0.5, "b": 0.5}, staleness=1)
    server.begin(numbers(3))
    return server


class TestServer:
    @pytest.mark.parametrize("size", [0, 1, 2, 4])
    def test_difference_of_another_size_is_refused_with_its_sender(self, size: int) -> None:
        server = open_server()
        with pytest.raises(RemoteProtocolError, match=r"bytes of weights instead of 12(.|\n)*'b/0'"):
            server.apply_push("b", 1, np.zeros(size, np.float32).view(np.uint8), last=False)
        server.close()

    def test_push_after_a_synchronisation_does_not_change_its_result(self) -> None:
        """A faster cluster pushes again before a slower one has received the weights of the synchronisation."""
        server = open_server()
        received: list[np.ndarray] = []
        last = np.float32([1, 2, 3]).view(np.uint8)
        slow = threading.Thread(target=lambda: received.append(server.apply_push("a", 1, last, last=True)))
        with server._condition:
            slow.start()
            server._condition.wait_for(lambda: server._rounds["a"] == float("inf"))
            received.append(server.apply_push("b", 1, last, last=True))
            server.apply_push("b", 2, np.float32([8, 8, 8]).view(np.uint8), last=False)
        slow.join()
        assert received[0].tobytes() == received[1].tobytes()
        assert server.shared is not None
        np.testing.assert_allclose(server.shared, received[0].view(np.float32) - 4.0, rtol=1e-6)
        server.close()

    @pytest.mark.parametrize("early", [False, True])
    def test_push_before_the_server_restarts_stays_in_effect(self, early: bool) -> None:
        """A cluster that has replaced its weights earlier than the server pushes a difference from the new ones."""
        server, fresh, move = open_server(), numbers(3, 5), np.float32([1, 0, -1])
        answer = np.zeros(3, np.float32)
        if early:
            answer = server.apply_push("b", 1, move.view(np.uint8), last=False).view(np.float32)
        server.reset(fresh)
        expected = fresh - 0.5 * move if early else fresh
        assert server.shared is not None
        np.testing.assert_allclose(server.shared, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(server._known_weights["b"], fresh + answer, rtol=1e-5, atol=1e-6)
        assert server._known_weights["a"].tobytes() == fresh.tobytes()
        server.close()

    def test_cluster_that_pushes_nothing_is_named_in_the_deadline_error(self) -> None:
        network = MemoryNetwork()
        lead_workers = {name: f"{name}/0" for name in CLUSTERS}
        links = {peer: network.link("a/0", peer, "a", name) for name, peer in lead_workers.items() if name != "a"}
        shares = dict.fromkeys(CLUSTERS, 1 / 3)
        server = Server(Ends("a/0", "a", lead_workers, links, 0.05), parse_encoding("none"), shares, staleness=1)
        server.begin(numbers(3))
        push = np.zeros(3, np.float32).view(np.uint8)
        server.apply_push("b", 1, push, last=False)
        server.apply_push("a", 1, push, last=False)
        for push_last in (False, True):
            with pytest.raises(DeadlineError, match=r"worker 'a/0' waited 0\.05 s for worker 'c/0'"):
                server.apply_push("a", 2, push, last=push_last)
        server.close()

    def test_patience_counts_from_the_last_push_of_any_cluster(self) -> None:
        """Patience counts from the latest push of any cluster."""
        lead_workers = {name: f"{name}/0" for name in CLUSTERS}
        network = MemoryNetwork()
        links = {peer: network.link("a/0", peer, "a", name) for name, peer in lead_workers.items() if name != "a"}
        server = Server(
            Ends("a/0", "a", lead_workers, links, 10.0), parse_encoding("none"), dict.fromkeys(CLUSTERS, 1 / 3), 9
        )
        server.begin(numbers(3))
        waits: list[dict[str, float]] = []
        push = np.zeros(3, np.float32).view(np.uint8)

        class Steps:
            """A condition that wakes whoever waits once another cluster has pushed."""

            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...
            def notify_all(self) -> None: ...
            def wait_for(self, round_count: Callable[[], bool], seconds: float) -> bool:
                waits.append(dict(server._rounds))
                cluster = "b" if len(waits) % 2 else "c"
                server._rounds[cluster] = float("inf") if len(waits) > 4 else len(waits)
                return round_count()

        server._condition = cast(threading.Condition, Steps())
        server.apply_push("a", 1, push, last=True)
        assert len(waits) == 6
        server.close()


def test_departures_are_those_that_all_workers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker asks as well, but of a later step: some do not know that yet when they leave."""
    asked = {worker: LeaveRequests(worker, each.links) for worker, each in sessions(["gpu/0", "npu/0"]).items()}
    asked["gpu/0"].ask("gpu/0", "SIGTERM npu=1")
    asked["gpu/0"].announce(1, 8)
    asked["npu/0"].receive()
    asked["npu/0"].ask("npu/0", "SIGTERM npu=0")
    asked["npu/0"].announce(1, 12)
    for each in asked.values():
        assert each.is_last_step(1, 8) and not each.is_last_step(1, 7)
        exit_agreement = ExitAgreement()
        monkeypatch.setattr("whale_nebula.runtime.local_sgd.step.exit_agreement", exit_agreement)
        each.leave(1)
        assert exit_agreement.counts == {"npu": 1}


def test_requests_are_announced_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """npu asks gpu, which tells all; its own reason comes later, for the same step, and one of another step is late."""
    asked = {
        worker: LeaveRequests(worker, each.links) for worker, each in sessions(["gpu/0", "npu/0", "tpu/0"]).items()
    }
    for why in ("SIGTERM", "SIGTERM"):
        asked["npu/0"].ask("gpu/0", why)
    asked["tpu/0"].receive()
    asked["gpu/0"].receive()
    asked["gpu/0"].announce(1, 8)
    for at, why in ((8, "OTHERS npu/1=1"), (8, "OTHERS npu/1=1 tpu/1=1"), (12, "OTHERS npu/1=0")):
        asked["gpu/0"].ask("gpu/0", why)
        asked["gpu/0"].announce(1, at)
    for each in asked.values():
        each.receive()
        assert each.is_last_step(1, 8)
        exit_agreement = ExitAgreement()
        monkeypatch.setattr("whale_nebula.runtime.local_sgd.step.exit_agreement", exit_agreement)
        each.leave(1)
        assert exit_agreement.counts == {"npu/1": 1, "tpu/1": 1}
        with pytest.raises(WorkerExit, match="; npu/0 was asked to stop: SIGTERM"):
            exit_agreement.begin_step()


@pytest.mark.parametrize("size", [1, 8, 9, 20])
def test_signs_and_scales_are_restored_from_exactly_their_bytes(size: int) -> None:
    ends = [size, 2 * size]
    data, decoded = compress_signs(np.linspace(-1.0, 2.0, 2 * size, dtype=np.float32), ends)
    assert data.nbytes == 4 * 2 + -(-2 * size // 8)
    assert restore_signs(data, ends).tolist() == decoded.tolist()
    for wrong in (data[:-1], np.append(data, np.uint8(0))):
        with pytest.raises(RemoteProtocolError, match=f"received {wrong.nbytes} bytes of signs instead of"):
            restore_signs(wrong, ends)
