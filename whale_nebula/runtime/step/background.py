"""Traces that a thread makes while steps run, so that the first step of a new signature does not wait for its trace.

Only what belongs to this process is done ahead: the capture, the passes, and the functions of fragments. The processes
of a run agree on a program when its first step begins, in the same order as without traces ahead. If anything fails
here, the step is traced when it begins, where errors and warnings have the line of the script.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from whale_nebula.capture.step import Captured, Signature
from whale_nebula.feed.rows import divide_rows
from whale_nebula.ir.cut import Cut
from whale_nebula.passes.pipeline import Compilation, run_passes
from whale_nebula.passes.replicas import count_local_micro_batches, find_replica_sums
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.engine import (
    Call,
    compile_cut,
    has_links,
    make_uncut_function,
    prepare_compilation,
    runs_uncut,
)
from whale_nebula.runtime.step.local import LocalStep
from whale_nebula.site import Site, use_thread_site
from whale_nebula.tf.threads import copy_thread_state

_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass(frozen=True)
class Prepared:
    """A capture made ahead, the `models` that it calls and, if they do not depend on other processes, the `cut` that
    the passes make of their input (`compilation`), and its `functions`: what `_build_functions` returns.
    """

    captured: Captured
    models: Sequence[Any] = ()
    compilation: Compilation | None = None
    cut: Cut | None = None
    functions: Any = None

    def find_results(self, given: Compilation) -> tuple[Cut | None, Any]:
        """The cut and the functions, if the input of the passes for the same capture (`given`) has not changed since;
        None for each that was not made.
        """
        ahead = self.compilation
        if ahead is None or (ahead.workers, ahead.held_layouts) != (given.workers, given.held_layouts):
            return None, None
        return self.cut, self.functions


class BackgroundTrace:
    """A trace by a thread, with the scopes, the device and the Keras settings of the thread that creates it. `site` is
    the line of the script that errors and warnings name.
    """

    def __init__(self, trace: Callable[[], Prepared], site: Site) -> None:
        self._trace, self._site = trace, site
        self._prepared: Prepared | None = None
        self._use_state = copy_thread_state()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="nebula-trace")
        self._thread.start()

    def _run(self) -> None:
        try:
            with use_thread_site(self._site), self._use_state():
                self._prepared = self._trace()
        except BaseException as failure:  # the step is traced again when it begins, and raises
            _LOG.info("a trace ahead failed, so the step is traced when it begins: %s", failure)

    @property
    def is_running(self) -> bool:
        """Whether the thread is still tracing."""
        return self._thread.is_alive()

    def wait(self) -> Prepared | None:
        """Wait until the trace is complete; returns None if it failed."""
        self._thread.join()
        return self._prepared


def prepare(captured: Captured, models: Sequence[Any], call: Call, layout: Signature, rows: int, run: Run) -> Prepared:
    """Cut a capture and build the functions of its fragments, for batches of this number of rows.

    Collectives of replicas and splits, and copies of a step by local SGD, are built when all processes begin the
    program; of these only the capture is ahead.
    """
    program = captured.program
    if program.local_sgd is not None or program.splits:
        return Prepared(captured, models)
    given = prepare_compilation(captured, run, follows_inputs=bool(run.config.forbid))
    cut: Cut = run_passes(given).require("cut")
    if cut.layouts or find_replica_sums(cut.program):
        return Prepared(captured, models, given, cut)
    return Prepared(captured, models, given, cut, _build_functions(captured, cut, call, layout, rows, run))


def _build_functions(captured: Captured, cut: Cut, call: Call, layout: Signature, rows: int, run: Run) -> Any:
    """The function of an uncut step, a step in one function, or the fragments of this worker, as `make_engine` does."""
    if run.alone and runs_uncut(cut):
        function = make_uncut_function(captured, call, layout)
        function.get_concrete_function()
        return function
    worker = cut.workers[0].name if run.alone else run.ledger.session.worker
    if run.alone and not has_links(cut, run):
        step = LocalStep(compile_cut(captured, cut, worker, is_outside_trace=False), captured.variables)
        step.trace(divide_rows(rows, count_local_micro_batches(cut.program)))
        return step
    compiled = compile_cut(captured, cut, worker, is_outside_trace=True)
    bind_fragments(compiled)
    return compiled


def bind_fragments(compiled: Compiled) -> None:
    """Build the functions of all fragments of a worker, which otherwise are built when a step first calls them."""
    for phase in compiled.cut.phases:
        compiled.bind_prologue(phase)
        for stage in compiled.stages:
            compiled.bind_stage(phase, stage)
        compiled.bind_updates(phase)
    _ = compiled.whole_batch_function, compiled.loss_weight_function  # computed when they are read
