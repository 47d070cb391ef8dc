"""A feed-forward layer of experts (Switch): a gate assigns each token to one or two of them.

Expert variables have the expert as axis 0, so `nb.split(axis=0)` around the layer spreads the experts over devices.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.ir.layout import ROW_GROUPS, ROWS_JOINED

IN_ORDER, RANDOM = "order", "random"


@tf.custom_gradient
def pick_rows(rows: Any, numbers: Any, back: Any) -> Any:
    """Gather rows by number, in each row group; any row for -1, which the caller ignores. No row is picked twice, so
    `back`, the inverse of `numbers` (-1 for a row that is not picked), gathers the gradients.
    """

    def give_back(upstream: Any) -> tuple[Any, None, None]:
        is_picked = tf.cast(back >= 0, upstream.dtype)[..., tf.newaxis]
        return _gather(upstream, back) * is_picked, None, None

    return _gather(rows, numbers), give_back


def _gather(rows: Any, numbers: Any) -> Any:
    return tf.gather(rows, tf.maximum(numbers, 0), batch_dims=1)


@keras.saving.register_keras_serializable("whale_nebula")
class SwitchFeedForward(keras.layers.Layer):
    """A feed-forward layer of `experts` pairs of dense layers, each `hidden` wide (mixture of experts).

    A gate in float32 assigns each token to its best `k` experts, weighted by their probabilities. The capacity of an
    expert is tokens / experts × k × `capacity_factor`, at least `min_capacity`. Tokens beyond it are dropped: their
    output is zero, so add the layer to its input: `x + layer(x)`.

    The layer's metrics are the entropy of the load (1 for a uniform load), the share of dropped assignments, and the
    share of tokens of the busiest expert.

    Args:
        experts: number of experts.
        hidden: width between the two dense layers of an expert.
        k: experts for each token, 1 or 2.
        capacity_factor: capacity of an expert, relative to a uniform load.
        min_capacity: minimum capacity of an expert.
        noise: standard deviation of noise that is added to the gate's logits in training.
        groups: number of expert groups; the gate first chooses a group, then an expert in it.
        aux: weight of the auxiliary loss, which is experts × sum of (share of tokens × mean probability), before any
            drop.
        drop: "random" drops random tokens in training and the last ones otherwise; "order" always drops the last ones.
        activation: activation function of the experts.
        seed: seed of the initial weights, the noise and the dropped tokens.
        row_groups: divides the rows of a (micro-)batch into this many groups, each with its own capacity, load and
            balance; `aux` and the metrics are means over groups, so four micro-batches of two groups equal one batch of
            eight. Each device of `nb.split` has some of the groups, and tokens are sent to experts and back by two
            all-to-alls. Results depend on the number of groups, not on the number of devices.

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
        row_groups: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check(experts, k, groups, drop, capacity_factor)
        _check_numbers(hidden=hidden, min_capacity=min_capacity, row_groups=1 if row_groups is None else row_groups)
        self.experts, self.hidden, self.k = experts, hidden, k
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity
        self.noise, self.groups, self.aux, self.drop = noise, groups, aux, drop
        self.activation, self.seed, self.row_groups = keras.activations.get(activation), seed, row_groups
        self.draws = keras.random.SeedGenerator(seed)
        self.balance = keras.metrics.Mean(name="load_entropy")
        self.dropped = keras.metrics.Mean(name="share_dropped")
        self.busiest = keras.metrics.Mean(name="busiest_expert")

    def build(self, shape: Any) -> None:
        """Create the gate and the experts."""
        width, count = shape[-1], self.experts
        glorot = keras.initializers.GlorotUniform(self.seed)

        def draw(shape: Any, dtype: Any = None) -> Any:
            """Draw a matrix for each expert, with different seeds, because equal seeds give equal matrices."""
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
        """The experts' outputs for tokens; zeros for dropped ones."""
        form = [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(x.shape)]
        groups, width = self.row_groups or 1, x.shape[-1]
        _check_rows(x.shape[0], groups)
        count = form[0] // groups * math.prod(form[1:-1])
        tokens = tf.identity(tf.reshape(x, [groups, count, width]), name=ROW_GROUPS)
        count = tf.shape(tokens)[1] if tokens.shape[1] is None else tokens.shape[1]  # of this micro-batch
        capacity = self.capacity(count)
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        chosen, weights = self.choose(tokens, count, rows, bool(training))
        places = self.find_queue_places(chosen, count, bool(training))
        kept = places < capacity
        picks = count * self.k if self.k > 1 else count
        slots = tf.reshape(tf.where(kept, chosen * capacity + places, -1), [groups, picks])
        taken = self.find_takers(chosen, kept, slots, capacity)
        if self.k > 1:
            tokens = tf.einsum("gsm,k->gskm", tokens, tf.ones([self.k], tokens.dtype))
        tokens_by_expert = pick_rows(tf.reshape(tokens, [groups, picks, width]), taken, slots)
        made = self.compute(tokens_by_expert, groups, capacity)
        weights = tf.cast(weights * tf.cast(kept, weights.dtype), made.dtype)
        found = pick_rows(made, slots, taken)
        if self.k == 1:
            found = found * weights
        else:
            found = tf.einsum("gsk,gskm->gsm", weights, tf.reshape(found, [groups, count, self.k, width]))
        self.dropped.update_state(1.0 - tf.reduce_mean(tf.cast(kept, tf.float32)), rows)
        return tf.identity(tf.reshape(found, form), name=ROWS_JOINED)

    def capacity(self, tokens: Any) -> Any:
        """The capacity of an expert for the tokens of a row group: it depends only on their number, so no device waits
        for another's count.
        """
        share = self.k * self.capacity_factor / self.experts
        if isinstance(tokens, int):
            return max(math.ceil(tokens * share), self.min_capacity)
        return tf.maximum(tf.cast(tf.math.ceil(tf.cast(tokens, tf.float32) * share), tf.int32), self.min_capacity)

    def choose(self, tokens: Any, count: Any, rows: Any, training: bool) -> tuple[Any, Any]:
        """The experts of each token, the best first, and their weights: both [row groups, tokens, k]. Adds the
        auxiliary loss, and updates the metrics of the load.
        """
        chances = self.score(tf.cast(tokens, tf.float32), count, training)
        chosen = tf.math.top_k(tf.stop_gradient(chances), self.k).indices
        marks = tf.one_hot(chosen, self.experts)
        weights = tf.einsum("gse,gske->gsk", chances, marks)
        shares, means = tf.reduce_mean(marks[:, :, 0], 1), tf.reduce_mean(chances, 1)  # [row groups, experts]
        self.add_loss(self.aux * self.experts * tf.reduce_mean(tf.reduce_sum(shares * means, 1)))
        spread = -tf.reduce_sum(tf.math.xlogy(shares, shares), 1) / tf.math.log(float(max(self.experts, 2)))
        self.balance.update_state(tf.reduce_mean(spread), rows)
        self.busiest.update_state(tf.reduce_mean(tf.reduce_max(shares, 1)), rows)
        if self.k > 1:
            sums = tf.einsum("gsk,k->gs", weights, tf.ones([self.k]))
            weights = tf.einsum("gsk,gs->gsk", weights, 1.0 / sums)
        return chosen, weights

    def score(self, tokens: Any, count: Any, training: bool) -> Any:
        """The probability of each expert for each token, in float32."""
        scores = tf.einsum("gsm,me->gse", tokens, tf.cast(self.gate, tf.float32))
        form = [self.row_groups or 1, count, self.experts]
        if training and self.noise:
            noise = keras.random.normal(form, stddev=self.noise, dtype="float32", seed=self.draws)
            scores = tf.add_n([scores, noise])
        if not self.groups:
            return tf.nn.softmax(scores)
        within = tf.nn.softmax(tf.reshape(scores, [*form[:2], self.groups, self.experts // self.groups]))
        groups = tf.nn.softmax(tf.einsum("gsm,mq->gsq", tokens, tf.cast(self.group_gate, tf.float32)))
        best = tf.one_hot(tf.argmax(groups, -1), self.groups)
        return tf.reshape(tf.einsum("gsq,gsq,gsqe->gsqe", groups, best, within), form)

    def find_queue_places(self, expert_numbers: Any, count: Any, training: bool) -> Any:
        """The place of each token in the queue of each of its experts, [row groups, tokens, k]; all first choices come
        before any second one.
        """
        queue = tf.one_hot(expert_numbers, self.experts, dtype=tf.int32)  # [row groups, tokens, k, experts]
        drawn = training and self.drop == RANDOM
        if drawn:
            order = keras.random.uniform([self.row_groups or 1, count], dtype="float32", seed=self.draws)
            order = tf.argsort(order)
            queue = tf.gather(queue, order, batch_dims=1)
        ahead = tf.math.cumsum(queue, 1, exclusive=True)
        firsts = tf.math.cumsum(tf.reduce_sum(queue, 1, keepdims=True), 2, exclusive=True)  # of all earlier choices
        places = tf.reduce_sum((ahead + firsts) * queue, -1)
        if drawn:
            places = tf.gather(places, tf.argsort(order), batch_dims=1)
        return places

    def find_takers(self, chosen: Any, kept: Any, slots: Any, capacity: Any) -> Any:
        """The number of the token at each place of each expert, [row groups, experts × capacity]; -1 if it is empty.

        Tokens sorted by slot are in the order of the experts' places, without the empty ones.
        """
        order = tf.argsort(tf.where(slots < 0, self.experts * capacity, slots))
        marks = tf.one_hot(chosen, self.experts, dtype=tf.int32) * tf.cast(kept, tf.int32)[..., tf.newaxis]
        counts = tf.reduce_sum(marks, [1, 2])
        begins = tf.math.cumsum(counts, 1, exclusive=True)
        places = tf.range(capacity)
        taken = places < counts[..., tf.newaxis]
        numbers = tf.where(taken, begins[..., tf.newaxis] + places, 0)
        flat = [self.row_groups or 1, self.experts * capacity]
        found = tf.gather(order, tf.reshape(numbers, flat), batch_dims=1)
        return tf.where(tf.reshape(taken, flat), found, -1)

    def compute(self, tokens_by_expert: Any, groups: int, capacity: Any) -> Any:
        """Apply each expert's two layers to its tokens of all row groups."""
        form, width = [groups, self.experts, capacity], tokens_by_expert.shape[-1]
        by_expert = tf.transpose(tf.reshape(tokens_by_expert, [*form, width]), [1, 0, 2, 3])
        rows = tf.reshape(by_expert, [self.experts, groups * capacity, width])
        inner = tf.matmul(rows, tf.cast(self.inner, rows.dtype)) + tf.expand_dims(
            tf.cast(self.inner_bias, rows.dtype), 1
        )
        made = tf.matmul(self.activation(inner), tf.cast(self.outer, rows.dtype))
        made += tf.expand_dims(tf.cast(self.outer_bias, rows.dtype), 1)
        by_group = tf.transpose(tf.reshape(made, [self.experts, groups, capacity, width]), [1, 0, 2, 3])
        return tf.reshape(by_group, [groups, self.experts * capacity, width])

    def compute_output_spec(self, x: Any, **options: Any) -> Any:
        """The shape and type of the input."""
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        options = (
            "experts", "hidden", "k", "capacity_factor", "min_capacity", "noise", "groups", "aux", "drop", "seed",
            "row_groups",
        )  # fmt: skip
        config = {name: getattr(self, name) for name in options}
        return {**super().get_config(), **config, "activation": keras.activations.serialize(self.activation)}


def _check_rows(rows: int | None, groups: int) -> None:
    if rows is not None and rows % groups:
        raise OptionError(
            f"a batch of {rows} rows is not divisible by row_groups={groups}",
            why="row groups have equal sizes, and a capacity each",
            mend="use a (micro-)batch size that is a multiple of row_groups, for example with drop_remainder=True",
        )


def _check(experts: int, k: int, groups: int | None, drop: str, factor: float) -> None:
    if experts < 1 or k not in (1, 2) or k > experts:
        raise OptionError(
            f"k={k!r} with {experts!r} experts",
            why="k must be 1 or 2, and not exceed the number of experts",
            mend=f"SwitchFeedForward({max(2, experts)}, hidden, k=1)",
        )
    if groups is not None and (groups < 1 or experts % groups or (k == 2 and experts // groups < 2)):
        raise OptionError(
            f"{experts} experts cannot be divided into {groups} groups",
            why="groups have equal sizes, with at least k experts each",
            mend="groups=None, or a divisor of the number of experts",
        )
    if drop not in (IN_ORDER, RANDOM):
        raise OptionError(
            f"drop={drop!r} is not a valid value",
            why='dropped tokens are chosen at random ("random") or from the end ("order")',
            mend='drop="random"',
        )
    if factor <= 0:
        raise OptionError(
            f"capacity_factor={factor!r} is not positive",
            why="each expert needs capacity for at least one token",
            mend="capacity_factor=1.25",
        )


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise OptionError(f"{name}={number!r} is not valid", why="it must be at least 1", mend=f"{name}=1")
