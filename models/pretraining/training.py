"""One step of pretraining: generators fill in hidden tokens, and one discriminator detects them.

    text of a family -> generator: hide, guess, fill in -> ids, marks, originals -> discriminator

No gradient returns: a generator learns from its own predictions only, so its cluster does not wait for the other. Each
network has its own optimizer.

*Replaced token detection* predicts for each token whether it is the original one: for sentences of many languages
(MRTD) and for pairs of translations (TRTD) it is the same loss, of other rows. *Corrective language modelling* (CLM)
predicts the original of each token; a discriminator may copy the visible token, with its predicted probability of being
original:

    p(original = w) = [w is shown] c + (1 - c) softmax(scores)[w],  c = 1 - p(replaced)

The gradient of that loss does not flow through c, which is trained by the detection. Each loss is the mean over rows of
the mean over a row's counted tokens: so it is the same in micro-batches and in replicas, for any padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from whale_nebula.errors import OptionError

from ..masked_lm import MaskedLm
from ..sides import Around, nowhere
from .corruption import Corrupted, Corruption, corrupt, fill_in, hide_tokens, put_back
from .discriminator import Discriminator


@dataclass(frozen=True, slots=True)
class Objectives:
    """The weights of the losses; 0 omits one, and the data that only it needs is not sent.

    >>> Objectives(correction=0).originals
    False
    """

    detection: float = 50.0
    correction: float = 1.0

    def __post_init__(self) -> None:
        if min(self.detection, self.correction) < 0:
            raise OptionError(f"{self} has a negative weight", mend="Objectives(detection=50.0, correction=1.0)")
        if not self.detection:
            raise OptionError(
                "correction requires detection",
                why="the copy mechanism of the correction uses the detection's probabilities",
                mend="Objectives(detection=50.0)",
            )

    @property
    def originals(self) -> bool:
        """Whether the discriminator needs the original ids at hidden places."""
        return self.correction > 0


def guess_loss(originals: Any, scores: Any, weights: Any) -> Any:
    """The loss of a generator: cross-entropy over hidden tokens."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(originals, tf.cast(scores, tf.float32))
    return _mean(each, weights)


def detection_loss(replaced: Any, logits: Any, there: Any) -> Any:
    """The loss of detection: binary cross-entropy of `replaced` (bool), over the tokens that `there` (float) marks."""
    each = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(replaced, tf.float32), tf.cast(logits, tf.float32))
    return _mean(each, there)


def correction_loss(originals: Any, shown: Any, logits: Any, scores: Any, there: Any) -> Any:
    """The loss of correction: cross-entropy of the original tokens with the copy mechanism, over the tokens that
    `there` (float) marks.

    `shown` are the discriminator's input, `logits` those of the detection, and `scores` (rows, length, vocabulary) the
    logits of the original token if it is not a copy.
    """
    logits = tf.stop_gradient(tf.cast(logits, tf.float32))
    surprise = tf.nn.sparse_softmax_cross_entropy_with_logits(originals, tf.cast(scores, tf.float32))
    other = tf.math.log_sigmoid(logits) - surprise
    copied = tf.math.log_sigmoid(-logits)
    most, least = tf.maximum(copied, other), tf.minimum(copied, other)
    either = most + tf.math.log1p(tf.exp(least - most))
    each = -tf.where(originals == shown, either, other)
    return _mean(each, there)


def _mean(each: Any, weights: Any) -> Any:
    """The mean over rows of the weighted mean of a row."""
    return tf.reduce_mean(tf.reduce_sum(each * weights, axis=1) / tf.reduce_sum(weights, axis=1))


DISCRIMINATOR = "discriminator"
"""The name of the discriminator's scope; those of generators have their names."""


