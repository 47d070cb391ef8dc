"""Messages of one cluster's workers over their links before TensorFlow connects them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.fuzz import sheets
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
from whale_nebula.runtime.session.rendezvous import _agree_on_config, _host, config_sheet, host_digest, open_among
from whale_nebula.runtime.session.task import prepare_task, tasks_of
from whale_nebula.tf import collectives as tf_collectives
from whale_nebula.wire.message import KINDS, TABLE, build_message, find_fault

MATES = ("a/0", "a/1")
WORKERS = (*MATES, "b/0")


def others(worker: str) -> list[str]:
    return [mate for mate in MATES if mate != worker]


def exchanged(doing: Mapping[str, str]) -> list[Any]:
    """What the mates hear, while the worker of another cluster says and hears nothing."""
    found = sessions(WORKERS)
    with ThreadPoolExecutor(len(doing)) as pool:
        asked = [
            pool.submit(found[worker].exchange, what, {"address": str(number)}, others(worker))
            for number, (worker, what) in enumerate(doing.items())
        ]
        return [each.result() for each in asked]


def test_mates_hear_each_other_and_nobody_else() -> None:
    first, second = exchanged({"a/0": "opening", "a/1": "opening"})
    assert {worker: sheet["address"] for worker, sheet in first.items()} == {"a/1": "1"}
    assert {worker: sheet["address"] for worker, sheet in second.items()} == {"a/0": "0"}


def test_a_mate_that_is_at_something_else_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="at closing"):
        exchanged({"a/0": "opening", "a/1": "closing"})


def test_a_mate_that_is_there_is_not_lost() -> None:
    assert sessions(WORKERS)["a/0"].lost(WORKERS) is None


def test_a_mate_that_left_or_failed_is_lost_and_others_do_not_matter() -> None:
    found = sessions(WORKERS)
    found["a/1"].close()
    assert isinstance(found["a/0"].lost(["a/1"]), LinkClosedError)
    found["b/0"].fail(ValueError("a NaN"))
    assert isinstance(found["a/0"].lost(["b/0"]), RemoteFailureError)
    assert found["a/0"].lost([]) is None


def test_where_tensorflow_had_started_in_one_all_do_without() -> None:
    tf.constant(1.0)
    found = sessions(WORKERS)
    with ThreadPoolExecutor(len(MATES)) as pool:
        asked = [pool.submit(open_among, found[worker], dict.fromkeys(others(worker), "127.0.0.1")) for worker in MATES]
        assert [each.result() for each in asked] == [None, None]


def test_tasks_are_the_workers_of_a_cluster_by_name() -> None:
    attachment = Attachment("a/1", "a", {"b/0": "b", "a/2": "a", "a/0": "a"}, {}, "run", None)
    assert tasks_of(attachment) == ["a/0", "a/1", "a/2"]


def test_a_worker_without_mates_becomes_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(tf_collectives, "prepare", lambda index, addresses, started: asked.append(len(addresses)))
    for peers in ({"a/0": "a"}, {"a/0": "a", "b/1": "b", "b/2": "b"}):
        prepare_task(Attachment("b/0", "b", peers, {}, "run", None))
    assert asked == [3]


@pytest.mark.grid
def test_a_process_is_prepared_whichever_module_loads_keras() -> None:
    """In a process of its own, as Keras is loaded here. Scripts that load Keras themselves: tests/processes."""
    script = """
from whale_nebula.launch import child
from whale_nebula.launch.attach import Attachment
child._prepare(Attachment("a/0", "a", {"a/1": "a"}, {}, "run", None))
import whale_nebula.runtime.session.rendezvous
from whale_nebula.tf import collectives
import tensorflow as tf
tf.constant(1.0)
print("tasks:", collectives.task().count)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "tasks: 2" in ended.stdout, ended.stderr


# -------------------- The settings that must be equal in the configs of all processes
FORM = {"shape": [None, 4], "dtype": "int32"}


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    return config_sheet(load(config))


def test_the_same_words_are_agreed_on() -> None:
    own = told({"inputs": {"x": FORM, "y": FORM}, "weights": "own"})
    _agree_on_config("gpu/0", own, {"npu/0": told({"inputs": {"y": FORM, "x": FORM}, "weights": "own"})})
    _agree_on_config("gpu/0", config_sheet(Config()), {})


