"""Messages of one cluster's workers over their links before TensorFlow connects them."""

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

from tests.unit.runtime.sessions import sessions
from whale_nebula.errors import LinkClosedError, PlanMismatchError, RemoteFailureError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.session.rendezvous import open_among
from whale_nebula.runtime.session.task import prepare_task, tasks_of
from whale_nebula.tf import collectives as tf_collectives

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
