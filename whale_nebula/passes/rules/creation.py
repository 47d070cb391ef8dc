"""Rules for ops that create tensors from a shape."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.passes.rules.algebra import join_folds, list_entries, move_by_wholes, move_entries
from whale_nebula.passes.rules.axes import FOREIGN_ROWS, axes, describe_entries, list_axes, match_rows, number_axes
from whale_nebula.passes.rules.registry import (
    COUNT,
    COUPLED,
    FIXED,
    NO_RANK,
    ROWS,
    SHAPE,
    SUM,
    UNKNOWN,
    WHOLE,
    Axes,
    Fold,
    Node,
    Result,
    Undecided,
    rows,
    rule,
    whole,
)

Sizes = tuple[int | None, ...]
_RANDOM = """
    RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt ParameterizedTruncatedNormal
    StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt
    StatelessRandomUniformFullInt StatelessRandomUniformV2 StatelessRandomNormalV2
    StatelessTruncatedNormalV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2
    StatelessRandomGammaV3
"""


def _describe_made(node: Node) -> Axes:
    """A tensor created from a shape: any axis can be cut, by creating less."""
    rank = node.op.outputs[0].rank
    if rank is None:
        raise Undecided(NO_RANK)
    return Axes((None,), (number_axes(rank),))


@rule("Fill", "Empty", axes=_describe_made, literal=True)
def fill(node: Node) -> Result:
    """A constant tensor."""
    value = node.folds[1] if len(node.folds) > 1 else whole()
    made = _make_of_shape(node, 0)
    if made.kind == ROWS and value.kind != WHOLE:
        return node.couple(f"rows are filled with {value.description}")
    if made.kind != WHOLE:
        return made
    known = move_entries(node, (1,)) if node.op.type == "Fill" and node.op.outputs[0].rank == 1 else None
    return known or move_by_wholes(node, (value, made))


@rule(_RANDOM)
def random(node: Node) -> Result:
    """A random tensor: each micro-batch draws its own."""
    made = _make_of_shape(node, 0)
    if any(fold.kind != WHOLE for fold in node.folds[1:]):
        return node.couple("the range of random numbers depends on the batch")
    same = made.kind == ROWS and _is_seeded(node, node.folds[1:])
    return node.couple(SAME_SEED) if same else made


SAME_SEED = "the seed is the same for each micro-batch, so each would draw the same rows"


def _is_seeded(node: Node, seeds: Sequence[Fold]) -> bool:
    """Whether every run draws the same: by constant seeds, or by the attributes of an op with its own kernel.

    A kernel counts its draws, but each micro-batch may have its own kernel.
    """
    if node.op.type.startswith("Stateless"):
        return all(fold.inputs for fold in seeds)
    return bool(node.number("seed", 0) or node.number("seed2", 0))


@rule("RngReadAndSkip")
def next_seed(node: Node) -> Result:
    """A tf.random.Generator's state, which each micro-batch advances by its draws."""
    return whole()


@rule("Multinomial", "StatelessMultinomial", "RandomGammaGrad", "RandomPoissonV2")
def draw_categories(node: Node) -> Result:
    """Draws for each row of scores."""
    scores = node.folds[0]
    if scores.kind == ROWS and _is_seeded(node, node.folds[2:]):
        return node.couple(SAME_SEED)
    if scores.kind == ROWS and all(fold.kind == WHOLE for fold in node.folds[1:]):
        return (
            scores.without_numbers if scores.axis == 0 else node.couple("random numbers are drawn along the batch axis")
        )
    return node.couple("the range of random numbers depends on the batch")


def _make_of_shape(node: Node, place: int) -> Fold:
    """The fold of a tensor whose shape is given by the entries of input number `place`."""
    parts = node.parts(place)
    if parts is None:
        return whole() if node.folds[place].kind == WHOLE else node.nonlinear([node.folds[place]])
    if any(part.kind not in (COUNT, WHOLE) for part in parts):
        return node.couple("the shape of a tensor depends on the batch")
    counts = [axis for axis, part in enumerate(parts) if part.kind == COUNT]
    if len(counts) > 1:
        return node.couple("two axes of a tensor have the length of the batch")
    return rows(counts[0], parts[counts[0]].per) if counts else whole()


def _describe_broadcast_to(node: Node) -> Axes:
    before, after = node.spec(0).shape, node.op.outputs[0].shape
    if before is None or after is None:
        raise Undecided(NO_RANK)
    new = number_axes(len(after))
    old = number_axes(len(before))
    aligned = zip(old, before, after[len(after) - len(before) :], strict=True)
    labels = [label if size == wanted else f"old {label}" for label, size, wanted in aligned]
    return Axes((labels,), (new,), mixed={label: "it is repeated" for label in labels if label.startswith("old")})


