"""Executing a step: from the call of a training function to the update of its variables.

1. `step.Step.run` lays out the arguments of a call; a new signature is captured (`capture.step`), compiled
  (`passes.pipeline`) and given an engine (`engine.make_engine`).
2. The engine's runner executes it: `local` (all stages in this process: one TensorFlow function if links are free,
  otherwise actors over memory links) or `distributed` (this process's stages, links to the others).
3. `distributed` announces the step to the other processes, and checks their announcements: number, rows, fingerprints.
4. `whole_batch` computes values of the whole batch, and runs the parts before the micro-batches.
5. `actors` gives each stage its list of instructions (`schedule.schedules`), and a thread that executes it.
6. For a forward or a backward, `stage_run` gathers the inputs of its function (`compiled`), calls it, and passes on the
   outputs: boundaries are sent by `runtime.exchange`, sums of replicas by `runtime.replicas`.
7. `gradients` adds up gradients of micro-batches and stages, in an order independent of the schedule.
8. `whole_batch` sends the values that updates of other workers need (`peers`), and applies the update, round by round;
  the update gets large gradients as their only owner (`handover`).
9. `rollback` restores variables after a step that failed, or that was skipped by a vote.
10. `clock`, `measurements` and `traffic` measure and predict times and bytes for the step's report.
"""
