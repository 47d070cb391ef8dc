"""Failpoints: their places, plans for them, and errors for invalid ones."""

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from whale_nebula import faults as failpoints
from whale_nebula.errors import OptionError, RunError
from whale_nebula.faults import (
    POINTS,
    VARIABLE,
    Action,
    Fault,
    FaultPlan,
    apply_plan,
    chunk_failpoint,
    failpoint,
    names,
)

ROOT = Path(__file__).resolve().parents[2]


def count_used_failpoints() -> Counter[str]:
    """The failpoints that the library's source names, outside of the simulator, which stands in for the runtime."""
    found: Counter[str] = Counter()
    for path in (ROOT / "whale_nebula").rglob("*.py"):
        source = path.read_text("utf-8")
        if path.parent.name == "testing" or "failpoint(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if isinstance(node, ast.Call) and name == "failpoint":
                found.update(n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and n.value)
            elif isinstance(node, ast.Call) and name == "chunk_failpoint":
                found.update(f"chunk.{part}.{ast.literal_eval(node.args[0])}" for part in ("first", "middle", "last"))
    return found


def test_failpoints_are_each_used_at_one_place() -> None:
    found = count_used_failpoints()
    assert {name for name, count in found.items() if count > 1} == set()
    assert set(found) == set(POINTS) and len(POINTS) >= 20


def test_failpoints_have_descriptions() -> None:
    assert names().keys() == POINTS.keys() and all(len(what) > 10 for what in names().values())


def test_testing_page_lists_all_failpoints() -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    rows = {f"| `{name}` | {point.what} | {'yes' if point.connection else ''} |" for name, point in POINTS.items()}
    assert rows <= set(page.splitlines()) and page.count("\n| `") == len(POINTS) + len(Action)


def test_failpoint_without_a_plan_does_nothing() -> None:
    assert failpoints._plan is None
    failpoint("step.before")
    failpoint("no such name, and nobody looks")
    chunk_failpoint("before", True, True, print)


def test_fault_applies_at_its_hit_and_hits_are_counted() -> None:
    plan = FaultPlan.parse("step.before=raise@2, npu/0:step.after=raise", worker="gpu/0")
    with apply_plan(plan):
        failpoint("step.before")
        failpoint("step.after")
        with pytest.raises(RunError, match=r"failpoint step\.before=raise@2"):
            failpoint("step.before")
        failpoint("step.before")
    failpoint("step.before")
    assert plan.reached == {"step.before": 3, "step.after": 1}
    assert [fault.worker for fault in plan.faults] == [None]


def test_repeated_fault_applies_from_its_hit_on() -> None:
    fault = Fault.parse("step.before=delay:0.25@2+")
    assert [fault.applies_at(number) for number in (1, 2, 3)] == [False, True, True]
    assert (fault.action, fault.seconds) == (Action.DELAY, 0.25)


def test_chunk_failpoints_depend_on_the_position() -> None:
    with apply_plan(FaultPlan()) as plan:
        for ends in ((True, False), (False, False), (False, True), (True, True)):
            chunk_failpoint("after", *ends, print)
    assert plan.reached == {"chunk.first.after": 2, "chunk.middle.after": 1, "chunk.last.after": 2}


def test_drop_fault_calls_the_drop_function() -> None:
    dropped: list[str] = []
    with apply_plan(FaultPlan.parse("chunk.first.before=drop")):
        chunk_failpoint("before", True, False, dropped.append)
    assert dropped == ["failpoint chunk.first.before=drop@1"]


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("update.begn=kill", "did you mean 'update.begun'"),
        ("update.begun=kil", "did you mean 'kill'"),
        ("update.begun", "update.begun=kill@3"),
        ("update.begun=kill@0", "update.begun=kill@3"),
        ("step.before=drop", "chunk.first.before=drop"),
    ],
)
def test_invalid_fault_is_refused_with_a_fix(text: str, mend: str) -> None:
    with pytest.raises(OptionError) as caught:
        FaultPlan.parse(text)
    assert mend in caught.value.mend


@pytest.mark.parametrize("text", ["npu/0:update.begun=kill@3", "chunk.last.after=delay:0.5@2+", "meet.after=freeze@1"])
def test_fault_round_trips_through_text(text: str) -> None:
    assert str(Fault.parse(text)) == text


def run_process(faults: str, code: str = "failpoint('step.before')") -> subprocess.CompletedProcess[str]:
    command = f"from whale_nebula.faults import failpoint; {code}; print('went on')"
    environment = {**os.environ, VARIABLE: faults}
    return subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_environment_variable_applies_a_fault() -> None:
    assert run_process("step.before=kill").returncode == -signal.SIGKILL


def test_invalid_environment_variable_ends_the_process() -> None:
    done = run_process("step.befor=kill")
    assert done.returncode == 1 and "did you mean 'step.before'?" in done.stderr


def test_faults_module_loads_neither_tensorflow_nor_grpc() -> None:
    done = run_process("", "import sys; assert not {'tensorflow', 'keras', 'grpc', 'numpy'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr
