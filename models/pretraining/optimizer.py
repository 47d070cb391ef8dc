"""Adam as pretraining uses it: the learning rate rises in a straight line, and then falls in one to zero."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from whale_nebula.errors import OptionError


@keras.saving.register_keras_serializable("whale_nebula")
class RiseAndFall(keras.optimizers.schedules.LearningRateSchedule):
    """From almost zero to `peak` in `warmup` steps, and from there to zero at `steps`, both linear.

    >>> [round(float(RiseAndFall(0.4, steps=6, warmup=2)(step)), 3) for step in range(7)]
    [0.2, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0]
    """

    def __init__(self, peak: float, *, steps: int, warmup: int) -> None:
        if not (0 <= warmup < steps and peak > 0):
            raise OptionError(
                f"a rate of {peak!r} that rises for {warmup} of {steps} steps",
                mend="peak above 0, warmup of 0 or more, steps more than warmup",
            )
        self.peak, self.steps, self.warmup = peak, steps, warmup

    def __call__(self, step: Any) -> Any:
        """The rate of a step, counted from 0."""
        now = ops.cast(step, "float32")
        rising = (now + 1.0) / max(1, self.warmup)
        falling = (self.steps - now) / (self.steps - self.warmup)
        return self.peak * ops.maximum(0.0, ops.minimum(ops.minimum(rising, falling), 1.0))

    def get_config(self) -> dict[str, Any]:
        """What it takes to make another one."""
        return {"peak": self.peak, "steps": self.steps, "warmup": self.warmup}


def make_adam(
    model: keras.Model, peak: float, *, steps: int, warmup: float = 0.1, clip: float | None = 1.0
) -> keras.optimizers.Adam:
    """An Adam for a model that rises over the share `warmup` of the steps; its slots are there already."""
    rate = RiseAndFall(peak, steps=steps, warmup=min(steps - 1, round(warmup * steps)))
    adam = keras.optimizers.Adam(rate, epsilon=1e-6, global_clipnorm=clip)
    adam.build(model.trainable_variables)  # made while the step is traced, they would have it traced twice
    return adam
