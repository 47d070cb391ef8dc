"""A gateway's conclusions about a silent worker from a probe of its address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.gateway.town import until
from whale_nebula.gateway.liveness import Liveness, verdict
from whale_nebula.transport.grpc.options import Probe

WHERE = "10.0.0.1:7101"


class Watched:
    """A worker, what is found at its address in turn, and what was told of it."""

    def __init__(self, *found: str, first: str = "open", back: Iterator[bool] | None = None) -> None:
        self.found = iter((first, *found))
        self.left = len(found) + 1
        self.told: list[tuple[str, str, str]] = []
        self.connected = True
        self.back = back
        self.liveness = Liveness(
            {"gpu/0": WHERE},
            self._back,
            lambda *report: self.told.append(report),
            look=self._look,
            rest=lambda seconds: None,
        )
        self.liveness.check_new("gpu/0")
        self.settle()

    def settle(self) -> None:
        until(lambda: not self.liveness._looking)

    def _back(self, worker: str) -> bool:
        return self.connected if self.back is None else next(self.back)

    def _look(self, address: str, seconds: float) -> Probe:
        assert address == WHERE
        self.left -= 1
        return Probe(next(self.found, "open"), "")

    def check_ended(self) -> list[tuple[str, str, str]]:
        self.connected = False
        self.liveness.check_ended("gpu/0")
        self.settle()
        return self.told

    def check_silent(self) -> list[tuple[str, str, str]]:
        self.connected = False
        self.liveness.check_silent("gpu/0")
        self.settle()
        return self.told


@pytest.mark.parametrize("found", [("refused", "refused"), ("open", "open", "refused", "silent", "refused", "refused")])
def test_an_address_that_refuses_twice_in_a_row_is_that_of_a_dead_worker(found: tuple[str, ...]) -> None:
    [(worker, state, why)] = Watched(*found).check_ended()
    assert (worker, state) == ("gpu/0", "dead")
    assert why == f"its stream has ended, and {WHERE} refused twice: no process listens on the port"


def test_one_that_does_not_answer_is_that_of_a_frozen_host() -> None:
    [(_, state, why)] = Watched("silent", "unknown").check_silent()
    assert state == "frozen"
    assert why.startswith("it sent no messages, and")


def test_a_stream_that_ends_while_somebody_still_looks_is_mourned() -> None:
    """Between the last question whether the worker is heard and the end of the look that asked it."""

    class Dying(Watched):
        def _back(self, worker: str) -> bool:
            heard, self.connected = self.connected, False
            if heard:
                self.liveness.check_ended(worker)  # it dies as the answer is given
            return heard

    [(worker, state, _)] = Dying("refused", "refused").told
    assert (worker, state) == ("gpu/0", "dead")


def test_who_comes_back_is_not_looked_for() -> None:
    watched = Watched("refused", "refused", back=iter([True, False, True]))
    watched.liveness.check_ended("gpu/0")
    watched.settle()
    assert watched.told == []
    assert watched.left == 1


def test_who_comes_back_at_the_last_moment_is_not_dead() -> None:
    watched = Watched("refused", "refused", back=iter([True, False, False, True, True]))
    watched.liveness.check_ended("gpu/0")
    watched.settle()
    assert watched.told == []


def test_a_host_that_answers_is_no_matter_for_the_gateway_whatever_its_process_does() -> None:
    watched = Watched("open", "refused", "refused")
    assert watched.check_silent() == []
    assert watched.left == 2


def test_an_address_that_was_never_open_from_here_says_nothing() -> None:
    watched = Watched("refused", "refused", first="refused")
    watched.liveness.check_ended("gpu/1")
    assert watched.check_ended() == []


def test_it_is_told_once() -> None:
    watched = Watched(*["refused"] * 6)
    watched.check_ended()
    watched.check_ended()
    assert len(watched.told) == 1


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ((), None),
        (("refused", "silent"), None),
        (("silent", "refused"), None),
        (("silent", "open"), None),
        (("unknown", "unknown"), "frozen"),
        (("open", "refused", "refused"), "dead"),
    ],
)
def test_verdicts(seen: tuple[str, ...], state: str | None) -> None:
    assert verdict(seen) == state
