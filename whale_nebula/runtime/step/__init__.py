"""Executing a step: from the call of a training function to the update of its variables.

1. `step.Step.run` lays out the arguments of a call; a form of them that is new is captured (`capture.step`), compiled
   (`passes.pipeline`) and given an engine (`engine.engine`).
2. The engine's runner executes it: `local` (all stages in this process: one TensorFlow function where links are free,
   else actors over memory links) or `distributed` (this process's stages, links to the others).
3. `distributed` announces the step to the other processes, and checks what they announce: number, rows, fingerprints.
4. `once` computes what is made of the whole batch, and what runs before the micro-batches.
5. `actors` gives each stage its list of instructions (`schedule.schedules`), and a thread to work through it.
6. For a forward or a backward, `stage_run` takes what its function needs (`compiled`), calls it, and hands on what it
   has made: boundaries cross by `runtime.exchange`, sums of replicas by `runtime.replicas`.
7. `gradients` adds what micro-batches and stages have made, in an order that no schedule changes.
8. `once` sends what updates of other workers need (`peers`), and applies the update, round by round.
9. `rollback` puts back what was written where a step failed, or was voted to be skipped.
10. `clock`, `measured`, `speeds` and `traffic` say how long all that took, and what it should take: the step's report.
"""
