"""The text of a program between passes: its ops, and the analyses so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from whale_nebula.ir.canonical import canonical_lines, digest_lines
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.program import Program
from whale_nebula.ir.text import to_text
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.spec import Value


def list_program(program: Program) -> Iterator[str]:
    """The digest, the stages of ops, and the ops."""
    yield f"canonical digest {digest_lines(canonical_lines(program))}"
    yield f"labels {' '.join(f'%{op}:{stage}' for op, stage in sorted(program.labels.items()))}"
    yield list_ops(program)


def list_ops(program: Program) -> str:
    """The ops, without what changes from trace to trace: the order of control inputs, counted names."""

    def in_order(found: re.Match[str]) -> str:
        return "".join(f" ^%{number}" for number in sorted(map(int, re.findall(r"\d+", found[0]))))

    text = re.sub(r"CustomGradient-\d+", "CustomGradient", to_text(program.graph, names=False))
    return re.sub(r"(?: \^%\d+)+", in_order, text)


def list_folds(folds: BatchFolds) -> Iterator[str]:
    """What each op's outputs are to the batch, and what waits for all micro-batches."""
    for name in ("once", "checks", "wholes"):
        yield f"{name}: {_format_field(getattr(folds, name))}"
    if folds.folding is not None:
        for op in folds.program.graph.ops:
            if op.outputs:
                yield f"%{op.index} {op.type}: {' | '.join(str(folds.folding.of(value)) for value in op.values)}"
    yield from (f"note: {note}" for note in folds.notes)


def list_fields(found: Any) -> Iterator[str]:
    """The fields of a record, a line each."""
    return (f"{field.name}: {_format_field(getattr(found, field.name))}" for field in fields(found))


def _format_field(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return " ".join(str(each) for each in sorted(value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{value[key]}" for key in sorted(value)) or "none"
    return str(value)


def list_cut(cut: Cut, number: Callable[[int], int] = int) -> Iterator[str]:
    """The fragments of every phase, what crosses between them, and who holds what; `number` numbers the ops."""
    for fragment in cut.whole.values():
        yield from _list_fragment(cut, fragment, number)
    for phase in cut.phases:
        yield f"phase {phase.index}, requests {list(phase.requests)}"
        fragments = list(phase.prologue.values())
        fragments += [f for stage in phase.stages for f in (stage.forward, stage.backward) if f is not None]
        fragments += [f for rounds in phase.updates.values() for f in rounds]
        for fragment in fragments:
            yield from (f"  {line}" for line in _list_fragment(cut, fragment, number))
        for each in phase.crossings:
            to = ", ".join(each.destinations)
            when = "before the updates" if each.round < 0 else f"after round {each.round}"
            yield f"  {_name_value(each.value, number)} crosses {each.source} -> {to} {when}"
    stages = cut.program.stages
    for b in cut.boundaries:
        to = ", ".join(stages[destination].key for destination in b.destinations)
        back = f"its gradient as {b.backward_codec}" if b.backward else "no gradient"
        value = _name_value(b.value, number)
        yield (
            f"boundary {b.slot}: {value} {stages[b.source].key} -> {to} as {b.codec}, {back}, {b.layout}, "
            f"phase {b.phase}"
        )
    yield from (f"merge {_name_value(value, number)}: {rule}" for value, rule in sorted(cut.merges.items()))
    yield from (f"held {path}: {', '.join(workers)}" for path, workers in cut.held.items())


def _list_fragment(cut: Cut, fragment: Fragment, number: Callable[[int], int]) -> Iterator[str]:
    stage = "" if fragment.stage is None else f" of {cut.program.stages[fragment.stage].key}"
    turn = f" round {fragment.round}" if fragment.kind == "update" else ""
    ops = ", ".join(f"%{number(op)} {cut.program.graph.ops[op].type}" for op in fragment.ops)
    yield f"{fragment.kind}{stage}{turn} on {fragment.worker}"
    yield f"  fed {', '.join(_name_value(value, number) for value in sorted(fragment.feeds)) or 'nothing'}"
    yield f"  ops {ops or 'none'}"
    yield f"  gives {', '.join(_name_value(value, number) for value in sorted(fragment.fetches)) or 'nothing'}"


def _name_value(value: Value, number: Callable[[int], int]) -> str:
    return str(Value(number(value.op), value.out))