DIFFERENT = [
    ({"results": "owner"}, "'results': gpu/0: everywhere; npu/0: owner"),
    ({"weights": "own"}, "'weights': gpu/0: everywhere; npu/0: own"),
    ({"inputs": {"x": FORM}}, "'inputs': gpu/0: {}; npu/0: {'x': ['int32', [None, 4]]}"),
]


@pytest.mark.parametrize(("other", "said"), DIFFERENT)
def test_what_differs_is_named_with_both(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _agree_on_config("gpu/0", told({}), {"npu/0": told(other)})
    assert said in caught.value.what
    assert "into the config of every cluster" in caught.value.mend


@pytest.mark.parametrize(
    ("peer", "said_by", "drawn", "everywhere", "believed"),
    [
        ("npu/0", "npu/0", True, False, True),
        ("npu/0", "gpu/0", True, False, False),  # what this worker has said of itself proves nothing of another
        ("npu/0", "npu/0", False, False, False),
        ("npu/0", "npu/0", False, True, True),
        ("gpu/1", "gpu/1", False, False, True),
    ],
)
def test_who_shares_a_folder_proves_it(
    monkeypatch: pytest.MonkeyPatch, peer: str, said_by: str, drawn: bool, everywhere: bool, believed: bool
) -> None:
    if not drawn:
        monkeypatch.setattr(rendezvous, "_BOOT", Path("/there/is/none"))
    launched = Attachment("gpu/0", "gpu", {"gpu/1": "gpu", "npu/0": "npu"}, {}, "mt", everywhere=everywhere)
    found = _host(launched, peer, {"host": host_digest("mt", said_by)})
    assert found == (host_digest("mt", "gpu/0") if believed else "")


def test_another_folder_of_the_same_name_is_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers of one host have them."""
    folder = tmp_path / "work"
    said = []
    for kept in ("first", "second"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        said.append(host_digest("mt", "gpu/0"))
        assert host_digest("mt", "gpu/0") == said[-1]
        folder.rename(tmp_path / kept)
    assert len(set(said)) == 2


# -------------------- A peer's messages in a session are accepted, or refused with this library's errors
def test_a_sample_of_hostile_sheets() -> None:
    counts = sheets.run(seed=7, count=60)
    assert min(counts[how] for how in ("refused", "told", "taken")) > 10, counts


@pytest.mark.parametrize("about", sheets.TRUE)
def test_true_sheets_fit_the_registry(about: str) -> None:
    message = build_message("SESSION", about, **sheets.TRUE[about])
    assert find_fault(message) == ""


def test_a_message_without_an_entry_cannot_be_built() -> None:
    with pytest.raises(LocalProtocolError, match="'SESSION VETO' of an unknown kind"):
        build_message("SESSION", "VETO", why="")


def test_every_kind_has_a_word_that_the_table_of_states_knows() -> None:
    assert {entry.word for entry in KINDS.values()} <= {word for _, word in TABLE}


# -------------------- The vote before an update whether a step is left out, with the same result in all processe
VOTERS = ("a/0", "b/0", "c/0")


def votes(*reasons: str, phases: tuple[int, ...] = (0, 0, 0)) -> list[list[str]]:
    found = sessions(VOTERS)
    with ThreadPoolExecutor(len(VOTERS)) as pool:
        asked = [
            pool.submit(found[worker].vote, "step", 4, phase, why)
            for worker, why, phase in zip(VOTERS, reasons, phases, strict=True)
        ]
        return [each.result() for each in asked]


def test_without_a_reason_the_step_goes_on() -> None:
    assert votes("", "", "") == [[], [], []]


def test_one_reason_is_everybodys() -> None:
    assert votes("", "a NaN", "") == [["a NaN"]] * 3


def test_of_several_reasons_all_take_the_same_first() -> None:
    assert votes("", "two", "one") == [["two", "one"]] * 3


def test_who_is_somewhere_else_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="phase 0 of step 4"):
        votes("", "", "", phases=(0, 1, 0))


# -------------------- Processes that read parts of one batch detect parts of different ones
ROW_WORKERS = ("a/0", "a/1", "b/0")
ROW_MATES = {"a/0": ["a/1"], "a/1": ["a/0"], "b/0": []}


def tell_rows(
    inputs: dict[str, Any], marks: dict[str, int], readers: dict[str, set[str]] | None = None
) -> list[dict[str, Any]]:
    """All announce a step and check it; what each heard of the others."""
    found = sessions(ROW_WORKERS)

    def one(worker: str) -> Any:
        session = found[worker]
        own_inputs = {"x": inputs.get(worker, [1, 2])}
        sheet = {"program": 1, "name": "step", "step": 3, "rows": 4, "inputs": own_inputs, "alike": {"a/0, a/1": 7}}
        session.start_step(sheet, marks[worker], ROW_MATES[worker], readers or {})
        return session.check_step(sheet, marks[worker])

    with ThreadPoolExecutor(len(ROW_WORKERS)) as pool:
        return [future.result() for future in [pool.submit(one, worker) for worker in ROW_WORKERS]]


def test_parts_of_the_same_batch_go_together() -> None:
    parts = {"a/0": [7, None], "a/1": [None, 8], "b/0": [7, 8]}
    heard = tell_rows(parts, {"a/0": 5, "a/1": 5, "b/0": 5})
    assert heard[0]["a/1"]["mark"] == 5 and heard[0]["a/1"]["inputs"] == {"x": [None, 8]}


def test_no_other_cluster_is_told_which_rows_there_are() -> None:
    heard = tell_rows({}, {"a/0": 5, "a/1": 5, "b/0": 9})
    assert "mark" not in heard[2]["a/0"] and "mark" not in heard[0]["b/0"]


def test_mates_that_share_no_row_notice_another_order() -> None:
    with pytest.raises(InputMismatchError, match=r"the order of rows differs between a/. and a/. at step 3"):
        tell_rows({"a/0": [7, None], "a/1": [None, 8]}, {"a/0": 5, "a/1": 6, "b/0": 5})


def test_who_reads_the_same_rows_notices_other_values() -> None:
    with pytest.raises(InputMismatchError, match=r"input 'x' differs between ./. and ./. at step 3"):
        tell_rows({"a/0": [7, None], "b/0": [9, 8], "a/1": [None, 8]}, {"a/0": 5, "a/1": 5, "b/0": 5})


def test_a_process_without_such_a_dataset_says_nothing_of_its_order() -> None:
    assert len(tell_rows({}, {"a/0": 5, "a/1": 0, "b/0": 0})) == 3


@pytest.mark.parametrize("readers", [{"a/0", "a/1"}, {"a/1", "b/0"}, {"b/0"}, set(ROW_WORKERS), set()])
def test_a_fingerprint_goes_to_readers_alone(readers: set[str]) -> None:
    heard = zip(ROW_WORKERS, tell_rows({}, dict.fromkeys(ROW_WORKERS, 0), {"x": readers}), strict=True)
    for worker, came in heard:
        assert [bool(sheet["inputs"]) for sheet in came.values()] == [worker in readers] * len(came)


def test_a_checksum_of_variables_goes_to_mates_alone() -> None:
    heard = tell_rows({}, dict.fromkeys(ROW_WORKERS, 0))
    assert heard[0]["a/1"]["alike"] and "alike" not in heard[2]["a/0"] and "alike" not in heard[0]["b/0"]


CLUSTERS = {"a/0": "a", "a/1": "a", "b/0": "b"}
UNSHARED = [({"a/0", "a/1"}, CLUSTERS, True), (set(), CLUSTERS, True), ({"a/0", "b/0"}, CLUSTERS, False)]
UNSHARED += [({"a/0"}, {"a/0": "a", "a/1": "a"}, False)]  # clusters that train apart compare nothing


@pytest.mark.parametrize(("readers", "clusters", "refused"), UNSHARED)
def test_ids_that_no_two_clusters_would_compare_are_refused(
    readers: set[str], clusters: dict[str, str], refused: bool
) -> None:
    with (
        pytest.raises(OptionError, match="only the workers that read this input have it")
        if refused
        else contextlib.nullcontext()
    ):
        refuse_unshared_ids(["id"], {"id": readers, "x": {"a/0"}}, clusters)
