"""The leading program of a run: the one whose steps the run's position counts, where several train."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from whale_nebula.checkpoint.manifest import Position

_AWAY = 32
"""Steps of other programs in a row after which the first of them leads."""


@dataclass
class Leading:
    """Chooses the leading program: that of the running `fit`; in loops the first that trained, until another one has
    trained alone for long, which then leads with all its steps so far.

    `_away` are the programs of the steps since the last one of the leading program, `_beside` those that train in turn
    with it.
    """

    _away: list[str] = field(default_factory=list)
    _beside: set[str] = field(default_factory=set)

    @property
    def trained_others(self) -> bool:
        """Whether other programs have trained since the last step of the leading one."""
        return bool(self._away)

    @property
    def has_others(self) -> bool:
        """Whether other programs have trained since, or train in turn with the leading one."""
        return bool(self._away or self._beside)

    def choose(self, position: Position, program: str) -> Position:
        """The position before a step of a program, with the program that leads from there on."""
        if program == position.program:
            self._beside.update(self._away)
            self._away.clear()
            return position
        self._away.append(program)
        if not position.program or len(self._away) > _AWAY:
            position = self._replace_leading(position)
            if program == position.program:  # this step is not done yet
                position = replace(position, step=position.step - 1)
        return position

    def count_last(self, position: Position) -> Position:
        """The position at the end of a loop, in which the last program leads if it trained after the leading one, not
        in turn with it.
        """
        while self._away and self._beside.isdisjoint(self._away) and position.programs.get(position.program, 0) > 1:
            position = self._replace_leading(position)
        return position

    def _replace_leading(self, position: Position) -> Position:
        """Let the first program lead that trained since the last step of the leading one, and count its steps."""
        away, self._away, self._beside = self._away, [], set()
        first = away[0]
        for program in away:
            if program == first:
                self._beside.update(self._away)
                self._away.clear()
            else:
                self._away.append(program)
        return replace(position, program=first, step=position.step + away.count(first))
