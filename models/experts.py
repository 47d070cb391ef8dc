"""A feed-forward layer of experts (Switch): a gate sends each token to one or two of them.

Expert variables have the expert as axis 0, so `nb.split(axis=0)` around the layer spreads the experts over devices.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from whale_nebula.errors import OptionError

IN_ORDER, RANDOM = "order", "random"


@keras.saving.register_keras_serializable("whale_nebula")
class SwitchFeedForward(keras.layers.Layer):
    """Two dense layers of which there are as many pairs as `experts`, each `hidden` numbers wide.

    A gate in float32 gives each token to its best `k` experts (1 or 2), weighted by their probabilities. An expert
    takes at most tokens / experts × k × `capacity_factor` of them, `min_capacity` at least; what is beyond that gets
    zeros, so add the layer to its input: `x + layer(x)`. Who is left out is drawn (`drop="random"`) while training,
    and is who comes last otherwise, or with "order". With `groups` the gate chooses a group first, and an expert of
    it then. `noise` is the deviation of what is added to the gate's scores while training. The loss has `aux` times
    what the load of experts lacks in balance: experts × sum of (share of tokens × mean probability), before any drop.

    The layer's metrics are the entropy of the load (1: all alike), the share of assignments that was dropped, and the
    share of tokens of the busiest expert.

    >>> layer = SwitchFeedForward(4, 16)
    >>> layer(tf.zeros([2, 5, 8])).shape
    TensorShape([2, 5, 8])
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        *,
        k: int = 1,
        capacity_factor: float = 1.25,
        min_capacity: int = 4,
        noise: float | None = None,
        groups: int | None = None,
        aux: float = 0.01,
        drop: str = RANDOM,
        activation: Any = "relu",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check(experts, k, groups, drop, capacity_factor)
        self.experts, self.hidden, self.k = experts, hidden, k
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity
        self.noise, self.groups, self.aux, self.drop = noise, groups, aux, drop
        self.activation, self.seed = keras.activations.get(activation), seed
        self.draws = keras.random.SeedGenerator(seed)
        self.balance = keras.metrics.Mean(name="load_entropy")
        self.dropped = keras.metrics.Mean(name="share_dropped")
        self.busiest = keras.metrics.Mean(name="busiest_expert")

    def build(self, shape: Any) -> None:
        """Make the gate and the experts."""
        width, count = shape[-1], self.experts
        glorot = keras.initializers.GlorotUniform(self.seed)

        def draw(shape: Any, dtype: Any = None) -> Any:
            """A matrix for each expert, each drawn with a seed of its own: one seed draws the same again."""
            seeds = range(glorot.seed, glorot.seed + shape[0])
            return tf.stack([keras.initializers.GlorotUniform(seed)(shape[1:], dtype) for seed in seeds])

        self.gate = self.add_weight((width, count), "glorot_uniform", dtype="float32", name="gate")
        if self.groups:
            self.group_gate = self.add_weight(
                (width, self.groups), "glorot_uniform", dtype="float32", name="group_gate"
            )
        self.inner = self.add_weight((count, width, self.hidden), draw, name="inner")
        self.inner_bias = self.add_weight((count, self.hidden), "zeros", name="inner_bias")
        self.outer = self.add_weight((count, self.hidden, width), draw, name="outer")
        self.outer_bias = self.add_weight((count, width), "zeros", name="outer_bias")

    def call(self, x: Any, training: bool | None = None) -> Any:
        """What the experts make of tokens; zeros for those that none had room for."""
        tokens = tf.reshape(x, [-1, x.shape[-1]])
        count = tf.shape(tokens)[0]
        capacity = self.capacity(count)
        chosen, weights = self.choose(tokens, bool(training))
        places = self.take_places(chosen, bool(training))
        kept = places < capacity
        slots = tf.where(kept, chosen * capacity + places, 0)
        given = self.dispatch(tokens, slots, kept, capacity)
        made = self.compute(tf.reshape(given, [self.experts, capacity, x.shape[-1]]))
        rows = tf.reshape(made, [self.experts * capacity, x.shape[-1]])
        factors = tf.cast(tf.where(kept, weights, 0.0), rows.dtype)
        found = sum(tf.gather(rows, slots[:, n]) * factors[:, n, tf.newaxis] for n in range(self.k))
        self.dropped.update_state(1.0 - tf.reduce_mean(tf.cast(kept, tf.float32)))
        return tf.reshape(found, tf.shape(x))

    def capacity(self, tokens: Any) -> Any:
        """How many tokens an expert takes: it depends on their number alone, so no device waits for another's count."""
        share = tf.cast(tokens, tf.float32) * (self.k * self.capacity_factor / self.experts)
        return tf.maximum(tf.cast(tf.math.ceil(share), tf.int32), self.min_capacity)

    def choose(self, tokens: Any, training: bool) -> tuple[Any, Any]:
        """The experts of each token, the best first, and their weights: [tokens, k] both."""
        chances = self.score(tf.cast(tokens, tf.float32), training)
        weights, chosen = tf.math.top_k(chances, self.k)
        first = tf.one_hot(chosen[:, 0], self.experts)
        shares, means = tf.reduce_mean(first, 0), tf.reduce_mean(chances, 0)
        self.add_loss(self.aux * self.experts * tf.reduce_sum(tf.stop_gradient(shares) * means))
        spread = -tf.reduce_sum(tf.math.xlogy(shares, shares)) / tf.math.log(float(max(self.experts, 2)))
        self.balance.update_state(spread)
        self.busiest.update_state(tf.reduce_max(shares))
        if self.k > 1:
            weights /= tf.reduce_sum(weights, -1, keepdims=True)
        return chosen, weights

    def score(self, tokens: Any, training: bool) -> Any:
        """The probability of each expert for each token, in float32."""
        scores = tokens @ tf.cast(self.gate, tf.float32)
        if training and self.noise:
            scores += keras.random.normal(tf.shape(scores), stddev=self.noise, dtype="float32", seed=self.draws)
        if not self.groups:
            return tf.nn.softmax(scores)
        within = tf.nn.softmax(tf.reshape(scores, [-1, self.groups, self.experts // self.groups]))
        groups = tf.nn.softmax(tokens @ tf.cast(self.group_gate, tf.float32))
        best = tf.one_hot(tf.argmax(groups, -1), self.groups)
        return tf.reshape(within * (groups * best)[:, :, tf.newaxis], [-1, self.experts])

    def take_places(self, chosen: Any, training: bool) -> Any:
        """The place of each token in the row before its expert; all first choices come before any second one."""
        queue = tf.one_hot(chosen, self.experts, dtype=tf.int32)  # [tokens, k, experts]
        drawn = training and self.drop == RANDOM
        if drawn:
            order = tf.argsort(keras.random.uniform(tf.shape(chosen)[:1], dtype="float32", seed=self.draws))
            queue = tf.gather(queue, order)
        ahead = tf.math.cumsum(queue, 0, exclusive=True)
        firsts = tf.math.cumsum(tf.reduce_sum(queue, 0), 0, exclusive=True)  # of earlier choices, by all tokens
        places = tf.reduce_sum((ahead + firsts) * queue, -1)
        if drawn:
            places = tf.gather(places, tf.argsort(order))
        return places

    def dispatch(self, tokens: Any, slots: Any, kept: Any, capacity: Any) -> Any:
        """The token of each place of each expert; zeros where it is empty."""
        size = self.experts * capacity
        count = tf.shape(tokens)[0]
        numbers = tf.repeat(tf.range(1, count + 1), self.k)
        flat = tf.where(tf.reshape(kept, [-1]), tf.reshape(slots, [-1]), size)
        taken = tf.scatter_nd(flat[:, tf.newaxis], numbers, [size + 1])[:size]
        found = tf.gather(tokens, tf.maximum(taken - 1, 0))
        return found * tf.cast(taken > 0, tokens.dtype)[:, tf.newaxis]

    def compute(self, given: Any) -> Any:
        """Each expert's two layers on its own tokens: [experts, capacity, width]."""
        inner = (
            tf.matmul(given, tf.cast(self.inner, given.dtype)) + tf.cast(self.inner_bias, given.dtype)[:, tf.newaxis]
        )
        made = tf.matmul(self.activation(inner), tf.cast(self.outer, given.dtype))
        return made + tf.cast(self.outer_bias, given.dtype)[:, tf.newaxis]

    def compute_output_spec(self, x: Any, **options: Any) -> Any:
        """What comes out is as what goes in."""
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """What it takes to make another one."""
        options = (
            "experts", "hidden", "k", "capacity_factor", "min_capacity", "noise", "groups", "aux", "drop", "seed",
        )  # fmt: skip
        config = {name: getattr(self, name) for name in options}
        return {**super().get_config(), **config, "activation": keras.activations.serialize(self.activation)}


def _check(experts: int, k: int, groups: int | None, drop: str, factor: float) -> None:
    if experts < 1 or k not in (1, 2) or k > experts:
        raise OptionError(
            f"k={k!r} of {experts!r} experts",
            why="a token goes to one expert or to two",
            mend=f"SwitchFeedForward({max(2, experts)}, hidden, k=1)",
        )
    if groups is not None and (groups < 1 or experts % groups or (k == 2 and experts // groups < 2)):
        raise OptionError(
            f"{experts} experts in {groups} groups",
            why="groups are of equal size, and hold as many experts as a token goes to",
            mend="groups=None, or a divisor of the number of experts",
        )
    if drop not in (IN_ORDER, RANDOM):
        raise OptionError(f"drop={drop!r}", why="who is left out is drawn, or comes last", mend='drop="random"')
    if factor <= 0:
        raise OptionError(f"capacity_factor={factor!r}", why="an expert takes some tokens", mend="capacity_factor=1.25")
