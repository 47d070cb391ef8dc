"""Roll back a failed step: restore the variables that its forward wrote, and locate the error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from whale_nebula.capture.errors import find_fixed_reshape
from whale_nebula.capture.mirror import find_origin
from whale_nebula.errors import CaptureError, StageFailedError
from whale_nebula.ir.program import Stage
from whale_nebula.tf import private as tf_private

_NODE_NAMES = re.compile(r"Detected at node (\S+) defined at|\{\{node (\S+?)\}\}|\{\{function_node (\S+?)\}\}")
_LIBRARY_FIX = re.compile(r"\bNB-\d{3} .+\n(?:  why: .+\n)?  mend: (.+)")
_SHAPE_ERRORS = re.compile(r"but the requested shape|[Ii]ncompatible shapes|[Dd]imensions? (?:.* )?must")


class OpLocations:
    """The user's lines of the ops of a traced graph, the clusters of its stages, and its number of phases."""

    def __init__(self, graph: Any = None, stages: Sequence[Stage] = (), phases: int = 1) -> None:
        self._graph = graph
        self.phases = phases
        self._clusters = {stage.key: stage.cluster for stage in stages}

    def describe(self, failure: BaseException, stage: str = "") -> str:
        """The op that failed, its line in the user's code, and the cluster."""
        name = find_failed_op(failure)
        cluster = self._clusters.get(stage)
        parts = [f"op {name!r}" if name else "", self.find_line(name), f"cluster {cluster!r}" if cluster else ""]
        return ", ".join(part for part in parts if part)

    def find_line(self, name: str) -> str:
        """The user's line of an op, or of the op whose gradient it is; "" if unknown.

        An op of a branch, or of a loop's body, has the line of the branch or the loop.
        """
        op = next((self._operations[each] for each in _list_enclosing(name) if each in self._operations), None)
        place = "" if op is None else str(find_origin(tf_private.find_forward_op(op)))
        return "" if op is None or place == op.name else place

    def suggest_fix(self, failure: BaseException) -> str:
        """The fix for an error of this library that TensorFlow passed on, or for a shape error that a constant batch
        size may have caused.
        """
        message = str(getattr(failure, "message", failure))
        own = _LIBRARY_FIX.search(message)
        if own is not None:
            return own[1]
        shapes = _SHAPE_ERRORS.search(message)
        baked = find_fixed_reshape(self._graph) if shapes else None
        if baked is None:
            return "correct the input or the op"
        return f"{baked.mend} at {baked.line}, where the batch size {baked.sizes[0]} is baked in"

    @cached_property
    def _operations(self) -> dict[str, Any]:
        return {} if self._graph is None else {op.name: op for op in self._graph.get_operations()}


def _list_enclosing(name: str) -> list[str]:
    """The names of an op and of the ops whose branches may contain it, innermost first.

    >>> _list_enclosing("m/Assert/AssertGuard/Assert")
    ['m/Assert/AssertGuard/Assert', 'm/Assert/AssertGuard', 'm/Assert', 'm']
    """
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def find_failed_op(failure: BaseException) -> str:
    """TensorFlow's name of the op that failed; "" if the message has none."""
    found = _NODE_NAMES.search(str(getattr(failure, "message", failure)))
    return "" if found is None else next(name for name in found.groups() if name)


