"""Local SGD of all clusters in one process: each has its own copy of the variables, and they run in turns.

What a user's model holds between steps is what the first cluster has. The others' values wait in copies; a cluster's
turn begins with its copies put into the model's variables, and ends with them taken out again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.ir.program import Leaf
from whale_nebula.report.records import LinkReport
from whale_nebula.runtime.local_sgd.deltas import seeds_of, sow
from whale_nebula.runtime.local_sgd.step import Meetings, Runner, Since, less, own_rows
from whale_nebula.runtime.local_sgd.topology import Sites
from whale_nebula.runtime.step.clock import StepOutcome


@dataclass
class Copies:
    """What the clusters but the first hold of the variables of a run, by the variables' ids."""

    kept: dict[str, dict[int, Any]] = field(default_factory=dict)
    last: dict[int, Any] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)

    def of(self, cluster: str, variables: Mapping[str, Any], place: int) -> dict[int, Any]:
        """A cluster's copies of these variables, made from the model's where there are none yet."""
        own = self.kept.setdefault(cluster, {})
        fresh = {path: variable for path, variable in variables.items() if id(variable) not in own}
        made = {path: tf.Variable(variable, trainable=False) for path, variable in fresh.items()}
        sow(made, place)
        self.seeds.update(id(seed) for seed in seeds_of(fresh).values())
        own.update({id(variable): made[path] for path, variable in fresh.items()})
        return own

    def left(self, variables: Iterable[Any]) -> None:
        """A step has left the model's variables so."""
        self.last.update({id(variable): variable.read_value() for variable in variables})

    def follow(self, variables: Iterable[Any]) -> None:
        """What was written to the model's variables since (a learning rate, a layer's weights) is written in every
        process of a run: so it is in all copies.
        """
        for variable in variables:
            before = None if id(variable) in self.seeds else self.last.get(id(variable))
            if before is not None and not _same(before.numpy(), variable.numpy()):
                for own in self.kept.values():
                    if id(variable) in own:
                        own[id(variable)].assign(variable)

    def alike(self, variables: Collection[Any]) -> None:
        """The model's variables were replaced: so are all copies."""
        for own in self.kept.values():
            for variable in variables:
                if id(variable) in own:
                    own[id(variable)].assign(variable)


@dataclass
class TakesTurns:
    """Runs a step as each cluster in turn. Its results are those of the first, on that one's rows."""

    inner: Runner
    leaves: Sequence[Leaf]
    sites: Sites
    variables: Mapping[str, Any]
    copies: Copies
    make: Callable[[], Mapping[str, Meetings]]
    _rounds: Mapping[str, Meetings] | None = None
    _sent: Mapping[str, LinkReport] = field(default_factory=dict)
    _since: Since = field(default_factory=Since)

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        rounds = self.rounds
        for each in rounds.values():
            each.begin()
        self.copies.follow(self.variables.values())
        began = time.perf_counter()
        first, *others = self.sites.names
        for cluster in others:
            with self._turn(cluster):
                self.inner.run(own_rows(self.leaves, tensors, self.sites, cluster))
        outcome = self.inner.run(own_rows(self.leaves, tensors, self.sites, first))
        for each in rounds.values():
            each.tell()
        for each in rounds.values():
            each.take()
        self.copies.left(self.variables.values())
        before, self._sent = self._sent, sent_reports(rounds)
        links = {name: less(now, before.get(name)) for name, now in self._sent.items()}
        seconds = time.perf_counter() - began
        said = self._since.step(rounds[first], seconds)
        return replace(outcome, seconds=seconds, links={**outcome.links, **links}, meetings=said)

    @property
    def rounds(self) -> Mapping[str, Meetings]:
        """Those of each cluster, made at the first step."""
        if self._rounds is None:
            self._rounds = self.make()
            self._sent = sent_reports(self._rounds)
        return self._rounds

    @contextlib.contextmanager
    def _turn(self, cluster: str) -> Iterator[None]:
        """Inside, the model's variables have what this cluster has."""
        own = self.copies.of(cluster, self.variables, self.sites.names.index(cluster))
        first = {path: tf.identity(variable) for path, variable in self.variables.items()}
        for variable in self.variables.values():
            variable.assign(own[id(variable)])
        try:
            yield
            for variable in self.variables.values():
                own[id(variable)].assign(variable)
        finally:
            for path, variable in self.variables.items():
                variable.assign(first[path])


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def sent_reports(rounds: Mapping[str, Meetings]) -> Mapping[str, LinkReport]:
    """What all clusters have sent so far, by the names of links."""
    return {name: report for each in rounds.values() for name, report in each.ends.sent().items()}
