"""A gateway's conclusions about a silent worker from a probe of its address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.gateway.networks import wait_until
from whale_nebula.gateway.liveness import Liveness, judge_probes
from whale_nebula.transport.grpc.options import Probe

WHERE = "10.0.0.1:7101"


class ProbedWorker:
    """A worker with scripted results of the probes of its address, and the reports about it."""

    def __init__(self, *found: str, first: str = "open", is_active: Iterator[bool] | None = None) -> None:
        self.found = iter((first, *found))
        self.probes_left = len(found) + 1
        self.reports: list[tuple[str, str, str]] = []
        self.connected = True
        self.is_active = is_active
        self.liveness = Liveness(
            {"gpu/0": WHERE},
            self._is_active,
            lambda *report: self.reports.append(report),
            probe=self._look,
            sleep=lambda seconds: None,
        )
        self.liveness.check_new("gpu/0")
        self.wait_for_probes()

    def wait_for_probes(self) -> None:
        wait_until(lambda: not self.liveness._next_probes)

    def _is_active(self, worker: str) -> bool:
        return self.connected if self.is_active is None else next(self.is_active)

    def _look(self, address: str, seconds: float) -> Probe:
        assert address == WHERE
        self.probes_left -= 1
        return Probe(next(self.found, "open"), "")

    def check_ended(self) -> list[tuple[str, str, str]]:
        self.connected = False
        self.liveness.check_ended("gpu/0")
        self.wait_for_probes()
        return self.reports

    def check_silent(self) -> list[tuple[str, str, str]]:
        self.connected = False
        self.liveness.check_silent("gpu/0")
        self.wait_for_probes()
        return self.reports


@pytest.mark.parametrize("found", [("refused", "refused"), ("open", "open", "refused", "silent", "refused", "refused")])
def test_two_consecutive_refusals_mean_a_dead_worker(found: tuple[str, ...]) -> None:
    [(worker, state, why)] = ProbedWorker(*found).check_ended()
    assert (worker, state) == ("gpu/0", "dead")
    assert why == f"its stream has ended, and {WHERE} refused twice: no process listens on the port"


def test_unanswered_probes_mean_a_frozen_host() -> None:
    [(_, state, why)] = ProbedWorker("silent", "unknown").check_silent()
    assert state == "frozen"
    assert why.startswith("it sent no messages, and")


def test_stream_ended_during_a_probe_is_probed_again() -> None:
    """Between the last check whether the worker is connected and the end of the probe that made it."""

    class Dying(ProbedWorker):
        def _is_active(self, worker: str) -> bool:
            connected, self.connected = self.connected, False
            if connected:
                self.liveness.check_ended(worker)  # its stream ends while the check returns
            return connected

    [(worker, state, _)] = Dying("refused", "refused").reports
    assert (worker, state) == ("gpu/0", "dead")


def test_reconnected_worker_is_not_probed() -> None:
    probed = ProbedWorker("refused", "refused", is_active=iter([True, False, True]))
    probed.liveness.check_ended("gpu/0")
    probed.wait_for_probes()
    assert probed.reports == []
    assert probed.probes_left == 1


def test_worker_reconnected_during_probes_is_not_dead() -> None:
    probed = ProbedWorker("refused", "refused", is_active=iter([True, False, False, True, True]))
    probed.liveness.check_ended("gpu/0")
    probed.wait_for_probes()
    assert probed.reports == []


def test_silent_worker_with_an_open_port_is_not_reported() -> None:
    probed = ProbedWorker("open", "refused", "refused")
    assert probed.check_silent() == []
    assert probed.probes_left == 2


def test_address_that_was_never_open_is_not_reported() -> None:
    probed = ProbedWorker("refused", "refused", first="refused")
    probed.liveness.check_ended("gpu/1")
    assert probed.check_ended() == []


def test_dead_worker_is_reported_once() -> None:
    probed = ProbedWorker(*["refused"] * 6)
    probed.check_ended()
    probed.check_ended()
    assert len(probed.reports) == 1


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ((), None),
        (("refused", "silent"), None),
        (("silent", "refused"), None),
        (("silent", "open"), None),
        (("unknown", "unknown"), "frozen"),
        (("open", "refused", "refused"), "dead"),
    ],
)
def test_state_by_probe_results(outcomes: tuple[str, ...], state: str | None) -> None:
    assert judge_probes(outcomes) == state
