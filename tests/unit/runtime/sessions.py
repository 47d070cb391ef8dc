"""Sessions of several workers in one process, over links in memory."""

from collections.abc import Sequence
from itertools import permutations

from whale_nebula.runtime.session.session import Session
from whale_nebula.transport import MemoryNetwork


def sessions(workers: Sequence[str]) -> dict[str, Session]:
    """One for each of these workers, with a link to each other one."""
    network = MemoryNetwork()
    links = {(one, other): network.link(one, other, one, other) for one, other in permutations(workers, 2)}
    return {
        worker: Session(worker, {there: link for (here, there), link in links.items() if here == worker}, patience=10.0)
        for worker in workers
    }
