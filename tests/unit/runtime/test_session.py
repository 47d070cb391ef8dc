"""Messages of one cluster's workers over their links before TensorFlow connects them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.fuzz import session_messages
from tests.unit.runtime.sessions import sessions
from whale_nebula.config import Config, load
from whale_nebula.errors import (
    ConfigError,
    InputMismatchError,
    LinkClosedError,
    LocalProtocolError,
    OptionError,
    PlanMismatchError,
    RemoteFailureError,
)
from whale_nebula.feed.checks import refuse_unshared_ids
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.session import rendezvous
from whale_nebula.runtime.session.rendezvous import (
    _agree_on_config,
    _agree_on_seed,
    _find_host,
    describe_config,
    digest_host,
    open_cluster_collectives,
)
from whale_nebula.runtime.session.task import list_tasks, prepare_task
from whale_nebula.tf import collectives as tf_collectives
from whale_nebula.wire.message import KINDS, TABLE, build_message, find_fault

MATES = ("a/0", "a/1")
WORKERS = (*MATES, "b/0")


def others(worker: str) -> list[str]:
    return [mate for mate in MATES if mate != worker]


def exchange_among_mates(exchange_names: Mapping[str, str]) -> list[Any]:
    """Run an exchange of the mates, without the worker of another cluster; return what each received."""
    found = sessions(WORKERS)
    with ThreadPoolExecutor(len(exchange_names)) as pool:
        futures = [
            pool.submit(found[worker].exchange, what, {"address": str(number)}, others(worker))
            for number, (worker, what) in enumerate(exchange_names.items())
        ]
        return [each.result() for each in futures]


def test_exchange_reaches_all_mates_and_no_other_worker() -> None:
    first, second = exchange_among_mates({"a/0": "opening", "a/1": "opening"})
    assert {worker: sheet["address"] for worker, sheet in first.items()} == {"a/1": "1"}
    assert {worker: sheet["address"] for worker, sheet in second.items()} == {"a/0": "0"}


def test_mate_with_another_exchange_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="at closing"):
        exchange_among_mates({"a/0": "opening", "a/1": "closing"})


def test_connected_worker_is_not_lost() -> None:
    assert sessions(WORKERS)["a/0"].find_lost_link_error(WORKERS) is None


def test_lost_reports_closed_and_failed_workers_among_those_asked() -> None:
    found = sessions(WORKERS)
    found["a/1"].close()
    assert isinstance(found["a/0"].find_lost_link_error(["a/1"]), LinkClosedError)
    found["b/0"].fail(ValueError("a NaN"))
    assert isinstance(found["a/0"].find_lost_link_error(["b/0"]), RemoteFailureError)
    assert found["a/0"].find_lost_link_error([]) is None


def test_failed_worker_ends_an_exchange_in_which_another_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the patience: a/1, which is awaited first, is alive and sends nothing."""
    monkeypatch.setattr("whale_nebula.runtime.session.session._LOOK_SECONDS", 0.1)
    found = sessions(WORKERS)
    threading.Timer(0.5, found["b/0"].fail, [ValueError("a NaN")]).start()
    begin = time.monotonic()
    with pytest.raises(RemoteFailureError, match="'b/0' failed"):
        found["a/0"].exchange("opening", {}, found["a/0"].links)
    assert time.monotonic() - begin < found["a/0"].patience / 2


def test_worker_that_greets_and_leaves_ends_the_rendezvous_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a third would otherwise begin a session with it, which would fail at the next exchange."""
    monkeypatch.setattr("whale_nebula.runtime.session.session._LOOK_SECONDS", 0.1)
    found = sessions(["gpu/0", "npu/0", "tpu/0"])
    found["npu/0"]._send("HELLO", "nb.init", {"epoch": 0})
    found["npu/0"].close()
    with pytest.raises(LinkClosedError, match="npu/0"):
        found["gpu/0"].hello({"epoch": 0})


def test_worker_with_another_list_of_workers_is_refused_before_a_missing_one_is_awaited() -> None:
    found = sessions(["gpu/0", "npu/0", "npu/1"])
    found["npu/0"]._send("HELLO", "nb.init", {"epoch": 0, "workers": ["gpu/0", "npu/0", "tpu/0"]})
    text = "gpu/0 and npu/0 list different workers: only gpu/0 lists npu/1; only npu/0 lists tpu/0"
    with pytest.raises(ConfigError, match=text):
        found["gpu/0"].hello({"epoch": 0, "workers": ["gpu/0", "npu/0", "npu/1"]})


def test_worker_that_refuses_a_greeting_sends_the_reason_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise exit before a slower worker has received its greeting, which then reports a lost worker."""
    found = sessions(["a/0", "b/0"])
    theirs = rendezvous._build_sheet(Attachment("b/0", "b", {"a/0": "a"}, {}, "run", None), 2, Config())
    found["b/0"]._send("HELLO", "nb.init", {**theirs, "epoch": 0})
    monkeypatch.setattr(rendezvous, "open_session", lambda *_: found["a/0"])
    with pytest.raises(ConfigError, match="a/0: 1, b/0: 2"):
        rendezvous.join(Attachment("a/0", "a", {"b/0": "b"}, {}, "run", None), 1, Config())
    assert found["b/0"]._receive_all("HELLO", "nb.init")["a/0"]["seed"] == 1
    with pytest.raises(RemoteFailureError, match="a/0: 1, b/0: 2"):
        found["b/0"].meet("a read")
    assert isinstance(found["a/0"].find_lost_link_error(["b/0"]), LinkClosedError)  # closed here


