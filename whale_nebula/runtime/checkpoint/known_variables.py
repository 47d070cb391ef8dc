"""The variables of a run, and their values from the checkpoint that it resumes from."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from whale_nebula.checkpoint.manifest import STATES
from whale_nebula.errors import CheckpointError, NebulaWarning
from whale_nebula.runtime.checkpoint.cluster_copies import restore_apart
from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.slices import Source
from whale_nebula.runtime.checkpoint.variable_names import ProgramTitles, VariableNames
from whale_nebula.site import script_site, warn_once
from whale_nebula.tf import keras_training

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
    from whale_nebula.runtime.local_sgd.clusters import OpenRounds
    from whale_nebula.runtime.local_sgd.step import LocalSgdRunner

_LOG = logging.getLogger("whale_nebula.runtime.run")
_SMALL = 16
"""The number of elements from which on a variable is not small."""
_NUMBER = re.compile(r"_\d+(?=/|$)")


def _refuse_missing(path: str, program: str, source: Source, is_fit_over: bool) -> CheckpointError:
    """The error for a variable that is missing, maybe because its layer's name has another number in the checkpoint.
    `is_fit_over`: the `fit` that trained it was complete when the checkpoint was saved.
    """
    why, mend = "the checkpoint is from a different model", 'nb.init(checkpoint="another/folder")'
    plain = _NUMBER.sub("", path)
    other = next((name for name in sorted(source.manifest.tensors) if _NUMBER.sub("", name) == plain), None)
    if is_fit_over and other in (None, path):
        why = "the checkpoint was saved in a later fit, when the model of this fit no longer existed"
        mend = "keep all trained models in a list until the script ends, so that they are saved\n"
        mend += 'or start again: nb.init(checkpoint="another/folder")'
    elif other is not None:
        why = f"the checkpoint has {other!r}: Keras numbers unnamed layers across all models of a process"
        mend = "call keras.utils.clear_session() before you create the model again, or name its layers\n"
        mend += 'or, for a different model, nb.init(checkpoint="another/folder")'
    return CheckpointError(
        f"variable {path!r} of {program} is not in the checkpoint", where=source.path, why=why, mend=mend
    )


def _is_small(variable: Any) -> bool:
    return bool((variable.shape.num_elements() or _SMALL) < _SMALL)


def _is_setting(variable: Any) -> bool:
    return bool(variable.shape.rank == 0 and variable.dtype.is_floating and not variable.trainable)


@dataclass
class KnownVariables:
    """The registered variables of a process, and their values from the checkpoint that it resumes from (`source`).

    `restored_elsewhere` are variables, by `id`, that are not restored here, and `written` is the name of a variable of
    which the saved loop had not written the next value. `is_fit_over`: the `fit` that is about to begin was complete
    when the checkpoint was saved. `restore_requests` counts the requests to restore all values again. By name,
    `_restored` are the variables that need not be restored (again), `_copied` those of them whose copies for clusters
    are restored as well, and `_apart` those of programs with local SGD. `_replayed` has restored variables with their
    values since `begin_replay`. `_settings` has by program the names of `list_settings`, and the number of variables
    that were known when these were found.
    """

    group: Group
    source: Source | None = None
    restored_elsewhere: Mapping[int, Any] = field(default_factory=dict)
    naming: VariableNames = field(default_factory=VariableNames)
    titles: ProgramTitles = field(init=False)
    written: str = ""
    is_fit_over: bool = False
    restore_requests: int = 0
    _has_kept: bool = False
    _restored: set[str] = field(default_factory=set)
    _copied: set[str] = field(default_factory=set)
    _apart: set[str] = field(default_factory=set)
    _replayed: dict[str, tuple[Any, Any]] | None = None
    _settings: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.titles = ProgramTitles(self.naming)

    def open(self, source: Source, written: str) -> None:
        """Restore from this checkpoint from now on; see `written`."""
        self.source, self.written = source, written
        self.naming.saved_aliases, self.titles.saved = source.manifest.aliases, source.manifest.position.titles

    def add(self, program: str, variables: Mapping[str, Any]) -> dict[str, str]:
        """Register variables; returns their names, each with its path in the program."""
        return self.naming.add(program, variables, free=() if self.source is None else self.source.kept)

    def begin_replay(self) -> None:
        """From here on, remember the values of variables that are restored: callbacks of batches that were already
        trained may change them.
        """
        self._replayed = {}

    def restore_replayed(self) -> None:
        """Set all variables that were restored since `begin_replay` to their restored values."""
        for variable, value in (self._replayed or {}).values():
            variable.assign(value)

    def end_replay(self) -> None:
        """Forget these values."""
        self._replayed = None

    def read_small(self) -> dict[str, Any]:
        """The values by name of all small variables that this worker completely holds, such as learning rates."""
        small = {name: each for name, each in self.naming.find_alive().items() if _is_small(each)}
        own = self.group.read_own(small)
        return {name: value for name, (variable, value) in own.items() if variable is small[name]}

    def list_settings(self, program: str) -> list[str]:
        """The names of a program's single numbers that are not trained: learning rates, and those of metrics."""
        known, (count, names) = len(self.naming.by_id), self._settings.get(program, (0, []))
        if count != known:
            alive, own = self.naming.find_alive(), self.naming.number_names(program)
            names = [name for name, each in alive.items() if name in own and _is_setting(each)]
            self._settings[program] = known, names
        return names

    def read_bytes(self, names: Iterable[str]) -> dict[str, tuple[Any, bytes]]:
        """The variables of these names that this worker completely holds, and the bytes of their values."""
        found = {name: each for name in names if (each := self.naming.find(name)) is not None}
        return {n: (each, np.asarray(value).tobytes()) for n, (each, value) in self.group.read_own(found).items()}

    def find_written(self, before: Mapping[str, tuple[Any, bytes]]) -> str:
        """The name of a number that the script has written since `read_bytes` returned `before`; "" if there is none.
        Metrics that Keras resets do not count.
        """
        present = self.read_bytes(before)
        changed = {name: each for name, (each, value) in before.items() if present.get(name, (None, value))[1] != value}
        reset = {id(each) for each in keras_training.list_reset_variables()} if changed else ()
        return next((name for name, each in changed.items() if id(each) not in reset), "")

    def restore(
        self, program: str, variables: Mapping[str, Any], needed: Collection[str] = (), *, counted: bool = True
    ) -> None:
        """Register the variables of a program, by path, and restore those that have not been restored. Raises if a
        `needed` one is missing in the checkpoint although the saved run had reached it. Warns if another one is
        missing and steps of the program are `counted` there.
        """
        fresh = {name: path for name, path in self.add(program, variables).items() if name not in self._restored}
        elsewhere = self.restored_elsewhere
        self._restore(fresh, variables, program, needed, self.group.restore, counted=counted, elsewhere=elsewhere)

    def restore_apart(
        self,
        program: str,
        variables: Mapping[str, Any],
        needed: Collection[str],
        runner: LocalSgdRunner,
        opened: OpenRounds,
        *,
        began: bool,
    ) -> None:
        """Like `restore`, for a program with local SGD: each cluster gets its own copy. If the run has `began` to train
        since, restored variables keep their values.
        """
        names = self.add(program, variables)
        self._apart.update(names)
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
        *,
        counted: bool = True,
        elsewhere: Collection[int] = (),
    ) -> None:
        self._restored.update(names)
        if self.source is None:
            return
        reset = {id(each) for each in keras_training.list_reset_variables()}  # before the step, like all that is saved
        done = reset.union(elsewhere)
        named = {name: variables[path] for name, path in names.items() if id(variables[path]) not in done}
        missing = restore(self.source, named)
        for name in names:
            self.source.kept.pop(name, None)
        if self._replayed is not None:
            self._replayed |= self.group.read_own(named)
        if self.written in named and counted and not keras_training.is_fitting():
            self._warn_of_written(self.source)
        paths = (names[name] for name in missing if names[name] in needed)
        lost = next((path for path in paths if self._was_saved(program, path)), None)
        if lost is not None:
            raise _refuse_missing(lost, program, self.source, self.is_fit_over)
        fresh = [names[name] for name in missing if names[name] not in needed and not self.is_fit_over]
        if (
            fresh
            and counted
            and program in self.source.manifest.position.programs
            and self.was_reached(program, needed)
        ):
            more = f" and {len(fresh) - 1} more variables" if len(fresh) > 1 else ""
            warn_once(
                script_site(),
                f"{fresh[0]!r}{more} of {program} are not in the checkpoint, and keep their initial values",
                where=self.source.path,
                why="it was saved with a different optimizer, different metrics, or random ops with a different seed",
                mend="use the same ones as before, to resume exactly where the run stopped",
                key=(program, self.source.path),
            )

    def _warn_of_written(self, source: Source) -> None:
        step = source.manifest.position.step
        warn_once(
            script_site(),
            f"{self.written!r} has the value of step {step} in step {step + 1}",
            where=source.path,
            why="the loop writes it between its steps, and the run was saved at its end: what a resumed script writes "
            "before its first step is replaced",
            mend="register it before the loop: nb.state(rate=optimizer.learning_rate)",
            key=self.written,
        )

    def was_reached(self, program: str, needed: Collection[str]) -> bool:
        """Whether the saved run had reached the model of these variables, if models are created again."""
        return not needed or any(self._was_saved(program, path) for path in needed)

    def _was_saved(self, program: str, path: str) -> bool:
        """Whether the saved run had reached this variable: if a model is created again, the previous one."""
        key = self.naming.find_key(program, path)
        return key == path or key in self.naming.saved_aliases.get(program, {})

    def restore_others(self) -> None:
        """Restore the other known variables again when the leading program of a resumed run begins to train: what the
        script writes to them afterwards must stay. Programs with local SGD restore theirs when they begin.
        """
        excluded = self._restored | self._apart
        others = {name: each for name, each in self.naming.find_alive().items() if name not in excluded}
        self._restored.update(others)
        if self.source is not None and others:
            self.group.restore(self.source, others)
            if self._replayed is not None:
                self._replayed |= self.group.read_own(others)

    def restore_again(self) -> None:
        """Request that all variables are restored again when the program of the resumed `fit` begins to train."""
        self.restore_requests += 1
        self._restored.clear()
        self._copied.clear()

    def expect_leading(self, program: str, leading: str, variables: Mapping[str, Any]) -> None:
        """Expect that these variables belong to the program that was leading when the checkpoint was saved, if a
        resumed loop trains the first program of that name: earlier ones have ended, and do not train again.
        """
        name = self.titles.saved.get(leading)
        is_leading = leading.startswith(f"{program}@") and program not in self.titles.trained
        if self.source is None or name is None or not is_leading:
            return
        aliases = self.naming.saved_aliases.get(program, {})
        key = next((key for key, each in aliases.items() if each == name), name)
        path, _, number = key.rpartition("@")
        if path not in variables or not number.isdecimal():
            return
        self.naming.first_numbers[program] = int(number)
        if self.naming.by_id.get(id(variables[path]), name) == name:
            return
        for path, variable in variables.items():
            if f"{path}@{number}" in aliases and id(variable) in self.naming.by_id:
                self._restored.discard(self.naming.forget(variable))
        warn_once(
            script_site(),
            f"a model of {program} had the weights of another one until its first training step",
            where=self.source.path,
            why="several models have the same name, and it was used before it was clear which one it is",
            mend="give each model a name of its own: keras.Model(inputs, outputs, name=...)\n"
            "or begin with a training step after the run has resumed",
            key=(program, self.source.path),
        )

    def keep_unused(self) -> None:
        """Before the first snapshot of a resumed run, which may later remove the checkpoint that it resumed from: keep
        the values of variables that no program has used since. If not all programs that had trained have been used,
        they are variables of models that an earlier loop trained, and later checkpoints contain them, too. If hosts
        have their own folders, all processes call it at the same point.
        """
        if self.source is None or self._has_kept:
            return
        self._has_kept, manifest, kept = True, self.source.manifest, {}
        forms: dict[str, Any] = {name: (form.dtype, form.shape) for name, form in self.source.tensors.items()}
        if self.group.label:  # each host has written its own tensors
            for each in self.group.exchange("the tensors of a checkpoint", forms).values():
                forms |= each
        with tf.device("CPU:0"):
            for name, (dtype, shape) in sorted(forms.items()):
                if name not in self.naming.used and not name.startswith(STATES):
                    kept[name] = tf.Variable(tf.zeros(shape, dtype), trainable=False)
        self.group.restore(self.source, kept)
        self.source.keep(kept)
        met = self.naming.list_programs() - self.titles.saved.keys()
        if manifest.position.programs.keys() <= met.union(*self.titles.trained.values()):
            return
        for program, aliases in manifest.aliases.items():
            others = {key: name for key, name in aliases.items() if name in kept}
            self.naming.aliases[program] = others | self.naming.aliases.get(program, {})
        self.naming.hold(kept)


