"""What workers of clusters that train apart tell each other of savings: they share no steps in whose sheets to say it.

The first worker says before which step all save: one that nobody reaches without having heard it. Each says when its
part is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.errors import DeadlineError
from whale_nebula.runtime.checkpoint.level import Level
from whale_nebula.transport import Link
from whale_nebula.wire.message import build_message

_SAVING = "SAVING"


@dataclass
class Notices:
    """Those of one worker. `due` says by level after which step it is saved."""

    worker: str
    links: Mapping[str, Link]
    levels: Sequence[Level]
    patience: float
    due: dict[int, int] = field(default_factory=dict)
    _parts: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)

    def announce(self, level: int, step: int) -> None:
        """All save a level after this step."""
        self._post(level, step)
        self.due[level] = step

    def take_due(self, step: int) -> list[Level]:
        """The levels that are saved after a step. One that should have been before it was heard of too late."""
        found = []
        for level in [level for level, due in self.due.items() if due <= step]:
            due = self.due.pop(level)
            if due == step:
                found.append(self.levels[level])
            else:
                self._tell_part(level, due, "!it heard of it too late")
        return found

    def hear(self) -> None:
        """Say which parts are written, take what others have said, and conclude what is complete."""
        self._tell_written()
        for peer in self.links:
            while self._take(peer, 0.0):
                continue
        self._settle()

    def drain(self) -> None:
        """Wait until all that is being written here has been written everywhere."""
        self.hear()
        while any(level.busy for level in self.levels):
            self._tell_written(wait=True)
            for number, level in enumerate(self.levels):
                step = level.pending
                for peer in self.links if step is not None else ():
                    while step is not None and peer not in self._parts.get((number, step), {}):
                        self._take(peer, self.patience)
            self._settle()

    def _tell_written(self, *, wait: bool = False) -> None:
        for number, level in enumerate(self.levels):
            said = level.read_part(wait=wait)
            if said is not None and self.worker not in self._parts.get((number, said[0]), {}):
                self._tell_part(number, *said)

    def _tell_part(self, level: int, step: int, digest: str) -> None:
        self._post(level, step, part=digest)
        self._parts.setdefault((level, step), {})[self.worker] = digest

    def _settle(self) -> None:
        for number, level in enumerate(self.levels):
            step = level.pending
            if step is not None:
                level.settle(self._parts.get((number, step), {}))
            if step is not None and level.pending is None:
                self._parts = {key: told for key, told in self._parts.items() if key[0] != number or key[1] > step}

    def _post(self, level: int, step: int, **part: str) -> None:
        for link in self.links.values():
            link.post(build_message(_SAVING, level=level, step=step, **part))

    def _take(self, peer: str, patience: float) -> bool:
        """Take what a peer has said, if it has said something."""
        said = None
        with contextlib.suppress(*([] if patience else [DeadlineError])):
            said = self.links[peer].take(_SAVING, patience)
        if said is None or said["level"] >= len(self.levels):
            return said is not None
        if "part" in said:
            self._parts.setdefault((said["level"], said["step"]), {})[peer] = said["part"]
        else:
            self.due[said["level"]] = said["step"]
        return True
