"""The variables of a run by their names in checkpoints, their values from the checkpoint that it resumes from, and its
leading program: if several programs train, the position of the run counts the steps of the leading one.

With local SGD, each cluster has its own copy of the weights. The shared weights are saved under the names of their
variables, with the optimizer's slots of the first cluster: this is the model, for any other plan. The copy of each
cluster is saved under names that contain the cluster's name, as are differences in flight, compression errors, and the
outer optimizer's state. A run of the same clusters resumes bit for bit; a run of other clusters starts from the model.
A cluster that was absent when the others saved joins them with the model and the state of their meetings.
"""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.checkpoint.manifest import STATES, Position
from whale_nebula.errors import CheckpointError, NebulaWarning
from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.objects import Put, decode_value, encode_value
from whale_nebula.runtime.checkpoint.slices import Entry, Source
from whale_nebula.runtime.local_sgd.topology import ClusterSync, find_seeds, offset_seeds
from whale_nebula.site import script_site, warn_once

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
    from whale_nebula.runtime.checkpoint.group import Group
    from whale_nebula.runtime.local_sgd.clusters import OpenRounds
    from whale_nebula.runtime.local_sgd.step import LocalSgdRunner


# ---------------------------------------------------------------------- clusters that train apart
_KIND = "rounds"


def name_copy(cluster: str, name: str) -> str:
    """The name in checkpoints of a cluster's copy of a variable.

    >>> name_copy("gpu", "dense/kernel")
    'apart/gpu/dense/kernel'
    """
    return f"apart/{cluster}/{name}"


def list_copies(
    opened: OpenRounds, group: Group, entries: Iterable[Entry], variables: Mapping[str, Any]
) -> Iterator[Entry]:
    """The entries of this process's variables for a checkpoint under local SGD."""
    shared, cluster = opened.read_shared(), opened.own_cluster
    is_first = cluster == opened.first_present
    for entry in entries:
        variable = variables[entry.name]
        if not group.knows_holders(variable) or (is_first and id(variable) not in shared):
            yield entry
        elif not is_first:
            yield entry._replace(name=name_copy(cluster, entry.name))
        else:
            numbers = tf.cast(tf.reshape(shared[id(variable)], variable.shape), variable.dtype)
            yield entry._replace(value=numbers)
            yield entry._replace(name=name_copy(cluster, entry.name))
        for other, copies in opened.copies.copies_by_cluster.items():
            if id(variable) in copies:
                yield entry._replace(name=name_copy(other, entry.name), value=copies[id(variable)].read_value())


def capture_rounds(opened: OpenRounds, names: Mapping[int, str]) -> Callable[[Put], dict[str, Any]]:
    """Take a snapshot of the rounds of this process's clusters; returns the function that encodes it, which any thread
    may call. `names` are the names of variables in checkpoints, by their ids.
    """
    taken, first = [], opened.first_present
    for meetings in opened.list_rounds():
        weights = _name_weights(next(iter(meetings.values())).flat.variables, names)
        begun = ((cluster, rounds) for cluster, rounds in meetings.items() if rounds.shared is not None)
        taken += [(cluster, weights, rounds.form, rounds.capture()) for cluster, rounds in begun]

    def encode(put: Put) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for cluster, weights, form, collect in taken:
            state = encode_value(collect(), put)
            found.setdefault(cluster, []).append({"weights": weights, "form": form, "state": state})
        return {_KIND: {"clusters": list(opened.names), "first": first, "of": found}}

    return encode


