"""Which tensor marks the rows of a boundary that have to be sent: what `nb.compress(mask=...)` stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import OptionError
from whale_nebula.ir.program import Program
from whale_nebula.ir.spec import Value
from whale_nebula.suggest import did_you_mean


def scopes_of(program: Program, value: Value, readers: Collection[int] | None = None) -> Iterator[int]:
    """The compress scopes of a value: around its producer, else around a consumer, of these stages if given."""
    graph = program.graph
    made = graph.ops[value.op].compress
    if made is not None:
        yield made
        return
    for op in graph.consumers(value):
        if op.compress is not None and (readers is None or program.labels.get(op.index) in readers):
            yield op.compress


def mask_of(program: Program, value: Value, readers: Collection[int] | None = None) -> Value | None:
    """The mask of a boundary: the input that the scope names, or the mask that Keras has given the tensor."""
    for scope in scopes_of(program, value, readers):
        name = parse_way(program.compressions[scope][0]).mask
        if name and not program.requests and all(leaf.name != name for leaf in program.leaves):
            return None  # a step that predicts need not be given what training is
        if name is not None:
            mask = program.masks.get(value) if not name else input_named(program, "mask", name)
            return mask if mask is not None and _marks(program, mask, value) else None
    return None


def input_named(program: Program, option: str, name: str) -> Value:
    """The input that an option of `nb.compress` names."""
    named = {leaf.name: leaf for leaf in program.leaves}
    if name not in named:
        inner = [each for each in named if each.endswith(f"/{name}")]
        raise OptionError(
            f"nb.compress({option}={name!r}) names no input of this step",
            why=f"its inputs are {', '.join(named)}",
            mend=f'{option}="{inner[0]}"' if inner else did_you_mean(name, list(named)),
        )
    return Value(named[name].op)


def _marks(program: Program, mask: Value, value: Value) -> bool:
    """Whether a mask has a value for each row of a tensor: the same axes but for the last."""
    graph = program.graph
    marks, marked = graph.spec(mask), graph.spec(value)
    return marked.floating and marks.rank is not None and marked.rank is not None and marks.rank == marked.rank - 1
