"""Who writes a checkpoint: the processes of one host, and what each of them holds of every variable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from whale_nebula import __version__
from whale_nebula.checkpoint.folder import Found, check_whole, choose_checkpoint, offer_checkpoints
from whale_nebula.checkpoint.manifest import Manifest, Position, Tensor
from whale_nebula.errors import CheckpointError
from whale_nebula.runtime.checkpoint.slices import Entry, Slice, Source, find_slice

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run

_LOG = logging.getLogger("whale_nebula.runtime.run")
_ALONE = "local/0"


class Group:
    """The processes of a run that share a host with this one, and so a folder: the first of them makes what they have
    written a checkpoint.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.worker: str = _ALONE if run.alone else run.ledger.session.worker
        hosts = run.hosts or {self.worker: ""}
        self.members = tuple(sorted(each for each, host in hosts.items() if host == hosts.get(self.worker)))
        self.label = "" if len(self.members) == len(hosts) else self.members[0].replace("/", "-")

    @cached_property
    def everyone(self) -> tuple[str, ...]:
        """All workers of the run."""
        return tuple(self._run.workers) or (self.worker,)

    @property
    def commits(self) -> bool:
        """Whether this process makes the parts of its host a checkpoint."""
        return self.worker == self.members[0]

    def exchange(self, doing: str, said: Any) -> dict[str, Any]:
        """What every process says of the same; this one's own word is among it."""
        if self._run.alone:
            return {self.worker: said}
        session = self._run.ledger.session
        told = session.exchange(doing, {"shared": said}, session.links.keys())
        return {self.worker: said, **{peer: sheet["shared"] for peer, sheet in told.items()}}

    def list_entries(self, variables: Mapping[str, Any]) -> Iterator[Entry]:
        """What this worker writes of variables: what it alone holds, and of what it holds with others its share."""
        for number, name in enumerate(sorted(variables)):
            variable = variables[name]
            form = Tensor(variable.dtype.name, tuple(variable.shape.as_list()))
            whole = Slice((0,) * len(form.shape), form.shape)
            kept = self._find_kept(variable)
            if kept is None:
                writes, held, value = self.commits, whole, variable
            elif kept.piece is not None:
                piece = kept.piece
                writes, value = piece.first == kept.holders[0], piece.variable
                held = find_slice(form.shape, piece.layout, piece.count, piece.index)
            else:
                near = [holder for holder in kept.holders if holder in self.members]
                writes = self.worker in near and near[number % len(near)] == self.worker
                held, value = whole, variable
            if writes:
                yield Entry(name, form, held, tf.convert_to_tensor(value.read_value()))

    def restore(self, source: Source, name: str, variable: Any) -> None:
        """Give a variable, or this worker's piece of it, the saved value."""
        form = source.tensors[name]
        if form.dtype != variable.dtype.name or not variable.shape.is_compatible_with(form.shape):
            raise CheckpointError(
                f"variable {name!r} is {variable.dtype.name}{variable.shape.as_list()} here, "
                f"and {form.dtype}{list(form.shape)} in the checkpoint",
                where=source.path,
                why="the checkpoint is of another model",
                mend='nb.init(checkpoint="another/folder"), or the model as it was when that was saved',
            )
        kept = self._find_kept(variable)
        if kept is not None and kept.piece is not None:
            piece = kept.piece
            part = find_slice(form.shape, piece.layout, piece.count, piece.index)
            piece.variable.assign(source.read(name, part))
        elif kept is None or self.worker in kept.holders:
            variable.assign(source.read(name))

    def _find_kept(self, variable: Any) -> Any:
        """What the run knows of who holds a variable; None where each process has it whole."""
        return None if self._run.alone else self._run.ledger.kept.get(id(variable))


def choose_source(group: Group, list_found: Callable[[], Sequence[Found]]) -> Source | None:
    """The newest checkpoint of which all parts are there, which all processes choose alike; None where there is none.
    What is damaged is told, and passed over.
    """
    whole: list[Found] = []
    for each in list_found() if group.commits else ():
        if (each.manifests or each.problems) and len(whole) < 2 and check_whole(each, _LOG.warning):
            whole.append(each)
    offers = group.exchange("the checkpoints that there are", offer_checkpoints(whole))
    chosen = choose_checkpoint(list(offers.values()))
    for each in list_found() if chosen is not None else ():
        if chosen is not None and chosen[1] in [manifest.identity for manifest in each.manifests.values()]:
            return Source(each, chosen[1])
    return None


def begin_manifest(run: Run, position: Position, aliases: Mapping[str, Mapping[str, str]]) -> Manifest:
    """What the manifest of a checkpoint says that all processes say alike."""
    return Manifest(
        position,
        aliases=aliases,
        attempt=run.here().epoch,
        run=run.config.run_name,
        seed=run.seed if run.seed is not None else run.config.seed,
        versions={"whale_nebula": __version__, "tensorflow": tf.__version__, "keras": keras.__version__},
    )
