"""Lifecycle of a run's rounds: opened for a set of weights, settled before reads, restarted after writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import NotYetError, PlanMismatchError
from whale_nebula.ir.program import ASYNC, Apart
from whale_nebula.runtime.local_sgd.async_mode import Pushes, Server
from whale_nebula.runtime.local_sgd.step import Asked, Copies
from whale_nebula.runtime.local_sgd.sync_rounds import Rounds
from whale_nebula.runtime.local_sgd.topology import Differences, Ends, Flat, Meetings, Sites, seeds_of, sow
from whale_nebula.runtime.run import Run
from whale_nebula.schedule.rounds import Timetable, pieces
from whale_nebula.transport import MemoryNetwork

_LOG = logging.getLogger("whale_nebula.runtime.run")
_MOST = 8
"""Bytes that a number may cross as: a large share of them, by topk, takes more than all of them as they are."""
_OWN = 1 << 10
"""Bytes that a codec may put before the numbers."""


@dataclass
class Opened:
    """All rounds of a run; those of a set of weights are the same for every step that trains them."""

    run: Run
    copies: Copies = field(default_factory=Copies)
    _known: dict[frozenset[int], Mapping[str, Meetings]] = field(default_factory=dict)
    _said: dict[frozenset[int], Apart] = field(default_factory=dict)
    _variables: dict[int, Any] = field(default_factory=dict)
    _made: int = 0

    @cached_property
    def asked(self) -> Asked:
        """Who was asked to leave this run."""
        session = self.run.ledger.session
        return Asked(session.worker, session.links)

    def here(
        self, apart: Apart, sites: Sites, weights: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Mapping[str, Meetings]:
        """The rounds of these weights in this process, by cluster: of one cluster, or of all where it has all.

        `variables` are all that the step touches.
        """
        key, said = frozenset(id(variable) for variable in weights.values()), replace(apart, where="")
        if key in self._known and self._said[key] != said:
            self.settle()
            for each in self._known.pop(key).values():
                each.close()
        if key not in self._known:
            self._said[key] = said
            self._check(key, weights, apart)
            fresh = {path: variable for path, variable in variables.items() if id(variable) not in self._variables}
            self._variables.update({id(variable): variable for variable in fresh.values()})
            self._made += 1
            make = self._all if self.run.alone else self._own
            self._known[key] = make(apart, sites, weights, fresh)
        return self._known[key]

    def settle(self) -> None:
        """Everybody has the same weights after this; every process calls it at the same point."""
        try:
            self._settle()
        except BaseException as failure:
            if not self.run.alone:
                self.run.ledger.session.fail(failure)
            raise

    def _settle(self) -> None:
        self.copies.follow(self._variables.values())
        for rounds in self._known.values():
            if all(each.settled for each in rounds.values()):
                continue
            if not self.run.alone:
                self._meet(*rounds.values())
            for each in rounds.values():
                each.settle_tell()
            for each in rounds.values():
                each.settle_take()
            self.copies.left(self._variables.values())

    def _meet(self, rounds: Meetings) -> None:
        """All processes come to the same meeting, and what they shared before it must be the same bits."""
        session, shared = self.run.ledger.session, rounds.digest()
        told = session.exchange(
            f"a meeting of all clusters after {rounds.steps} steps", {"shared": shared}, session.links
        )
        unlike = next((peer for peer, sheet in told.items() if sheet.get("shared") != shared), None)
        if unlike is not None:
            raise PlanMismatchError(
                f"{session.worker} and {unlike} no longer share the same weights, after {rounds.steps} steps",
                where=unlike,
                why="what all share is computed by each from the same bytes; a device has computed it in another way",
                mend="start all workers from a checkpoint; model.save_weights(...) while all are alike writes one",
            )

    def restart(self) -> None:
        """The weights were replaced, in every process by the same ones."""
        for rounds in self._known.values():
            first = next(iter(rounds.values()))
            self.copies.alike(first.flat.variables)
        self.copies.left(self._variables.values())
        for rounds in self._known.values():
            for each in rounds.values():
                each.restart()

    def close(self) -> None:
        """Let all threads go."""
        for each in [each for rounds in self._known.values() for each in rounds.values()]:
            each.close()

    def _check(self, key: frozenset[int], weights: Mapping[str, Any], apart: Apart) -> None:
        """A weight belongs to one set of rounds."""
        met = [known for known in self._known if known & key]
        if met:
            shared = next(path for path, variable in weights.items() if id(variable) in met[0])
            raise NotYetError(
                "two steps that train some of the same weights apart",
                where=apart.where,
                why=f"{shared!r} is trained by an earlier step together with other weights",
                mend="one step (a function, or fit) for all that is trained with sync_every",
            )

    # ------------------------------------------------------------------ all clusters are here
    def _all(
        self, apart: Apart, sites: Sites, weights: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Mapping[str, Meetings]:
        specs = {(a, b): self.run.links.between(a, b) for a in sites.names for b in sites.names if a != b}
        network = MemoryNetwork(specs)
        firsts = {cluster: f"{cluster}/0" for cluster in sites.names}
        made = {}
        for place, (cluster, first) in enumerate(firsts.items()):
            others = {other: peer for other, peer in firsts.items() if peer != first}
            links = {peer: network.link(first, peer, cluster, other) for other, peer in others.items()}
            ends = Ends(first, cluster, firsts, links, self.run.config.patience, number=self._made)
            held = weights
            if place:
                own = self.copies.of(cluster, variables, place)
                held = {path: own[id(variable)] for path, variable in weights.items()}
            made[cluster] = _meetings(apart, sites, held, ends)
        return made

    # ------------------------------------------------------------------ others are in other processes
    def _own(
        self, apart: Apart, sites: Sites, weights: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Mapping[str, Meetings]:
        session, here = self.run.ledger.session, self.run.here()
        firsts = {cluster: workers[0] for cluster, workers in sites.workers.items()}
        mates = [worker for worker in sites.workers[here.cluster] if worker != session.worker]
        ends = Ends(session.worker, here.cluster, firsts, session.links, session.patience, mates, self._made)
        rounds = _meetings(apart, sites, weights, ends, waits=True)
        session.expected.add_round(ends.program, _MOST * rounds.flat.total + _OWN)
        self._start_alike(rounds, seeds_of(variables))
        sow(variables, sites.names.index(here.cluster))
        return {here.cluster: rounds}

    def _start_alike(self, rounds: Meetings, seeds: Mapping[str, Any]) -> None:
        """All begin with the first worker's seeds and weights; where these are the same already, they do not cross."""
        session, ends = self.run.ledger.session, rounds.ends
        whole = (0, rounds.flat.total)
        own = {
            "weights": google_crc32c.value(rounds.flat.read(whole).tobytes()),
            "seeds": [[int(number) for number in seed.numpy()] for seed in seeds.values()],
        }
        told = session.exchange("the weights that all clusters begin with", own, session.links)
        told = {**told, session.worker: own}
        first = next(iter(ends.firsts.values()))
        for seed, numbers in zip(seeds.values(), told[first]["seeds"], strict=True):
            seed.assign(tf.constant(numbers, seed.dtype))
        if len({sheet["weights"] for sheet in told.values()}) == 1:
            return
        _LOG.info("%s: the clusters have unlike weights, and all begin with those of %s", session.worker, first)
        if session.worker == first:
            data = rounds.flat.read(whole).view(np.uint8)
            for peer in session.links:
                ends.send_start(peer, data)
        else:
            rounds.flat.write(whole, np.asarray(ends.receive_start(first)).view(np.float32))


def _meetings(apart: Apart, sites: Sites, weights: Mapping[str, Any], ends: Ends, waits: bool = False) -> Meetings:
    """What a cluster does between its steps."""
    flat, way = Flat(tuple(weights.values())), parse_way(apart.codec)
    if apart.mode == ASYNC:
        serves = ends.worker == ends.server
        server = Server(ends, way, sites.shares, apart.staleness, waits) if serves else None
        return Pushes(flat, ends, Differences(way), every=apart.every, server=server)
    table = Timetable(apart.every, apart.fragments or pieces(flat.total, apart.every), apart.delay)
    return Rounds(flat, ends, Differences(way), table=table, outer=apart.outer, shares=sites.shares)
