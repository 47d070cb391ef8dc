"""Checkpoints of local SGD, under which each cluster has its own copy of the weights.

The shared weights are saved under the names of their variables, with the optimizer's slots of the first cluster: this
is the model, for any other plan. The copy of each cluster is saved under names that contain the cluster's name, as are
differences in flight, compression errors, and the outer optimizer's state. A run of the same clusters resumes bit for
bit; a run of other clusters starts from the model. A cluster that was absent when the others saved joins them with the
model and the state of their meetings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.objects import Put, decode_value, encode_value
from whale_nebula.runtime.checkpoint.slices import Entry, Source
from whale_nebula.runtime.local_sgd.topology import ClusterSync, find_seeds, offset_seeds

if TYPE_CHECKING:
    from whale_nebula.runtime.local_sgd.clusters import OpenRounds
    from whale_nebula.runtime.local_sgd.step import LocalSgdRunner

_LOG = logging.getLogger("whale_nebula.runtime.run")
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
    """The entries of this process's variables for a checkpoint under local SGD, by the `entries` of a checkpoint
    without it: shared weights, the copy of this process's own cluster, and those that it has for other clusters.
    """
    shared, own = opened.read_shared(), opened.own_cluster
    is_first = own == opened.first_present
    for entry in entries:
        variable = variables[entry.name]
        if not group.knows_holders(variable) or (is_first and id(variable) not in shared):
            yield entry
        elif not is_first:
            yield entry._replace(name=name_copy(own, entry.name))
        else:
            numbers = tf.cast(tf.reshape(shared[id(variable)], variable.shape), variable.dtype)
            yield entry._replace(value=numbers)
            yield entry._replace(name=name_copy(own, entry.name))
        for other, copies in opened.copies.copies_by_cluster.items():
            if id(variable) in copies:
                yield entry._replace(name=name_copy(other, entry.name), value=copies[id(variable)].read_value())


def capture_rounds(opened: OpenRounds, names: Mapping[int, str]) -> Callable[[Put], dict[str, Any]]:
    """Take a snapshot of the rounds of this process's clusters; returns the function that encodes it, which any thread
    may call, and which waits for exchanges in flight. `names` are the names of variables in checkpoints, by their ids.
    """
    captured, first = [], opened.first_present
    for rounds_by_cluster in opened.list_rounds():
        weights = _name_weights(next(iter(rounds_by_cluster.values())).flat.variables, names)
        begun = ((cluster, rounds) for cluster, rounds in rounds_by_cluster.items() if rounds.shared is not None)
        captured += [(cluster, weights, rounds.form, rounds.capture()) for cluster, rounds in begun]

    def encode(put: Put) -> dict[str, Any]:
        states: dict[str, list[Any]] = {}
        for cluster, weights, form, collect in captured:
            state = encode_value(collect(), put)
            states.setdefault(cluster, []).append({"weights": weights, "form": form, "state": state})
        return {_KIND: {"clusters": list(opened.names), "first": first, "of": states}}

    return encode


def _name_weights(variables: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    return [names.get(id(variable), "") for variable in variables]


class SavedRounds:
    """The states of the rounds of local SGD in a checkpoint, as far as they can be read locally. `first` is the cluster
    whose slots and other untrained variables were saved under the names of the variables.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        documents = [part.memory[_KIND] for part in source.parts.values() if _KIND in part.memory]
        self._clusters = tuple(documents[0]["clusters"]) if documents else ()
        self.first = str(documents[0].get("first", self._clusters[0])) if self._clusters else ""
        self._states_by_cluster: dict[str, Sequence[Mapping[str, Any]]] = {}
        for each in documents:
            self._states_by_cluster.update(each["of"])

    def find_owners(
        self, clusters: tuple[str, ...], here: Mapping[str, ClusterSync], weights: Sequence[str]
    ) -> dict[str, str]:
        """The cluster from whose state each cluster of this process resumes: its own, or another one's if it was
        absent. Empty unless all are from a run of exactly these clusters with the same options.
        """
        other = next((each for each in self._states_by_cluster if self._find(each, weights) is not None), self.first)
        owners = {name: name if self._find(name, weights) is not None else other for name in here}
        found = {name: self._find(owner, weights) for name, owner in owners.items()}
        alike = all(each is not None and each.get("form") == here[name].form for name, each in found.items())
        return owners if self._clusters == clusters and alike else {}

    def read(self, cluster: str, weights: Sequence[str]) -> Any:
        """The state of a cluster in the rounds of these weights; None if it was not saved."""
        found = self._find(cluster, weights)
        return None if found is None else decode_value(found["state"], self._source.read)

    def _find(self, cluster: str, weights: Sequence[str]) -> Mapping[str, Any] | None:
        states = self._states_by_cluster.get(cluster, ())
        return next((each for each in states if each["weights"] == list(weights)), None)


def restore_apart(
    group: Group, source: Source, runner: LocalSgdRunner, opened: OpenRounds, named: Mapping[str, Any]
) -> list[str]:
    """Restore the variables of a step with local SGD, by their names in checkpoints, this process's copies of them for
    other clusters, and the rounds; returns the names without a saved value. All processes call it at the same point.
    """
    rounds, clusters, copies_by_cluster = runner.rounds, runner.participants.names, opened.copies.copies_by_cluster
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
        each.restart()  # if they were restored before, the script may have replaced the weights since
    if not exact:
        _LOG.info("%s: all clusters start with the weights in %s", group.worker, source.path)
        for place, cluster in enumerate(clusters):
            copies = named if cluster == own else _select_copies(copies_by_cluster.get(cluster, {}), named)
            offset_seeds(find_seeds(copies), place)
        opened.copies.record_values(named.values())
        return missing
    trained = {id(variable) for variable in flat}
    copied = {name: v for name, v in named.items() if own != saved.first or id(v) in trained}
    _restore_copy(group, source, own, copied if owners[own] == own else {})
    for cluster, of_cluster in copies_by_cluster.items():
        _restore_copy(group, source, cluster, _select_copies(of_cluster, named) if owners[cluster] == cluster else {})
    for cluster, each in rounds.items():
        state = saved.read(owners[cluster], weights)
        if owners[cluster] == cluster:
            each.resume(state)
        else:
            _LOG.info("%s: %s was absent, and joins with the shared weights", group.worker, cluster)
            copies = named if cluster == own else _select_copies(copies_by_cluster[cluster], named)
            offset_seeds(find_seeds(copies), clusters.index(cluster) - clusters.index(saved.first))
            each.join(state)
    opened.copies.record_values(named.values())
    return missing


def _select_copies(copies: Mapping[int, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The copies of variables, by the variables' names."""
    return {name: copies[id(variable)] for name, variable in named.items() if id(variable) in copies}


def _restore_copy(group: Group, source: Source, cluster: str, variables: Mapping[str, Any]) -> None:
    group.restore(source, {name_copy(cluster, name): variable for name, variable in variables.items()})


def must_synchronize(opened: OpenRounds) -> bool:
    """Whether all clusters must synchronise before they are saved: in mode "async", if training has begun."""
    each = (rounds for rounds_by_cluster in opened.list_rounds() for rounds in rounds_by_cluster.values())
    return any(rounds.waits_for_all and rounds.shared is not None for rounds in each)
