"""The numbers of stages that name no cluster and stand in no block: they are dealt when a step is captured.

While a functional model is built outside of `nb.cluster`, nobody knows where one model ends and the next begins. A step
knows its stages: they are numbered from 0 on, in the order in which they were entered. A stage keeps its number in the
steps that follow, so a part of a model that predicts alone stays on its cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from whale_nebula.scopes.frames import Block, Frame, Known, current_stack
from whale_nebula.scopes.identity import dealt_to


@dataclass(slots=True)
class Numbers:
    """The stages of one step that stood in no block when they were built: the key and the cluster of each."""

    homes: dict[Frame, tuple[str, str]] = field(default_factory=dict)

    def meet(self, stages: Iterable[Frame], around: Sequence[Frame]) -> None:
        """These stages belong to the step, whose call stands `around`."""
        fresh = {frame for frame in stages if frame.place is not None and frame not in self.homes}
        ordered = sorted(fresh, key=lambda frame: frame.place or 0)
        block = current_stack().block
        for frame in ordered:
            if _unnamed(frame) and frame.dealt is not None and _key(frame.dealt) not in block.stages:
                self._settle(frame, frame.dealt, block, around)
        for number, frame in enumerate(ordered, block.entries):
            if frame not in self.homes:
                self._settle(frame, _free(number, block) if _unnamed(frame) else number, block, around)
        last = max((frame.dealt for frame in ordered if frame.dealt is not None), default=-1)
        block.entries = max(block.entries + len(ordered), last + 1)

    def identity(self, frame: Frame, around: Sequence[Frame]) -> tuple[str | None, str | None]:
        """(key, cluster) of a stage in this step."""
        self.meet([frame], around)
        return self.homes.get(frame, (frame.key, frame.cluster))

    def _settle(self, frame: Frame, number: int, block: Block, around: Sequence[Frame]) -> None:
        key = _key(number) if _unnamed(frame) else str(frame.key)
        if frame.options.get("cluster") is not None:
            cluster = str(frame.cluster)
        else:
            frame.dealt = number if frame.dealt is None else frame.dealt
            known = block.stages.get(key)
            cluster = known.cluster if known else dealt_to(number if _unnamed(frame) else frame.dealt, around)
        block.stages.setdefault(key, Known(cluster, frame.site))
        self.homes[frame] = key, cluster


def _unnamed(frame: Frame) -> bool:
    return frame.options.get("name") is None and frame.options.get("cluster") is None


def _free(number: int, block: Block) -> int:
    return number if _key(number) not in block.stages else _free(number + 1, block)


def _key(number: int) -> str:
    return f"stage{number}"
