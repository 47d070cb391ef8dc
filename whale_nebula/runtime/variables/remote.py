"""Variables of other clusters: emptied in this process, so that a model may be larger than any of its clusters.

Reading such a variable would return a tensor of another shape, so its class is replaced by one that raises on reads. A
function of TensorFlow that was traced before reads NaN. All processes together can read the complete model
(`gathered`); a single process cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.capture.splits import is_undrawn, release
from whale_nebula.capture.tracing import is_waiting_for_plan
from whale_nebula.errors import CollectiveReadError, PlanError
from whale_nebula.ir.layout import WHOLE_LAYOUT, Layout
from whale_nebula.runtime.replicas.collectives import Collectives
from whale_nebula.runtime.session.session import Session
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.drawing import copy_array
from whale_nebula.tf.guarded_variables import make_guarded_class
from whale_nebula.transport.protocol import Key

_CONTROL = 0


class VariablePiece(Protocol):
    """A sharded variable; this process has one shard."""

    layout: Layout

    @property
    def variable(self) -> Any:
        """The shard of this process."""
        ...

    def store(self, whole: Any) -> None:
        """Keep this process's piece of a whole value."""

    def join(self, size: int) -> Any:
        """All-gather the whole value; `size` is that of the sharded axis."""


@dataclass
class HeldVariable:
    """A variable that programs of this run use, and the workers that hold it: completely, or in pieces, of which this
    process may have one (`piece`). Its `layout` is the same in every process. It is `copied` if some of the holders
    have values of their own.
    """

    path: str
    variable: Any
    holders: tuple[str, ...]
    piece: VariablePiece | None = None
    layout: Layout = WHOLE_LAYOUT
    copied: bool = False


class Transfer(NamedTuple):
    """A value with a dtype and a shape (`spec`) that process `source` reads and the `receivers` store. Only `read` of
    the source is called; a process that does not keep the value has None as `store`.
    """

    source: str
    receivers: tuple[str, ...]
    read: Callable[[], Any]
    spec: tuple[str, tuple[int, ...]]
    store: Callable[[Any], None] | None


