"""Weight penalties of another stage: their gradients do not cross, and their values cross once a step."""

import numpy as np
import tensorflow as tf

import whale_nebula as nb

ROWS = np.linspace(0.0, 1.0, 32, dtype=np.float32).reshape(8, 4)


class Penalised:
    """Two matrices, one in each stage, and the sum of squares of both in the loss."""

    def __init__(self, micro_batch: int, scale: float = 0.01) -> None:
        self.a = tf.Variable(np.eye(4, dtype=np.float32), name="a")
        self.b = tf.Variable(np.full((4, 1), 0.5, np.float32), name="b")
        self.scale = scale
        self.micro_batch = micro_batch
        self.step = nb.function(self._step)

    def _step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batch=self.micro_batch):
            with nb.stage(cluster="gpu"):
                hidden = x @ self.a
            with nb.stage(cluster="npu"):
                out = hidden @ self.b
            penalty = tf.add_n([tf.nn.l2_loss(variable) for variable in (self.a, self.b)])
            loss = tf.reduce_mean(tf.square(out)) + self.scale * penalty
        for variable, gradient in zip((self.a, self.b), tape.gradient(loss, (self.a, self.b)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def test_penalty_of_another_stage_adds_no_boundary() -> None:
    step = Penalised(micro_batch=4).step
    plan = nb.plan(step, ROWS)
    assert [boundary.shape for boundary in plan.boundaries] == [(None, 4)]
    assert plan.stages["npu"].outputs == ("loss",)


def test_step_with_a_penalty_equals_the_uncut_step() -> None:
    for micro_batch in (1, 4):
        result = nb.verify(Penalised(micro_batch, scale=0.5).step, ROWS)
        assert result.ok, str(result)
