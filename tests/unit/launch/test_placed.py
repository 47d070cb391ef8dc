"""Workers that are started by a placement: what they are told, that they are watched, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from whale_nebula.config import Config, load
from whale_nebula.launch.identity import Identity, SecurityFiles
from whale_nebula.launch.job import Job
from whale_nebula.launch.placed import Output, identities, run_name, seed_of, start_placed
from whale_nebula.launch.processes import Sink
from whale_nebula.launch.resolve import Placement

SOON = 60.0
PLACEMENT = Placement(("gpu/0", "npu/0"), {"gpu/0": "127.0.0.1:7101", "npu/0": "127.0.0.1:7102"})
FILES = SecurityFiles("ca", "cert", "key")
START = "import sys, time, os\nfrom whale_nebula.launch import attach\nme = attach()\n"
CONFIG = load(
    {
        "run": "mt",
        "clusters": {"gpu": {"gateway": "10.0.0.9:7100"}, "npu": {}},
        "patience": "20s",
        "security": {"insecure": True},
    }
)


def started(code: str, output: Path, workers: Mapping[str, Identity] | None = None, **options: object) -> Job:
    with (output / "out").open("wb") as out, (output / "err").open("wb") as err:
        sinks = {"out": Sink(os.dup(out.fileno())), "err": Sink(os.dup(err.fileno()))}
    told = workers or identities(PLACEMENT, CONFIG, {})
    return start_placed(["-c", START + code], told, output=Output(sinks), **options)  # type: ignore[arg-type]


class TestWhatTheyAreTold:
    def test_all_of_it(self) -> None:
        found = identities(PLACEMENT, CONFIG, {}, path="clusters.yaml")["gpu/0"]
        assert found == Identity(
            worker="gpu/0",
            cluster="gpu",
            peers={"npu/0": "npu"},
            addresses={"npu/0": "127.0.0.1:7102"},
            run_id="mt",
            seed=seed_of(CONFIG),
            listen="127.0.0.1:7101",
            insecure=True,
            gateway="10.0.0.9:7100",
            patience=20.0,
            config=str(Path("clusters.yaml").absolute()),
        )

    def test_certificates_another_place_to_listen_and_no_gateway(self) -> None:
        config = Config(run="mt", clusters=CONFIG.clusters)
        files = dict.fromkeys(PLACEMENT.here, FILES)
        listen = {"gpu/0": "0.0.0.0:7101", "npu/0": "0.0.0.0:7102"}
        found = identities(PLACEMENT, config, files, listen=listen, gateways=False)
        assert (found["gpu/0"].security, found["gpu/0"].listen, found["gpu/0"].gateway) == (FILES, "0.0.0.0:7101", None)
        assert found["gpu/0"].addresses["npu/0"] == "127.0.0.1:7102"

    def test_only_those_of_this_host_are_started(self) -> None:
        here = Placement(("npu/0",), PLACEMENT.addresses)
        assert list(identities(here, CONFIG, {})) == ["npu/0"]

    def test_every_host_comes_to_the_same_seed(self) -> None:
        assert seed_of(Config(run="a")) == seed_of(Config(run="a")) != seed_of(Config(run="b"))
        assert 0 <= seed_of(Config()) < 2**32
        assert (run_name(Config()), run_name(Config(run="mt"))) == ("run", "mt")


def test_a_worker_knows_where_it_is_and_where_the_others_are(tmp_path: Path) -> None:
    code = (
        "print(me.worker, me.listen, dict(me.addresses), dict(me.peers), me.security, me.gateway,"
        " me.patience, me.run_id)"
    )
    with started(code, tmp_path) as job:
        job.wait(SOON).check()
    assert sorted((tmp_path / "out").read_text().splitlines()) == [
        "gpu/0 127.0.0.1:7101 {'npu/0': '127.0.0.1:7102'} {'npu/0': 'npu'} None 10.0.0.9:7100 20.0 mt",
        "npu/0 127.0.0.1:7102 {'gpu/0': '127.0.0.1:7101'} {'gpu/0': 'gpu'} None None 20.0 mt",
    ]


def test_a_worker_that_is_stopped_is_found_frozen_and_killed(tmp_path: Path) -> None:
    told: list[str] = []
    code = "print('ready', flush=True); time.sleep(300)"
    with started(code, tmp_path, silence=2.0, notice=told.append) as job:
        wait_for(lambda: (tmp_path / "out").read_text().count("ready") == 2)
        time.sleep(1.2)  # a beat at least
        os.kill(job.pids["npu/0"], signal.SIGSTOP)
        result = job.wait(SOON, grace=0.1)
    assert (result.culprit, result.frozen, result.late) == ("npu/0", {"npu/0"}, False)
    assert result.codes["npu/0"] == -signal.SIGKILL
    assert told == ["worker npu/0 is frozen (no heartbeat for 2 s): it is killed"]


def test_a_worker_that_has_ended_and_does_not_go_is_not_frozen_and_keeps_its_exit_code(tmp_path: Path) -> None:
    """As a library may hold it up that gives back its connections when no thread of Python is left."""
    told: list[str] = []
    code = """
class Library:
    def __del__(self, sleep=time.sleep): sleep(300)
if me.cluster == "npu": sys.modules["library"] = Library()
me.heart.code = 1
sys.exit("NB-402 worker 'gpu/0' was not heard")
"""
    with started(code, tmp_path, silence=2.0, ending=2.5, notice=told.append) as job:
        result = job.wait(SOON, grace=SOON)
    assert (result.codes, result.frozen, result.late) == ({"gpu/0": 1, "npu/0": 1}, frozenset(), False)
    assert told == ["worker npu/0 has ended, and its process has stood still for 2.5 s since: it is killed"]


def test_who_leaves_is_waited_for_with_patience_and_is_nobodys_fault(tmp_path: Path) -> None:
    code = "if me.cluster == 'npu': time.sleep(0.3)\nsys.exit(75)"
    with started(code, tmp_path) as job:
        result = job.wait(SOON, grace=0.0, patience=SOON)
    assert result.codes == {"gpu/0": 75, "npu/0": 75}
    assert result.culprit in result.codes


def test_who_fails_is_the_culprit_and_not_who_left_before(tmp_path: Path) -> None:
    code = "if me.cluster == 'gpu': sys.exit(75)\ntime.sleep(0.3); sys.exit(3)"
    with started(code, tmp_path) as job:
        result = job.wait(SOON, patience=SOON)
    assert (result.culprit, result.codes["npu/0"]) == ("npu/0", 3)


def test_what_a_worker_has_started_ends_with_it_though_others_go_on(tmp_path: Path) -> None:
    code = """
import subprocess
if me.cluster == "gpu":
    print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
else:
    time.sleep(300)
"""
    with started(code, tmp_path) as job:
        wait_for(lambda: (tmp_path / "out").read_text().endswith("\n"))
        pid = int((tmp_path / "out").read_text())
        wait_for(lambda: not alive(pid))
        assert alive(job.pids["npu/0"])


def test_nothing_stays_open(tmp_path: Path) -> None:
    with started("pass", tmp_path) as job:
        job.wait(SOON).check()
    before = psutil.Process().num_fds()
    with start_placed(["-c", START], identities(PLACEMENT, CONFIG, {})) as job:
        job.wait(SOON).check()
    assert psutil.Process().num_fds() == before


def test_who_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().num_fds()
    monkeypatch.setattr("sys.executable", "/nowhere/at/all")
    with pytest.raises(FileNotFoundError):
        start_placed(["-c", START], identities(PLACEMENT, CONFIG, {}))
    assert psutil.Process().num_fds() == before


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