@rule("BroadcastTo", axes=_describe_broadcast_to)
def broadcast_to(node: Node) -> Result:
    """A tensor broadcast to a shape."""
    data, made = node.folds[0], _make_of_shape(node, 1)
    if made.kind == COUPLED or (made.kind == WHOLE and data.kind != ROWS):
        return made if made.kind == COUPLED else move_by_wholes(node, (data, made))
    if made.kind != ROWS or data.kind not in (ROWS, WHOLE):
        return node.couple(FIXED if data.kind == ROWS else f"rows are filled with {data.description}")
    unknown = "rows with an unknown number of axes are repeated"
    rank, long = node.need_rank(0, unknown), node.op.outputs[0].rank
    if long is None:
        raise Undecided(unknown)
    if data.kind == ROWS:
        return match_rows(data._replace(axis=data.axis + long - rank).without_numbers, made._replace(order=data.order))
    axis = made.axis - (long - rank)
    return made if axis < 0 or node.size(0, axis) == 1 else node.couple(FOREIGN_ROWS)


def _describe_tile(node: Node) -> Axes:
    unknown = "the number of repetitions of a tensor is not known"
    often, labels = node.need_ints(1, unknown), number_axes(node.need_rank(0, unknown))
    mixed = {label: "it is repeated" for label, times in zip(labels, often, strict=True) if times != 1}
    return Axes((labels,), (labels,), mixed=mixed)


@rule("Tile", axes=_describe_tile)
def tile(node: Node) -> Result:
    """A tensor repeated along its axes; repeated rows follow each other."""
    data, times_each = node.folds[0], node.parts(1)
    if data.kind == ROWS:
        if times_each is None or any(part.kind != WHOLE for part in times_each):
            return node.couple("the number of repetitions of rows is the size of the batch")
        often = times_each[data.axis].literal
        if often == (1,):
            return data.without_numbers
        if often is None or data.order or data.per <= 0:
            return node.couple("the batch is repeated along its axis")
        pers = (data.per,) * int(often[0])
        return data._replace(per=sum(pers), order=pers).without_numbers
    made = _make_of_shape(node, 1)
    if made.kind != ROWS:
        return move_by_wholes(node, (data, made))
    if data.kind != WHOLE:
        return node.couple(f"rows are filled with {data.description}")
    size = node.size(0, made.axis)
    return made._replace(per=UNKNOWN if size is None else made.per * size)


@rule("ZerosLike", "OnesLike", axes=describe_entries, positions=True)
def zeros_like(node: Node) -> Result:
    """A tensor of an input's shape, whose values do not matter."""
    data = node.folds[0]
    if data.kind == ROWS:
        return data._replace(position=0, offset=False).without_numbers
    return whole(0) if node.op.type == "ZerosLike" and node.op.outputs[0].scalar else whole()


@rule("Range", literal=True)
def number_rows(node: Node) -> Result:
    """A range over the batch, which numbers the rows."""
    start, stop, step = (node.folds[place] for place in range(3))
    if start.kind == stop.kind == step.kind == WHOLE:
        numbers = [fold.literal[0] for fold in (start, stop, step) if fold.literal is not None]
        few = len(numbers) == 3 and all(isinstance(number, int) for number in numbers) and numbers[2] != 0
        found = range(*(int(number) for number in numbers)) if few else ()
        return whole(*found) if 0 < len(found) <= 64 else whole()
    if start.literal == (0,) and step.literal == (1,) and stop.kind == COUNT:
        return rows(0, stop.per)._replace(position=1)
    if stop.kind in (COUNT, SHAPE):
        return node.couple("a range over the batch that does not number its rows one by one")
    return node.nonlinear(node.folds)


def _pad_whole(node: Node, folds: Sequence[Fold]) -> Fold:
    filled = folds[2] if len(folds) > 2 else whole(0)
    clean = folds[1].kind == WHOLE and (filled.is_zero or folds[0].kind != SUM)
    return join_folds(node, folds[0].without_numbers, filled) if clean else node.nonlinear(folds)


@axes("Pad PadV2 MirrorPad MirrorPadGrad", rest=_pad_whole)
def pad(node: Node) -> Axes:
    """Padding with constants or reflections, except along the batch."""
    widths, labels = list_entries(node, 1), list_axes(node)
    if widths is None:
        raise Undecided("the padding of rows is not known")
    around = [label for axis, label in enumerate(labels) if not all(w.is_zero for w in widths[2 * axis : 2 * axis + 2])]
    return Axes((labels,), (labels,), mixed=dict.fromkeys(around, "the batch axis is padded"))


@axes("ReverseV2 Roll", rest=move_by_wholes)
def reverse(node: Node) -> Axes:
    """Reversal along any axis but the batch."""
    along = f"{node.op.type} along the batch axis"
    numbers, labels = node.need_ints(len(node.folds) - 1, along), number_axes(node.need_rank(0, along))
    return Axes((labels,), (labels,), mixed=dict.fromkeys([labels[axis] for axis in numbers], along))


@axes("ReverseSequence", rest=move_by_wholes)
def reverse_sequence(node: Node) -> Axes:
    """Reversal of each row by its own length."""
    labels, over = number_axes(node.need_rank(0)), node.number("seq_dim", 0)
    lengths = [labels[node.number("batch_dim", 0)]]
    mixed = {labels[over]: "the batch axis is reversed, or the lengths do not correspond to rows"}
    return Axes((labels, lengths), (labels,), mixed=mixed)
