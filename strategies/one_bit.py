"""Adam and LAMB optimizers that freeze the variance after a warm-up, so that momenta can be sent at one bit per number.

With `nb.replica(exchange="1bit")` clusters exchange momenta after each step, in float32 during the warm-up and as signs
once the variance is frozen. Without it they are ordinary optimizers whose variance is frozen after `freeze_step` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.runtime.local_sgd.one_bit import Slots, note_optimizer

_OF_GRADIENTS = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "loss_scale_factor",
    "use_ema",
)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def check_number(name: str, option: str, value: Any, example: float, end: float = np.inf) -> None:
    """Refuse a value of an optimizer's option that is not a number of at least 0 and less than `end`."""
    if not is_number(value) or not 0 <= value < end:
        bounds = "at least 0" if end == np.inf else f"at least 0 and less than {end:g}"
        raise OptionError(f"{option}={value!r} of {name} is not a number {bounds}", mend=f"{option}={example:g}")


class OneBitAdam(keras.optimizers.Optimizer):
    """1-bit Adam: Adam without bias correction, whose variance is frozen after a warm-up of `freeze_step` steps.

    With `nb.replica(exchange="1bit")` clusters exchange momenta instead of gradients, after the warm-up at one bit per
    number.

    Args:
        learning_rate: learning rate, or a schedule.
        freeze_step: number of warm-up steps, usually 15 to 25 % of all steps.
        beta_1: decay of the momentum.
        beta_2: decay of the variance in the warm-up.
        epsilon: added to the root of the variance.
        weight_decay: weight decay, which is part of the update.
        servers: whether the mean of momenta is compressed a second time, with its own error feedback, as with parameter
            servers. Between clusters this saves no bytes; between three or more workers of one cluster it does.
        name: name of the optimizer.
        kwargs: further options of a Keras optimizer. Gradient clipping and accumulation, loss scaling and `use_ema` are
            not supported.

    >>> OneBitAdam(1e-3, freeze_step=500).get_config()["freeze_step"]
    500
    """

    fused = False
    """Whether all momenta of an exchange share one scale; otherwise each variable has its own."""

    def __init__(
        self, learning_rate: Any = 1e-3, freeze_step: int = 1000, beta_1: float = 0.9, beta_2: float = 0.999,
        epsilon: float = 1e-8, weight_decay: float = 0.0, servers: bool = False, name: str = "one_bit_adam",
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        for option in _OF_GRADIENTS:
            if kwargs.get(option):
                why = "it would apply to the gradients of each cluster's own rows, before momenta are exchanged"
                raise OptionError(
                    f"{name} does not support {option}={kwargs[option]!r}", why=why, mend=f"remove {option}="
                )
        if not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1:
            raise OptionError(
                f"freeze_step={freeze_step!r} of {name} is not a positive integer", mend="freeze_step=1000"
            )
        for option, value in {"beta_1": beta_1, "beta_2": beta_2}.items():
            check_number(name, option, value, 0.9, end=1.0)
        check_number(name, "epsilon", epsilon, 1e-8)
        check_number(name, "weight_decay", weight_decay, 0.01)
        if not isinstance(servers, bool):
            raise OptionError(f"servers={servers!r} of {name} is not a bool", mend="servers=True, or servers=False")
        self.freeze_step, self.beta_1, self.beta_2, self.epsilon = freeze_step, beta_1, beta_2, epsilon
        self.decay, self.servers = weight_decay, servers

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots."""
        if self.built:
            return
        super().build(variables)
        names = self._slot_names()
        self._own_slots = [self._make_slots(variable, names) for variable in variables]
        note_optimizer(self)

    def _slot_names(self) -> tuple[str, ...]:
        return "momentum", "velocity"

    def _make_slots(self, variable: Any, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(self.add_variable_from_reference(variable, name=name) for name in names)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable by the gradient of all rows, or, if momenta are exchanged, of the cluster's rows."""
        momentum, *others = self._own_slots[self._get_variable_index(variable)]
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        before = tf.convert_to_tensor(momentum)
        after = self.beta_1 * before + (1.0 - self.beta_1) * gradient
        rate = tf.cast(learning_rate, variable.dtype)
        tensors = [tf.convert_to_tensor(each) for each in others]
        step = tf.cast(tf.convert_to_tensor(self.iterations), tf.int64)
        weight, new_others = self.advance(tf.convert_to_tensor(variable), before, after, tensors, gradient, step, rate)
        self.assign(variable, weight)
        for slot, value in zip((momentum, *others), (after, *new_others), strict=True):
            self.assign(slot, value)

    def slots_of(self, variable: Any) -> Slots | None:
        """The slots of a weight; None if the weight is not trained by this optimizer."""
        for trained, slots in zip(self._trainable_variables, self._own_slots, strict=True):
            if getattr(trained, "value", trained) is variable:
                momentum, *others = (getattr(each, "value", each) for each in slots)
                return Slots(momentum, tuple(others), getattr(trained, "constraint", None))
        return None

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rate = self._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(step)
        elif callable(rate) and not hasattr(rate, "assign"):
            rate = rate()
        return float(tf.convert_to_tensor(rate))

    def scales_of(self, momenta: Sequence[Any]) -> Sequence[float]:
        """The factors of momenta before compression: 1, as all momenta are compressed unscaled."""
        return [1.0] * len(momenta)

    def advance(
        self, weight: Any, before: Any, momentum: Any, others: Sequence[Any], gradient: Any, step: Any, rate: Any
    ) -> tuple[Any, Sequence[Any]]:
        """The weight and its other slots (here the variance) after an update by the momentum `momentum`, which was
        `before`; the variance changes only before `freeze_step`.
        """
        (velocity,) = others
        fresh = self.beta_2 * velocity + (1.0 - self.beta_2) * tf.square(gradient)
        velocity = tf.where(step >= self.freeze_step, velocity, fresh)
        update = momentum / (tf.sqrt(velocity) + self.epsilon) + self.decay * weight
        return weight - rate * update, (velocity,)

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        names = ("freeze_step", "beta_1", "beta_2", "epsilon", "servers")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}, "weight_decay": self.decay}


