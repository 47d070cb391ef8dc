"""The leading program of a run: if several programs train, the position of the run counts the steps of this one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from whale_nebula.checkpoint.manifest import Position

_STEPS_BEFORE_LEADING = 32
"""The number of steps of other programs in a row up to which the leading program stays the same."""


@dataclass
class LeadingProgram:
    """Chooses the leading program: that of the running `fit`; in loops the first program that trained, until a
    different one has trained alone for long, which then leads with all its steps so far.

    `_other_steps` are the programs of the steps since the last one of the leading program, in order, and `_concurrent`
    those that train in turn with it.
    """

    _other_steps: list[str] = field(default_factory=list)
    _concurrent: set[str] = field(default_factory=set)

    @property
    def trained_others(self) -> bool:
        """Whether other programs have trained since the last step of the leading one."""
        return bool(self._other_steps)

    @property
    def has_others(self) -> bool:
        """Whether other programs have trained since, or train in turn with the leading one."""
        return bool(self._other_steps or self._concurrent)

    def choose(self, position: Position, program: str) -> Position:
        """The position before a step of a program, with the program that leads from there on."""
        if program == position.program:
            self._concurrent.update(self._other_steps)
            self._other_steps.clear()
            return position
        self._other_steps.append(program)
        if not position.program or len(self._other_steps) > _STEPS_BEFORE_LEADING:
            position = self._replace_leading(position)
            if program == position.program:  # this step is not done yet
                position = replace(position, step=position.step - 1)
        return position

    def count_last(self, position: Position) -> Position:
        """The position at the end of a loop, in which the last program leads if it trained after the leading one, not
        in turn with it.
        """
        while (
            self._other_steps
            and self._concurrent.isdisjoint(self._other_steps)
            and position.programs.get(position.program, 0) > 1
        ):
            position = self._replace_leading(position)
        return position

    def _replace_leading(self, position: Position) -> Position:
        """Let the first program lead that has trained since the last step of the leading one, and count its steps."""
        steps, self._other_steps, self._concurrent = self._other_steps, [], set()
        first = steps[0]
        for program in steps:
            if program == first:
                self._concurrent.update(self._other_steps)
                self._other_steps.clear()
            else:
                self._other_steps.append(program)
        return replace(position, program=first, step=position.step + steps.count(first))
