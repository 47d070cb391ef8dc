"""The text of named programs after every pass, and the digests of their plans, one golden file for each program."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.golden.files import FOLDER, check_golden
from tests.golden.programs import PROGRAMS
from tests.unit.passes.programs import Read, list_cut
from whale_nebula.ir.canonical import canonical_lines, digest_lines
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import Program
from whale_nebula.ir.text import to_text
from whale_nebula.passes import plan as pipeline
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.phases import Parts

PASSES = ("one_in_flight", "fold_batch", "split_parts", "with_merges", "_map_workers")


@pytest.fixture(autouse=True)
def no_run_is_open() -> Iterator[None]:
    nb.shutdown()
    yield
    nb.shutdown()


def shown(value: Any) -> str:
    """A field of what a pass found; sets and mappings in order."""
    if isinstance(value, set | frozenset):
        return " ".join(str(each) for each in sorted(value)) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key}:{value[key]}" for key in sorted(value)) or "none"
    return str(value)


def describe_folds(folds: BatchFolds) -> Iterator[str]:
    """What an op's outputs are to the batch, and what waits for all micro-batches."""
    for name in ("once", "checks", "wholes"):
        yield f"{name}: {shown(getattr(folds, name))}"
    if folds.folding is not None:
        for op in folds.program.graph.ops:
            if op.outputs:
                yield f"%{op.index} {op.type}: {' | '.join(str(folds.folding.of(value)) for value in op.values)}"
    yield from (f"note: {note}" for note in folds.notes)


def describe_program(program: Program) -> Iterator[str]:
    yield f"canonical digest {digest_lines(canonical_lines(program))}"
    labels = (f"%{op}:{stage}" for op, stage in sorted(program.labels.items()))
    yield f"labels {' '.join(labels)}"


def list_ops(program: Program) -> str:
    """The ops of a program, without what changes from trace to trace: the order of control inputs, counted names."""

    def in_order(found: re.Match[str]) -> str:
        return "".join(f" ^%{number}" for number in sorted(map(int, re.findall(r"\d+", found[0]))))

    text = re.sub(r"CustomGradient-\d+", "CustomGradient", to_text(program.graph, names=False))
    return re.sub(r"(?: \^%\d+)+", in_order, text)


def describe(found: Any) -> Iterable[str]:
    """The lines of what one pass gives."""
    match found:
        case Program():
            return describe_program(found)
        case BatchFolds():
            return describe_folds(found)
        case Parts():
            return (f"{field.name}: {shown(getattr(found, field.name))}" for field in fields(found))
        case Cut():
            program = found.program
            return list_cut(found, Read(program, {}, list(range(len(program.graph.ops)))))
    raise AssertionError(f"no text for {type(found).__name__}")


def record_passes(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nb.Plan]) -> list[str]:
    """The text after each pass while a program is planned; the last planning of a step counts."""
    lines: list[str] = []

    def recording(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **options: Any) -> Any:
            if name == PASSES[0]:
                lines[:] = ["", "== capture", list_ops(given[0])]
            found = apply(*given, **options)
            lines.extend(["", f"== {name.strip('_')}", *describe(found)])
            return found

        return recorded

    for name in PASSES:
        monkeypatch.setattr(pipeline, name, recording(name, getattr(pipeline, name)))
    keras.utils.clear_session()
    plan = make()
    portable = replace(plan, versions={}, threads={})
    head = [f"program digest {plan.program_digest}", f"plan digest, without versions and threads, {portable.digest}"]
    return [f"program {make.__name__}: {(make.__doc__ or '').splitlines()[0]}", *head, *lines]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_after_every_pass_is_the_golden_one(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_golden(request, f"programs/{name}.txt", "\n".join(record_passes(monkeypatch, PROGRAMS[name])))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in (FOLDER / "programs").iterdir()} == set(PROGRAMS)
