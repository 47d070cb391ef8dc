"""The variables of a run by their names in checkpoints, and their values from the checkpoint that it goes on from."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import CheckpointError
from whale_nebula.runtime.checkpoint.apart import restore_apart
from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.slices import Source

if TYPE_CHECKING:
    from whale_nebula.runtime.local_sgd.clusters import Opened
    from whale_nebula.runtime.local_sgd.step import BetweenClusters


_NUMBER = re.compile(r"_\d+(?=/|$)")


def _refuse_missing(path: str, program: str, source: Source) -> CheckpointError:
    """The error for a variable that is not there, or is there with another number behind its layer's name."""
    why, mend = "the checkpoint is of another model", 'nb.init(checkpoint="another/folder")'
    mend += "\nor nb.restore(path, model), which takes what fits"
    plain = _NUMBER.sub("", path)
    other = next((name for name in sorted(source.manifest.tensors) if _NUMBER.sub("", name) == plain), None)
    if other is not None:
        why = f"it has {other!r}: Keras numbers layers without a name through all models of a process"
        mend = (
            "keras.utils.clear_session() before the model is made again, or layers with names\nor, of another model, "
        )
        mend += 'nb.init(checkpoint="another/folder")'
    return CheckpointError(
        f"variable {path!r} of {program} is not in the checkpoint", where=source.path, why=why, mend=mend
    )


@dataclass
class Known:
    """What one process knows of them. `aliases` gives by program the names that are not the paths of its variables."""

    group: Group
    source: Source | None = None
    names: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    _alive: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    _restored: set[str] = field(default_factory=set)
    _copied: set[str] = field(default_factory=set)

    def find_alive(self) -> dict[str, Any]:
        """All variables that there still are, by name."""
        found = {name: known() for name, known in self._alive.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    def restore(self, program: str, variables: Mapping[str, Any], needed: Collection[str] = ()) -> None:
        """Know the variables of a program, which are given by their paths; give those their values that have not got
        them. One that is `needed` must be in the checkpoint.
        """
        fresh = {name: path for name, path in self._add(program, variables).items() if name not in self._restored}
        self._restore(fresh, variables, program, needed, self.group.restore)

    def restore_apart(
        self,
        program: str,
        variables: Mapping[str, Any],
        needed: Collection[str],
        runner: BetweenClusters,
        opened: Opened,
        *,
        began: bool,
    ) -> None:
        """The same for a program that clusters train apart: each cluster is given what it had. If the run `began` to
        train since, what has got its values keeps them.
        """
        names = self._add(program, variables)
        if names.keys() <= (self._restored if began else self._copied):
            return

        def restore(source: Source, named: Mapping[str, Any]) -> list[str]:
            return restore_apart(self.group, source, runner, opened, named)

        self._restore(names, variables, program, needed, restore)
        self._copied.update(names)

    def _restore(
        self,
        names: Mapping[str, str],
        variables: Mapping[str, Any],
        program: str,
        needed: Collection[str],
        restore: Callable[[Source, Mapping[str, Any]], Sequence[str]],
    ) -> None:
        self._restored.update(names)
        if self.source is None:
            return
        missing = restore(self.source, {name: variables[path] for name, path in names.items()})
        lost = next((names[name] for name in missing if names[name] in needed), None)
        if lost is not None:
            raise _refuse_missing(lost, program, self.source)

    def _add(self, program: str, variables: Mapping[str, Any]) -> dict[str, str]:
        """Know variables; gives their names, each with its path in the program."""
        for path in sorted(variables):
            variable = variables[path]
            known = self._alive.get(self.names.get(id(variable), ""))
            if known is None or known() is not variable:
                name = self._choose_name(program, path)
                self._alive[name], self.names[id(variable)] = weakref.ref(variable), name
        return {self.names[id(variable)]: path for path, variable in sorted(variables.items())}

    def _choose_name(self, program: str, path: str) -> str:
        """The name of a variable in checkpoints: its path, unless another one has that already."""
        saved = {} if self.source is None else self.source.manifest.aliases.get(program, {})
        name = saved.get(path, path)
        number = 2
        while name in self._alive and self._alive[name]() is not None:
            name, number = f"{path}@{number}", number + 1
        if name != path:
            self.aliases.setdefault(program, {})[path] = name
        return name