def warn_of_unused(checkpoints: Checkpoints) -> None:
    """Log a warning if a script exits without an error, but has not used its checkpoint, or not saved anything."""
    if sys.exc_info()[0] is not None:
        return
    resumed, folder = checkpoints.resumed, checkpoints.levels[0].folder.path
    if resumed is not None and checkpoints.fits < resumed.fit:
        calls = f"fit {checkpoints.fits} time{'' if checkpoints.fits == 1 else 's'}"
        what = f"this run was saved in fit {resumed.fit}, but the script has now called {calls}"
        why = f"training resumes in fit {resumed.fit}: earlier fits were complete, and trained nothing"
        mend = "call fit as often in a resumed run as in a new one, without `if nb.resumed() is None:`"
    elif resumed is not None and not checkpoints.has_read:
        what = f"the checkpoint of step {resumed.step} was not read"
        why = "no step was called, so all models have their initial values"
        mend = f"call nb.restore({folder!r}, model) if a loop has no steps left to train"
    elif resumed is None and not checkpoints.known_variables.naming.by_id:
        what = "nothing was saved"
        why = "no model was trained by fit, and no step under @nb.function was called"
        mend = "use @nb.function instead of @tf.function on the step of a loop; without training, remove checkpoint="
    else:
        return
    _LOG.warning("%s", NebulaWarning(what, where=folder, why=why, mend=mend))
