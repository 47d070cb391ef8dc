"""Runs: opened once, optional, closed in order."""

from __future__ import annotations

import pytest

import whale_nebula as nb
from whale_nebula.run import Here, current_run


@pytest.fixture(autouse=True)
def closed():
    nb.shutdown()
    yield
    nb.shutdown()


def test_a_run_opens_once() -> None:
    nb.init()
    with pytest.raises(nb.errors.OptionError, match="open already"):
        nb.init()


def test_without_init_one_is_opened_with_free_links() -> None:
    run = current_run()
    assert current_run() is run
    assert run.links.between("gpu", "npu").rate is None
    assert run.alone


def test_it_is_a_context_manager() -> None:
    with nb.init(links="1mbit,5ms") as run:
        assert run.links.between("a", "b").delay == 0.005
    assert current_run() is not run


def test_links_of_the_config_count_where_none_are_given() -> None:
    link = {"between": ["gpu", "npu"], "rate": "60mbit", "delay": "20ms"}
    run = nb.init({"clusters": {"gpu": {}, "npu": {}}, "links": [link]})
    assert run.links.between("npu", "gpu").rate == 60e6
    assert nb.here().clusters == ("gpu", "npu")


def test_clusters_come_to_be_by_being_named() -> None:
    run = nb.init()
    run.meet(["gpu", "npu"])
    run.meet(["npu", "tpu"])
    assert nb.here() == Here("local", "local/0", True, ("gpu", "npu", "tpu"), alone=True)
    assert all(nb.here().runs(name) for name in ("gpu", "anything"))


def test_shutdown_closes_last_opened_first() -> None:
    closed: list[int] = []
    run = nb.init()
    run.closers += [lambda: closed.append(1), lambda: closed.append(2)]
    nb.shutdown()
    assert closed == [2, 1]


def test_gathered_does_nothing_in_one_process() -> None:
    with nb.gathered():
        assert nb.here().lead
