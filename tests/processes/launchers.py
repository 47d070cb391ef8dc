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
from whale_nebula.launch.restarts import Attempts, RestartPolicy, RunEnd
from whale_nebula.launch.worker_processes import EchoedOutput, create_identities, start_workers

SCRIPT = str(HERE / "workers" / "restart.py")
DEADLINE = 180.0


@dataclass
class Launchers:
    """Run `whale-nebula run` once for each cluster, in threads of this process."""

    folder: Path
    config: Config
    addresses: Mapping[str, str]
    security: Mapping[str, Any]
    endings: dict[str, RunEnd] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    script: str = SCRIPT
    before_start: Callable[[str, int], None] = lambda worker, epoch: None

    def start(
        self, worker: str, *arguments: object, name: str = "", max_restarts: int = 3, **identity_changes: Any
    ) -> None:
        """Start a worker and its launcher, which has the worker's name unless it gets a `name`; `identity_changes` are
        fields of the worker's identity.
        """
        argv = ["-m", "whale_nebula.launch.child", self.script, str(self.folder), *map(str, arguments)]
        identity = create_identities(Placement((worker,), self.addresses), self.config, self.security)[worker]
        identity = replace(identity, **identity_changes)

        @contextmanager
        def start(epoch: int) -> Iterator[Job]:
            self.before_start(worker, epoch)
            output = EchoedOutput(echo=self._add_output)
            with start_workers(argv, {worker: identity}, output=output, silence=DEADLINE, epoch=epoch) as job:
                self.jobs[name or worker] = job
                yield job

        thread = threading.Thread(target=self._run, args=(name or worker, start, max_restarts), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _run(self, name: str, start: Callable[[int], AbstractContextManager[Job]], max_restarts: int) -> None:
        rule = RestartPolicy(Restarts(max_restarts, 0.0))
        attempts = Attempts(rule, start, wait=lambda _: True, is_stopped=lambda: False, report=self._add_line)
        self.endings[name] = attempts.run(DEADLINE)

    def _add_output(self, worker: str, stream: str, line: str) -> None:
        self._add_line(f"[{worker}] {line}" if stream == "out" else line)

    def _add_line(self, line: str) -> None:
        with self.changed:
            self.lines.append(line)
            self.changed.notify_all()

    def await_line(self, *parts: str) -> str:
        """Wait for a line with all of these parts."""

        def find_line() -> str:
            return next((line for line in self.lines if all(part in line for part in parts)), "")

        with self.changed:
            assert self.changed.wait_for(find_line, DEADLINE), (parts, "".join(self.lines)[-4000:])
            return find_line()

    def wait_for_all(self) -> dict[str, RunEnd]:
        """Wait for all launchers; returns how they ended."""
        for thread in self.threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "\n".join(self.lines)[-4000:]
        return self.endings


@contextmanager
def prepare_launchers(folder: Path, workers: Mapping[str, int]) -> Iterator[Launchers]:
    """Launchers for these numbers of workers, with certificates; all processes are killed at the end."""
    addresses = {f"{name}/{n}": f"127.0.0.1:{free_port()}" for name, count in workers.items() for n in range(count)}
    listed = {name: [addresses[f"{name}/{n}"] for n in range(count)] for name, count in workers.items()}
    config = load({"clusters": {name: {"workers": each} for name, each in listed.items()}})
    with ExitStack() as stack:
        security = stack.enter_context(gateways.issue_for_run(config, addresses))
        found = Launchers(folder, config, addresses, security)
        yield found
        for job in found.jobs.values():
            job.kill()
