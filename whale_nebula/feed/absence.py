"""What to say of an input that a cluster was not given."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.errors import AbsentInputError
from whale_nebula.ir.program import Leaf


def absent_error(name: str, reader: str, where: str) -> AbsentInputError:
    """The error for a read of an input that is not here; `reader` names the stage and the cluster."""
    return AbsentInputError(
        f"input {name!r} is None in this process, and {reader or 'something'} here reads it",
        where=where or name,
        why="the config's 'inputs' gives its form, so that clusters that do not read it need not have it",
        mend=f"yield {name!r} in this cluster as well\nor move what reads it into a stage of the cluster that has it",
    )


def no_rows(leaves: Sequence[Leaf]) -> AbsentInputError:
    """The error for a step none of whose inputs is here."""
    names = ", ".join(repr(leaf.name) for leaf in leaves)
    return AbsentInputError(
        f"all inputs of this step are None in this process: {names}",
        where=leaves[0].name,
        why="how many rows the step has is taken from those that are here",
        mend="yield at least one of them in every cluster: ids of the rows, say, which nb.init(ids=...) then compares",
    )
