"""Checkpoints of clusters that train apart: each cluster's copy of the weights, and the state of local SGD.

The shared weights are saved under the names of their variables, with the optimizer's slots of the first cluster: that
is the model, for any other plan. Each cluster's own copy is saved under names that contain the cluster's, as are
differences in flight, compression errors, and the outer optimizer's state. A run of the same clusters resumes bit for
bit; a run of others starts from the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.runtime.checkpoint.objects import Put, decode_value, encode_value
from whale_nebula.runtime.checkpoint.slices import Entry, Source
from whale_nebula.runtime.local_sgd.topology import Meetings, offset_seeds, seeds_of

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.group import Group
    from whale_nebula.runtime.local_sgd.clusters import Opened
    from whale_nebula.runtime.local_sgd.step import BetweenClusters

_LOG = logging.getLogger("whale_nebula.runtime.run")
_KIND = "rounds"


def name_copy(cluster: str, name: str) -> str:
    """The name in checkpoints of a cluster's copy of a variable.

    >>> name_copy("gpu", "dense/kernel")
    'apart/gpu/dense/kernel'
    """
    return f"apart/{cluster}/{name}"


def list_copies(
    opened: Opened, group: Group, entries: Iterable[Entry], variables: Mapping[str, Any]
) -> Iterator[Entry]:
    """The entries of this process's variables for a checkpoint of clusters that train apart."""
    shared, first = opened.read_shared(), opened.names[:1]
    cluster = opened.own_cluster
    for entry in entries:
        variable = variables[entry.name]
        if not group.knows_holders(variable) or (cluster in first and id(variable) not in shared):
            yield entry
        elif cluster not in first:
            yield entry._replace(name=name_copy(cluster, entry.name))
        else:
            numbers = tf.cast(tf.reshape(shared[id(variable)], variable.shape), variable.dtype)
            yield entry._replace(value=numbers)
            yield entry._replace(name=name_copy(cluster, entry.name))
        for other, copies in opened.copies.kept.items():
            if id(variable) in copies:
                yield entry._replace(name=name_copy(other, entry.name), value=copies[id(variable)].read_value())


def capture_rounds(opened: Opened, names: Mapping[int, str]) -> Callable[[Put], dict[str, Any]]:
    """Take a snapshot of the rounds of this process's clusters; returns the function that encodes it, in any thread.
    `names` are the names of variables in checkpoints, by their ids.
    """
    taken = []
    for meetings in opened.list_rounds():
        weights = _name_weights(next(iter(meetings.values())).flat.variables, names)
        begun = ((cluster, rounds) for cluster, rounds in meetings.items() if rounds.shared is not None)
        taken += [(cluster, weights, rounds.form, rounds.capture()) for cluster, rounds in begun]

    def encode(put: Put) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for cluster, weights, form, collect in taken:
            state = encode_value(collect(), put)
            found.setdefault(cluster, []).append({"weights": weights, "form": form, "state": state})
        return {_KIND: {"clusters": list(opened.names), "of": found}}

    return encode


def _name_weights(variables: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    return [names.get(id(variable), "") for variable in variables]


class SavedRounds:
    """The state of the rounds of local SGD in a checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source = source
        found = [part.memory[_KIND] for part in source.parts.values() if _KIND in part.memory]
        self._clusters = tuple(found[0]["clusters"]) if found else ()
        self._of: dict[str, Sequence[Mapping[str, Any]]] = {}
        for each in found:
            self._of.update(each["of"])

    def has(self, clusters: tuple[str, ...], here: Mapping[str, Meetings], weights: Sequence[str]) -> bool:
        """Whether it was a run of exactly these clusters with the same options, and the state of this process's
        clusters is in this checkpoint.
        """
        found = {cluster: self._find(cluster, weights) for cluster in here}
        alike = all(each is not None and each.get("form") == here[cluster].form for cluster, each in found.items())
        return self._clusters == clusters and alike

    def read(self, cluster: str, weights: Sequence[str]) -> Any:
        """The state of a cluster in the rounds of these weights."""
        found = self._find(cluster, weights)
        return None if found is None else decode_value(found["state"], self._source.read)

    def _find(self, cluster: str, weights: Sequence[str]) -> Mapping[str, Any] | None:
        documents = self._of.get(cluster, ())
        return next((each for each in documents if each["weights"] == list(weights)), None)


def restore_apart(
    group: Group, source: Source, runner: BetweenClusters, opened: Opened, named: Mapping[str, Any]
) -> list[str]:
    """Restore the variables of a step that clusters train apart, by their names in checkpoints, and this process's
    copies of them for other clusters; returns the names without a saved value. All processes call it at the same point.
    """
    rounds, clusters, kept = runner.rounds, runner.participants.names, opened.copies.kept
    own = opened.own_cluster
    flat = rounds[own].flat.variables
    weights = _name_weights(flat, {id(variable): name for name, variable in named.items()})
    saved = SavedRounds(source)
    exact = all(group.exchange("whether all clusters go on", saved.has(clusters, rounds, weights)).values())
    missing = group.restore(source, named)
    opened.copies.alike(named.values())
    for each in rounds.values():
        each.begin()
    if not exact:
        _LOG.info("%s: all clusters begin with the weights that are in %s", group.worker, source.path)
        for place, cluster in enumerate(clusters):
            held = {n: v for n, v in named.items() if cluster == own} or _pick(kept.get(cluster, {}), named)
            offset_seeds(seeds_of(held), place)
        return missing
    trained = {id(variable) for variable in flat}
    copied = {name: v for name, v in named.items() if own != clusters[0] or id(v) in trained}
    _restore_copy(group, source, own, copied)
    for cluster, copies in kept.items():
        _restore_copy(group, source, cluster, _pick(copies, named))
    for cluster, each in rounds.items():
        each.resume(saved.read(cluster, weights))
    return missing


def _pick(copies: Mapping[int, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The copies of variables, by the variables' names."""
    return {name: copies[id(variable)] for name, variable in named.items() if id(variable) in copies}


def _restore_copy(group: Group, source: Source, cluster: str, variables: Mapping[str, Any]) -> None:
    group.restore(source, {name_copy(cluster, name): variable for name, variable in variables.items()})


def must_meet(opened: Opened) -> bool:
    """Whether some clusters of this run must synchronise before they are saved."""
    every = (rounds for meetings in opened.list_rounds() for rounds in meetings.values())
    return any(rounds.waits_for_all and rounds.shared is not None for rounds in every)
