"""The channels of a program that have an end in this process: what they keep from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from whale_nebula.codec.registry import parse
from whale_nebula.codec.way import NONE
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing
from whale_nebula.passes.batch import entries_per_row
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import Auto, Direction
from whale_nebula.runtime.exchange.crossing import SKIP, Crossing, Crossings
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import States, StepLines, Tally
from whale_nebula.spec import Value


@dataclass
class Channels:
    """What crosses between the hosts of a program, and the ends of channels that are here. `seed` is the run's.

    `here` says which hosts this process is, `clusters` in which clusters hosts stand, where they are not clusters.
    """

    cut: Cut
    routing: Routing
    states: States
    seed: int = 0
    here: Callable[[str], bool] = lambda host: True
    clusters: Mapping[str, str] = field(default_factory=dict)
    last: Mapping[str, BoundaryReport] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _ends: dict[tuple[Value, str, str, bool], Any] = field(default_factory=dict)

    @cached_property
    def crossings(self) -> Crossings:
        """What crosses, by value."""
        return Crossings(self.cut, self.routing, self.clusters)

    @cached_property
    def training(self) -> bool:
        """Whether steps of the program train: only these change what channels remember."""
        return bool(self.cut.program.requests)

    @cached_property
    def may_skip(self) -> bool:
        """Whether any boundary asks that steps with a NaN be left out: then all processes must agree on each step."""
        return self.training and any(each.way.nonfinite == SKIP for each in self.crossings.of_boundaries)

    def end(self, crossing: Crossing, host: str, lane: str, *, out: bool) -> Any:
        """The end of a channel at a host: an `Outgoing`, or an `Incoming`."""
        key = (crossing.value, host, lane, out)
        if key not in self._ends:
            state = self.crossings.state_key(crossing, host, lane, out=out)
            ends = crossing.label, state, crossing.way, self.states, crossing.back
            if out:
                self._ends[key] = Outgoing(*ends, stage=self.cut.program.stages[crossing.source].key)
            else:
                self._ends[key] = Incoming(*ends, dtype=crossing.spec.dtype)
        return self._ends[key]

    @cached_property
    def entries(self) -> Mapping[Value, int]:
        """Of what may come encoded, with a first axis that only a step knows: how many entries a row has there."""
        program, boundaries = self.cut.program, self.crossings.of_boundaries
        coded = dict.fromkeys(each.boundary.value for each in boundaries if each.boundary and each.way.coded)
        return entries_per_row(program, [n for n in coded if (program.graph.spec(n).shape or (0,))[0] is None])

    @cached_property
    def auto(self) -> Auto:
        """Chooses the codecs that are left to the line."""
        return Auto(tuple(self._directions()), self.states, self.training)

    def _directions(self) -> Iterator[Direction]:
        """Those that are sent from here and leave the choice of their codec to the line."""
        for each in self.crossings.of_boundaries:
            links = self.crossings.links(each) if each.way.auto else ()
            for lane in self.crossings.lanes(each) if links else ():
                if self.here(lane.home):
                    key = self.crossings.state_key(each, lane.home, lane.name, out=True)
                    yield Direction(each.label, key, each.way, each.spec, links)

    def lines_of(self, tally: Tally) -> StepLines:
        """What is to be said of a step. Of one that is left out nothing has changed."""
        out, notes = tally.left_out, tally.notes()
        changes = () if out else tally.changes()
        fresh = [note for note in notes if note not in self._said]
        self._said.update(fresh)
        return StepLines((*changes, *fresh), (*changes, *notes, *([f"left out: {out}"] if out else [])), out)

    def boundaries(self) -> tuple[Boundary, ...]:
        """Those of the plan, as they crossed in the last step: on a ramp, and where the line decides."""
        found = {each.value: each for each in self.cut.boundaries}
        for each in self.crossings.of_boundaries:
            way, last = each.way, self.last.get(each.label)
            if each.boundary is not None and last is not None and (way.auto or way.ladder or way.start):
                used = None if last.codec in ("", NONE) else parse(last.codec)
                text = str(replace(way, codec=used, auto=False, ladder=(), start=0))
                crossed = found[each.boundary.value]
                crossed = replace(crossed, backward_codec=text) if each.back else replace(crossed, codec=text)
                found[crossed.value] = crossed
        return tuple(found.values())


@dataclass
class Models:
    """The models of a run, numbered as their first programs come, which is the same order in every process.

    >>> class Variable: ...
    >>> models, ours, theirs = Models(), [Variable(), Variable()], [Variable()]
    >>> models.number(ours), models.number(theirs), models.number(ours[1:])
    (0, 1, 0)
    """

    _known: list[list[weakref.ref[Any]]] = field(default_factory=list)

    def number(self, variables: Iterable[Any]) -> int:
        """The model of a program with these variables."""
        given = list(variables)
        for number, refs in enumerate(self._known):
            if any(ref() is each for ref in refs for each in given):
                refs.extend(weakref.ref(each) for each in given if all(ref() is not each for ref in refs))
                return number
        self._known.append([weakref.ref(each) for each in given])
        return len(self._known) - 1

    def find_gone(self) -> set[int]:
        """The models of which nothing is left."""
        return {number for number, refs in enumerate(self._known) if refs and all(ref() is None for ref in refs)}