def _name_weights(variables: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    return [names.get(id(variable), "") for variable in variables]


class SavedRounds:
    """The state of the rounds of local SGD in a checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source = source
        found = [part.memory[_KIND] for part in source.parts.values() if _KIND in part.memory]
        self._clusters = tuple(found[0]["clusters"]) if found else ()
        self.first = str(found[0].get("first", self._clusters[0])) if self._clusters else ""
        self._rounds_by_name: dict[str, Sequence[Mapping[str, Any]]] = {}
        for each in found:
            self._rounds_by_name.update(each["of"])

    def find_owners(
        self, clusters: tuple[str, ...], here: Mapping[str, ClusterSync], weights: Sequence[str]
    ) -> dict[str, str]:
        """The cluster from whose state each cluster of this process resumes: its own, or another one's if it was
        absent. Empty unless all are from a run of exactly these clusters with the same options.
        """
        other = next((each for each in self._rounds_by_name if self._find(each, weights) is not None), self.first)
        owners = {name: name if self._find(name, weights) is not None else other for name in here}
        found = {name: self._find(owner, weights) for name, owner in owners.items()}
        alike = all(each is not None and each.get("form") == here[name].form for name, each in found.items())
        return owners if self._clusters == clusters and alike else {}

    def read(self, cluster: str, weights: Sequence[str]) -> Any:
        """The state of a cluster in the rounds of these weights."""
        found = self._find(cluster, weights)
        return None if found is None else decode_value(found["state"], self._source.read)

    def _find(self, cluster: str, weights: Sequence[str]) -> Mapping[str, Any] | None:
        documents = self._rounds_by_name.get(cluster, ())
        return next((each for each in documents if each["weights"] == list(weights)), None)


def restore_apart(
    group: Group, source: Source, runner: LocalSgdRunner, opened: OpenRounds, named: Mapping[str, Any]
) -> list[str]:
    """Restore the variables of a step with local SGD, by their names in checkpoints, and this process's copies of them
    for other clusters; returns the names without a saved value. All processes call it at the same point.
    """
    rounds, clusters, kept = runner.rounds, runner.participants.names, opened.copies.copies_by_cluster
    own = opened.own_cluster
    flat = rounds[own].flat.variables
    weights = _name_weights(flat, {id(variable): name for name, variable in named.items()})
    saved = SavedRounds(source)
    owners = saved.find_owners(clusters, rounds, weights)
    exact = all(group.exchange("the resumption of all clusters", bool(owners)).values())
    missing = group.restore(source, named)
    opened.copies.reset_copies(named.values())
    for each in rounds.values():
        each.begin()
    if not exact:
        _LOG.info("%s: all clusters start with the weights in %s", group.worker, source.path)
        for place, cluster in enumerate(clusters):
            held = {n: v for n, v in named.items() if cluster == own} or _select_copies(kept.get(cluster, {}), named)
            offset_seeds(find_seeds(held), place)
        _record_copied(opened, named)
        return missing
    trained = {id(variable) for variable in flat}
    copied = {name: v for name, v in named.items() if own != saved.first or id(v) in trained}
    _restore_copy(group, source, own, copied if owners[own] == own else {})
    for cluster, copies in kept.items():
        _restore_copy(group, source, cluster, _select_copies(copies, named) if owners[cluster] == cluster else {})
    for cluster, each in rounds.items():
        state = saved.read(owners[cluster], weights)
        if owners[cluster] == cluster:
            each.resume(state)
        else:
            _LOG.info("%s: %s was absent, and joins with the shared weights", group.worker, cluster)
            held = {n: v for n, v in named.items() if cluster == own} or _select_copies(kept[cluster], named)
            offset_seeds(find_seeds(held), clusters.index(cluster) - clusters.index(saved.first))
            each.join(state)
    _record_copied(opened, named)
    return missing


def _record_copied(opened: OpenRounds, variables: Mapping[str, Any]) -> None:
    """Record the values of variables of which this process has copies, so that later writes reach the copies."""
    if opened.copies.copies_by_cluster:
        opened.copies.record_values(variables.values())


def _select_copies(copies: Mapping[int, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The copies of variables, by the variables' names."""
    return {name: copies[id(variable)] for name, variable in named.items() if id(variable) in copies}


def _restore_copy(group: Group, source: Source, cluster: str, variables: Mapping[str, Any]) -> None:
    group.restore(source, {name_copy(cluster, name): variable for name, variable in variables.items()})


def must_synchronize(opened: OpenRounds) -> bool:
    """Whether some clusters of this run must synchronise before they are saved."""
    every = (rounds for meetings in opened.list_rounds() for rounds in meetings.values())
    return any(rounds.waits_for_all and rounds.shared is not None for rounds in every)


# ---------------------------------------------------------------------- variables by name
Trained = weakref.WeakValueDictionary[int, Any]
_SMALL = 16
"""The number of elements from which a variable is not small."""
_NUMBER = re.compile(r"_\d+(?=/|$)")


def _refuse_missing(path: str, program: str, source: Source, is_fit_over: bool) -> CheckpointError:
    """The error for a variable that is missing, or whose layer's name has another number in the checkpoint. The fit
    that trained it may have been complete when the checkpoint was saved (`is_fit_over`).
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


@dataclass
class KnownVariables:
    """The registered variables of a process. `aliases` gives, by program, the names that are not the paths of its
    variables. The n-th variable with a path in programs of one name is `path@n`: it belongs to a model that was created
    again. A name is not reused, even if its variable no longer exists. `is_fit_over`: the `fit` that is about to begin
    was complete when the checkpoint was saved. `restore_requests` counts the requests to restore all values again.
    `_met` has by program and path the names of its variables in this order, and `_first_numbers` by program the number
    of the first ones.
    """

    group: Group
    source: Source | None = None
    names: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    is_fit_over: bool = False
    restore_requests: int = 0
    _alive: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    _met: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _first_numbers: dict[str, int] = field(default_factory=dict)
    _has_kept: bool = False
    _restored: set[str] = field(default_factory=set)
    _copied: set[str] = field(default_factory=set)
    _apart: set[str] = field(default_factory=set)
    _titles: dict[str, dict[str, Trained]] = field(default_factory=dict)
    _replayed: dict[str, tuple[Any, Any]] | None = None

    def begin_replay(self) -> None:
        """From here on, remember the values of variables that are restored: callbacks of batches that were already
        trained may change them.
        """
        self._replayed = {}

    def restore_replayed(self) -> None:
        """Restore the values of all variables that were restored since `begin_replay`."""
        for variable, value in (self._replayed or {}).values():
            variable.assign(value)

    def end_replay(self) -> None:
        """Forget these values."""
        self._replayed = None

    def read_small(self) -> dict[str, Any]:
        """The values of all small variables that this worker completely holds, such as learning rates and counters."""
        small = {n: v for n, v in self.find_alive().items() if (v.shape.num_elements() or _SMALL) < _SMALL}
        own = self.group.read_own(small)
        return {name: value for name, (variable, value) in own.items() if variable is small[name]}

    def find_alive(self) -> dict[str, Any]:
        """All variables that still exist, by name."""
        found = {name: known() for name, known in self._alive.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    def restore(
        self, program: str, variables: Mapping[str, Any], needed: Collection[str] = (), *, counted: bool = True
    ) -> None:
        """Register the variables of a program, by path, and restore those that have not been restored. A `needed`
        variable must be in the checkpoint, unless the program had not trained, so that its steps are not `counted`
        there.
        """
        fresh = {name: path for name, path in self.add(program, variables).items() if name not in self._restored}
        self._restore(fresh, variables, program, needed, self.group.restore, counted=counted)

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
    ) -> None:
        self._restored.update(names)
        if self.source is None:
            return
        named = {name: variables[path] for name, path in names.items()}
        missing = restore(self.source, named)
        for name in named:
            self.source.kept.pop(name, None)
        if self._replayed is not None:
            self._replayed |= self.group.read_own(named)
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

    def was_reached(self, program: str, needed: Collection[str]) -> bool:
        """Whether the saved run had reached the model of these variables, if models are created again."""
        return not needed or any(self._was_saved(program, path) for path in needed)

    def _was_saved(self, program: str, path: str) -> bool:
        """Whether the saved run had reached this variable: if a model is created again, the previous one."""
        key = self._find_key(program, path)
        return key == path or (self.source is not None and key in self.source.manifest.aliases.get(program, {}))

    def _find_key(self, program: str, path: str) -> str:
        """The key of the newest variable with a path among the aliases of a program."""
        count = len(self._met.get((program, path), ()))
        return path if count <= 1 else f"{path}@{count}"

    def restore_others(self) -> None:
        """Restore the other known variables again when the program of a resumed `fit` begins to train: what the script
        writes to them afterwards must stay. Programs with local SGD restore theirs when they begin.
        """
        done = self._restored | self._apart
        others = {name: each for name, each in self.find_alive().items() if name not in done}
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

    def find_title(self, program: str, trained: Sequence[Any]) -> str:
        """The title of a program that trains these variables: its name, with a number if other programs with that name
        train none of these.
        """
        met, own = self._titles.setdefault(program, {}), {id(each): each for each in trained}
        title = next((title for title, known in met.items() if any(each in known for each in own)), None)
        title = title or self._choose_title(program, {self.names.get(each, "") for each in own})
        self.note_trained(program, title, trained)
        return title

    def note_trained(self, program: str, title: str, trained: Sequence[Any]) -> None:
        """Record that the program with this title trains these variables."""
        known = self._titles[program].setdefault(title, weakref.WeakValueDictionary())
        known.update({id(each): each for each in trained})

    def _choose_title(self, program: str, trained: Collection[str]) -> str:
        """The title of a new program: the one under which it was saved, or a free one."""
        saved = {} if self.source is None else self.source.manifest.position.titles
        every = (program if number == 1 else f"{program}@{number}" for number in count(1))
        free = [*islice((title for title in every if title not in self._titles[program]), len(saved) + 1)]
        return next((title for title in free if saved.get(title) in trained), None) or next(
            title for title in free if title not in saved
        )

    def list_titles(self) -> dict[str, str]:
        """For programs that share a name, by title: a variable that each trains, if possible it alone."""
        found = {} if self.source is None else dict(self.source.manifest.position.titles)
        for program, met in self._titles.items():
            if len(met) > 1:
                lists = (names for (each, _), names in self._met.items() if each == program)
                numbers = {name: number for names in lists for number, name in enumerate(names)}
                trained = {title: [self.names.get(each, "") for each in ids] for title, ids in met.items() if ids}
                found |= {title: max(names, key=lambda name: numbers.get(name, 0)) for title, names in trained.items()}
        return found

    def expect_leading(self, program: str, leading: str, variables: Mapping[str, Any]) -> None:
        """Expect that these variables belong to the program that was leading when the checkpoint was saved, if a
        resumed loop trains the first program of that name: earlier ones have ended, and do not train again.
        """
        name = None if self.source is None else self.source.manifest.position.titles.get(leading)
        if self.source is None or name is None or program in self._titles or not leading.startswith(f"{program}@"):
            return
        aliases = self.source.manifest.aliases.get(program, {})
        key = next((key for key, each in aliases.items() if each == name), name)
        path, _, number = key.rpartition("@")
        if path not in variables or not number.isdecimal():
            return
        self._first_numbers[program] = int(number)
        if self.names.get(id(variables[path]), name) == name:
            return
        for path, variable in variables.items():
            if f"{path}@{number}" in aliases and id(variable) in self.names:
                known = self.names.pop(id(variable))
                self._restored.discard(known)
                del self._alive[known]
                for names in self._met.values():
                    names[:] = [each for each in names if each != known]
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
        """Before the first save of a resumed run, which may later remove the checkpoint that it resumed from: keep the
        values of variables that no program has used since. If not all programs that had trained have been used, they
        are variables of models that an earlier loop trained, and later checkpoints contain them, too.
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
                if name not in self._alive and not name.startswith(STATES):
                    kept[name] = tf.Variable(tf.zeros(shape, dtype), trainable=False)
        self.group.restore(self.source, kept)
        self.source.keep(kept)
        met = {program for program, _ in self._met} - manifest.position.titles.keys()
        if manifest.position.programs.keys() <= met.union(*self._titles.values()):
            return
        for program, aliases in manifest.aliases.items():
            others = {key: name for key, name in aliases.items() if name in kept}
            self.aliases[program] = others | self.aliases.get(program, {})
        self._alive |= {name: weakref.ref(variable) for name, variable in kept.items()}

    def add(self, program: str, variables: Mapping[str, Any]) -> dict[str, str]:
        """Register variables; returns their names, each with its path in the program."""
        for path in sorted(variables):
            variable = variables[path]
            known = self._alive.get(self.names.get(id(variable), ""))
            name = None if known is None or known() is not variable else self.names[id(variable)]
            name = self._choose_name(program, path, name)
            self._alive[name], self.names[id(variable)] = weakref.ref(variable), name
        return {self.names[id(variable)]: path for path, variable in sorted(variables.items())}

    def _choose_name(self, program: str, path: str, known: str | None) -> str:
        """The name of a variable in checkpoints: the one by which it is `known`, otherwise its path, or a free name if
        that is already used.
        """
        saved = {} if self.source is None else self.source.manifest.aliases.get(program, {})
        if (program, path) not in self._met:
            numbers = range(self._first_numbers.get(program, 1), 1, -1)
            first = next((each for each in numbers if f"{path}@{each}" in saved), 1)
            self._met[program, path] = [""] * (first - 1)
        met = self._met[program, path]
        if known in met:
            return known
        met.append("")
        key = self._find_key(program, path)
        name, number = known or saved.get(key, key), 2
        kept = {} if self.source is None else self.source.kept
        while known is None and name in self._alive and name not in kept:
            name, number = f"{path}@{number}", number + 1
        if name != path:
            self.aliases.setdefault(program, {})[key] = name
        met[-1] = name
        return name


# ---------------------------------------------------------------------- the leading program
_STEPS_BEFORE_LEADING = 32
"""Steps of other programs in a row after which the first of them leads."""


@dataclass
class LeadingProgram:
    """Chooses the leading program: that of the running `fit`; in loops the first program that trained, until a
    different one has trained alone for long, which then leads with all its steps so far.

    `_other_steps` are the programs of the steps since the last one of the leading program, `_concurrent_steps` those
    that train in turn with it.
    """

    _other_steps: list[str] = field(default_factory=list)
    _concurrent_steps: set[str] = field(default_factory=set)

    @property
    def trained_others(self) -> bool:
        """Whether other programs have trained since the last step of the leading one."""
        return bool(self._other_steps)

    @property
    def has_others(self) -> bool:
        """Whether other programs have trained since, or train in turn with the leading one."""
        return bool(self._other_steps or self._concurrent_steps)

    def choose(self, position: Position, program: str) -> Position:
        """The position before a step of a program, with the program that leads from there on."""
        if program == position.program:
            self._concurrent_steps.update(self._other_steps)
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
            and self._concurrent_steps.isdisjoint(self._other_steps)
            and position.programs.get(position.program, 0) > 1
        ):
            position = self._replace_leading(position)
        return position

    def _replace_leading(self, position: Position) -> Position:
        """Make the first program lead that has trained since the last step of the leading one, and count its steps."""
        away, self._other_steps, self._concurrent_steps = self._other_steps, [], set()
        first = away[0]
        for program in away:
            if program == first:
                self._concurrent_steps.update(self._other_steps)
                self._other_steps.clear()
            else:
                self._other_steps.append(program)
        return replace(position, program=first, step=position.step + away.count(first))


_LOG = logging.getLogger("whale_nebula.runtime.run")


def warn_of_unused(checkpoints: Checkpoints) -> None:
    """Log a warning if a script that exits without error has not trained the programs of its checkpoints."""
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
    elif resumed is None and not checkpoints.known_variables.names:
        what = "nothing was saved"
        why = "no model was trained by fit, and no step under @nb.function was called"
        mend = "use @nb.function instead of @tf.function on the step of a loop; without training, remove checkpoint="
    else:
        return
    _LOG.warning("%s", NebulaWarning(what, where=folder, why=why, mend=mend))
