"""Asynchronous local SGD (`mode="async"`): a server of shared weights, and clusters that push and pull differences.

The server is in the process of the first cluster's first worker, with a thread for each of the other clusters. It
applies each difference as it arrives and answers with the changes since that cluster's last push. Every `sync_every`
steps, a cluster applies the answer to its last push and pushes again: an exchange has the steps between two pushes to
complete, and clusters only wait for one that is too far behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np

from whale_nebula.codec.encoding import Encoding
from whale_nebula.errors import DeadlineError, LinkClosedError, RemoteProtocolError
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.local_sgd.topology import ClusterSync, Differences, Ends, name_sender, read_numbers
from whale_nebula.runtime.single_thread import SingleThread
from whale_nebula.transport.mailbox import unsent_item_error
from whale_nebula.wire.tensor import Bytes

_POLL_SECONDS = 1.0
"""Seconds after which a thread that waits for a push checks whether the run is over."""
_WHOLE_FRAGMENT = 0


@dataclass
class Server:
    """The parameter server. It weights the differences of clusters by `shares`, and answers the push of a cluster that
    is more than `staleness` rounds ahead of the slowest when that one has pushed.

    The last push of each cluster before a synchronisation is answered with the shared weights that include the last
    pushes of all clusters (`_settled`). At the end of a run it serves until the other clusters have stopped, if it
    `waits`. `_known_weights` has the shared weights as decoded by each cluster, and `_rounds` the number of the last
    push of each, infinity from its last push before a synchronisation until that is answered.
    """

    ends: Ends
    encoding: Encoding
    shares: Mapping[str, float]
    staleness: int
    waits: bool = False
    shared: Numbers | None = None
    failure: BaseException | None = None
    _known_weights: dict[str, Numbers] = field(default_factory=dict)
    _answer_encoders: dict[str, Differences] = field(default_factory=dict)
    _rounds: dict[str, float] = field(default_factory=dict)
    _settled: Numbers = field(default_factory=lambda: np.zeros(0, np.float32))
    _settled_clusters: set[str] = field(default_factory=set)
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, shared: Numbers) -> None:
        """Initialise the shared weights, and start the threads."""
        self.shared, self._settled = shared.copy(), shared.copy()
        self._known_weights = {cluster: shared.copy() for cluster in self.ends.lead_workers}
        self._answer_encoders = {cluster: Differences(self.encoding) for cluster in self.ends.lead_workers}
        self._rounds = dict.fromkeys(self.ends.lead_workers, 0)
        for cluster in self.ends.others:
            named = f"nebula-serves-{cluster}"
            self._threads.append(threading.Thread(target=self._serve, args=(cluster,), name=named, daemon=True))
            self._threads[-1].start()

    def apply_push(self, cluster: str, round_number: int, data: Bytes, *, last: bool) -> Bytes:
        """Apply a cluster's difference; returns the answer, once the cluster may continue. It is the `last` one before
        a synchronisation.
        """
        with name_sender(self.ends.lead_workers[cluster]):
            difference = self._answer_encoders[cluster].decode(data, self._size)
        with self._condition:
            shared = self._known_weights[cluster] if self.shared is None else self.shared
            self.shared = shared - np.float32(self.shares[cluster]) * difference
            self._rounds[cluster] = inf if last else round_number
            self._condition.notify_all()
            self._wait_for_others(cluster, last)
            if self.failure is not None:
                raise self.failure
            return self._settled_weights(cluster, round_number) if last else self._make_answer(cluster)

    def reset(self, shared: Numbers) -> None:
        """Replace the weights of the last synchronisation by values that all clusters have now. Faster clusters may
        already have pushed differences from these: they stay in effect.
        """

        def replace(numbers: Numbers) -> Numbers:
            same = np.array_equal(numbers, self._settled, equal_nan=True)
            return shared.copy() if same else shared + (numbers - self._settled)

        with self._condition:
            self.shared = shared.copy() if self.shared is None else replace(self.shared)
            self._known_weights = {cluster: replace(known) for cluster, known in self._known_weights.items()}
            self._settled = shared.copy()

    def close(self) -> None:
        """Stop all threads, after they have answered slower clusters."""
        for thread in self._threads if self.waits and self.failure is None else ():
            thread.join(self.ends.patience)
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    @property
    def _size(self) -> int:
        return 0 if self.shared is None else self.shared.size

    def _wait_for_others(self, cluster: str, last: bool) -> None:
        """Block a cluster that is too far ahead; raises if the clusters that it waits for push nothing for too long."""

        def is_done() -> bool:
            return self._is_closed or self.failure is not None or self._may_continue(cluster, last)

        def is_done_or_pushed(before: Mapping[str, float]) -> bool:
            return is_done() or self._rounds != before

        patience = self.ends.patience
        while not is_done():
            before = dict(self._rounds)
            if not self._condition.wait_for(partial(is_done_or_pushed, before), patience):
                slowest = min(before, key=before.__getitem__)
                raise unsent_item_error(
                    self.ends.lead_workers[cluster],
                    self.ends.lead_workers[slowest],
                    f"round {before[slowest] + 1}",
                    patience,
                )

    def _may_continue(self, cluster: str, last: bool) -> bool:
        if last:
            return all(each == inf for each in self._rounds.values()) or bool(self._settled_clusters)
        return self._rounds[cluster] - min(self._rounds.values()) <= self.staleness

    def _make_answer(self, cluster: str) -> Bytes:
        """The change of the shared weights since this cluster's last pull, as decoded by the cluster."""
        known = self._known_weights[cluster]
        shared = known if self.shared is None else self.shared
        data, there = self._answer_encoders[cluster].encode(_WHOLE_FRAGMENT, shared - known)
        self._known_weights[cluster] = known + there
        return data

    def _settled_weights(self, cluster: str, round_number: int) -> Bytes:
        """The shared weights after the last pushes of all clusters, the same for each, even if a faster one has already
        pushed again.
        """
        if not self._settled_clusters and self.shared is not None:
            self._settled = self.shared.copy()
        self._known_weights[cluster] = self._settled.copy()
        self._answer_encoders[cluster].forget()
        self._rounds[cluster] = round_number
        self._settled_clusters.add(cluster)
        if len(self._settled_clusters) == len(self._rounds):
            self._settled_clusters.clear()
        return self._settled.view(np.uint8)

    def _serve(self, cluster: str) -> None:
        round_number = 0
        try:
            while not self._is_closed:
                try:
                    data = self.ends.receive_push(round_number + 1, cluster, _POLL_SECONDS)
                except DeadlineError:
                    continue
                round_number += 1
                answer = self.apply_push(cluster, round_number, data[1:], last=bool(data[:1].any()))
                self.ends.answer(round_number, cluster, answer, 4 * self._size)
        except (DeadlineError, LinkClosedError, RemoteProtocolError) as known:  # raised by waiting threads
            self._fail(known)
        except BaseException as failure:
            self._fail(failure)
            raise

    def _fail(self, failure: BaseException) -> None:
        """Record a failure, which ends the run, and wake the threads that wait for another cluster."""
        with self._condition:
            if not self._is_closed:
                self.failure = failure
            self._condition.notify_all()


