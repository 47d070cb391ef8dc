"""Workers that are started again: they go on from what they have saved, meet again, and keep out who belongs to an
earlier epoch.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.processes.running import SEED, run, told_alone
from tests.processes.sites import HERE, sites
from tests.processes.telling import told
from tests.processes.workers import restarting
from tests.unit.transport.crossing import Line
from whale_nebula.cli.main import main
from whale_nebula.config import Config, load
from whale_nebula.config.schema import Restarts
from whale_nebula.launch import Job, gateways
from whale_nebula.launch.placed import Echoed, identities, start_placed
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.ports import free_port
from whale_nebula.launch.restarts import Attempts, Ended, Rule

SCRIPT = str(HERE / "workers" / "restarting.py")
DEADLINE = 60.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What one process comes to that is not disturbed."""
    return told_alone(lambda: restarting.train(tmp_path_factory.mktemp("alone")), links="free")


def test_after_a_kill_both_clusters_go_on_from_what_was_saved(
    tmp_path: Path, alone: Mapping[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--all", "--clusters", "gpu,npu", "--restarts", "2", SCRIPT, str(tmp_path), "npu/0@0@2"]
    assert main(words) == 0
    out, err = capfd.readouterr()
    found = told(out)
    assert "worker npu/0 failed first: ended by SIGKILL; restart 1 of 2 begins after 1 s, as epoch 1" in err
    assert [name for name in found if "step" in name] == [
        f"epoch {int(step > 2)} step {step}" for step in range(restarting.STEPS)
    ]
    assert (found["weights"], found["loss"]) == (alone["weights"], alone["loss"])


# ---------------------------------------------------------------------- launchers, a cluster each
@dataclass
class Launchers:
    """What `whale-nebula run` does, once for each cluster, in threads of this process."""

    folder: Path
    config: Config
    addresses: Mapping[str, str]
    security: Mapping[str, Any]
    endings: dict[str, Ended] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    script: str = SCRIPT
    before: Callable[[str, int], None] = lambda worker, epoch: None

    def start(self, worker: str, *arguments: object, name: str = "", most: int = 3, **told: Any) -> None:
        """Start a worker and its launcher, which is called like the worker unless there is another one of it already;
        `told` is what that tells its worker otherwise than usual.
        """
        argv = ["-m", "whale_nebula.launch.child", self.script, str(self.folder), *map(str, arguments)]
        identity = identities(Placement((worker,), self.addresses), self.config, self.security)[worker]
        identity = replace(identity, **told)

        @contextmanager
        def start(epoch: int) -> Iterator[Job]:
            self.before(worker, epoch)
            output = Echoed(echo=self._echo)
            with start_placed(argv, {worker: identity}, output=output, silence=DEADLINE, epoch=epoch) as job:
                self.jobs[name or worker] = job
                yield job

        thread = threading.Thread(target=self._run, args=(name or worker, start, most), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _run(self, name: str, start: Callable[[int], AbstractContextManager[Job]], most: int) -> None:
        rule = Rule(Restarts(most, 0.0))
        attempts = Attempts(rule, start, rest=lambda _: True, is_stopped=lambda: False, tell=self._tell)
        self.endings[name] = attempts.run(DEADLINE)

    def _echo(self, worker: str, stream: str, line: str) -> None:
        self._tell(f"[{worker}] {line}" if stream == "out" else line)

    def _tell(self, line: str) -> None:
        with self.changed:
            self.lines.append(line)
            self.changed.notify_all()

    def await_line(self, *parts: str) -> str:
        """Wait for a line with all of these."""

        def seen() -> str:
            return next((line for line in self.lines if all(part in line for part in parts)), "")

        with self.changed:
            assert self.changed.wait_for(seen, DEADLINE), (parts, "".join(self.lines)[-4000:])
            return seen()

    def ended(self) -> dict[str, Ended]:
        """How all ended."""
        for thread in self.threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "\n".join(self.lines)[-4000:]
        return self.endings


@contextmanager
def launching(folder: Path, workers: Mapping[str, int]) -> Iterator[Launchers]:
    """Launchers of so many workers of each cluster, on this host, with certificates; nothing of theirs is left."""
    addresses = {f"{name}/{n}": f"127.0.0.1:{free_port()}" for name, count in workers.items() for n in range(count)}
    listed = {name: [addresses[f"{name}/{n}"] for n in range(count)] for name, count in workers.items()}
    config = load({"clusters": {name: {"workers": each} for name, each in listed.items()}})
    with ExitStack() as stack:
        security = stack.enter_context(gateways.for_one_run(config, addresses))
        found = Launchers(folder, config, addresses, security)
        yield found
        for job in found.jobs.values():
            job.kill()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Of two clusters of a worker each."""
    with launching(tmp_path, {"gpu": 1, "npu": 1}) as found:
        yield found


def test_a_host_that_is_new_goes_on_from_the_copy_in_the_memory_of_another(tmp_path: Path) -> None:
    """Nothing is on a disk, and what the host of the worker that is killed had in its memory is gone."""
    workers, epochs = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}, 2
    undisturbed = run("resuming", workers, "-", "-", epochs)
    memory = {worker: tmp_path / worker.replace("/", "-") for worker in workers}

    def replace_host(worker: str, epoch: int) -> None:
        if epoch == 0 or worker == "c0/1":
            shutil.rmtree(memory[worker], ignore_errors=True)
            memory[worker].mkdir()

    with launching(tmp_path, {"c0": 2, "c1": 1}) as found:
        found.script, found.before = str(HERE / "workers" / "resuming.py"), replace_host
        for worker in workers:
            found.start(worker, "c0/1:step.announced=kill@14", epochs, "piped", memory=str(memory[worker]), seed=SEED)
        for worker, ended in found.ended().items():
            assert (ended.epoch, ended.result.culprit) == (1, None)
            last = told(ended.result.outcomes[worker].out)
            assert last["resumed"][0] > 0
            assert {name: last[name] for name in ("history", "weights")} == {
                name: undisturbed.same(name) for name in ("history", "weights")
            }


def test_launchers_of_two_clusters_start_their_own_and_all_meet_again(
    launchers: Launchers, alone: Mapping[str, Any]
) -> None:
    """The other notices by the end of the link, or by the greeting of who was started again."""
    for worker in launchers.addresses:
        launchers.start(worker, "gpu/0@0@3")
    found = launchers.ended()
    assert {worker: (ended.epoch, ended.result.culprit) for worker, ended in found.items()} == {
        "gpu/0": (1, None),
        "npu/0": (1, None),
    }
    for worker, ended in found.items():
        assert told(ended.result.outcomes[worker].out)["weights"] == alone["weights"]
    assert "gpu/0" in launchers.await_line("worker npu/0 failed first: exit code 1: NB-4")


@pytest.mark.grid
def test_a_worker_that_was_frozen_is_kept_out_by_those_of_a_later_epoch(
    launchers: Launchers, alone: Mapping[str, Any], tmp_path: Path
) -> None:
    """Its host stood still, launcher and all; meanwhile another host has taken its place."""
    hasty = tmp_path / "clusters.yaml"
    hasty.write_text("patience: 4s\n")
    line = Line(launchers.addresses["gpu/0"])
    launchers.start("npu/0", "", 0.2, most=0, addresses={"gpu/0": line.address})
    launchers.start("gpu/0", "", 0.2, config=str(hasty))
    launchers.await_line("[npu/0]", "epoch 0 step 1")
    launchers.jobs["npu/0"].signal("npu/0", signal.SIGSTOP)
    line.passes = False
    launchers.await_line("worker gpu/0 failed first: exit code 1: NB-402", "npu/0")
    launchers.start("npu/0", "", 0.3, name="another host", listen=f"127.0.0.1:{free_port()}")
    launchers.await_line("[npu/0]", "epoch 1 step")
    line.passes = True
    line.cut()
    launchers.jobs["npu/0"].signal("npu/0", signal.SIGCONT)
    found = launchers.ended()
    old = found["npu/0"].result.outcomes["npu/0"]
    assert "NB-415 this worker, 'npu/0', is of epoch 0, and the run is in epoch 1" in old.err
    assert (old.code, old.told.error, found["npu/0"].epoch) == (1, "NB-415", 0)
    for name in ("gpu/0", "another host"):
        assert (found[name].epoch, found[name].result.culprit) == (1, None)
        (outcome,) = found[name].result.outcomes.values()
        assert told(outcome.out)["weights"] == alone["weights"]
    line.close()


@pytest.mark.grid
def test_as_users_start_them_two_sites_meet_again(tmp_path: Path, alone: Mapping[str, Any]) -> None:
    with sites(tmp_path, restarts={"most": 2, "wait": "0s"}) as found:
        (tmp_path / "saved").mkdir()
        found.start("restarting", tmp_path / "saved", "", 0.3)
        found["gpu"].await_line("epoch 0 step 1")
        killed = time.monotonic()
        os.kill(found["gpu"].worker, signal.SIGKILL)
        found["gpu"].await_line("restart 1 of 2 begins")
        noticed = found["npu"].await_line("restart 1 of 2 begins") - killed
        assert found.ended() == {"gpu": 0, "npu": 0}, found["npu"].said
        assert found.same("weights") == alone["weights"]
        assert noticed < 10.0
