"""Synchronous rounds of local SGD: send own fragments, receive the others', and apply the outer optimizer.

All clusters have the same *shared* weights. A fragment of a cluster's difference (shared minus own) is sent after a
step. Some steps later, when the fragments of the others have arrived, the outer optimizer is applied to their mean. All
clusters decode the same bytes, add them in the same order and keep the same state, so the shared weights stay
bit-identical without being sent. A cluster's training *after sending* is kept: its own weights change by the difference
between the new shared weights and those at the time of sending.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import tensorflow as tf

from whale_nebula.ir.outer_optimizer import Numbers, Outer
from whale_nebula.runtime.local_sgd.attendance import share_among
from whale_nebula.runtime.local_sgd.topology import ClusterSync, Range, name_sender
from whale_nebula.runtime.single_thread import SingleThread
from whale_nebula.schedule.rounds import Timetable, list_ranges


class Averaged(NamedTuple):
    """The result of an exchange: the new shared weights, and the clusters that were absent."""

    shared: Numbers
    absent: tuple[str, ...] = ()


class SentFragment(NamedTuple):
    """A fragment in flight: the cluster's weights when it was sent, and the result of its exchange."""

    fragment: int
    own_weights: Numbers
    averaged: Future[Averaged]


@dataclass
class Rounds(ClusterSync):
    """The rounds of one cluster. `shares` are the weights of the clusters' differences in their mean, by name; if some
    are absent, the weights of the others are scaled to a sum of 1. `note_absent` is called with the absent clusters of
    an exchange when its result is applied, so at the same step in all clusters.
    """

    table: Timetable = field(kw_only=True)
    outer: Outer = field(kw_only=True)
    shares: Mapping[str, float] = field(kw_only=True)
    note_absent: Callable[[Collection[str]], None] = field(kw_only=True, default=lambda absent: None)
    _missed_counts: Counter[str] = field(default_factory=Counter)
    _states: dict[int, Any] = field(default_factory=dict)
    _in_flight: list[SentFragment] = field(default_factory=list)
    _round_number: int = 0
    _sending: SingleThread = field(default_factory=lambda: SingleThread("nebula-sends"))
    _receiving: SingleThread = field(default_factory=lambda: SingleThread("nebula-receives"))

    def send_due(self) -> None:
        """After a step: send the fragments that are due."""
        self.steps += 1
        for fragment in self.table.sends(self.steps):
            self._send(fragment)

    def apply_due(self) -> None:
        """Apply the fragments that are due now; waits for those that have not arrived."""
        for fragment in self.table.applies(self.steps):
            self._apply(fragment)

    def send_remaining(self) -> None:
        """Apply fragments in flight, then send all differences, because all clusters need the shared weights now."""
        if self.is_synchronized:
            return
        while self._in_flight:
            self._apply(self._in_flight[0].fragment)
        for fragment in range(self.table.fragments):
            self._send(fragment)

    def receive_remaining(self) -> None:
        """Receive the differences, after which all clusters have bit-identical weights."""
        for sent in self._in_flight[:]:
            self._apply(sent.fragment, exactly=True)
        self._synchronized_steps = self.steps

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Take a snapshot of the state. The compression errors and the states of the outer optimizer are those after
        the exchanges in flight, whose results are part of the snapshot.
        """
        plain = {
            "steps": self.steps,
            "when": self._round_number,
            "met": self.round_count,
            "told": self._synchronized_steps,
            "missed": dict(self._missed_counts),
        }
        narrow = any(variable.dtype != tf.float32 for variable in self.flat.variables)
        shared = None if self._shared is None or not narrow else self._shared.copy()  # variables would round them
        on_way = list(self._in_flight)
        left = self._sending.submit(lambda: self.differences.residues)
        states = self._receiving.submit(lambda: dict(self._states))

        def collect() -> dict[str, Any]:
            sent = [[each.fragment, each.own_weights, each.averaged.result().shared] for each in on_way]
            return {**plain, "shared": shared, "sent": sent, "left": left.result(), "states": states.result()}

        return collect

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Exchanges in flight at its snapshot are complete now, and are applied when they are due."""
        self.steps, self.round_count, self._synchronized_steps = (int(state[name]) for name in ("steps", "met", "told"))
        self._round_number = max(self._round_number, int(state["when"]))  # numbers of sent fragments are not used again
        self._shared = self._shared if state["shared"] is None else state["shared"]
        self.differences.resume(state["left"])
        self._states = dict(state["states"])
        self._missed_counts = Counter(state.get("missed", {}))
        self._in_flight = [
            SentFragment(int(fragment), own, _complete(shared)) for fragment, own, shared in state["sent"]
        ]

    def join(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of another cluster, because this one was absent when it was captured: with the shared
        weights, and results in flight as if this cluster had not trained since they were sent.
        """
        self.resume({**state, "left": {}})
        self._in_flight = [
            each._replace(own_weights=self.flat.read(self._ranges[each.fragment])) for each in self._in_flight
        ]

    @property
    def missed(self) -> Mapping[str, float]:
        """How many exchanges of all weights each cluster has missed so far, by name, without those that missed none."""
        return {cluster: count / max(1, self.fragments) for cluster, count in sorted(self._missed_counts.items())}

    def restart(self) -> None:
        """Restart with the current weights, and reset the outer optimizer."""
        super().restart()
        self._states.clear()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._sending, self._receiving):
            pool.close(cancel=True)

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
    def _shared_weights(self) -> Numbers:
        if self._shared is None:
            self.begin()
        return self._shared if self._shared is not None else np.zeros(0, np.float32)

    def _send(self, fragment: int) -> None:
        where = self._ranges[fragment]
        if where[0] == where[1]:
            return
        own = self.flat.read(where)
        difference = self._shared_weights[slice(*where)] - own
        self._round_number += 1
        sent = self._sending.submit(self._send_difference, self._round_number, fragment, difference)
        averaged = self._receiving.submit(self._average_differences, self._round_number, fragment, sent)
        self._in_flight.append(SentFragment(fragment, own, averaged))

    def _send_difference(self, round_number: int, fragment: int, difference: Numbers) -> Numbers:
        data, there = self.differences.encode(fragment, difference)
        self.ends.send_fragment(round_number, fragment, data, difference.nbytes)
        return there

    def _average_differences(self, round_number: int, fragment: int, sent: Future[Numbers]) -> Averaged:
        """The new shared weights of a fragment: receives the differences of all clusters that take part, and applies
        the outer optimizer to their mean.
        """
        where = self._ranges[fragment]
        size = where[1] - where[0]
        own = sent.result()
        before = self._shared_weights[slice(*where)]
        received = self.ends.receive_fragments(round_number, fragment, lambda: google_crc32c.value(before.tobytes()))
        decoded = {}
        for cluster, data in received.items():
            with name_sender(self.ends.lead_workers[cluster]):
                decoded[cluster] = self.differences.decode(data, size)
        decoded[self.ends.cluster] = own
        mean = np.zeros(size, np.float32)
        shares = share_among(self.shares, decoded)
        for cluster in self.ends.lead_workers:  # in the same order everywhere, for identical bits
            if cluster in decoded:
                mean += np.float32(shares[cluster]) * decoded[cluster]
        state = self._states[fragment] if fragment in self._states else self.outer.init(before)
        shared, self._states[fragment] = self.outer.update(before, mean, state)
        return Averaged(shared, self.ends.absent)

    def _apply(self, fragment: int, *, exactly: bool = False) -> None:
        """Wait for the exchange of a fragment in flight, if there is one, and apply it: add the difference between the
        new shared weights and the sent ones, or set the shared weights `exactly`.
        """
        place = next((n for n, sent in enumerate(self._in_flight) if sent.fragment == fragment), None)
        if place is None:
            return
        began = time.perf_counter()
        sent = self._in_flight[place]
        shared, absent = sent.averaged.result()
        self.wait_seconds += time.perf_counter() - began
        del self._in_flight[place]
        where = self._ranges[fragment]
        self._shared_weights[slice(*where)] = shared
        if exactly or self.table.delay == 0:
            self.flat.write(where, shared)
        else:
            self.flat.add(where, shared - sent.own_weights)
        self.round_count += 1
        self._missed_counts.update(absent)
        self.note_absent(absent)


def _complete(shared: Numbers) -> Future[Averaged]:
    found: Future[Averaged] = Future()
    found.set_result(Averaged(shared))
    return found