def test_collectives_are_not_opened_after_tensorflow_has_started() -> None:
    tf.constant(1.0)
    found = sessions(WORKERS)
    with ThreadPoolExecutor(len(MATES)) as pool:
        futures = [
            pool.submit(open_cluster_collectives, found[worker], dict.fromkeys(others(worker), "127.0.0.1"))
            for worker in MATES
        ]
        assert [each.result() for each in futures] == [None, None]


def test_tasks_are_the_workers_of_the_own_cluster_in_order() -> None:
    attachment = Attachment("a/1", "a", {"b/0": "b", "a/2": "a", "a/0": "a"}, {}, "run", None)
    assert list_tasks(attachment) == ["a/0", "a/1", "a/2"]


def test_worker_without_mates_is_not_prepared_as_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    task_counts: list[int] = []
    monkeypatch.setattr(
        tf_collectives, "prepare_task", lambda index, addresses, started: task_counts.append(len(addresses))
    )
    for peers in ({"a/0": "a"}, {"a/0": "a", "b/1": "b", "b/2": "b"}):
        prepare_task(Attachment("b/0", "b", peers, {}, "run", None))
    assert task_counts == [3]


@pytest.mark.grid
def test_process_is_prepared_when_any_module_loads_keras() -> None:
    """In a process of its own, as Keras is loaded here. Scripts that load Keras themselves: tests/processes."""
    script = """
from whale_nebula.launch import child
from whale_nebula.launch.attach import Attachment
child._prepare(Attachment("a/0", "a", {"a/1": "a"}, {}, "run", None))
import whale_nebula.runtime.session.rendezvous
from whale_nebula.tf import collectives
import tensorflow as tf
tf.constant(1.0)
print("tasks:", collectives.find_task().count)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "tasks: 2" in ended.stdout, ended.stderr


# -------------------- The settings that must be equal in the configs of all processes
FORM = {"shape": [None, 4], "dtype": "int32"}


def make_sheet(config: Mapping[str, Any]) -> dict[str, Any]:
    return describe_config(load(config))


def test_equal_configs_are_agreed_on() -> None:
    own = make_sheet({"inputs": {"x": FORM, "y": FORM}, "weights": "own"})
    _agree_on_config("gpu/0", own, {"npu/0": make_sheet({"inputs": {"y": FORM, "x": FORM}, "weights": "own"})})
    _agree_on_config("gpu/0", describe_config(Config()), {})


@pytest.mark.parametrize("name", ["whale_nebula", "tensorflow", "keras"])
def test_worker_with_another_version_is_refused_by_both(name: str) -> None:
    sheets = [{"whale_nebula": "1", "tensorflow": "2", "keras": "3"} for _ in MATES]
    sheets[1][name] = "9"
    found = sessions(MATES)
    with ThreadPoolExecutor(len(MATES)) as pool:
        futures = [pool.submit(found[mate].hello, sheet) for mate, sheet in zip(MATES, sheets, strict=True)]
        errors = [future.exception() for future in futures]
    for error, mate, sheet, other in zip(errors, MATES, sheets, sheets[::-1], strict=True):
        assert isinstance(error, PlanMismatchError)
        assert error.what == f"{mate} runs {name} {sheet[name]}, but {others(mate)[0]} runs {other[name]}"


@pytest.mark.parametrize("seed", [None, 3])
def test_seed_has_to_be_that_of_all_others(seed: int | None) -> None:
    _agree_on_seed("gpu/0", seed, {"npu/0": {"seed": seed}, "npu/1": {"seed": seed}})
    with pytest.raises(ConfigError, match=f"different seeds: gpu/0: {seed}, npu/0: {seed}, npu/1: 4"):
        _agree_on_seed("gpu/0", seed, {"npu/0": {"seed": seed}, "npu/1": {"seed": 4}})


DIFFERENT = [
    ({"results": "owner"}, "'results': gpu/0: everywhere; npu/0: owner"),
    ({"weights": "own"}, "'weights': gpu/0: everywhere; npu/0: own"),
    ({"inputs": {"x": FORM}}, "'inputs': gpu/0: {}; npu/0: {'x': ['int32', [None, 4]]}"),
]


@pytest.mark.parametrize(("other", "message"), DIFFERENT)
def test_differing_setting_is_reported_with_both_values(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _agree_on_config("gpu/0", make_sheet({}), {"npu/0": make_sheet(other)})
    assert message in caught.value.what
    assert "into the config of every cluster" in caught.value.mend


@pytest.mark.parametrize(
    ("peer", "source", "drawn", "same_host", "accepted"),
    [
        ("npu/0", "npu/0", True, False, True),
        ("npu/0", "gpu/0", True, False, False),  # what this worker has said of itself proves nothing of another
        ("npu/0", "npu/0", False, False, False),
        ("npu/0", "npu/0", False, True, True),
        ("gpu/1", "gpu/1", False, False, True),
    ],
)
def test_shared_host_is_accepted_only_with_proof(
    monkeypatch: pytest.MonkeyPatch, peer: str, source: str, drawn: bool, same_host: bool, accepted: bool
) -> None:
    if not drawn:
        monkeypatch.setattr(rendezvous, "_BOOT", Path("/there/is/none"))
    launched = Attachment("gpu/0", "gpu", {"gpu/1": "gpu", "npu/0": "npu"}, {}, "mt", has_one_launcher=same_host)
    found = _find_host(launched, peer, {"host": digest_host("mt", source)})
    assert found == (digest_host("mt", "gpu/0") if accepted else "")


def test_host_digest_differs_for_another_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two containers of one host have them."""
    folder = tmp_path / "work"
    digests = []
    for kept in ("first", "second"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        digests.append(digest_host("mt", "gpu/0"))
        assert digest_host("mt", "gpu/0") == digests[-1]
        folder.rename(tmp_path / kept)
    assert len(set(digests)) == 2


# -------------------- A peer's messages in a session are accepted, or refused with this library's errors
def test_hostile_messages_are_refused_or_accepted_without_crashing() -> None:
    counts = session_messages.run(seed=7, count=60)
    assert min(counts[how] for how in ("refused", "told", "taken")) > 10, counts


@pytest.mark.parametrize("about", session_messages.VALID_MESSAGES)
def test_valid_messages_match_the_registry(about: str) -> None:
    message = build_message("SESSION", about, **session_messages.VALID_MESSAGES[about])
    assert find_fault(message) == ""


def test_message_of_an_unregistered_kind_cannot_be_built() -> None:
    with pytest.raises(LocalProtocolError, match="'SESSION VETO' of an unknown kind"):
        build_message("SESSION", "VETO", why="")


def test_state_table_covers_the_words_of_all_kinds() -> None:
    assert {entry.trigger for entry in KINDS.values()} <= {trigger for _, trigger in TABLE}


# -------------------- The vote before an update whether a step is left out, with the same result in all processe
VOTERS = ("a/0", "b/0", "c/0")


def collect_votes(*reasons: str, phases: tuple[int, ...] = (0, 0, 0)) -> list[list[str]]:
    found = sessions(VOTERS)
    with ThreadPoolExecutor(len(VOTERS)) as pool:
        futures = [
            pool.submit(found[worker].vote, "step", 4, phase, why)
            for worker, why, phase in zip(VOTERS, reasons, phases, strict=True)
        ]
        return [each.result() for each in futures]


def test_vote_without_reasons_applies_the_step() -> None:
    assert collect_votes("", "", "") == [[], [], []]


def test_reason_of_one_voter_reaches_all() -> None:
    assert collect_votes("", "a NaN", "") == [["a NaN"]] * 3


def test_several_reasons_have_the_same_order_in_all_voters() -> None:
    assert collect_votes("", "two", "one") == [["two", "one"]] * 3


def test_voter_in_another_phase_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="phase 0 of step 4"):
        collect_votes("", "", "", phases=(0, 1, 0))


