"""Run `whale-nebula run` once for each cluster, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.processes.sites import HERE
from whale_nebula.config import Config, load
from whale_nebula.config.schema import Restarts
from whale_nebula.launch import Job, gateways
from whale_nebula.launch.placement import Placement, free_port
from whale_nebula.launch.restarts import Attempts, Ended, RestartPolicy
from whale_nebula.launch.worker_processes import EchoedOutput, create_identities, start_workers

SCRIPT = str(HERE / "workers" / "restarting.py")
DEADLINE = 60.0


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
        identity = create_identities(Placement((worker,), self.addresses), self.config, self.security)[worker]
        identity = replace(identity, **told)

        @contextmanager
        def start(epoch: int) -> Iterator[Job]:
            self.before(worker, epoch)
            output = EchoedOutput(echo=self._echo)
            with start_workers(argv, {worker: identity}, output=output, silence=DEADLINE, epoch=epoch) as job:
                self.jobs[name or worker] = job
                yield job

        thread = threading.Thread(target=self._run, args=(name or worker, start, most), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _run(self, name: str, start: Callable[[int], AbstractContextManager[Job]], most: int) -> None:
        rule = RestartPolicy(Restarts(most, 0.0))
        attempts = Attempts(rule, start, rest=lambda _: True, is_stopped=lambda: False, report=self._tell)
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
        security = stack.enter_context(gateways.issue_for_run(config, addresses))
        found = Launchers(folder, config, addresses, security)
        yield found
        for job in found.jobs.values():
            job.kill()
