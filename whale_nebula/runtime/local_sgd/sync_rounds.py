"""Synchronous rounds of local SGD: send own fragments, receive the others', and apply the outer optimizer.

All clusters have the same *shared* weights. A fragment of a cluster's difference (shared minus own) is sent after a
step. Some steps later, when the fragments of the others have arrived, the outer optimizer is applied to their mean. All
clusters decode the same bytes, add them in the same order and keep the same state, so the shared weights stay
bit-identical without being sent. A cluster's training *after sending* is kept: its own weights change by the difference
between the new shared weights and those at the time of sending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.ir.outer_optimizer import Numbers, Outer
from whale_nebula.runtime.local_sgd.topology import ClusterSync, Range, name_sender
from whale_nebula.schedule.rounds import Timetable, list_ranges


class SentFragment(NamedTuple):
    """A fragment in flight: the cluster's weights when it was sent, and the shared weights that will result."""

    fragment: int
    own_weights: Numbers
    shared: Future[Numbers]


@dataclass
class Rounds(ClusterSync):
    """The rounds of one cluster. `shares` are the weights of the clusters' differences in their mean, by name."""

    table: Timetable = field(kw_only=True)
    outer: Outer = field(kw_only=True)
    shares: Mapping[str, float] = field(kw_only=True)
    _states: dict[int, Any] = field(default_factory=dict)
    _in_flight: list[SentFragment] = field(default_factory=list)
    _round_number: int = 0
    _sending: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-sends"))
    _receiving: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-receives"))

    def send_due(self) -> None:
        """After a step: send the fragments that are due."""
        self.steps += 1
        for fragment in self.table.sends(self.steps):
            self._send(fragment)

    def take(self) -> None:
        """Apply the fragments that are due now; waits for those that have not arrived."""
        for fragment in self.table.takes(self.steps):
            self._take(fragment)

    def send_remaining(self) -> None:
        """Apply fragments in flight, then send all differences, because all clusters need the shared weights now."""
        if self.is_synchronized:
            return
        while self._in_flight:
            self._take(self._in_flight[0].fragment)
        for fragment in range(self.table.fragments):
            self._send(fragment)

    def receive_remaining(self) -> None:
        """Receive the differences, after which all clusters have bit-identical weights."""
        for sent in self._in_flight[:]:
            self._take(sent.fragment, exactly=True)
        self._synchronized_steps = self.steps

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Take a snapshot of the state; the sending and receiving threads add theirs after their earlier work."""
        plain = {
            "steps": self.steps,
            "when": self._round_number,
            "met": self.round_count,
            "told": self._synchronized_steps,
        }
        narrow = any(variable.dtype != tf.float32 for variable in self.flat.variables)
        shared = None if self._shared is None or not narrow else self._shared.copy()  # variables would round them
        on_way = list(self._in_flight)
        left = self._sending.submit(lambda: self.differences.residues)
        states = self._receiving.submit(lambda: dict(self._states))

        def collect() -> dict[str, Any]:
            sent = [[each.fragment, each.own_weights, each.shared.result()] for each in on_way]
            return {**plain, "shared": shared, "sent": sent, "left": left.result(), "states": states.result()}

        return collect

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a state; fragments in flight count as arrived."""
        self.steps, self._round_number, self.round_count, self._synchronized_steps = (
            int(state[name]) for name in ("steps", "when", "met", "told")
        )
        self._shared = self._shared if state["shared"] is None else state["shared"]
        self.differences.resume(state["left"])
        self._states = dict(state["states"])
        self._in_flight = [
            SentFragment(int(fragment), own, _complete(shared)) for fragment, own, shared in state["sent"]
        ]

    def restart(self) -> None:
        """Restart with the current weights, and reset the outer optimizer."""
        super().restart()
        self._states.clear()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._sending, self._receiving):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def fragments(self) -> int:
        """The number of fragments that are not empty."""
        return sum(begin < end for begin, end in self._ranges)

    @property
    def form(self) -> str:
        """The form of the rounds: with the timetable, for fragments in flight, and the outer optimizer's state."""
        return f"{super().form} {self.table} {type(self.outer).__name__}"

    # ------------------------------------------------------------------ exchange of a fragment
    @cached_property
    def _ranges(self) -> Sequence[Range]:
        return list_ranges(self.flat.total, self.table.fragments)

    @property
    def _read_known(self) -> Numbers:
        if self._shared is None:
            self.begin()
        return self._shared if self._shared is not None else np.zeros(0, np.float32)

    def _send(self, fragment: int) -> None:
        where = self._ranges[fragment]
        if where[0] == where[1]:
            return
        own = self.flat.read(where)
        difference = self._read_known[slice(*where)] - own
        self._round_number += 1
        sent = self._sending.submit(self._send_difference, self._round_number, fragment, difference)
        shared = self._receiving.submit(self._average_differences, self._round_number, fragment, sent)
        self._in_flight.append(SentFragment(fragment, own, shared))

    def _send_difference(self, round_number: int, fragment: int, difference: Numbers) -> Numbers:
        data, there = self.differences.encode(fragment, difference)
        self.ends.send_fragment(round_number, fragment, data, difference.nbytes)
        return there

    def _average_differences(self, round_number: int, fragment: int, sent: Future[Numbers]) -> Numbers:
        """Receive the differences of all clusters, average them and apply the outer optimizer: the new shared weights
        of a fragment.
        """
        where = self._ranges[fragment]
        size = where[1] - where[0]
        own = sent.result()
        received = self.ends.receive_fragments(round_number, fragment)
        decoded = {}
        for cluster, data in received.items():
            with name_sender(self.ends.lead_workers[cluster]):
                decoded[cluster] = self.differences.decode(data, size)
        decoded[self.ends.cluster] = own
        mean = np.zeros(size, np.float32)
        for cluster in self.ends.lead_workers:  # in the same order everywhere, for identical bits
            mean += np.float32(self.shares[cluster]) * decoded[cluster]
        before = self._read_known[slice(*where)]
        state = self._states[fragment] if fragment in self._states else self.outer.init(before)
        shared, self._states[fragment] = self.outer.update(before, mean, state)
        return shared

    def _take(self, fragment: int, *, exactly: bool = False) -> None:
        place = next((n for n, sent in enumerate(self._in_flight) if sent.fragment == fragment), None)
        if place is None:
            return
        began = time.perf_counter()
        sent = self._in_flight[place]
        shared = sent.shared.result()
        self.wait_seconds += time.perf_counter() - began
        del self._in_flight[place]
        where = self._ranges[fragment]
        self._read_known[slice(*where)] = shared
        if exactly or self.table.delay == 0:
            self.flat.write(where, shared)
        else:
            self.flat.add(where, shared - sent.own_weights)
        self.round_count += 1


def _complete(numbers: Numbers) -> Future[Numbers]:
    found: Future[Numbers] = Future()
    found.set_result(numbers)
    return found
