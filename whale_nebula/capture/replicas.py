"""How many replicas the stages of a step have: what the `nb.replica` around them says, or as many as their cluster has
workers for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale_nebula import scopes
from whale_nebula.errors import NestingError, OptionError
from whale_nebula.ir.program import Stage
from whale_nebula.scopes import Frame


@dataclass
class Replicas:
    """The replica scopes that a trace has met: which stood around which stage, and which around all of the step.

    >>> from whale_nebula.scopes import Site
    >>> three = Frame("replica", {"count": 3}, Site("train.py", 4))
    >>> met = Replicas()
    >>> met.entered(three)
    >>> met.stage("gpu", [three], Site("train.py", 5))
    >>> [stage.replicas for stage in met.settled([Stage("gpu", "gpu"), Stage("npu", "npu")])]
    [3, 1]
    """

    around: Frame | None = None
    met: list[Frame] = field(default_factory=list)
    of: dict[str, Frame | None] = field(default_factory=dict)
    holding: set[Frame] = field(default_factory=set)
    home: str = "local"

    @property
    def several(self) -> bool:
        """Whether a batch may have to be cut for the replicas of a stage; asked while their number may yet be open."""
        return any((frame.options["count"] or scopes.most_workers()) > 1 for frame in self._all)

    @property
    def _all(self) -> Sequence[Frame]:
        return [*self.met, *([self.around] if self.around is not None else [])]

    def entered(self, frame: Frame) -> None:
        """A replica scope is entered."""
        if frame not in self._all:
            self.met.append(frame)
        self.home = scopes.home_of(scopes.open_frames())

    def stage(self, key: str, frames: Sequence[Frame], site: object) -> None:
        """A stage is entered inside these scopes."""
        frame = scopes.replica_of(frames) or self.around
        if frame is not None:
            self.holding.add(frame)
        before = self.of.setdefault(key, frame)
        if before is not frame and _count(before) != _count(frame):
            raise OptionError(
                f"stage {key!r} stands in {_said(frame)}, and where it was entered first in {_said(before)}",
                where=str(site),
                why="entering a stage again continues it, and a stage has as many replicas everywhere",
                mend="the same nb.replica(...) around both, or a name of its own for the second: nb.stage(name=...)",
            )

    def settled(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages with their numbers of replicas; a step without a stage is one stage."""
        if not stages:
            return [self._alone()]
        idle = next((frame for frame in self.met if frame not in self.holding), None)
        if idle is not None:
            raise _stageless(idle, stages)
        inside = Counter((self.of.get(stage.key), stage.cluster) for stage in stages)
        return [replace(stage, replicas=self._number(stage, inside)) for stage in stages]

    def _number(self, stage: Stage, inside: Mapping[tuple[Frame | None, str], int]) -> int:
        frame = self.of.get(stage.key)
        if frame is None:
            return 1
        return _count(frame) or max(1, scopes.workers_in(stage.cluster) // inside[frame, stage.cluster])

    def _alone(self) -> Stage:
        """The one stage of a step that names none; where it has replicas, they are on the first cluster."""
        frame = next(iter(self._all), None)
        if frame is None:
            return Stage("stage0", "local")
        count = _count(frame) or scopes.workers_in(self.home)
        return Stage("stage0", self.home, str(frame.site) if count > 1 else "", count)


def _count(frame: Frame | None) -> int:
    """The number that a scope gives; 0 where it leaves it to the cluster."""
    return 1 if frame is None else int(frame.options["count"] or 0)


def _said(frame: Frame | None) -> str:
    return "none" if frame is None else f"nb.replica({_count(frame) or ''}) at {frame.site}"


def _stageless(frame: Frame, stages: Sequence[Stage]) -> NestingError:
    return NestingError(
        f"{_said(frame)} holds no nb.stage",
        where=str(frame.site),
        why=f"the step has stages elsewhere ({', '.join(stage.key for stage in stages[:3])}), and copies are made of "
        "stages",
        mend='with nb.replica(...), nb.stage(name="..."): around the same lines',
    )