# -------------------- Processes that read parts of one batch detect parts of different ones
ROW_WORKERS = ("a/0", "a/1", "b/0")
ROW_MATES = {"a/0": ["a/1"], "a/1": ["a/0"], "b/0": []}


def announce_rows(
    inputs: dict[str, Any], row_marks: dict[str, int], readers: dict[str, set[str]] | None = None
) -> list[dict[str, Any]]:
    """All announce a step and check it; what each heard of the others."""
    found = sessions(ROW_WORKERS)

    def one(worker: str) -> Any:
        session = found[worker]
        own_inputs = {"x": inputs.get(worker, [1, 2])}
        sheet = {"program": 1, "name": "step", "step": 3, "rows": 4, "inputs": own_inputs, "alike": {"a/0, a/1": 7}}
        session.start_step(sheet, row_marks[worker], ROW_MATES[worker], readers or {})
        return session.check_step(sheet, row_marks[worker])

    with ThreadPoolExecutor(len(ROW_WORKERS)) as pool:
        return [future.result() for future in [pool.submit(one, worker) for worker in ROW_WORKERS]]


def test_parts_of_the_same_batch_are_accepted() -> None:
    parts = {"a/0": [7, None], "a/1": [None, 8], "b/0": [7, 8]}
    heard = announce_rows(parts, {"a/0": 5, "a/1": 5, "b/0": 5})
    assert heard[0]["a/1"]["mark"] == 5 and heard[0]["a/1"]["inputs"] == {"x": [None, 8]}