@dataclass
class Ledger:
    """The variables of a run's programs by their ids, and their holders, the same in every process.

    Variables are kept until the run is closed, including those of dropped models: Python frees them at different times
    in each process, and exchanges require the same list in all. With `keeps_own_weights` no values are exchanged: each
    process keeps its own parts (`weights: own`). `collectives` are TensorFlow's, between the workers of this process's
    cluster. `exchanges` counts the collective exchanges of values, which numbers their messages. `gathered` are the
    variables that an open `gather` has fetched. `last_decision` is the planner's decision that last moved all variables
    of a program; `changes` counts the changes of holders.
    """

    session: Session
    keeps_own_weights: bool = False
    collectives: Collectives | None = None
    variables: dict[int, HeldVariable] = field(default_factory=dict)
    exchanges: int = 0
    gathered: set[int] = field(default_factory=set)
    last_decision: Any = None
    changes: int = 0

    def register_program(
        self,
        variables: Mapping[str, Any],
        holders_by_path: Mapping[str, Sequence[str]],
        copy_workers: Sequence[str] = (),
        piece_layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        """Register the variables of a program that no earlier one has registered: those of several workers start from
        the value of the first, those that this worker does not hold are emptied. Collective.

        The workers in `copy_workers` hold variables of their own as well, independent of others. Variables in
        `piece_layouts`, which has their layouts, are not sent here: see `distribute_pieces`.
        """
        new, piece_layouts = self._select_new(variables, holders_by_path), piece_layouts or {}
        self._share([entry for entry in new if len(entry.holders) > 1 and entry.path not in piece_layouts])
        for entry in new:
            entry.holders = tuple(dict.fromkeys([*entry.holders, *copy_workers]))
            entry.layout, entry.copied = piece_layouts.get(entry.path, WHOLE_LAYOUT), bool(copy_workers)
            self.variables[id(entry.variable)] = entry
            if self.session.worker not in entry.holders:
                empty_variable(entry)
            elif self.keeps_own_weights:
                _require_values(entry, self.session.worker)
        self.changes += 1

    def prepare_step(
        self, variables: Mapping[str, Any], holders_by_path: Mapping[str, Sequence[str]], written: Collection[str]
    ) -> None:
        """Prepare a step of a program after the holders of variables have changed: variables that some of its workers
        no longer hold are sent to them, and other workers free those that it writes, because their values would be out
        of date. Collective.
        """
        self.require_movable(variables, holders_by_path, written, apart=False)
        known = {path: self.variables.get(id(variable)) for path, variable in variables.items()}
        found = {
            path: entry
            for path, entry in known.items()
            if entry is not None and not entry.copied and entry.layout == WHOLE_LAYOUT
        }
        lacking = {path for path, entry in found.items() if set(holders_by_path[path]) - set(entry.holders)}
        if lacking:
            also = {path: tuple(dict.fromkeys((*found[path].holders, *holders_by_path[path]))) for path in lacking}
            self.move(variables, also, exactly=False)
        for path in found.keys() & written:
            entry, holders = found[path], tuple(holders_by_path[path])
            if set(entry.holders) - set(holders):
                entry.holders = holders
                if self.session.worker not in holders:
                    empty_variable(entry)
                self.changes += 1

    def drop_outdated(self, written: Iterable[Any]) -> None:
        """Free the copies that an open `gather` has fetched of variables that a step is about to write, because they
        would be out of date; another `gather` inside it fetches them again.
        """
        ids = {id(variable) for variable in written}
        for key in list(self.gathered):
            entry = self.variables[key]
            if key in ids or (entry.piece is not None and id(entry.piece.variable) in ids):
                self.gathered.discard(key)
                if entry.piece is not None or self.session.worker not in entry.holders:
                    empty_variable(entry)

    def admit_program_values(
        self,
        variables: Mapping[str, Any],
        holders_by_path: Mapping[str, Sequence[str]],
        piece_shapes: Mapping[str, Sequence[int] | None] | None = None,
    ) -> None:
        """Admit the values that `register_program` and `distribute_pieces` will receive. Called before the agreement on
        a program, because others send them immediately after it. For a variable in `piece_shapes` a piece of that shape
        is admitted; nothing if it is None.
        """
        piece_shapes, here, new = piece_shapes or {}, self.session.worker, self._select_new(variables, holders_by_path)
        shared = [entry for entry in new if len(entry.holders) > 1 and entry.path not in piece_shapes]
        self._admit(
            self.exchanges + 1, [(slot, entry) for slot, entry in enumerate(shared) if here in entry.holders[1:]]
        )
        pieces = [entry for entry in new if piece_shapes.get(entry.path) is not None]
        own_slots = [(slot, entry) for slot, entry in enumerate(pieces) if here in entry.holders[1:]]
        self._admit(self.exchanges + 2, own_slots, {entry.path: piece_shapes[entry.path] or () for entry in pieces})

    def move(
        self, variables: Mapping[str, Any], holders_by_path: Mapping[str, Sequence[str]], *, exactly: bool
    ) -> None:
        """Move variables to other holders, one after the other, and free those that are no longer held here.
        Collective. Without `exactly`, a variable stays with its present holders if all of the new ones are among them.
        """
        known = (
            (entry, tuple(holders_by_path[path]))
            for path in sorted(holders_by_path)
            if (entry := self.variables.get(id(variables[path])))
        )
        moving = [
            (entry, to)
            for entry, to in known
            if set(to) - set(entry.holders) or (exactly and set(to) != set(entry.holders))
        ]
        self.exchanges += 1
        here = self.session.worker
        wanted = {slot: entry for slot, (entry, to) in enumerate(moving) if here in to and here not in entry.holders}
        self._admit(self.exchanges, list(wanted.items()))
        self.session.meet(f"a move of {len(moving)} variables")
        for slot, (entry, to) in enumerate(moving):
            self._send(slot, entry, [worker for worker in to if worker not in entry.holders])
            if slot in wanted:
                fill_variable(entry, self._receive(slot, entry))
            entry.holders = to
            self.gathered.discard(id(entry.variable))
            if here not in to:
                empty_variable(entry)
        self.changes += 1

    def distribute_pieces(self, slot: int, variable: Any, find_piece: Callable[[str], Any]) -> Any:
        """The piece of a variable for this worker, one of its holders: the first holder sends the others their pieces,
        one after the other. `find_piece` returns the piece of a worker. All holders call it, with the same `slot`.
        """
        entry, here = self.variables[id(variable)], self.session.worker
        if entry.holders[0] != here:
            return copy_array(self._receive(slot, entry))
        for worker in entry.holders[1:]:
            self.session.links[worker].send(self._key(slot, entry, worker), np.asarray(find_piece(worker)))
        return find_piece(here)

    def hold_piece(self, variable: Any, piece: VariablePiece) -> None:
        """Hold a piece of a variable from now on, and free the variable itself."""
        entry = self.variables[id(variable)]
        entry.piece = piece
        empty_variable(entry)

    def transfer_values(self, transfers: Sequence[Transfer], doing: str) -> None:
        """Send each of these values from the process that has it to those that need it, one after the other.
        Collective, with the same list in all processes.
        """
        self.exchanges += 1
        here, session = self.session.worker, self.session

        def key_of(slot: int, source: str, destination: str) -> Key:
            return Key("control", _CONTROL, self.exchanges, 0, -1, slot, source, destination)

        wanted = [(slot, each) for slot, each in enumerate(transfers) if here in each.receivers and each.source != here]
        for slot, each in wanted:
            key = key_of(slot, each.source, here)
            session.expected.add_value(key, *each.spec)
            session.links[each.source].announce_receive(key)
        session.meet(doing)
        for slot, each in enumerate(transfers):
            if each.source == here:
                array = np.asarray(each.read())
                for receiver in each.receivers:
                    if receiver == here and each.store is not None:
                        each.store(array)
                    elif receiver != here:
                        session.links[receiver].send(key_of(slot, here, receiver), array)
        for slot, each in wanted:
            key = key_of(slot, each.source, here)
            value = session.links[each.source].receive(key, session.patience)
            session.expected.drop_value(key)
            if each.store is not None:
                each.store(value)

    def layout_of(self, variable: Any) -> Layout | None:
        """The layout of a variable at its holders; None if no program has touched it yet."""
        entry = self.variables.get(id(variable))
        return None if entry is None else entry.layout

    def is_everywhere(self, variable: Any) -> bool:
        """Whether every process holds the whole variable, or no program has registered it yet."""
        entry = self.variables.get(id(variable))
        everyone = {self.session.worker, *self.session.links}
        return entry is None or (entry.layout == WHOLE_LAYOUT and everyone <= {*entry.holders})

    def _select_new(
        self, variables: Mapping[str, Any], holders_by_path: Mapping[str, Sequence[str]]
    ) -> list[HeldVariable]:
        every = [HeldVariable(path, variables[path], tuple(holders_by_path[path])) for path in sorted(variables)]
        return [entry for entry in every if id(entry.variable) not in self.variables]

    def require_movable(
        self,
        variables: Mapping[str, Any],
        holders_by_path: Mapping[str, Sequence[str]],
        written: Collection[str],
        *,
        apart: bool,
    ) -> None:
        """Refuse a program that needs a variable in this worker that is elsewhere and cannot be sent, or that writes a
        variable of which clusters have values of their own (`copied`) only in some of them. `apart`: the program trains
        each cluster apart.
        """
        for path, needed in sorted(holders_by_path.items()):
            entry = self.variables.get(id(variables[path]))
            if entry is None:
                continue
            differs = entry.copied and not apart and path in written and set(entry.holders) - set(needed)
            if self.session.worker not in set(needed) - set(entry.holders) and not differs:
                continue
            why, mend = None, "assign its layer to the same stage in all programs"
            if self.keeps_own_weights:
                why = "with 'weights: own' in the config, variables stay in their clusters"
            elif entry.layout != WHOLE_LAYOUT:
                why = "an earlier program of this run divided it between workers, and pieces cannot move"
            elif apart or entry.copied:
                why = "this program or an earlier one trains each cluster apart, and their variables cannot move"
                mend = "train it with sync_every in all programs of this run\n"
                mend += "or save the weights, and load them in another run"
            if why is not None:
                needs = (
                    f"writes it on {', '.join(needed)} only" if differs else f"needs it on {', '.join(needed)} as well"
                )
                raise PlanError(
                    f"variable {path!r} is on {', '.join(entry.holders)}, but this program {needs}",
                    where=path,
                    why=why,
                    mend=mend,
                )

    def list_common(self, paths: Iterable[str], variables: Mapping[str, Any]) -> list[str]:
        """The paths of variables that every process holds, or that no program has registered yet."""
        return [path for path in paths if self.is_everywhere(variables[path])]

    def _share(self, variables: Sequence[HeldVariable]) -> None:
        self.exchanges += 1
        for slot, entry in enumerate(variables):
            self._send(slot, entry, entry.holders[1:])
        for slot, entry in enumerate(variables):
            if self.session.worker in entry.holders[1:]:
                entry.variable.assign(tf.convert_to_tensor(self._receive(slot, entry)))

    def _send(self, slot: int, entry: HeldVariable, destinations: Sequence[str]) -> None:
        if entry.holders[0] == self.session.worker and destinations:
            array = entry.variable.numpy()
            for destination in destinations:
                self.session.links[destination].send(self._key(slot, entry, destination), array)

    def _admit(
        self,
        exchange: int,
        wanted: Sequence[tuple[int, HeldVariable]],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Admit these values, of their variables' shapes or of those in `shapes`, and announce to the links that they
        will be received: all are sent at once, before they are requested.
        """
        for slot, entry in wanted:
            key = self._key(slot, entry, self.session.worker, exchange)
            shape = (shapes or {}).get(entry.path, entry.variable.shape)
            self.session.expected.add_value(key, entry.variable.dtype.name, shape)
            self.session.links[entry.holders[0]].announce_receive(key)

    def _receive(self, slot: int, entry: HeldVariable) -> Any:
        key = self._key(slot, entry, self.session.worker)
        value = self.session.links[entry.holders[0]].receive(key, self.session.patience)
        self.session.expected.drop_value(key)
        return value

    def _key(self, slot: int, entry: HeldVariable, destination: str, exchange: int | None = None) -> Key:
        number = self.exchanges if exchange is None else exchange
        return Key("control", _CONTROL, number, 0, -1, slot, entry.holders[0], destination)

    @contextlib.contextmanager
    def gather(self, only: Collection[int] | None = None) -> Iterator[None]:
        """Context in which each process holds all variables (or those with these ids); all enter it at the same point.
        Variables that an enclosing `gather` has fetched are not fetched again.
        """
        if self.keeps_own_weights:
            raise CollectiveReadError(
                "no process may gather the whole model",
                why="with 'weights: own' in the config, the parts of a model stay in their clusters",
                mend="set weights: everywhere in the config of every cluster\n"
                'or use model.save_weights("model.weights.h5"), which writes the part of each cluster in that cluster\n'
                "or, in place of EarlyStopping(restore_best_weights=True), "
                "ModelCheckpoint(..., save_best_only=True, save_weights_only=True) and load_weights",
            )
        wanted = {key: entry for key, entry in self.variables.items() if only is None or key in only}
        fresh = {key: entry for key, entry in wanted.items() if key not in self.gathered}
        self.gathered |= fresh.keys()
        try:
            with self.join_pieces(fresh.values()):
                if fresh or not self.gathered:
                    self._exchange(list(fresh.values()))
                yield
        finally:
            self.gathered -= fresh.keys()
            for entry in fresh.values():
                if self.session.worker not in entry.holders:
                    empty_variable(entry)

    @contextlib.contextmanager
    def join_pieces(self, variables: Iterable[HeldVariable]) -> Iterator[None]:
        """Context in which those of the variables that this process has in pieces are complete. All holders of pieces,
        which are workers of one cluster, enter it at the same point; nothing is sent to other clusters.
        """
        joined: list[tuple[HeldVariable, VariablePiece]] = []
        try:
            for entry in variables:
                if entry.piece is not None:
                    fill_variable(entry, entry.piece.join(entry.variable.shape[entry.piece.layout.axis]))
                    joined.append((entry, entry.piece))
            yield
        finally:
            for entry, piece in joined:
                if not isinstance(entry.variable, _RemoteVariable):  # otherwise a step has written the piece meanwhile
                    piece.store(entry.variable.read_value())
                    empty_variable(entry)

    def _exchange(self, chosen: Sequence[HeldVariable]) -> None:
        """Send the local variables to all processes without them, and receive the others."""
        self.exchanges += 1
        here = self.session.worker
        self._admit(self.exchanges, [(slot, entry) for slot, entry in enumerate(chosen) if here not in entry.holders])
        self.session.meet(f"a read of {len(chosen)} variables")
        everyone = tuple(sorted([here, *self.session.links]))
        for slot, entry in enumerate(chosen):
            self._send(slot, entry, [worker for worker in everyone if worker not in entry.holders])
        for slot, entry in enumerate(chosen):
            if here not in entry.holders:
                fill_variable(entry, self._receive(slot, entry))


@contextlib.contextmanager
def read_as_placeholders(variables: Sequence[Any]) -> Iterator[None]:
    """Context in which those of the variables that are emptied are read as placeholders: arrays of shape (number, 0),
    with the variable's number in the list. `fill_placeholders` replaces them in a file.
    """
    empty_here = [
        (number, variable) for number, variable in enumerate(variables) if isinstance(variable, _RemoteVariable)
    ]
    for number, variable in empty_here:
        variable.nebula_blank = number
    try:
        yield
    finally:
        for _, variable in empty_here:
            variable.nebula_blank = None


def empty_variable(entry: HeldVariable) -> None:
    """Free the memory of a variable, and make reads of it raise an error that names its holders."""
    variable = entry.variable
    if is_undrawn(variable):
        release(variable)
    _free_value(variable)
    if not isinstance(variable, _RemoteVariable):
        kind: Any = type(variable)
        variable.__class__ = make_guarded_class(
            kind, _RemoteVariable, f"Elsewhere{kind.__name__}", _guard_read, _guard_write
        )
    variable.nebula_home = (entry.path, entry.holders)
    variable.nebula_piece = entry.piece


def require_local(variables: Iterable[Any]) -> None:
    """Refuse a read of any of these variables, Keras's or TensorFlow's, that is emptied here."""
    for variable in variables:
        held = variable if isinstance(variable, tf.Variable) else variable.value
        if isinstance(held, _RemoteVariable):
            raise held._refuse()


def _require_values(entry: HeldVariable, worker: str) -> None:
    """Refuse a variable that has no values: in the file of a cluster, those of others are marked as absent."""
    variable = entry.variable
    if find_absent_mark(variable.dtype) is None or is_undrawn(variable):
        return
    value = variable.read_value()  # of another shape if nothing was assigned to it: slots of pieces
    if variable.shape.num_elements() and value.shape == variable.shape and _are_absent(value):
        raise PlanError(
            f"no value of variable {entry.path!r} was loaded, but this program needs it on {worker}",
            where=entry.path,
            why="a weights file of 'weights: own' has only the variables of its cluster, and no values of all others",
            mend="assign its layer to the stage in which the file was saved\n"
            "or load the file of the whole model, saved with weights: everywhere",
        )


def find_absent_mark(dtype: Any) -> Any:
    """The value that stands for absent ones of a type: NaN, or the integer that is farthest from zero; None for floats
    of one byte, integers of less than four, and other types, in which no value can be spared.
    """
    kind = tf.as_dtype(dtype)
    if kind.size > 1 and kind.is_floating:
        return np.nan
    if kind.size > 2 and kind.is_integer:
        return kind.max if kind.is_unsigned else kind.min
    return None


def _are_absent(value: tf.Tensor) -> bool:
    if value.dtype.is_floating:
        return bool(tf.reduce_all(tf.math.is_nan(value)))
    return bool(np.all(value.numpy() == find_absent_mark(value.dtype)))


def _free_value(variable: Any) -> None:
    kind = variable.dtype
    nothing = tf.constant([np.nan], kind) if kind.is_floating or kind.is_complex else tf.zeros([0], kind)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing, validate_shape=False)


def fill_variable(entry: HeldVariable, array: Any) -> None:
    """Give an emptied variable this value, and its own class."""
    variable = entry.variable
    if isinstance(variable, _RemoteVariable):
        variable.__class__ = type(variable).__mro__[2]
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(array, variable.dtype), validate_shape=False)


class _RemoteVariable:
    """Mixin for the class of an emptied variable: reads of its value outside the trace of a step are refused."""

    nebula_home: tuple[str, tuple[str, ...]]
    nebula_piece: VariablePiece | None = None
    nebula_blank: int | None = None

    def _refuse(self) -> CollectiveReadError:
        path, holders = self.nebula_home
        what, why = f"on {holders[0]}, not", "it belongs to a stage of another cluster, and its copy here is empty"
        if self.nebula_piece is not None:
            what, why = "not", f"nb.split has divided it: {', '.join(holders)} each have a piece"
        return CollectiveReadError(
            f"variable {path!r} is {what} in this process",
            where=str(script_site()),
            why=why,
            mend="use with nb.gathered(): around the read, in every process; after a training step, enter it again\n"
            "or model.get_weights() or model.save(...) in every process; they gather the whole model\n"
            "inside it, one process writes a tf.train.Checkpoint: if nb.here().lead: checkpoint.save(path)",
        )


def _guard_read(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A read, which is refused outside the trace of a step."""
    if is_waiting_for_plan():
        return plain(variable, *args, **kwargs)
    if variable.nebula_blank is None or not tf.executing_eagerly():
        raise variable._refuse()
    return tf.zeros([variable.nebula_blank, 0], variable.dtype)


def _guard_write(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A write, which every process performs: it is ignored, or stored in the local piece."""
    piece = variable.nebula_piece
    if is_waiting_for_plan():
        return plain(variable, *args, **kwargs)
    if not tf.executing_eagerly():
        raise variable._refuse()
    if piece is None:
        return variable
    if name not in tf_private.VARIABLE_OVERWRITES:
        raise variable._refuse()
    whole = tf.convert_to_tensor(tf_private.find_written_value(*args, **kwargs), variable.dtype)
    whole.shape.assert_is_compatible_with(variable.shape)
    piece.store(whole)
    return variable
