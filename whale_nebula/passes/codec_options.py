"""Resolve the options of `nb.compress` for a boundary: its codecs, the mask of its rows, and the ids of its samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.codec.packing import TYPES
from whale_nebula.errors import OptionError, PlanError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.ir.cut import Boundary, Cut, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.replicas import list_stage_workers
from whale_nebula.spec import Value
from whale_nebula.wire.frame import MAX_RANK
from whale_nebula.wire.tensor import DTYPE_NAMES


def _list_scopes(program: Program, value: Value, readers: Collection[int] | None = None) -> Iterator[int]:
    """The compress scopes of a value: those around its producer, else around a consumer (in these stages if given),
    else the planner's choice for the first of these stages.
    """
    made = program.graph.ops[value.op].compress
    if made is not None:
        yield made
        return
    for op in program.graph.consumers(value):
        if op.compress is not None and (readers is None or program.labels.get(op.index) in readers):
            yield op.compress
    planned = None if not readers else program.stages[min(readers)].compress
    if planned is not None:
        yield planned


def find_scope(program: Program, value: Value, readers: Collection[int] | None = None) -> int | None:
    """The number of the effective compress scope of a value (see `_list_scopes`); None if it has none."""
    return next(_list_scopes(program, value, readers), None)


def find_scope_line(program: Program, scope: int | None) -> str:
    """The line of a compress scope; "" if there is none."""
    return "" if scope is None else next(iter(program.compress_sites[scope : scope + 1]), "")


def choose_codec(program: Program, value: Value, scope: int | None, direction: int, mask: Value | None) -> str:
    """The codec, as text, of a value in a compress scope, forward (0) or backward (1); "none" without a scope."""
    if scope is None:
        return "none"
    spec, encoding = program.graph.spec(value), parse_encoding(program.compressions[scope][direction])
    if not spec.rank and (spec.rank == 0 or encoding.coded):
        return "none"
    if not spec.floating:
        return "bits" if (encoding.codec is not None or encoding.auto) and spec.dtype in TYPES else "none"
    encoding = encoding if mask is not None else replace(encoding, mask=None)
    return "none" if spec.dtype.startswith("complex") else str(encoding)


def find_mask(
    program: Program, value: Value, readers: Collection[int] | None = None
) -> tuple[Value | None, str | None]:
    """The mask of the rows of a boundary, the input that the scope names or the tensor's Keras mask; None and the
    reason if one is requested that does not fit or does not exist.
    """
    name, spec = _find_requested_mask(program, value, readers), program.graph.spec
    mask = None if name is None else _find_input(program, "mask", name) if name else program.masks.get(value)
    if mask is not None and _marks_rows(program, mask, value):
        return mask, None
    if name is None or not spec(value).floating:
        return None, None
    if mask is None:
        return None, 'mask=True, but Keras computed no mask for it; mask="x/mask" uses an input'
    whose = repr(name) if name else "the Keras mask"
    return None, f"{whose} is {spec(mask)}, which does not have one value per row of {spec(value)}"


def _find_requested_mask(program: Program, value: Value, readers: Collection[int] | None) -> str | None:
    """The mask that `mask=` requests for a boundary: the name of an input, "" for Keras's mask, None for none.

    A prediction step may lack inputs of training.
    """
    encodings = (parse_encoding(program.compressions[scope][0]) for scope in _list_scopes(program, value, readers))
    name = next((each.mask for each in encodings if each.mask is not None), None)
    absent = name and not program.requests and all(leaf.name != name for leaf in program.leaves)
    return None if absent else name


def _find_input(program: Program, option: str, name: str) -> Value:
    """The input that an option of `nb.compress` names."""
    named = {leaf.name: leaf for leaf in program.leaves}
    if name not in named:
        inner = [each for each in named if each.endswith(f"/{name}")]
        raise OptionError(
            f"nb.compress({option}={name!r}): the step has no input {name!r}",
            where=_find_option_line(program, option, name),
            why=f"its inputs are {', '.join(named)}",
            mend=f'{option}="{inner[0]}"' if inner else did_you_mean(name, list(named)),
        )
    return Value(named[name].op)


def _find_option_line(program: Program, option: str, name: str) -> str | None:
    """The line of the compress scope whose option has this value; None if its line is unknown."""
    encodings = (parse_encoding(there) for there, _ in program.compressions)
    return next(
        (site for each, site in zip(encodings, program.compress_sites, strict=False) if getattr(each, option) == name),
        None,
    )


def _marks_rows(program: Program, mask: Value, value: Value) -> bool:
    """Whether a mask has a value for each row of a tensor: the same axes except the last."""
    marks, marked = program.graph.spec(mask), program.graph.spec(value)
    return marked.floating and marks.rank is not None and marked.rank is not None and marks.rank == marked.rank - 1


def find_ids(program: Program, value: Value, layout: str, readers: Collection[int] | None = None) -> Value | None:
    """The input with an id for each row of a boundary whose differences a training step sends; otherwise None."""
    scope = find_scope(program, value, readers)
    name = None if scope is None else parse_encoding(program.compressions[scope][0]).delta
    if name is None or not program.requests:
        return None
    ids = _find_input(program, "delta", name)
    leaf = program.leaves[program.leaf_ops[ids.op]]
    shape = leaf.spec.shape if leaf.batched else ()
    if not leaf.spec.dtype.startswith(("int", "uint")) or not shape or shape[1:] not in ((), (1,)):
        raise OptionError(
            f"nb.compress(delta={leaf.name!r}): input {leaf.spec} does not contain ids",
            where=_find_option_line(program, "delta", name),
            why="an id is one integer per row of the batch",
            mend=f"pass {leaf.name!r} as int64 of shape [batch]",
        )
    spec = program.graph.spec(value)
    return ids if spec.floating and layout == "rows" and (spec.rank is None or spec.rank > 1) else None


def list_scope_notes(program: Program, boundaries: Sequence[Boundary]) -> Iterator[str]:
    """Notes of a plan on compress scopes without effect: they are overridden, or nothing crosses under them."""
    used: set[str] = set()
    overruled: dict[str, str] = {}
    for each in boundaries:
        scope = find_scope(program, each.value, each.destinations)
        if scope is None:
            continue
        used.add(here := find_scope_line(program, scope))
        readers = (
            op for op in program.graph.consumers(each.value) if program.labels.get(op.index) in each.destinations
        )
        around = {find_scope_line(program, op.compress) for op in readers if op.compress is not None}
        for site in sorted(around - {here}):
            overruled[site] = (
                f"b{each.slot}: nb.compress at {site} is ignored: the tensor is produced in nb.compress at {here}"
            )
    yield from overruled.values()
    for site in dict.fromkeys(program.compress_sites) if program.local_sgd is None else ():  # else for weights
        if site not in used and site not in overruled:
            yield f"nb.compress at {site} has no effect: it contains no tensor that crosses"


def list_state_notes(program: Program, boundaries: Sequence[Boundary], workers: Sequence[Worker]) -> Iterator[str]:
    """Notes on boundaries whose results depend on how many workers share a stage, as each pair of them has its own
    codec state.
    """
    several = [len(names) > 1 for names in list_stage_workers(len(program.stages), workers)]
    for each in boundaries:
        dims = program.graph.spec(each.value).fill_shape(unknown=1) or (1, 1)
        kept = dict.fromkeys(_describe_state(text, dims) for text in (each.codec, each.backward_codec))
        for what in filter(None, kept) if any(several[stage] for stage in (each.source, *each.destinations)) else ():
            yield f"b{each.slot}: each pair of workers has {what}, so {_CONSEQUENCE}"


_CONSEQUENCE = "results depend on the number of workers"


def _describe_state(text: str, dims: tuple[int, ...]) -> str:
    """The codec state between micro-batches in words; "" for a stateless codec.

    >>> _describe_state("rank(4) >> int8", (8, 16)), _describe_state("topk(0.5)", (8, 16))
    ('its own basis', '')
    """
    encoding = parse_encoding(text)
    if encoding.delta is not None:
        return "its own samples to compute deltas from"
    if encoding.structure is not None and encoding.structure.news(dims):
        return "its own basis"
    return "its own ramp" if encoding.ladder and not encoding.auto else ""


def check_crossable(cut: Cut, where: Callable[[int], str]) -> None:
    """Refuse boundaries between clusters, and values that updates and results need elsewhere, whose tensor cannot be
    serialized.
    """
    stages, graph = cut.program.stages, cut.program.graph
    for boundary in cut.boundaries:
        source, op, spec = stages[boundary.source], graph.ops[boundary.value.op], graph.spec(boundary.value)
        away = [stages[s].key for s in boundary.destinations if stages[s].cluster != source.cluster]
        if away and (spec.rank or 0) > MAX_RANK:
            raise PlanError(
                f"a tensor of rank {spec.rank} would cross from stage {source.key!r} to stage {away[0]!r}",
                where=f"{op.label}, {where(op.index)}",
                why=f"a tensor that is sent has at most {MAX_RANK} axes",
                mend=f"tf.reshape it in {source.key!r}, and back in {away[0]!r}",
            )
        if away and spec.dtype not in DTYPE_NAMES:
            raise PlanError(
                f"a tensor of type {spec.dtype} would cross from stage {source.key!r} to stage {away[0]!r}",
                where=f"{op.label}, {where(op.index)}",
                why="only numbers and booleans can be sent between clusters",
                mend=f"keep it inside one stage: move {op.type} into {away[0]!r}, "
                f"or send numbers (ids from a StringLookup in {source.key!r})",
            )
    for crossing in (each for phase in cut.phases for each in phase.crossings):
        op, spec = graph.ops[crossing.value.op], graph.spec(crossing.value)
        large = (spec.rank or 0) > MAX_RANK
        if large or spec.dtype not in DTYPE_NAMES:
            kind, limit, remedy = (
                (f"rank {spec.rank}", f"tensors of at most {MAX_RANK} axes", f"tf.reshape it to {MAX_RANK} axes")
                if large
                else (f"type {spec.dtype}", "numbers and booleans", "return numbers (ids)")
            )
            raise PlanError(
                f"a result of {kind} would be sent from worker {crossing.source!r} to the other processes",
                where=f"{op.label}, {where(op.index)}",
                why=f"only {limit} can be sent",
                mend=f"{remedy}, or set results: owner in every config: only scalars are sent then",
            )
