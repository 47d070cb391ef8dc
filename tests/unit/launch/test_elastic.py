"""The numbers of workers that a launcher starts, and its answers at its socket."""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.config import load
from whale_nebula.errors import ConfigError, NotYetError, OptionError
from whale_nebula.launch.control import parse_counts, parse_notice, serve_control_socket, watch_notices
from whale_nebula.launch.elastic import Sizes
from whale_nebula.launch.gateways import open_memory_folder, remove_abandoned
from whale_nebula.launch.heartbeat import WorkerStatus
from whale_nebula.launch.job import Outcome, Result
from whale_nebula.launch.placement import Placement, place_all_workers
from whale_nebula.launch.restarts import Failure

CLUSTERS = {"gpu": {"workers": ["a:1"]}, "npu": {"workers": ["b:1", "b:2", "b:3"]}}


def create_sizes(**limits: Mapping[str, int]) -> Sizes:
    config = load({"clusters": CLUSTERS, "elastic": limits or {"npu": {"min": 1, "max": 3}}})
    return Sizes(config, place_all_workers(config, [], lambda host: True))


def test_requested_worker_count_applies_to_the_next_start() -> None:
    found = create_sizes()
    assert len(found.select_placement().here) == 4
    assert found.request_counts({"npu": 1}) and found.current_counts["npu"] == 3
    assert found.select_placement().here == ("gpu/0", "npu/0") and not found.request_counts({"npu": 1})
    assert found.request_counts({"npu": 2}) and list(found.select_placement().addresses) == ["gpu/0", "npu/0", "npu/1"]


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
    assert found.requested_counts == {"gpu": 1, "npu": 2}
    assert not any(found.note_failure(Failure("npu/0", "")) for _ in range(4)) and found.requested_counts["npu"] == 2


def create_sizes_of_launcher(cluster: str, path: str | None = None, **limits: Mapping[str, int]) -> Sizes:
    """The numbers as the launcher of one cluster has them."""
    config = load({"clusters": CLUSTERS, "elastic": limits or {"npu": {"min": 0}}})
    whole = place_all_workers(config, [], lambda host: True)
    here = tuple(worker for worker in whole.here if worker.startswith(cluster))
    return Sizes(config, Placement(here, whole.addresses), path)


def create_result(**counts: int) -> Result:
    return Result(
        {"gpu/0": Outcome("gpu/0", 75, "", "", WorkerStatus(counts=counts))}, "gpu/0", late=False, trained=1.0
    )


def test_run_continues_without_a_cluster_that_is_lost_twice() -> None:
    found = create_sizes_of_launcher("gpu")
    missed = [Failure("gpu/0", "", lost=worker) for worker in ("npu/0", "npu/2")]
    assert [found.note_failure(each) for each in missed] == [
        "",
        "npu/2 did not recover: the run continues without npu",
    ]
    assert found.select_placement() == Placement(("gpu/0",), {"gpu/0": "a:1"}) and found.requested_counts["npu"] == 0
    assert list(found.find_absent()) == ["npu/0", "npu/1", "npu/2"]
    assert found.adopt_counts(create_result(npu=3)) == "the run continues with 1 in gpu, 3 in npu"
    assert len(found.select_placement().addresses) == 4
    stays = create_sizes_of_launcher("npu")
    assert not any(stays.note_failure(Failure("npu/0", "", lost="gpu/0")) for _ in range(4))


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
    found.select_placement()
    result = create_result(**announced)
    result.outcomes["gpu/0"].status.missed = missed
    assert found.adopt_counts(result) == change
    assert len(found.select_placement().addresses) == 1 + count


def test_resize_request_reaches_other_launchers_through_workers(tmp_path: Path) -> None:
    one, other = create_sizes_of_launcher("gpu", str(tmp_path / "asked")), create_sizes_of_launcher("npu")
    one.select_placement(), other.select_placement()
    assert one.request_counts({"npu": 1}) and json.loads((tmp_path / "asked").read_text()) == {"npu": 1}
    assert other.adopt_counts(create_result(npu=1)) == "the run continues with 1 in gpu, 1 in npu"
    assert other.select_placement().here == ("npu/0",) and other.adopt_counts(create_result(npu=1)) == ""
    # Another step was the last one.
    assert one.adopt_counts(create_result(gpu=1)) == "" and len(one.select_placement().addresses) == 4
    assert json.loads((tmp_path / "asked").read_text()) == {"npu": 1}
    assert one.adopt_counts(create_result(npu=1)) == "the run continues with 1 in gpu, 1 in npu"
    one.select_placement()
    assert json.loads((tmp_path / "asked").read_text()) == {}
    assert one.request_counts({"npu": 0})
    # Before a step.
    assert one.adopt_counts(Result({}, "gpu/0", late=False)) == "the run continues with 1 in gpu, 0 in npu"
    assert other.adopt_counts(create_result(npu=9, gpu=5, tpu=1)) == "the run continues with 1 in gpu, 3 in npu"


def test_invalid_elastic_limits_are_refused_at_the_start() -> None:
    config = load({"clusters": CLUSTERS, "elastic": {"npu": {"max": 4}}})
    with pytest.raises(ConfigError, match="max: 4, but 3 workers are listed"):
        Sizes(config, place_all_workers(config, [], lambda host: True))
    with pytest.raises(NotYetError, match="several launchers"):
        create_sizes_of_launcher("npu/1")
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
        assert send_request(path, "GET", "/status") == (200, {"workers": {"gpu": 1, "npu": 3}, **expected_status(3)})
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