class PushedDifference(NamedTuple):
    """A difference in flight: the cluster's weights when it was sent, and the shared weights by the answer to it."""

    own_weights: Numbers
    known_weights: Future[Numbers]


@dataclass
class Pushes(ClusterSync):
    """The cluster's side of asynchronous mode. The first cluster's first worker has the `server`."""

    waits_for_all: ClassVar[bool] = True
    every: int = field(kw_only=True)
    server: Server | None = None
    _in_flight: PushedDifference | None = None
    _synchronized_digest: int = 0
    _thread: SingleThread = field(default_factory=lambda: SingleThread("nebula-pushes"))

    def begin(self, shared: Numbers | None = None) -> None:
        """Initialise the shared weights, including the server's."""
        begun = self._shared is not None
        super().begin(shared)
        if not begun and self.server is not None and self._shared is not None:
            self.server.begin(self._shared)

    def send_due(self) -> None:
        """After a step: if a push is due, apply the answer to the last one and push again."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._apply_answer()
            self._push()

    def apply_due(self) -> None:
        """Nothing to do: answers are applied before the next push."""

    def send_remaining(self) -> None:
        """Push the remaining difference, because all clusters need the shared weights now."""
        if not self.is_synchronized:
            self._apply_answer()
            self._push(last=True)

    def receive_remaining(self) -> None:
        """Receive the shared weights, after which all clusters have bit-identical weights."""
        self._apply_answer(exactly=True)
        self._synchronized_steps = self.steps
        self._synchronized_digest = super().digest()

    def restart(self) -> None:
        """Restart with the current weights, including the server."""
        super().restart()
        if self.server is not None and self._shared is not None:
            self.server.reset(self._shared)

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Take a snapshot of the state; after a synchronisation it is only the number of steps."""
        steps = self.steps
        return lambda: {"steps": steps}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after the saved number of steps."""
        self.steps = self._synchronized_steps = int(state["steps"])

    def digest(self) -> int:
        """A checksum of the weights that all clusters had at the last synchronisation."""
        return self._synchronized_digest

    def close(self) -> None:
        """Stop the threads."""
        if self.server is not None:
            self.server.close()
        self._thread.close(cancel=True)

    # ------------------------------------------------------------------ pushing a difference
    def _push(self, *, last: bool = False) -> None:
        own = self._read_all()
        known = own if self._shared is None else self._shared
        self.round_count += 1
        self._in_flight = PushedDifference(own, self._thread.submit(self._exchange, self.round_count, known, own, last))

    def _exchange(self, round_number: int, known: Numbers, own: Numbers, last: bool) -> Numbers:
        data, _ = self.differences.encode(0, known - own)
        answer = self._ask_server(round_number, data, last)
        with name_sender(self.ends.server):
            if last:
                self.differences.forget()
                return read_numbers(answer, known.size)
            return known + self.differences.decode(answer, known.size)

    def _ask_server(self, round_number: int, data: Bytes, last: bool) -> Bytes:
        if self.server is not None:
            answer = self.server.apply_push(self.ends.cluster, round_number, data, last=last)
            self.ends.forward_answer(round_number, answer)
            return answer
        self.ends.push(round_number, np.concatenate([np.array([last], np.uint8), data]), 4 * self.flat.total)
        return self.ends.pull(round_number)

    def _apply_answer(self, *, exactly: bool = False) -> None:
        """Wait for the answer to the last push, if it was not applied yet, and apply it: add the difference between the
        shared weights and the pushed ones, or set the shared weights `exactly`.
        """
        if self._in_flight is None:
            return
        began = time.perf_counter()
        known = self._in_flight.known_weights.result()
        self.wait_seconds += time.perf_counter() - began
        if exactly:
            self.flat.write((0, self.flat.total), known)
        else:
            self.flat.add((0, self.flat.total), known - self._in_flight.own_weights)
        self._shared, self._in_flight = known.copy(), None
