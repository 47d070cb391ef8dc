"""The number of replicas of each stage: from the enclosing `nb.replica`, else from the workers of its cluster."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale_nebula import scopes
from whale_nebula.errors import NebulaWarning, NestingError, OptionError
from whale_nebula.ir.program import Apart, Stage
from whale_nebula.scopes import Frame, Site


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
    apart: Apart | None = None
    slow: Frame | None = None

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
            _tell_around(self.around, frame)
        frames = scopes.open_frames()
        self.home = scopes.home_of(frames)
        self._slowly(frame, frames)

    def _slowly(self, frame: Frame, frames: Sequence[Frame]) -> None:
        """A scope may say that each cluster trains a copy: then it does so of the whole step."""
        apart = scopes.apart_of(frames, frame)
        if apart is None:
            return
        if self.apart is not None and replace(self.apart, where="") != replace(apart, where=""):
            raise OptionError(
                f"nb.replica(sync_every={apart.every}) says something else than the one at {self.apart.where}",
                where=apart.where,
                why=f"a step is copied to all clusters as a whole: {apart}; and there: {self.apart}",
                mend="one nb.replica(sync_every=...) around the whole step",
            )
        self.apart, self.slow, self.home = apart, frame, scopes.own_home(frames)

    def compressed(self, frames: Sequence[Frame]) -> None:
        """A compress scope is entered: inside a copy that each cluster trains, it says how differences cross."""
        within = self.slow is not None and self.slow in frames and scopes.stage_of(frames) is None
        found = scopes.apart_of(frames, self.slow) if within else None
        if self.apart is not None and found is not None:
            self.apart = replace(self.apart, codec=found.codec)

    def stage(self, key: str, frames: Sequence[Frame], site: object) -> None:
        """A stage is entered inside these scopes."""
        frame = scopes.replica_of(frames) or self.around
        if frame is not None:
            self.holding.add(frame)
        self._check_homeless(frames, site)
        before = self.of.setdefault(key, frame)
        if before is not frame and _count(before) != _count(frame):
            raise OptionError(
                f"stage {key!r} stands in {_describe_frame(frame)}, and where it was entered first in "
                f"{_describe_frame(before)}",
                where=str(site),
                why="entering a stage again continues it, and a stage has as many replicas everywhere",
                mend="the same nb.replica(...) around both, or a name of its own for the second: nb.stage(name=...)",
            )

    def _check_homeless(self, frames: Sequence[Frame], site: object) -> None:
        """What each cluster has a copy of is on no cluster in particular."""
        stage = scopes.stage_of(frames)
        named = None if stage is None or self.apart is None else stage.options.get("cluster")
        if named is not None and self.slow is not None:
            raise OptionError(
                f"nb.stage(cluster={named!r}) stands in {_describe_frame(self.slow)}",
                where=str(site),
                why="with sync_every each cluster trains a copy of all that is inside, so no stage of it is on one",
                mend=f'nb.stage(name="{named}"), or leave sync_every out',
            )

    def settled(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages with their numbers of replicas; a step without a stage is one stage."""
        if not stages:
            return [self._alone()]
        if self.apart is not None:
            stages = [replace(stage, cluster=self.home) for stage in stages]
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
        return Stage("stage0", self.home, str(frame.site) if count > 1 or self.apart else "", count)


def _count(frame: Frame | None) -> int:
    """The number that a scope gives; 0 where it leaves it to the cluster."""
    return 1 if frame is None else int(frame.options["count"] or 0)


def _describe_frame(frame: Frame | None) -> str:
    if frame is None:
        return "none"
    every = frame.options.get("sync_every")
    said = [str(_count(frame))] * bool(_count(frame)) + [f"sync_every={every}"] * (every is not None)
    return f"nb.replica({', '.join(said)}) at {frame.site}"


_told: set[tuple[Site, Site]] = set()


def _tell_around(around: Frame | None, frame: Frame) -> None:
    """The one that a model was built under goes before one that stands around `fit`."""
    if around is None or around.options == frame.options or (around.site, frame.site) in _told:
        return
    _told.add((around.site, frame.site))
    warning = NebulaWarning(
        f"{_describe_frame(around).partition(' at ')[0]} around the step does not count",
        where=str(around.site),
        why=f"what it holds stands in {_describe_frame(frame)}; it is said once for this place",
        mend="leave one of the two out",
    )
    warnings.warn_explicit(warning, NebulaWarning, around.site.file, around.site.line)


def _stageless(frame: Frame, stages: Sequence[Stage]) -> NestingError:
    return NestingError(
        f"{_describe_frame(frame)} holds no nb.stage",
        where=str(frame.site),
        why=f"the step has stages elsewhere ({', '.join(stage.key for stage in stages[:3])}), and copies are made of "
        "stages",
        mend='with nb.replica(...), nb.stage(name="..."): around the same lines',
    )