def test_row_marks_are_not_sent_to_other_clusters() -> None:
    heard = announce_rows({}, {"a/0": 5, "a/1": 5, "b/0": 9})
    assert "mark" not in heard[2]["a/0"] and "mark" not in heard[0]["b/0"]


def test_another_row_order_is_refused_among_mates_without_shared_rows() -> None:
    with pytest.raises(InputMismatchError, match=r"the order of rows differs between a/. and a/. at step 3"):
        announce_rows({"a/0": [7, None], "a/1": [None, 8]}, {"a/0": 5, "a/1": 6, "b/0": 5})


def test_other_values_of_shared_rows_are_refused() -> None:
    with pytest.raises(InputMismatchError, match=r"input 'x' differs between ./. and ./. at step 3"):
        announce_rows({"a/0": [7, None], "b/0": [9, 8], "a/1": [None, 8]}, {"a/0": 5, "a/1": 5, "b/0": 5})


def test_row_order_is_not_compared_without_a_sharded_dataset() -> None:
    assert len(announce_rows({}, {"a/0": 5, "a/1": 0, "b/0": 0})) == 3


@pytest.mark.parametrize("readers", [{"a/0", "a/1"}, {"a/1", "b/0"}, {"b/0"}, set(ROW_WORKERS), set()])
def test_input_fingerprints_are_sent_to_readers_only(readers: set[str]) -> None:
    heard = zip(ROW_WORKERS, announce_rows({}, dict.fromkeys(ROW_WORKERS, 0), {"x": readers}), strict=True)
    for worker, came in heard:
        assert [bool(sheet["inputs"]) for sheet in came.values()] == [worker in readers] * len(came)


def test_variable_checksums_are_sent_to_mates_only() -> None:
    heard = announce_rows({}, dict.fromkeys(ROW_WORKERS, 0))
    assert heard[0]["a/1"]["alike"] and "alike" not in heard[2]["a/0"] and "alike" not in heard[0]["b/0"]


CLUSTERS = {"a/0": "a", "a/1": "a", "b/0": "b"}
UNSHARED = [({"a/0", "a/1"}, CLUSTERS, True), (set(), CLUSTERS, True), ({"a/0", "b/0"}, CLUSTERS, False)]
UNSHARED += [({"a/0"}, {"a/0": "a", "a/1": "a"}, False)]  # clusters that train apart compare nothing


@pytest.mark.parametrize(("readers", "clusters", "refused"), UNSHARED)
def test_ids_are_refused_when_no_two_clusters_compare_them(
    readers: set[str], clusters: dict[str, str], refused: bool
) -> None:
    with (
        pytest.raises(OptionError, match="only the workers that read this input have it")
        if refused
        else contextlib.nullcontext()
    ):
        refuse_unshared_ids(["id"], {"id": readers, "x": {"a/0"}}, clusters)