@contextlib.contextmanager
def roll_back(variables: Sequence[Any]) -> Iterator[None]:
    """Run an update only for its results: all variables are restored at the end.

    >>> import tensorflow as tf
    >>> weight = tf.Variable(1.0)
    >>> with roll_back([weight]):
    ...     shown = float(weight.assign(float("nan")))
    >>> float(weight)
    1.0
    """
    saved = [(variable, variable.read_value()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)


class Guard:
    """Snapshot of the variables that a step's forward may write (few: seeds, averages in coupled mode), for rollback.

    `has_begun` is true when an update has started: afterwards no rollback is possible, unless the program `updates`
    nothing. `held_paths` are those of the variables in this process, by default all. `alone`: the run has no other
    process.
    """

    _begun = False

    def __init__(
        self,
        variables: Mapping[str, Any],
        written: Sequence[str],
        alone: bool = True,
        locations: OpLocations | None = None,
        held_paths: Collection[str] | None = None,
        updates: bool = True,
    ) -> None:
        self._updates = updates
        self._continuation = "go on" if alone else "start all workers again"
        self._locations = locations or OpLocations()
        self._saved = [(variables[path], variables[path].read_value()) for path in written if path in variables]
        self._variables, self._held_paths = variables, held_paths

    @property
    def has_begun(self) -> bool:
        """Whether an update has started that cannot be rolled back."""
        return self._begun

    def begin(self) -> None:
        """Record that an update starts."""
        self._begun = self._updates

    def roll_back_if_skipped(self, update: Callable[[], None], is_skipped: bool = True) -> Callable[[], None]:
        """The function that runs an update and, if the step is skipped, rolls it back with the forward's writes."""

        def run() -> None:
            held = self._variables.keys() if self._held_paths is None else self._held_paths
            with roll_back([self._variables[path] for path in held]):
                update()
            self.restore()

        return run if is_skipped else update

    def restore(self) -> None:
        """Restore the variables that forwards write to their values before the step."""
        for variable, value in self._saved:
            variable.assign(value)

    @contextlib.contextmanager
    def roll_back_on_failure(self) -> Iterator[None]:
        """Context around a step that restores these variables if it fails before an update, when all of its threads
        have stopped.
        """
        try:
            yield
        except BaseException:
            if not self.has_begun:
                self.restore()
            raise

    @contextlib.contextmanager
    def explain_stage_failure(self, stage: str, phase: int, micro_batch: int, what: str) -> Iterator[None]:
        """Context around a piece of a stage (`what`: its forward or backward) that names it in errors."""
        try:
            yield
        except tf.errors.OpError as failure:
            raise self._failed_error(what, stage, phase, micro_batch, failure) from failure

    @contextlib.contextmanager
    def explain_phase_failure(self, what: str, phase: int) -> Iterator[None]:
        """Context around a part that runs once a step, outside micro-batches, that names it (`what`) in errors."""
        try:
            yield
        except tf.errors.OpError as failure:
            raise self._once_error(what, phase, failure) from failure

    def update_error(self, failure: BaseException, phase: int) -> StageFailedError:
        """The error for a failure after the update has started."""
        self.begin()
        return self._once_error("update", phase, failure)

    def step_error(self, failure: BaseException) -> StageFailedError:
        """The error for a failure of an unknown piece before any update."""
        return self._failed_error("step", "", 0, None, failure)

    def _once_error(self, what: str, phase: int, failure: BaseException) -> StageFailedError:
        if self.has_begun:
            return self._torn_error(failure)
        return self._failed_error("step" if what == "update" else what, "", phase, None, failure)

    def _failed_error(
        self, what: str, stage: str, phase: int, micro_batch: int | None, failure: BaseException
    ) -> StageFailedError:
        where = f" of stage {stage!r}" if stage else ""
        at = [f"phase {phase}"] * (phase > 0 or self._locations.phases > 1)
        at += [f"micro-batch {micro_batch}"] * (micro_batch is not None)
        fix = self._locations.suggest_fix(failure)
        state = f"{fix}; the variables are as they were before the step: then {self._continuation}"
        return StageFailedError(
            f"the {what}{where} failed{' in ' * bool(at)}{', '.join(at)}",
            where=self._locations.describe(failure, stage),
            why=_extract_message(failure),
            mend="restore a checkpoint: an earlier phase has updated some variables" if self.has_begun else state,
            stage=stage,
            phase=phase,
            micro_batch=micro_batch,
            torn=self.has_begun,
        )

    def _torn_error(self, failure: BaseException) -> StageFailedError:
        """The error for a failure during an update: some variables are new, some old."""
        return StageFailedError(
            "the update failed, and the step is torn: some variables are updated and some are not",
            where=self._locations.describe(failure),
            why=_extract_message(failure),
            mend="restore a checkpoint before you continue",
            torn=True,
        )


def plain_step_error(stage: str, failure: BaseException, locations: OpLocations) -> StageFailedError:
    """The error for a failed step that runs as the original function, with unknown progress."""
    return StageFailedError(
        f"the step of stage {stage!r} failed",
        where=locations.describe(failure, stage),
        why=_extract_message(failure),
        mend=f"{locations.suggest_fix(failure)}; some variables may be updated: restore a checkpoint if that matters",
        stage=stage,
        torn=True,
    )


def uncut_step_error(failure: BaseException, locations: OpLocations) -> StageFailedError:
    """The error for a failed step that runs without a plan; its caller has restored the variables."""
    return StageFailedError(
        "the uncut step failed",
        where=locations.describe(failure),
        why=_extract_message(failure),
        mend=f"{locations.suggest_fix(failure)}; the variables are as they were before",
    )


def micro_batch_error(
    counts: Sequence[int], failure: BaseException, locations: OpLocations, undivided: str
) -> CaptureError:
    """The error for a step that TensorFlow cannot trace for micro-batches of these rows; nothing has run. `undivided`
    is the change to the code that keeps the batch undivided.
    """
    if len(counts) == 1:
        return CaptureError(
            "the parts of the step cannot be traced",
            where=locations.describe(failure),
            why=f"an op needs a size that TensorFlow does not infer in a part: {_extract_message(failure)}",
            mend="compute the same with other ops, or leave the op out of nb.split",
        )
    rows = " and ".join(str(count) for count in sorted(set(counts)))
    return CaptureError(
        f"the step cannot run in micro-batches of {rows} rows",
        where=locations.describe(failure),
        why=f"an op that accepts the whole batch does not accept a part of it: {_extract_message(failure)}",
        mend=f"{locations.suggest_fix(failure)}\nor {undivided}",
    )


_FRAME_PREFIXES = ("Graph execution error", "Detected at node", "<stack traces", "File ", "[[{{node")


def _extract_message(failure: BaseException) -> str:
    """TensorFlow's message without locations and decoration."""
    lines = [line.strip() for line in str(getattr(failure, "message", failure)).splitlines()]
    sentences = [line for line in lines if line and not line.startswith(_FRAME_PREFIXES)]
    return re.sub(r"^\{\{.*?\}\} ", "", (sentences or [type(failure).__name__])[0])[:300]
