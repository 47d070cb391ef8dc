"""The rows of each input that a worker reads, in a plan."""

from dataclasses import replace

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import alone, program_of
from whale_nebula.feed.rows import WorkerRows
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.program import Pipeline, Program
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import rows_read

WORKERS = [Worker("a/0", "a", (0,)), Worker("a/1", "a", (0,)), Worker("b/0", "b", (1,))]


def program() -> Program:
    """Two stages, the first in two replicas; the first reads x, the second y."""
    made = program_of(TWO_STAGES + DESCENT)
    first, second = made.stages
    return replace(made, stages=(replace(first, replicas=2), second), pipeline=Pipeline(micro_batch=4, coupled="allow"))


def read(cut: Cut, worker: str) -> dict[str, WorkerRows]:
    return dict(zip((leaf.name for leaf in cut.program.leaves), rows_read(cut, worker), strict=True))


def test_replicas_read_the_rows_of_their_micro_batches() -> None:
    cut = cut_program(program(), WORKERS)
    of = {worker: read(cut, worker) for worker in ("a/0", "a/1", "b/0")}
    assert of["a/0"]["x"].select(4).tolist() == [True, False, True, False]
    assert of["a/1"]["x"].select(4).tolist() == [False, True, False, True]
    assert not of["a/0"]["y"].select(4).any() and not of["b/0"]["x"].select(4).any()
    assert of["b/0"]["y"].select(4).all() and not of["b/0"]["y"].all_rows


def test_all_devices_of_a_replica_read_its_rows() -> None:
    made = program()
    first, second = made.stages
    split = replace(made, stages=(replace(first, shards=2), second))
    workers = [*(Worker(f"a/{number}", "a", (0,)) for number in range(4)), WORKERS[2]]
    found = [read(cut_program(split, workers), f"a/{number}")["x"].select(4).tolist() for number in range(4)]
    assert found == [[True, False, True, False]] * 2 + [[False, True, False, True]] * 2


def test_with_one_process_for_all_every_row_is_read() -> None:
    made = program()
    cut = cut_program(made, alone(made))
    assert all(each.select(6).all() for each in read(cut, "local/0").values())


def test_an_input_that_is_not_cut_is_read_whole_by_who_reads_it() -> None:
    made = program()
    x, y = made.leaves
    cut = cut_program(replace(made, leaves=(x, replace(y, batched=False))), WORKERS)
    assert read(cut, "b/0")["y"].all_rows
    assert not read(cut, "a/1")["y"].select(4).any()


def test_an_input_that_the_step_returns_is_read_whole() -> None:
    made = program()
    (x,) = made.graph.ops[made.leaves[0].op].values
    cut = cut_program(replace(made, returns=(*made.returns, x)), WORKERS)
    assert read(cut, "b/0")["x"].all_rows and read(cut, "a/0")["x"].all_rows