@dataclass(frozen=True)
class Pretraining:
    """Generators by family name, one discriminator, and their objectives; all share one vocabulary.

    Call `losses` inside the tape of a step, and `update` after it. Pass the row numbers as the first argument of the
    step: every process has them, and processes compare the number of rows of such an input. `around` returns the scope
    of each network, by the name of a generator or "discriminator":

    ```python
    @nb.function
    def step(numbers, texts):
        with tf.GradientTape(persistent=True) as tape, nb.cluster():
            losses = pretraining.losses(texts, numbers, around=lambda name: nb.stage(cluster=name))
        pretraining.update(tape, losses)
        return losses
    ```
    """

    generators: Mapping[str, MaskedLm]
    discriminator: Discriminator
    corruption: Corruption
    objectives: Objectives = field(default_factory=Objectives)
    optimizers: Mapping[str, keras.optimizers.Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.generators or DISCRIMINATOR in self.generators:
            raise OptionError(
                f"invalid generators: {', '.join(self.generators) or 'none'}",
                why=f"at least one is required, and the name {DISCRIMINATOR!r} is reserved",
                mend='generators={"all": masked_lm(Bert(...))}',
            )
        sizes = {name: each.bert.sizes.vocabulary for name, each in self.generators.items()}
        sizes[DISCRIMINATOR] = self.discriminator.bert.sizes.vocabulary
        if len(set(sizes.values())) > 1:
            raise OptionError(
                f"the networks have different vocabularies: {sizes}",
                why="the discriminator reads the tokens that generators produce",
                mend="create all networks with BertSizes of the same vocabulary",
            )
        if self.objectives.originals and not self.discriminator.corrects:
            raise OptionError(
                "the discriminator has no correction head",
                why="the objectives include correction",
                mend="Discriminator(bert, corrects=True), or Objectives(correction=0)",
            )

    @property
    def networks(self) -> dict[str, keras.Model]:
        """All networks, by the names of their scopes."""
        return {**self.generators, DISCRIMINATOR: self.discriminator}

    @tf.autograph.experimental.do_not_convert  # neither it nor the scopes need conversion
    def losses(self, texts: Mapping[str, Any], numbers: Mapping[str, Any], around: Around = nowhere) -> dict[str, Any]:
        """The loss of each network, by name; and `detected`, `corrected`, the parts of the discriminator's loss.

        `texts` are rows of tokens for each generator (rows, length), `numbers` identify the rows (rows,).
        """
        found: dict[str, Any] = {}
        sent: list[Corrupted] = []
        for name, generator in self.generators.items():
            with around(name):
                found[name], corrupted = self._generate(generator, texts[name], numbers[name])
                sent.append(corrupted)
        with around(DISCRIMINATOR):
            return {**found, **self._discriminate(sent)}

    def update(self, tape: tf.GradientTape, losses: Mapping[str, Any]) -> None:
        """Apply the gradient of each network's loss; the tape is persistent."""
        if missing := [name for name in self.networks if name not in self.optimizers]:
            raise OptionError(
                f"there is no optimizer for {', '.join(missing)}",
                why="each network has its own",
                mend="Pretraining(..., optimizers={name: make_adam(network, 1e-3, steps=1000), ...})",
            )
        for name, network in self.networks.items():
            gradients = tape.gradient(losses[name], network.trainable_variables)
            self.optimizers[name].apply_gradients(zip(gradients, network.trainable_variables, strict=True))

    def _generate(self, generator: MaskedLm, tokens: Any, numbers: Any) -> tuple[Any, Corrupted]:
        hidden = hide_tokens(tokens, numbers, self.corruption)
        scores = generator({"tokens": hidden.shown, "places": hidden.places}, training=True)
        ids = fill_in(tokens, numbers, hidden, tf.stop_gradient(scores), self.corruption)
        corrupted = corrupt(tokens, hidden, ids, originals=self.objectives.originals)
        return guess_loss(hidden.originals, scores, hidden.weights), corrupted

    def _discriminate(self, sent: Sequence[Corrupted]) -> dict[str, Any]:
        if self.objectives.originals:
            originals = _join([put_back(each.ids, each.marked, each.originals) for each in sent])
        ids = _join([each.ids for each in sent])
        replaced = ids != originals if self.objectives.originals else _join([each.marked for each in sent])
        there = tf.cast(ids != self.discriminator.bert.sizes.padding, tf.float32)
        outputs = self.discriminator(ids, training=True)
        found = {"detected": detection_loss(replaced, outputs["replaced"], there)}
        loss = self.objectives.detection * found["detected"]
        if self.objectives.originals:
            found["corrected"] = correction_loss(originals, ids, outputs["replaced"], outputs["tokens"], there)
            loss += self.objectives.correction * found["corrected"]
        return {DISCRIMINATOR: loss, **found}


def _join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


@keras.saving.register_keras_serializable("whale_nebula")
class RiseAndFall(keras.optimizers.schedules.LearningRateSchedule):
    """Learning-rate schedule that rises linearly to `peak` in `warmup` steps, then falls linearly to zero at `steps`.

    Args:
        peak: maximum learning rate.
        steps: number of steps.
        warmup: number of steps in which the rate rises.

    >>> [round(float(RiseAndFall(0.4, steps=6, warmup=2)(step)), 3) for step in range(7)]
    [0.2, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0]
    """

    def __init__(self, peak: float, *, steps: int, warmup: int) -> None:
        if not (0 <= warmup < steps and peak > 0):
            raise OptionError(
                f"invalid schedule: peak={peak!r}, warmup={warmup}, steps={steps}",
                mend="use peak > 0, warmup >= 0 and steps > warmup",
            )
        self.peak, self.steps, self.warmup = peak, steps, warmup

    def __call__(self, step: Any) -> Any:
        """The rate of a step, counted from 0."""
        now = ops.cast(step, "float32")
        rising = (now + 1.0) / max(1, self.warmup)
        falling = (self.steps - now) / (self.steps - self.warmup)
        return self.peak * ops.maximum(0.0, ops.minimum(ops.minimum(rising, falling), 1.0))

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {"peak": self.peak, "steps": self.steps, "warmup": self.warmup}


def make_adam(
    model: keras.Model, peak: float, *, steps: int, warmup: float = 0.1, clip: float | None = 1.0
) -> keras.optimizers.Adam:
    """Create an Adam optimizer whose rate rises and falls linearly, with slots for a model.

    Args:
        model: the model.
        peak: maximum learning rate.
        steps: number of steps.
        warmup: share of the steps in which the rate rises.
        clip: maximum global norm of the gradients; None does not clip.
    """
    rate = RiseAndFall(peak, steps=steps, warmup=min(steps - 1, round(warmup * steps)))
    adam = keras.optimizers.Adam(rate, epsilon=1e-6, global_clipnorm=clip)
    adam.build(model.trainable_variables)  # slots created during tracing would cause a second trace
    return adam
