"""The names of variables in checkpoints, and the titles of programs that train them.

Models that are created again, and loops that train several models, repeat names: the n-th variable with a path in
programs of one name, and the n-th program of one name, get names that end in `@n`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

Trained = weakref.WeakValueDictionary[int, Any]


@dataclass
class VariableNames:
    """The names in checkpoints of the variables of a process, `by_id`. A name is not reused, even if its variable no
    longer exists.

    The n-th variable with a path in programs of one name has the key `path@n`. `aliases` gives, by program and key, the
    names that are not the paths of their variables; `saved_aliases` are those of the checkpoint that the run resumes
    from. `first_numbers` has by program the number of its first variables, if earlier ones are not created again, and
    `_met` by program and path the names of its variables in this order.
    """

    by_id: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    saved_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    first_numbers: dict[str, int] = field(default_factory=dict)
    _alive: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    _met: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def used(self) -> Collection[str]:
        """The names of all variables, also of those that no longer exist."""
        return self._alive.keys()

    def find_alive(self) -> dict[str, Any]:
        """All variables that still exist, by name."""
        found = {name: known() for name, known in self._alive.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    def find(self, name: str) -> Any:
        """The variable with this name, or None if it does not exist."""
        known = self._alive.get(name)
        return None if known is None else known()

    def add(self, program: str, variables: Mapping[str, Any], free: Collection[str] = ()) -> dict[str, str]:
        """Register the variables of a program, by path; returns their paths by name. The names in `free` may be given
        to different variables.
        """
        for path, variable in sorted(variables.items()):
            known = self._alive.get(self.by_id.get(id(variable), ""))
            name = None if known is None or known() is not variable else self.by_id[id(variable)]
            name = self._choose_name(program, path, name, free)
            self._alive[name], self.by_id[id(variable)] = weakref.ref(variable), name
        return {self.by_id[id(variable)]: path for path, variable in sorted(variables.items())}

    def hold(self, variables: Mapping[str, Any]) -> None:
        """Register variables by name that belong to no program of this run."""
        self._alive |= {name: weakref.ref(variable) for name, variable in variables.items()}

    def forget(self, variable: Any) -> str:
        """Forget the name of a variable, so that a different one gets it; returns the name."""
        name = self.by_id.pop(id(variable))
        del self._alive[name]
        for names in self._met.values():
            names[:] = [each for each in names if each != name]
        return name

    def find_key(self, program: str, path: str) -> str:
        """The key of the newest variable with a path among the aliases of a program."""
        count = len(self._met.get((program, path), ()))
        return path if count <= 1 else f"{path}@{count}"

    def list_programs(self) -> set[str]:
        """The names of the programs that have registered variables."""
        return {program for program, _ in self._met}

    def number_names(self, program: str) -> dict[str, int]:
        """The numbers of a program's variables among those with the same path, from 0, by name."""
        lists = (names for (each, _), names in self._met.items() if each == program)
        return {name: number for names in lists for number, name in enumerate(names)}

    def _choose_name(self, program: str, path: str, known: str | None, free: Collection[str]) -> str:
        """The name of a variable in checkpoints: the one by which it is `known`, otherwise its path, or a free name if
        that is already used.
        """
        saved = self.saved_aliases.get(program, {})
        if (program, path) not in self._met:
            numbers = range(self.first_numbers.get(program, 1), 1, -1)
            first = next((each for each in numbers if f"{path}@{each}" in saved), 1)
            self._met[program, path] = [""] * (first - 1)
        met = self._met[program, path]
        if known in met:
            return known
        met.append("")
        key = self.find_key(program, path)
        name, number = known or saved.get(key, key), 2
        while known is None and name in self._alive and name not in free:
            name, number = f"{path}@{number}", number + 1
        if name != path:
            self.aliases.setdefault(program, {})[key] = name
        met[-1] = name
        return name


@dataclass
class ProgramTitles:
    """The titles of programs, which distinguish programs that share a name and train different variables. `saved` has
    by title the name of a variable that the program trains, from the checkpoint that the run resumes from. `trained`
    has the trained variables by program and title.
    """

    names: VariableNames
    saved: Mapping[str, str] = field(default_factory=dict)
    trained: dict[str, dict[str, Trained]] = field(default_factory=dict)

    def find(self, program: str, trained: Sequence[Any]) -> str:
        """The title of a program that trains these variables: its name, with a number if other programs with that name
        train none of these.
        """
        met, own = self.trained.setdefault(program, {}), {id(each): each for each in trained}
        title = next((title for title, known in met.items() if any(each in known for each in own)), None)
        title = title or self._choose(program, {self.names.by_id.get(each, "") for each in own})
        self.note_trained(program, title, trained)
        return title

    def note_trained(self, program: str, title: str, trained: Sequence[Any]) -> None:
        """Record that the program with this title trains these variables."""
        known = self.trained[program].setdefault(title, weakref.WeakValueDictionary())
        known.update({id(each): each for each in trained})

    def describe(self) -> dict[str, str]:
        """For programs that share a name, by title: the name of a variable that it trains, if possible it alone."""
        found = dict(self.saved)
        for program, met in self.trained.items():
            if len(met) > 1:
                numbers = self.names.number_names(program)
                trained = {title: [self.names.by_id.get(each, "") for each in ids] for title, ids in met.items() if ids}
                found |= {title: max(names, key=lambda name: numbers.get(name, 0)) for title, names in trained.items()}
        return found

    def _choose(self, program: str, trained: Collection[str]) -> str:
        """The title of a new program: the one under which it was saved, or a free one."""
        every = (program if number == 1 else f"{program}@{number}" for number in count(1))
        free = [*islice((title for title in every if title not in self.trained[program]), len(self.saved) + 1)]
        return next((title for title in free if self.saved.get(title) in trained), None) or next(
            title for title in free if title not in self.saved
        )
