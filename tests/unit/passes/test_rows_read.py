"""The rows of each input that a worker reads, in a plan."""

from dataclasses import replace

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import assign_one_worker, parse_program
from whale_nebula.feed.rows import WorkerRows
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.program import Pipeline, Program
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import find_rows_read

WORKERS = [Worker("a/0", "a", (0,)), Worker("a/1", "a", (0,)), Worker("b/0", "b", (1,))]


def make_program() -> Program:
    """Two stages, the first in two replicas; the first reads x, the second y."""
    program = parse_program(TWO_STAGES + DESCENT)
    first, second = program.stages
    return replace(
        program, stages=(replace(first, replicas=2), second), pipeline=Pipeline(micro_batch=4, coupled="allow")
    )


def rows_by_input(cut: Cut, worker: str) -> dict[str, WorkerRows]:
    return dict(zip((leaf.name for leaf in cut.program.leaves), find_rows_read(cut, worker), strict=True))


def test_replica_reads_the_rows_of_its_micro_batches() -> None:
    cut = cut_program(make_program(), WORKERS)
    rows_by_worker = {worker: rows_by_input(cut, worker) for worker in ("a/0", "a/1", "b/0")}
    assert rows_by_worker["a/0"]["x"].select(4).tolist() == [True, False, True, False]
    assert rows_by_worker["a/1"]["x"].select(4).tolist() == [False, True, False, True]
    assert not rows_by_worker["a/0"]["y"].select(4).any() and not rows_by_worker["b/0"]["x"].select(4).any()
    assert rows_by_worker["b/0"]["y"].select(4).all() and not rows_by_worker["b/0"]["y"].all_rows


def test_all_devices_of_a_replica_read_the_same_rows() -> None:
    program = make_program()
    first, second = program.stages
    split = replace(program, stages=(replace(first, shards=2), second))
    workers = [*(Worker(f"a/{number}", "a", (0,)) for number in range(4)), WORKERS[2]]
    found = [rows_by_input(cut_program(split, workers), f"a/{number}")["x"].select(4).tolist() for number in range(4)]
    assert found == [[True, False, True, False]] * 2 + [[False, True, False, True]] * 2


def test_single_process_reads_all_rows() -> None:
    program = make_program()
    cut = cut_program(program, assign_one_worker(program))
    assert all(each.select(6).all() for each in rows_by_input(cut, "local/0").values())


def test_unbatched_input_is_read_whole_by_its_readers() -> None:
    program = make_program()
    x, y = program.leaves
    cut = cut_program(replace(program, leaves=(x, replace(y, batched=False))), WORKERS)
    assert rows_by_input(cut, "b/0")["y"].all_rows
    assert not rows_by_input(cut, "a/1")["y"].select(4).any()


def test_returned_input_is_read_whole() -> None:
    program = make_program()
    (x,) = program.graph.ops[program.leaves[0].op].values
    cut = cut_program(replace(program, returns=(*program.returns, x)), WORKERS)
    assert rows_by_input(cut, "b/0")["x"].all_rows and rows_by_input(cut, "a/0")["x"].all_rows
