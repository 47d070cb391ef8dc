"""Resolve `nb.compress(mask=...)` to the tensor that marks the rows of a boundary to be sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import OptionError, PlanError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.ir.cut import Boundary, Cut, Fragment, Worker
from whale_nebula.ir.program import Leaf, Program
from whale_nebula.passes.effects import is_effect, written_handles
from whale_nebula.passes.replicas import running
from whale_nebula.spec import Value
from whale_nebula.wire.tensor import DTYPE_NAMES


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


def mask_refusal(program: Program, value: Value, readers: Collection[int] | None = None) -> str | None:
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


def compress_notes(program: Program, boundaries: Sequence[Boundary]) -> Iterator[str]:
    """What a plan says of them, with the lines where they stand."""
    used: set[str] = set()
    overruled: dict[str, str] = {}
    for each in boundaries:
        counting = next(scopes_of(program, each.value, each.destinations), None)
        if counting is not None:
            used.add(_site(program, counting))
            others = _around(program, each, counting)
            overruled |= {site: _describe_overruled(each, site, _site(program, counting)) for site in others}
    yield from overruled.values()
    if program.apart is not None:  # they say how differences of weights cross
        return
    for site in dict.fromkeys(program.sites):
        if site not in used and site not in overruled:
            yield f"nb.compress at {site} changes nothing: no tensor that crosses comes under it"


def _around(program: Program, boundary: Boundary, counting: int) -> Iterator[str]:
    """The lines of other scopes around what reads a boundary."""
    found = {
        op.compress
        for op in program.graph.consumers(boundary.value)
        if op.compress is not None and program.labels.get(op.index) in boundary.destinations
    }
    sites = {_site(program, scope) for scope in found}
    yield from sorted(sites - {_site(program, counting)})


def _describe_overruled(boundary: Boundary, site: str, counting: str) -> str:
    return f"b{boundary.slot}: nb.compress at {site} does not count: what makes the tensor stands in one, at {counting}"


def _site(program: Program, scope: int) -> str:
    return next(iter(program.sites[scope : scope + 1]), "")


def lane_notes(program: Program, boundaries: Sequence[Boundary], workers: Sequence[Worker]) -> Iterator[str]:
    """Boundaries whose results depend on how many workers share a stage: each pair of them sees other micro-batches."""
    several = [len(names) > 1 for names in running(len(program.stages), workers)]
    for each in boundaries:
        dims = program.graph.spec(each.value).sized(unknown=1) or (1, 1)
        kept = dict.fromkeys(_describe_memory(text, dims) for text in (each.codec, each.backward_codec))
        if any(several[stage] for stage in (each.source, *each.destinations)):
            yield from (f"b{each.slot}: each pair of workers has {what}, so {_SO}" for what in kept if what)


_SO = "results depend on how many workers there are"


def _describe_memory(text: str, dims: tuple[int, ...]) -> str:
    """What is remembered from one micro-batch to the next, in words; empty where that is nothing.

    >>> _describe_memory("rank(4) >> int8", (8, 16)), _describe_memory("topk(0.5)", (8, 16))
    ('a basis of its own', '')
    """
    way = parse_way(text)
    if way.delta is not None:
        return "samples of its own to tell changes of"
    if way.structure is not None and way.structure.news(dims):
        return "a basis of its own"
    return "a ramp of its own" if way.ladder and not way.auto else ""


def check_crossable(cut: Cut, where: Callable[[int], str]) -> None:
    """Refuse a boundary between clusters whose tensor no frame can carry."""
    stages, graph = cut.program.stages, cut.program.graph
    for boundary in cut.boundaries:
        away = [s for s in boundary.destinations if stages[s].cluster != stages[boundary.source].cluster]
        if away and graph.spec(boundary.value).dtype not in DTYPE_NAMES:
            raise _error(cut, boundary, away[0], where)


def _error(cut: Cut, boundary: Boundary, to: int, where: Callable[[int], str]) -> PlanError:
    op, dtype = cut.program.graph.ops[boundary.value.op], cut.program.graph.spec(boundary.value).dtype
    source, destination = cut.program.stages[boundary.source].key, cut.program.stages[to].key
    return PlanError(
        f"a {dtype} would cross from stage {source!r} to stage {destination!r}",
        where=f"{op.name} ({op.type}), {where(op.index)}",
        why="between clusters go numbers and bools only",
        mend=f"keep it inside one stage: move {op.type} into {destination!r}, "
        f"or let numbers cross (ids, from a StringLookup in {source!r})",
    )


def skip(program: Program, fragment: Fragment | None) -> tuple[Fragment | None, tuple[str, ...]]:
    """The part of a stage's forward that does not ask which rows it is given, and what it writes; and the paths of the
    variables that it writes from its rows.
    """
    if fragment is None:
        return None, ()
    graph, own = program.graph, frozenset(fragment.ops)
    writes = [op for op in fragment.ops if is_effect(graph.ops[op], graph) and written_handles(graph.ops[op], graph)]
    asks = _asks(program, fragment)
    free = [op for op in writes if asks.isdisjoint(_above([op], program, own))]
    bound = {handle for op in writes if op not in free for handle in written_handles(graph.ops[op], graph)}
    drifting = tuple(sorted(program.variable_ops[handle].path for handle in bound if handle in program.variable_ops))
    if not free:
        return None, drifting
    ops = tuple(sorted(op for op in _above(free, program, own) if op in own))
    read = {value for op in ops for value in graph.ops[op].inputs}
    feeds = tuple(value for value in fragment.feeds if value in read)
    return Fragment("skip", fragment.phase, fragment.stage, fragment.worker, 0, ops, feeds, ()), drifting


def _asks(program: Program, fragment: Fragment) -> frozenset[int]:
    """The ops through which a fragment is fed what differs from one micro-batch to the next."""
    scaled = {program.share, program.grow}
    return frozenset(
        value.op
        for value in fragment.feeds
        if value in scaled
        or value.op in program.of_batch
        or value.op in program.arrivals
        or program.labels.get(value.op, fragment.stage) != fragment.stage
    )


def _above(ops: Collection[int], program: Program, own: Collection[int]) -> set[int]:
    """Ops with all that they read, within a fragment and one step beyond it."""
    graph = program.graph
    found, pending = set(ops), list(ops)
    while pending:
        op = pending.pop()
        before = [value.op for value in graph.ops[op].inputs] + [each for each in graph.ops[op].control if each in own]
        for each in before:
            if each not in found:
                found.add(each)
                if each in own:
                    pending.append(each)
    return found