class OneBitLamb(OneBitAdam):
    """1-bit LAMB: the variance is frozen after a warm-up, and layer coefficients continue from their means.

    After the warm-up each layer's coefficient is its mean so far times a factor: the largest ratio of the frozen to the
    current root of the variance (or of the variances, with `roots=False`), limited to `factors` and, in each step, to a
    relative change of `factor_change`. The current variance is that of the gradients which the momenta imply. Before
    momenta are compressed, they are scaled to the same root mean square in all layers.

    Args:
        learning_rate: learning rate, or a schedule.
        freeze_step: number of warm-up steps, usually 15 to 25 % of all steps.
        coefficients: limits of a layer's coefficient.
        coefficient_beta: decay of the mean of coefficients.
        factors: limits of the factor.
        roots: whether the factor is the ratio of the roots of the variances, as in the published code; otherwise that
            of the variances, as in the paper.
        factor_change: maximum relative change of the factor in a step.
        name: name of the optimizer.
        kwargs: further options of `OneBitAdam`.
    """

    fused = True

    def __init__(
        self, learning_rate: Any = 1e-3, freeze_step: int = 1000, *, coefficients: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9, factors: tuple[float, float] = (0.5, 4.0), factor_change: float = 0.1,
        roots: bool = True, name: str = "one_bit_lamb", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, freeze_step, name=name, **kwargs)
        for option, limits in {"coefficients": coefficients, "factors": factors}.items():
            pair = isinstance(limits, tuple | list) and len(limits) == 2
            if not pair or not all(is_number(each) for each in limits) or not 0 < limits[0] <= limits[1]:
                raise OptionError(
                    f"{option}={limits!r} of {name} is not a pair of positive limits, the smaller first",
                    mend=f"{option}=(0.5, 4.0)",
                )
        check_number(name, "coefficient_beta", coefficient_beta, 0.9, end=1.0)
        check_number(name, "factor_change", factor_change, 0.1, end=1.0)
        if not isinstance(roots, bool):
            raise OptionError(f"roots={roots!r} of {name} is not a bool", mend="roots=True, or roots=False")
        self.roots = roots
        self.coefficients, self.factors = tuple(coefficients), tuple(factors)
        self.coefficient_beta, self.factor_change = coefficient_beta, factor_change

    def _slot_names(self) -> tuple[str, ...]:
        return "momentum", "velocity", "current_velocity"

    def _make_slots(self, variable: Any, names: Sequence[str]) -> tuple[Any, ...]:
        path = variable.path.replace("/", "_")
        mean = self.add_variable((), initializer="zeros", dtype="float32", name=f"{path}_coefficient")
        last = self.add_variable((), initializer="ones", dtype="float32", name=f"{path}_factor")
        return *super()._make_slots(variable, names), mean, last

    def scales_of(self, momenta: Sequence[Any]) -> Sequence[float]:
        """Factors that scale the momenta of all layers to the same root mean square; 1 for a layer without momentum."""
        roots = np.array([float(tf.sqrt(tf.reduce_mean(tf.square(each)))) for each in momenta])
        return np.where(roots > 0, np.mean(roots) / np.where(roots > 0, roots, 1.0), 1.0).tolist()

    def advance(
        self, weight: Any, before: Any, momentum: Any, others: Sequence[Any], gradient: Any, step: Any, rate: Any
    ) -> tuple[Any, Sequence[Any]]:
        """The weight, both variances, the mean of coefficients and the last factor after an update."""
        velocity, current, mean, last = others
        frozen = step >= self.freeze_step
        current = self.beta_2 * current + (1.0 - self.beta_2) * tf.square(gradient)
        velocity = tf.where(frozen, velocity, current)
        root = tf.sqrt(velocity) + self.epsilon
        plain = momentum / root
        update = plain + self.decay * weight
        trusted = self._clip(tf.math.divide_no_nan(tf.norm(weight), tf.norm(update)), self.coefficients)
        trusted = tf.where((tf.norm(weight) > 0) & (tf.norm(update) > 0), trusted, 1.0)
        seen = self.coefficient_beta * mean + (1.0 - self.coefficient_beta) * trusted
        warm = tf.where(trusted != 1.0, seen, mean)
        factor = tf.reduce_max(root / (tf.sqrt(current) + self.epsilon))
        factor = factor if self.roots else tf.square(factor)
        if self.decay:
            share = tf.minimum(1.0, tf.math.divide_no_nan(tf.norm(plain), tf.norm(update)))
            factor = factor * share + (1.0 - share)
        factor = self._clip(factor, self.factors)
        factor = self._clip(factor, (last * (1.0 - self.factor_change), last * (1.0 + self.factor_change)))
        coefficient = tf.where(frozen, mean * factor, trusted)
        weight = weight - rate * coefficient * update
        return weight, (velocity, current, tf.where(frozen, mean, warm), tf.where(frozen, factor, last))

    @staticmethod
    def _clip(value: Any, limits: Sequence[Any]) -> Any:
        return tf.clip_by_value(value, limits[0], limits[1])

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        names = ("coefficients", "coefficient_beta", "factors", "factor_change", "roots")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
