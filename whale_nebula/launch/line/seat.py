"""Where an end of a measurement sits in a run, and the measurement from there with one end after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from whale_nebula.errors import DeadlineError, LinkClosedError, NebulaError
from whale_nebula.launch.line.ends import End
from whale_nebula.launch.line.found import DIRECT, THROUGH, LineFound
from whale_nebula.launch.line.sheet import sheet
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink


@dataclass(frozen=True, slots=True)
class Seat(Place):
    """A worker's place, for which only some of the others are there; `everyone` are all workers of the run, as frames
    and gateways number them.
    """

    everyone: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, whether they take part or not."""
        return self.everyone or (*self.peers, self.here)


def measure(seat: Seat, *, seconds: float, patience: float, tell: Callable[[str], None]) -> Iterator[LineFound]:
    """Measure the lines to all peers of a seat, one after the other in an order that all ends know.

    Who is waited for is told as well; nobody is waited for longer than `patience`.
    """
    joined = GrpcLinks(seat, deadlines=Deadlines(patience=patience), announce=lambda wait: tell(str(wait)))
    try:
        for there in sorted(seat.peers, key=lambda each: sorted((seat.here, each))):
            yield _measured(seat, joined.links[there], seconds, patience, tell)
    finally:
        joined.close()


def _measured(
    seat: Seat, link: PeerLink, seconds: float, patience: float, tell: Callable[[str], None]
) -> LineFound:
    end = End(link, leads=seat.here < link.there, seconds=seconds, patience=patience, tell=tell)
    path = THROUGH if seat.through_gateway(link.there) else DIRECT
    try:
        found = end.measure(sheet(), path, time.time())
    except (DeadlineError, LinkClosedError) as error:
        raise _absent(error, link.there, path, came=end.met) from None
    return replace(found, broken=max(0, link.state().connections - 1))


def _absent(error: NebulaError, there: str, path: str, *, came: bool) -> NebulaError:
    """The same error with the command that is missing, if the other end has never come."""
    if came:
        return error
    command = f"whale-nebula bench link --config clusters.yaml --cluster {there.rpartition('/')[0]}"
    gateways = "start the gateways of both clusters, and " if path == THROUGH else ""
    return type(error)(
        error.what, where=error.where, why=error.why, mend=f"{gateways}run there, at the same time: {command}"
    )


def others(everyone: Sequence[str], cluster: str, only: str | None = None) -> list[str]:
    """Who is at the other ends: the first worker of every other cluster, or of one.

    >>> others(["gpu/0", "gpu/1", "npu/0", "npu/1", "tpu/0"], "gpu")
    ['npu/0', 'tpu/0']
    """
    found = [each for each in everyone if each.endswith("/0") and each != f"{cluster}/0"]
    return [each for each in found if only is None or each == f"{only}/0"]
