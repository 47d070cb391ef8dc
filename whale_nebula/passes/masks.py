"""Which tensor marks the rows of a boundary that have to be sent: what `nb.compress(mask=...)` stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.ir.program import Program
from whale_nebula.spec import Value


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
    name = asked_mask(program, value, readers)
    if name is None or _not_given(program, name):
        return None
    mask = input_named(program, "mask", name) if name else program.masks.get(value)
    return mask if mask is not None and _marks(program, mask, value) else None


def asked_mask(program: Program, value: Value, readers: Collection[int] | None = None) -> str | None:
    """What `mask=` says for a boundary: the name of an input, "" for the mask of Keras, None for no mask."""
    ways = (program.compressions[scope][0] for scope in scopes_of(program, value, readers))
    return next((name for way in ways if (name := parse_way(way).mask) is not None), None)


def unmarked(program: Program, value: Value, readers: Collection[int] | None = None) -> str | None:
    """Why a boundary that `mask_of` has no mask for crosses whole; None where none was asked for."""
    name = asked_mask(program, value, readers)
    if name is None or _not_given(program, name) or not program.graph.spec(value).floating:
        return None
    marks = input_named(program, "mask", name) if name else program.masks.get(value)
    if marks is None:
        return 'mask=True, and Keras has given it no mask; a name, as mask="x/mask", takes an input'
    whose = repr(name) if name else "the mask of Keras"
    return f"{whose} is {program.graph.spec(marks)}, which has no value for each row of {program.graph.spec(value)}"


def _not_given(program: Program, name: str) -> bool:
    """A step that predicts need not be given what training is."""
    return bool(name) and not program.requests and all(leaf.name != name for leaf in program.leaves)


def input_named(program: Program, option: str, name: str) -> Value:
    """The input that an option of `nb.compress` names."""
    named = {leaf.name: leaf for leaf in program.leaves}
    if name not in named:
        inner = [each for each in named if each.endswith(f"/{name}")]
        raise OptionError(
            f"nb.compress({option}={name!r}) names no input of this step",
            where=line_of(program, option, name),
            why=f"its inputs are {', '.join(named)}",
            mend=f'{option}="{inner[0]}"' if inner else did_you_mean(name, list(named)),
        )
    return Value(named[name].op)


def line_of(program: Program, option: str, name: str) -> str | None:
    """The line of the compress scope that says so."""
    ways = (parse_way(there) for there, _ in program.compressions)
    sites = zip(ways, program.sites, strict=False)
    return next((site for way, site in sites if getattr(way, option) == name), None)


def _marks(program: Program, mask: Value, value: Value) -> bool:
    """Whether a mask has a value for each row of a tensor: the same axes but for the last."""
    graph = program.graph
    marks, marked = graph.spec(mask), graph.spec(value)
    return marked.floating and marks.rank is not None and marked.rank is not None and marks.rank == marked.rank - 1
