"""Identity of stages: which stage an `nb.stage` block belongs to, and its cluster.

The key of a stage is its name, else its cluster, else `stage<n>` for the n-th entry in its block. Entering
the same key again continues that stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.errors import StageIdentityError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.scopes.frames import Block, Frame, KnownStage, Stack, cluster_block_of, current_stack
from whale_nebula.site import Site

LOCAL = "local"
_clusters: tuple[str, ...] = ()
_workers: Mapping[str, int] = {}
_own_cluster: str = ""
_speeds: Mapping[str, Sequence[float]] = {}
_replacements: Mapping[str, str] = {}
_least: Mapping[str, int] = {}


def set_clusters(
    clusters: Mapping[str, int],
    own: str = "",
    speeds: Mapping[str, Sequence[float]] | None = None,
    moved: Mapping[str, str] | None = None,
    least: Mapping[str, int] | None = None,
) -> None:
    """Set the clusters of the run, each with its number of workers: stages that name none get them in order.

    `own` is the cluster of this process, if there are several processes. `speeds` has the speeds of workers, for
    clusters for which they are configured. `moved` maps each cluster that is away to the one that runs its stages.
    `least` has the number of workers that a cluster keeps in an elastic run, for clusters that may lose some.
    """
    global _clusters, _workers, _own_cluster, _speeds, _replacements, _least
    _clusters, _workers, _own_cluster = tuple(clusters), dict(clusters), own
    _speeds, _replacements, _least = dict(speeds or {}), dict(moved or {}), dict(least or {})


def resolve_cluster(cluster: str) -> str:
    """The cluster that runs the stages of this one: itself, unless it is away.

    >>> resolve_cluster("gpu")
    'gpu'
    """
    return _replacements.get(cluster, cluster)


def get_worker_speeds() -> Mapping[str, Sequence[float]]:
    """The speeds of the workers of each cluster with different configured speeds."""
    return _speeds


def find_own_cluster(frames: Sequence[Frame]) -> str:
    """The cluster whose copy of a model is trained here under local SGD: this process's, or the first if one process
    runs all clusters.
    """
    return _own_cluster or find_default_cluster(frames)


def has_single_cluster(clusters: Sequence[str]) -> bool:
    """Whether a step whose layout lists these clusters, or none, has one cluster. If it lists none, all of the run
    count.

    >>> has_single_cluster(["gpu"]), has_single_cluster(["gpu", "npu"])
    (True, False)
    """
    return len(clusters or _clusters) <= 1


def has_other_processes() -> bool:
    """Whether the run has other processes than this one.

    >>> has_other_processes()
    False
    """
    return bool(_own_cluster)


def count_workers(cluster: str) -> int:
    """The number of workers of a cluster; one if it is not configured.

    >>> count_workers("nowhere")
    1
    """
    return max(1, _workers.get(cluster, 1))


def count_least_workers(cluster: str) -> int:
    """The number of workers that a cluster keeps while it is part of an elastic run; otherwise all of them.

    >>> count_least_workers("nowhere")
    1
    """
    return _least.get(cluster, count_workers(cluster))


def count_most_workers() -> int:
    """The number of workers of the largest cluster."""
    return max(map(count_workers, _workers), default=1)


def find_default_cluster(frames: Sequence[Frame]) -> str:
    """The cluster of ops that are inside these scopes, but in no stage."""
    return resolve_cluster(find_cluster_of_number(0, frames))


def identify_stage(name: str | None, cluster: str | None, site: Site, stack: Stack) -> tuple[str, str]:
    """Give a stage that is entered on this stack its key and cluster, record it in its block, and return both."""
    block = _block(stack)
    number = block.entries
    key = name or cluster or _key(number)
    if name is None and cluster is None and stack.replayed:
        what = "nb.stage() has neither a name nor a cluster, inside a layer that was built under scopes"
        why = "its number would depend on how often the model is traced"
        mend = 'nb.stage(name="...")'
        raise StageIdentityError(what, where=str(site), why=why, mend=mend)
    around = cluster_block_of(stack.frames)
    known = block.stages.get(key)
    if name is None and cluster is None and known is not None:
        what = f"nb.stage() at {site} would get the name {key!r} of the stage at {known.site}"
        why = "a stage with neither a name nor a cluster is named after its number in the block"
        mend = 'give it a name: nb.stage(name="...")'
        raise StageIdentityError(what, where=str(site), why=why, mend=mend)
    home = cluster or (known.cluster if known is not None else find_cluster_of_number(number, stack.frames))
    if known is not None and known.cluster != home:
        raise cluster_conflict_error(key, home, str(site), known.cluster, str(known.site))
    check_layout(home, site, around)
    block.entries += 1
    if not block.open:
        block.stages.setdefault(key, KnownStage(home, site))
    return key, home


def find_open_place(stack: Stack) -> int | None:
    """The position that the next stage gets among those outside any block; None inside a block."""
    block = _block(stack)
    return block.entries if block.open else None


def release_number(stack: Stack) -> None:
    """Release the number of a stage outside any block in which no op was created."""
    block = _block(stack)
    if block.open:
        block.entries -= 1


def _block(stack: Stack) -> Block:
    """The block of the outermost scope that has one; else that of the whole stack."""
    return next((frame.block for frame in stack.frames if frame.block is not None), stack.block)


def find_cluster_of_number(number: int, frames: Sequence[Frame]) -> str:
    """The cluster of the stage with this number, which names none, inside these scopes."""
    around = cluster_block_of(frames)
    if around is not None and around.cluster is not None:
        return around.cluster
    layout = _layout(around) or _clusters
    return layout[number % len(layout)] if layout else LOCAL


def clusters_of(stage: Frame, frames: Sequence[Frame]) -> tuple[str, ...]:
    """The clusters that may run a stage, by its scope and the enclosing ones; empty if any cluster may."""
    around = cluster_block_of(frames)
    named = stage.options.get("cluster") or (around.cluster if around is not None else None)
    chosen = (str(named),) if named is not None else _layout(around)
    return tuple(dict.fromkeys(map(resolve_cluster, chosen)))


def _layout(around: Frame | None) -> tuple[str, ...]:
    layout = around.options.get("layout") if around is not None else None
    return layout if isinstance(layout, tuple) else ()


def cluster_conflict_error(key: str, cluster: str, where: str, known: str, there: str) -> StageIdentityError:
    """The error for a stage on one cluster here that is on another where it was entered first."""
    what = f"stage {key!r} is on cluster {cluster!r} at {where}, but on {known!r} at {there}"
    why = "entering a stage again continues it, and a stage runs on a single cluster"
    mend = f"give the second one its own name: nb.stage(cluster={cluster!r}, name={key + '_2'!r})"
    return StageIdentityError(what, where=where, why=why, mend=mend)


def check_layout(cluster: str, site: Site, around: Frame | None, what: str = "nb.stage") -> None:
    """Refuse a stage on a cluster that the layout of the enclosing `nb.cluster` does not list."""
    layout = _layout(around)
    if around is not None and layout and cluster not in layout:
        raise StageIdentityError(
            f"{what} at {site} is on cluster {cluster!r}, which nb.cluster at {around.site} does not include",
            where=str(site),
            why=f"it includes {' and '.join(map(repr, layout))}",
            mend=did_you_mean(cluster, layout),
        )


@dataclass(slots=True)
class StageNumbers:
    """The stages of one step that were built outside any block: the key and the cluster of each."""

    homes: dict[Frame, tuple[str, str]] = field(default_factory=dict)

    def number_stages(self, stages: Iterable[Frame], around: Sequence[Frame]) -> None:
        """Number stages that belong to the step; `around` are the scopes that the step is called in."""
        fresh = {frame for frame in stages if frame.place is not None and frame not in self.homes}
        ordered = sorted(fresh, key=lambda frame: frame.place or 0)
        block = current_stack().block
        for frame in ordered:
            if (
                _is_unnamed(frame)
                and frame.assigned_number is not None
                and _key(frame.assigned_number) not in block.stages
            ):
                self._assign(frame, frame.assigned_number, block, around)
        for number, frame in enumerate(ordered, block.entries):
            if frame not in self.homes:
                while _is_unnamed(frame) and _key(number) in block.stages:
                    number += 1
                self._assign(frame, number, block, around)
        last = max((frame.assigned_number for frame in ordered if frame.assigned_number is not None), default=-1)
        block.entries = max(block.entries + len(ordered), last + 1)

    def find_identity(self, frame: Frame, around: Sequence[Frame]) -> tuple[str | None, str | None]:
        """(key, cluster) of a stage in this step; a new one gets its number."""
        self.number_stages([frame], around)
        return self.homes.get(frame, (frame.key, frame.cluster))

    def _assign(self, frame: Frame, number: int, block: Block, around: Sequence[Frame]) -> None:
        key = _key(number) if _is_unnamed(frame) else str(frame.key)
        if frame.options.get("cluster") is not None:
            cluster = str(frame.cluster)
        else:
            frame.assigned_number = number if frame.assigned_number is None else frame.assigned_number
            known = block.stages.get(key)
            cluster = (
                known.cluster
                if known
                else find_cluster_of_number(number if _is_unnamed(frame) else frame.assigned_number, around)
            )
        block.stages.setdefault(key, KnownStage(cluster, frame.site))
        self.homes[frame] = key, cluster


def _is_unnamed(frame: Frame) -> bool:
    return frame.options.get("name") is None and frame.options.get("cluster") is None


def _key(number: int) -> str:
    return f"stage{number}"
