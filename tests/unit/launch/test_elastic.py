"""The numbers of workers that a launcher starts, and its answers at its socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.config import load
from whale_nebula.errors import ConfigError, OptionError, OtherWorkersError, StaleWorkerError
from whale_nebula.launch.control import parse_counts, parse_notice, serve_control_socket, watch_notices
from whale_nebula.launch.elastic import Membership
from whale_nebula.launch.gateways import open_memory_folder, remove_abandoned
from whale_nebula.launch.heartbeat import WorkerStatus
from whale_nebula.launch.job import Outcome, Result
from whale_nebula.launch.placement import Placement, place_all_workers
from whale_nebula.launch.restarts import Failure
from whale_nebula.wire.greeting import Hello, check_absent

CLUSTERS = {"gpu": {"workers": ["a:1"]}, "npu": {"workers": ["b:1", "b:2", "b:3"]}}


def create_sizes(**limits: Mapping[str, int]) -> Membership:
    config = load({"clusters": CLUSTERS, "elastic": limits or {"npu": {"min": 1, "max": 3}}})
    return Membership(config, place_all_workers(config, [], lambda host: True))


def test_requested_worker_count_applies_to_the_next_start() -> None:
    found = create_sizes()
    assert len(found.begin_next_start().here) == 4
    assert found.request_counts({"npu": 1}) and found.current_counts["npu"] == 3
    assert found.begin_next_start().here == ("gpu/0", "npu/0") and not found.request_counts({"npu": 1})
    assert found.request_counts({"npu": 2}) and list(found.begin_next_start().addresses) == ["gpu/0", "npu/0", "npu/1"]


@pytest.mark.parametrize(
    ("cluster", "count", "message"),
    [("npu", 0, "may have 1 to 3"), ("npu", 4, "may have 1 to 3"), ("gpu", 1, "'gpu' cannot change")],
)
def test_worker_count_outside_the_configured_limits_is_refused(cluster: str, count: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        create_sizes().request_counts({cluster: count})


def test_repeatedly_failing_worker_is_excluded_down_to_the_minimum() -> None:
    found = create_sizes(npu={"min": 2, "max": 3})
    excluded = [bool(found.note_failure(Failure(each, ""))) for each in ("npu/1", "gpu/0", "npu/1", "npu/1")]
    assert excluded == [False, False, False, True]
    assert found.describe_change() == "the run continues with 1 in gpu, 2 in npu, without npu/1"
    assert found.requested_counts == {"gpu": 1, "npu": 2}
    assert not any(found.note_failure(Failure("npu/0", "")) for _ in range(4)) and found.requested_counts["npu"] == 2


def create_sizes_of_launcher(cluster: str, path: str | None = None, **limits: Mapping[str, int]) -> Membership:
    """The numbers as the launcher of one cluster has them."""
    config = load({"clusters": CLUSTERS, "elastic": limits or {"npu": {"min": 0}}})
    whole = place_all_workers(config, [], lambda host: True)
    here = tuple(worker for worker in whole.here if worker.startswith(cluster))
    return Membership(config, Placement(here, whole.addresses), path)


def create_result(**counts: int) -> Result:
    return Result(
        {"gpu/0": Outcome("gpu/0", 75, "", "", WorkerStatus(counts=counts))}, "gpu/0", late=False, trained=1.0
    )


def test_run_continues_without_a_cluster_that_is_lost_twice() -> None:
    found = create_sizes_of_launcher("gpu")
    missed = [Failure("gpu/0", "", lost=frozenset(lost)) for lost in (["npu/1"], ["npu/0", "npu/1", "npu/2"])]
    assert [found.note_failure(each) for each in missed] == [
        "",
        "npu/0, npu/1, npu/2 did not recover: the run continues without npu",
    ]
    assert found.begin_next_start() == Placement(("gpu/0",), {"gpu/0": "a:1"}) and found.requested_counts["npu"] == 0
    assert list(found.find_absent()) == ["npu/0", "npu/1", "npu/2"]
    assert found.adopt_counts(create_result(npu=3)) == "the run continues with 1 in gpu, 3 in npu"
    assert len(found.begin_next_start().addresses) == 4
    stays = create_sizes_of_launcher("npu")
    assert not any(stays.note_failure(Failure("npu/0", "", lost=frozenset(["gpu/0"]))) for _ in range(4))


HOSTS = {"a": ["gpu/0", "gpu/1"], "b": ["gpu/2"], "c": ["npu/0", "npu/1"], "d": ["npu/2"]}
"""The workers of four launchers."""
MISSED_CASES = {
    "a host": ("a", ["gpu/2"], {"gpu": 1, "npu": 1}, "gpu/2 did not recover: gpu continues with 2"),
    "hosts of two clusters": ("a", ["gpu/2", "npu/2"], {"gpu": 1, "npu": 1}, "gpu/2, npu/2 did not recover: gpu "
        "continues with 2, npu continues with 2"),
    "the first host of the second cluster": ("a", ["npu/0", "npu/1"], {"npu": 1}, "npu/0, npu/1 did not "
        "recover: npu continues with 1"),
    "the first host, if another cluster is fixed": ("c", ["gpu/0", "gpu/1"], {"gpu": 1}, "gpu/0, gpu/1 did not "
        "recover: gpu continues with 1"),
    "a whole cluster": ("a", ["npu/0", "npu/1", "npu/2"], {"gpu": 1, "npu": 0}, "npu/0, npu/1, npu/2 did not "
        "recover: the run continues without npu"),
    "by a launcher without the anchor": ("b", ["npu/2"], {"gpu": 1, "npu": 1}, ""),
    "the anchor": ("b", ["gpu/0", "gpu/1"], {"gpu": 1, "npu": 0}, ""),
    "too many workers": ("a", ["gpu/2"], {"gpu": 3}, ""),
    "a host of a fixed cluster": ("a", ["npu/2"], {"gpu": 1}, ""),
}  # fmt: skip
"""The launcher, the workers that it misses twice, the minimum of each elastic cluster, and what it decides."""


def create_sizes_of_host(host: str, least: Mapping[str, int], **limits: int) -> Membership:
    everyone = [worker for workers in HOSTS.values() for worker in workers]
    addresses = {
        worker: f"{name}:{number}" for name, workers in HOSTS.items() for number, worker in enumerate(workers, 1)
    }
    clusters = {
        name: {"workers": [addresses[each] for each in everyone if each.startswith(name)]} for name in ("gpu", "npu")
    }
    elastic = {name: {"min": count, **limits} for name, count in least.items()}
    return Membership(load({"clusters": clusters, "elastic": elastic}), Placement(tuple(HOSTS[host]), addresses))


@pytest.mark.parametrize(("host", "missed", "least", "words"), MISSED_CASES.values(), ids=MISSED_CASES)
def test_host_that_is_missed_twice_is_excluded_unless_the_run_needs_it(
    host: str, missed: list[str], least: dict[str, int], words: str
) -> None:
    found, failure = create_sizes_of_host(host, least), Failure(HOSTS[host][0], "", lost=frozenset(missed))
    assert found.note_failure(failure) == "" and not found.find_absent()
    assert (
        found.note_failure(Failure(HOSTS[host][0], "", follows=True)) == ""
    )  # another launcher's worker gave up first
    assert found.note_failure(failure) == words
    found.begin_next_start()
    assert list(found.find_absent()) == (missed if words else [])
    assert found.note_failure(failure) == found.note_failure(failure) == ("" if words else words)


def meet(launchers: Mapping[str, Membership]) -> bool:
    """Let the workers of these launchers greet each other, as at a rendezvous, until no launcher learns anything;
    returns whether they then form a group: each expects exactly the workers that are there.
    """
    for _ in range(9):
        here = {name: each.begin_next_start().here for name, each in launchers.items()}
        hellos = {
            name: Hello("r", here[name][0], "", "", "", 1, 1, 1, absent=list(each.find_absent()), launched=HOSTS[name])
            for name, each in launchers.items()
        }
        changes = []
        for name, each in launchers.items():
            learned = learn(hellos[name], [hellos[other] for other in hellos if other != name], each)
            changes.append(each.adopt_counts(create_result_of(here[name][0], learned)))
        if not any(changes):
            break
    else:
        pytest.fail("the launchers do not agree")
    present = {worker for workers in here.values() for worker in workers}
    return all(set(each.begin_next_start().addresses) == present for each in launchers.values())


def learn(own: Hello, others: Sequence[Hello], sizes: Membership) -> dict[str, int]:
    free = {name: limits.most - sizes.current_counts[name] for name, limits in sizes.config.elastic.items()}
    found: dict[str, int] = {}
    for other in others:
        with contextlib.suppress(StaleWorkerError):
            try:
                check_absent(own, other, sizes.anchor, free)
            except OtherWorkersError as error:
                found.update(error.counts)
    return found


def create_result_of(worker: str, counts: Mapping[str, int]) -> Result:
    return Result({worker: Outcome(worker, 75, "", "", WorkerStatus(counts=dict(counts)))}, None, late=False)


def test_launchers_agree_and_a_part_without_the_anchor_waits() -> None:
    found = {host: create_sizes_of_host(host, {"gpu": 1, "npu": 1}) for host in HOSTS}
    assert meet(found) and {each.anchor for each in found.values()} == {"gpu/0"}

    def lose(host: str, by: str) -> str:
        failure = Failure(HOSTS[by][0], "", lost=frozenset(HOSTS[host]))
        return [found[by].note_failure(failure) for _ in range(2)][-1]

    assert not lose("b", by="c") and lose("b", by="a") and meet({host: found[host] for host in "acd"})
    assert lose("c", by="a") and meet({host: found[host] for host in "ad"})
    found["b"] = create_sizes_of_host("b", {"gpu": 1, "npu": 1})  # a new launcher
    assert meet({host: found[host] for host in "abd"}) and list(found["b"].find_absent()) == ["npu/0", "npu/1"]
    # The network splits.
    assert not lose("a", by="b") and not lose("d", by="b") and not meet({host: found[host] for host in "bc"})
    assert lose("b", by="a") and meet({host: found[host] for host in "ad"})
    assert meet(found) and not any(each.find_absent() for each in found.values()), "two return at once"


def test_spare_host_waits_until_it_replaces_a_lost_one() -> None:
    """Two of three workers of gpu take part, of whichever hosts."""
    found = {host: create_sizes_of_host(host, {"gpu": 0}, max=2) for host in HOSTS}

    def agree(hosts: str) -> dict[str, str]:
        meet({host: found[host] for host in hosts})
        running = {host: sorted(each for each in found[host].running if each.startswith("gpu")) for host in hosts}
        return {host: " ".join(worker[-1] for worker in each) for host, each in running.items()}

    assert agree("abcd") == {"a": "0 1", "b": "0 1 2", "c": "0 1", "d": "0 1"} and not found["b"].is_leaving
    failure = Failure("npu/0", "", lost=frozenset(HOSTS["a"]))
    assert [bool(found["c"].note_failure(failure)) for _ in range(2)] == [False, True]
    assert agree("bcd") == dict.fromkeys("bcd", "2"), "the spare host takes part"
    found["a"] = create_sizes_of_host("a", {"gpu": 0}, max=2)
    assert agree("abcd") == dict.fromkeys("abcd", "0 2"), "a worker of the lost host fits"
    found["b"], found["a"] = (create_sizes_of_host(host, {"gpu": 0}, max=2) for host in "ba")
    assert agree("abcd") == dict.fromkeys("abcd", "0 2")


def test_broken_worker_is_excluded_by_its_launcher_only() -> None:
    found = {host: create_sizes_of_host(host, {"gpu": 1, "npu": 1}) for host in HOSTS}
    assert [bool(found["c"].note_failure(Failure("npu/0", ""))) for _ in range(2)] == [False, True]
    assert meet(found) and list(found["d"].find_absent()) == ["npu/0"]
    assert not any(found["d"].note_failure(Failure("npu/2", "")) for _ in range(4)), (
        "it is the last one of its launcher"
    )


def test_request_for_a_number_selects_the_same_workers_at_each_launcher() -> None:
    found = {host: create_sizes_of_host(host, {"gpu": 1, "npu": 1}) for host in HOSTS}
    for counts, absent in (({"gpu": 2}, ["gpu/2"]), ({"npu": 2, "gpu/2": 1}, ["npu/2"]), ({"npu": 3}, [])):
        for host, each in found.items():
            each.adopt_counts(create_result_of(HOSTS[host][0], counts))
            assert each.is_leaving == (HOSTS[host] == absent)
            each.begin_next_start()
        assert all(list(each.find_absent()) == absent for each in found.values())


@pytest.mark.parametrize(
    ("missed", "announced", "change", "count"),
    [
        (["npu"], {"npu": 3}, "the run continues with 1 in gpu, 3 in npu", 3),  # it has returned
        (["npu"], {}, "", 0),  # a failure while it is missed: the restart is counted, and does without it
        (["gpu"], {}, "", 3),
        (["tpu"], {}, "", 3),
    ],
)
def test_cluster_that_the_workers_went_on_without_has_no_workers_until_it_returns(
    missed: list[str], announced: dict[str, int], change: str, count: int
) -> None:
    found = create_sizes_of_launcher("gpu")
    found.begin_next_start()
    result = create_result(**announced)
    result.outcomes["gpu/0"].status.missed = missed
    assert found.adopt_counts(result) == change
    assert len(found.begin_next_start().addresses) == 1 + count


def test_resize_request_reaches_other_launchers_through_workers(tmp_path: Path) -> None:
    one, other = create_sizes_of_launcher("gpu", str(tmp_path / "asked")), create_sizes_of_launcher("npu")
    one.begin_next_start(), other.begin_next_start()
    assert one.request_counts({"npu": 1}) and json.loads((tmp_path / "asked").read_text()) == {"npu": 1}
    assert other.adopt_counts(create_result(npu=1)) == "the run continues with 1 in gpu, 1 in npu"
    assert other.begin_next_start().here == ("npu/0",) and other.adopt_counts(create_result(npu=1)) == ""
    # Another step was the last one.
    assert one.adopt_counts(create_result(gpu=1)) == "" and len(one.begin_next_start().addresses) == 4
    assert json.loads((tmp_path / "asked").read_text()) == {"npu": 1}
    assert one.adopt_counts(create_result(npu=1)) == "the run continues with 1 in gpu, 1 in npu"
    one.begin_next_start()
    assert json.loads((tmp_path / "asked").read_text()) == {}
    assert one.request_counts({"npu": 0})
    # Before a step.
    assert one.adopt_counts(Result({}, "gpu/0", late=False)) == "the run continues with 1 in gpu, 0 in npu"
    assert other.adopt_counts(create_result(npu=9, gpu=5, tpu=1)) == "the run continues with 1 in gpu, 3 in npu"


def test_invalid_elastic_limits_are_refused_at_the_start() -> None:
    config = load({"clusters": CLUSTERS, "elastic": {"npu": {"max": 4}}})
    with pytest.raises(ConfigError, match="max: 4, but 3 workers are listed"):
        Membership(config, place_all_workers(config, [], lambda host: True))
    with pytest.raises(ConfigError, match="all clusters have min: 0"):
        create_sizes_of_launcher("gpu", gpu={"min": 0}, npu={"min": 0})
    for wrong, message in (
        ({"tpu": {}}, "unknown cluster 'tpu'"),
        ({"npu": {"min": 3, "max": 2}}, "min: 3 is greater"),
    ):
        with pytest.raises(ConfigError, match=message):
            load({"clusters": CLUSTERS, "elastic": wrong})


# ------------------------------------------------------------------ the socket
class UnixSocketConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: str) -> None:
        super().__init__("run", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def send_request(path: str, method: str, what: str) -> tuple[int, Any]:
    connection = UnixSocketConnection(path)
    connection.request(method, what)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def test_control_socket_answers_requests_and_is_removed_at_the_end(tmp_path: Path) -> None:
    found, path = create_sizes(), str(tmp_path / "run.sock")

    def resize(given: Mapping[str, str]) -> Mapping[str, Any]:
        found.request_counts(parse_counts(given))
        return found.describe()

    with serve_control_socket(path, {"/status": lambda given: found.describe()}, {"/resize": resize}):
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert send_request(path, "GET", "/status") == (
            200,
            {"workers": {"gpu": 1, "npu": 3}, "absent": [], **expected_status(3)},
        )
        assert send_request(path, "POST", "/resize?npu=2")[1]["asked"] == {"gpu": 1, "npu": 2}
        for what, message in {
            "/resize?npu=9": "1 to 3",
            "/resize?npu=x": "numbers of workers",
            "/resize": "POST",
        }.items():
            code, answer = send_request(path, "POST", what)
            assert code == 400 and message in answer["error"]
        code, answer = send_request(path, "GET", "/resize?npu=1")
        assert code == 404 and "POST /resize" in answer["error"]
    assert not os.path.exists(path)


def expected_status(npu: int) -> dict[str, Any]:
    return {"asked": {"gpu": 1, "npu": npu}, "limits": {"npu": [1, 3]}}


def test_control_socket_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot open the control socket"),
        serve_control_socket(str(tmp_path / "no" / "x"), {}, {}),
    ):
        pass


def test_control_socket_replaces_an_earlier_socket_and_no_other_file(tmp_path: Path) -> None:
    path, script = str(tmp_path / "run.sock"), tmp_path / "train.py"
    with socket.socket(socket.AF_UNIX) as left:  # of a launcher that was killed
        left.bind(path)
    with serve_control_socket(path, {"/status": lambda given: {}}, {}):
        assert send_request(path, "GET", "/status") == (200, {})
    script.write_text("pass\n")
    with (
        pytest.raises(ConfigError, match="cannot open the control socket"),
        serve_control_socket(str(script), {}, {}),
    ):
        pass
    assert script.read_text() == "pass\n"


def test_new_notices_in_a_file_are_handled_once(tmp_path: Path) -> None:
    path, found = tmp_path / "notice", queue.SimpleQueue[dict[str, int]]()
    path.write_text("npu=3\n")  # of an earlier run
    with watch_notices(str(path), lambda text: found.put(parse_notice(text)), 0.01):
        for text, counts in {"npu=1 gpu=2\n": {"npu": 1, "gpu": 2}, "preempt": {}}.items():
            path.write_text(text)
            assert found.get(timeout=60) == counts
    assert found.empty()
    with pytest.raises(OptionError, match="'npu=' is not a valid notice"):
        parse_notice("npu=")


# ------------------------------------------------------------------ memory
def test_memory_folder_and_abandoned_ones_are_removed(tmp_path: Path) -> None:
    abandoned, other = tmp_path / "whale-nebula-x", tmp_path / "other"
    abandoned.mkdir(), other.mkdir(), (abandoned / "in-use").touch()
    with open_memory_folder(tmp_path) as folder:
        assert folder is not None and os.stat(folder).st_mode & 0o777 == 0o700
        assert not abandoned.exists() and other.exists()
        remove_abandoned(tmp_path)
        assert os.path.isdir(folder)
    assert os.listdir(tmp_path) == ["other"]
    with open_memory_folder(tmp_path / "nowhere") as nothing:
        assert nothing is None
