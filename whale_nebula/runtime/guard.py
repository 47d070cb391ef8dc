"""A failed step leaves no trace: what its forward wrote is put back, and the error says where it happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.errors import StageFailedError


class Guard:
    """Remembers what the forward of a step may write (it is little: seeds, averages in coupled mode)."""

    def __init__(self, variables: Mapping[str, Any], written: Sequence[str]) -> None:
        self._saved = [(variables[path], variables[path].read_value()) for path in written if path in variables]

    def restore(self) -> None:
        """Put everything back as it was before the step."""
        for variable, value in self._saved:
            variable.assign(value)

    @contextlib.contextmanager
    def piece(self, stage: str, phase: int, micro_batch: int, what: str) -> Iterator[None]:
        """Name the piece of the step that runs inside; a failure puts things back and tells."""
        try:
            yield
        except tf.errors.OpError as failure:
            self.restore()
            raise StageFailedError(
                f"the {what} of stage {stage!r} failed in phase {phase}, micro-batch {micro_batch}",
                where=_node(failure),
                why=_sentence(failure),
                mend="the variables are as they were before the step: correct the input or the op and go on",
                stage=stage,
                phase=phase,
                micro_batch=micro_batch,
                torn=False,
            ) from failure

    def torn(self, failure: BaseException) -> StageFailedError:
        """The error for a failure during an update: some variables are new, some old."""
        return StageFailedError(
            "the update failed, and the step is torn: some variables are updated and some are not",
            where=_node(failure),
            why=_sentence(failure),
            mend="go back to a checkpoint before going on",
            stage="",
            phase=-1,
            micro_batch=-1,
            torn=True,
        )


def _sentence(failure: BaseException) -> str:
    """The first line of what TensorFlow said."""
    return str(getattr(failure, "message", failure)).strip().splitlines()[0][:300]


def _node(failure: BaseException) -> str:
    node = getattr(failure, "node_def", None)
    return "" if node is None else f"op {node.name!r}"
