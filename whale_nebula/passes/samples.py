"""Which input names the samples of a boundary: what `nb.compress(delta=...)` stands for."""

from __future__ import annotations

from collections.abc import Collection

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import OptionError
from whale_nebula.ir.program import Leaf, Program
from whale_nebula.passes.masks import input_named, line_of, scopes_of
from whale_nebula.spec import Value


def ids_of(program: Program, value: Value, layout: str, readers: Collection[int] | None = None) -> Value | None:
    """The input with an id for each row of a boundary that a step of training sends differences of; None without."""
    scope = next(scopes_of(program, value, readers), None)
    name = None if scope is None else parse_way(program.compressions[scope][0]).delta
    if name is None or not program.requests:
        return None
    ids = input_named(program, "delta", name)
    _check(program.leaves[program.leaf_ops[ids.op]], line_of(program, "delta", name))
    spec = program.graph.spec(value)
    of_rows = spec.floating and layout == "rows" and (spec.rank is None or spec.rank > 1)
    return ids if of_rows else None


def _check(leaf: Leaf, where: str | None) -> None:
    shape = leaf.spec.shape if leaf.batched else ()
    if not leaf.spec.dtype.startswith(("int", "uint")) or not shape or shape[1:] not in ((), (1,)):
        raise OptionError(
            f"nb.compress(delta={leaf.name!r}) names an input {leaf.spec}, which holds no ids",
            where=where,
            why="an id is one whole number for each row of the batch",
            mend=f"give {leaf.name!r} as int64 numbers of shape [batch]",
        )
