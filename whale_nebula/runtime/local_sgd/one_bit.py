"""Exchange of momenta at one bit a number: after each step clusters have the same momentum, and apply one update.

Each cluster trains a copy. Its optimizer (`whale_nebula.strategies.OneBitAdam`, `OneBitLamb`) makes a step with the
gradients of the cluster's rows, and only the resulting momentum is used. It is sent in float32 during warm-up, then as
signs and one scale with error feedback. All clusters decode the same bytes, average them in the same order, and update
the previous weights and slots, so all copies stay bit-identical.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np
import tensorflow as tf

from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.ir.layout import divide
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.local_sgd.topology import ClusterSync, Ends, FlatVariables, name_sender, read_numbers
from whale_nebula.wire.tensor import Bytes

SCALE_BYTES = 4


class Slots(NamedTuple):
    """Optimizer slots of a weight (its momentum and the others), and the weight's constraint."""

    momentum: Any
    others: tuple[Any, ...]
    constraint: Callable[[Any], Any] | None = None


class MomentumOptimizer(Protocol):
    """The interface of an optimizer whose momenta are exchanged, from `freeze_step` on at one bit a number. With
    `servers` their mean is compressed again; if `fused`, the momenta of all weights share one scale.
    """

    iterations: Any
    freeze_step: int
    beta_1: float
    servers: bool
    fused: bool

    def slots_of(self, variable: Any) -> Slots | None:
        """The slots of a weight; None if the optimizer does not train it."""

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""

    def scales_of(self, momenta: Sequence[Any]) -> Sequence[float]:
        """Factors by which momenta are multiplied before compression, once the variance is frozen."""

    def advance(
        self, weight: Any, before: Any, momentum: Any, others: Sequence[Any], gradient: Any, step: Any, rate: Any
    ) -> tuple[Any, Sequence[Any]]:
        """A weight and its other slots after an update; `before` and `momentum` are the momenta before and after it."""


_OPTIMIZERS: weakref.WeakSet[Any] = weakref.WeakSet()


def note_optimizer(optimizer: MomentumOptimizer) -> None:
    """Register an optimizer that has created its slots, so that `find_exchanged` finds it."""
    _OPTIMIZERS.add(optimizer)


class ExchangedWeights(NamedTuple):
    """An optimizer whose momenta are exchanged, with the paths of the weights that it trains in a step."""

    optimizer: MomentumOptimizer
    paths: tuple[str, ...]


def find_exchanged(weights: Mapping[str, Any], variables: Mapping[str, Any], where: str) -> ExchangedWeights:
    """Find the one optimizer that trains these weights in a step that touches `variables`; an optimizer from an earlier
    `compile` of the model does not count. Other weights are moving averages of layers.
    """
    touched = {id(variable) for variable in variables.values()}
    found = []
    for optimizer in list(_OPTIMIZERS):
        slots = {path: optimizer.slots_of(variable) for path, variable in weights.items()}
        paths = tuple(path for path, own in slots.items() if own is not None and id(own.momentum) in touched)
        found += [ExchangedWeights(optimizer, paths)] if paths else []
    if len(found) == 1:
        return found[0]
    raise OptionError(
        'exchange="1bit" needs one optimizer that exchanges momenta',
        where=where,
        why="the weights of this step have several" if found else "none of the weights of this step has one",
        mend="use model.compile(whale_nebula.strategies.OneBitAdam(1e-3, freeze_step=1000), ...), or OneBitLamb",
    )


def compress_signs(numbers: Numbers, ends: Sequence[int]) -> tuple[Bytes, Numbers]:
    """One-bit compression: the bytes of scales and signs, and their decoded values. Each number of a part, which `ends`
    at these positions, becomes plus or minus the part's root mean square.

    >>> data, there = compress_signs(np.float32([3.0, -4.0, 0.0, 2.0]), [3, 4])
    >>> data.nbytes, [round(float(each), 3) for each in there]
    (9, [2.887, -2.887, 2.887, 2.0])
    """
    parts = np.split(numbers, ends[:-1])
    scales = np.array([np.sqrt(np.mean(np.square(part, dtype=np.float64))) for part in parts], np.float32)
    data = np.concatenate([scales.view(np.uint8), np.packbits(numbers >= 0)])
    return data, restore_signs(data, ends)


def restore_signs(data: Bytes, ends: Sequence[int]) -> Numbers:
    """Decode scales and signs."""
    count, size = SCALE_BYTES * len(ends), ends[-1]
    if data.nbytes != count + -(-size // 8):
        raise RemoteProtocolError(f"received {data.nbytes} bytes of signs instead of {count + -(-size // 8)}")
    scales = np.repeat(np.ascontiguousarray(data[:count]).view(np.float32), np.diff([0, *ends]))
    return np.where(np.unpackbits(data[count:], count=size).astype(bool), scales, -scales)


def list_spans(ends: Sequence[int], count: int) -> list[list[tuple[int, int]]]:
    """The spans of numbers of each of `count` servers: one in each part that shares a scale, which `ends` there.

    >>> list_spans([5, 8], 2)
    [[(0, 3), (5, 7)], [(3, 5), (7, 8)]]
    """
    cuts = [
        list(itertools.accumulate(divide(end - begin, count), initial=begin))
        for begin, end in itertools.pairwise([0, *map(int, ends)])
    ]
    return [[(cut[n], cut[n + 1]) for cut in cuts] for n in range(count)]


@dataclass(repr=False)
class OneBitRounds(ClusterSync):
    """Exchange of one-bit compressed momenta with error feedback, for one cluster. `flat` are all weights, of which
    `trained_variables` have slots; the others are moving averages, which are sent uncompressed. `shares` are the
    clusters' weights in the mean. `_optimizer_step` is the number of the step by the optimizer's count, which a loaded
    model continues.
    """

    optimizer: MomentumOptimizer = field(kw_only=True)
    trained_variables: Sequence[Any] = field(kw_only=True)
    slots: Sequence[Slots] = field(kw_only=True)
    shares: Mapping[str, float] = field(kw_only=True)
    _slots_before: list[tuple[Any, ...]] | None = None
    _error: Numbers = field(default_factory=lambda: np.zeros(0, np.float32))
    _server_error: Numbers = field(default_factory=lambda: np.zeros(0, np.float32))
    _mask: Numbers = field(default_factory=lambda: np.zeros(0, np.float32))
    _scales: Numbers = field(default_factory=lambda: np.zeros(0, np.float32))
    _sent_values: tuple[Numbers, Numbers] | None = None
    _optimizer_step: int = 0
    _update_function: Any = None

    @staticmethod
    def count_bytes(optimizer: MomentumOptimizer, sizes: Sequence[int], participants: int) -> tuple[int, int]:
        """The bytes that each participant sends to each other one in a step for weights of these sizes: in the warm-up,
        and after it.
        """
        return 4 * sum(sizes), SCALE_BYTES * (1 if optimizer.fused else len(sizes)) + -(-sum(sizes) // 8)

    def begin(self, shared: Numbers | None = None) -> None:
        """Read the weights and slots before each step, from which its update is computed: the script may have changed
        them.
        """
        self._shared = self._read_all() if shared is None else shared.copy()
        self._slots_before = [tuple(each.read_value() for each in (own.momentum, *own.others)) for own in self.slots]

    @property
    def shared(self) -> Numbers | None:
        """The weights that all clusters share; None before the first step."""
        return None if self._shared is None else self._read_all()

    def digest(self) -> int:
        """A checksum of the weights."""
        return google_crc32c.value(self._read_all().tobytes())

    def send_due(self) -> None:
        """After a step: send its momentum."""
        momentum, self._optimizer_step = (
            self._momenta.read((0, self._momenta.total)),
            int(self.optimizer.iterations.numpy()) - 1,
        )
        data, decoded = self._encode(momentum)
        averages = self._averages.read((0, self._averages.total))
        self._sent_values = decoded, averages
        self.steps += 1
        self._send(data, averages)

    def _send(self, data: Bytes, averages: Numbers) -> None:
        """Send encoded momenta, and the averages of layers."""
        raw = 4 * self._momenta.total + averages.nbytes
        self.ends.send_fragment(self.steps, 0, np.concatenate([data, averages.view(np.uint8)]), raw)

    def apply_due(self) -> None:
        """Receive the momenta of the others, and apply the common update."""
        if self._sent_values is None:
            return
        momentum, averages = self._average(*self._sent_values)
        self._sent_values = None
        if self._compresses:
            momentum = momentum / self._scales * self._mask
        self._averages.write((0, self._averages.total), averages)
        self._make_update(momentum)
        self.round_count += 1

    def _average(self, own: Numbers, own_averages: Numbers) -> tuple[Numbers, Numbers]:
        """The mean of all momenta (compressed again if there are servers), and of the averages of layers."""
        began = time.perf_counter()
        received = self.ends.receive_fragments(self.steps, 0)
        self.wait_seconds += time.perf_counter() - began
        momentum, averages = np.zeros_like(own), np.zeros_like(own_averages)
        for cluster in self.ends.lead_workers:  # in the same order everywhere, for identical bits
            with name_sender(self.ends.lead_workers[cluster]):
                found = (own, own_averages) if cluster == self.ends.cluster else self._decode(received[cluster])
            momentum += np.float32(self.shares[cluster]) * found[0]
            averages += np.float32(self.shares[cluster]) * found[1]
        if self._compresses and self.optimizer.servers:
            sizes = [end - begin for spans in zip(*self._list_spans(), strict=True) for begin, end in spans]
            momentum = self._compress_mean(momentum, sizes, self._mask)[1]
        return momentum, averages

    def send_remaining(self) -> None:
        """Do nothing: all have the same weights after each step."""

    def receive_remaining(self) -> None:
        """Receive nothing: it was already verified that all have the same weights."""
        self._synchronized_steps = self.steps

    @property
    def form(self) -> str:
        """The form of the rounds, with the optimizer's kind."""
        return f"{super().form} {type(self.optimizer).__name__}"

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Take a snapshot of the state: the numbers of steps and exchanges, compression errors, and the factors and the
        mask of the frozen variance.
        """
        arrays = {"error": self._error, "server": self._server_error, "mask": self._mask, "scales": self._scales}
        state = {"steps": self.steps, "met": self.round_count, **{name: each.copy() for name, each in arrays.items()}}
        return lambda: state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a state; weights and slots are restored as variables."""
        self.steps = self._synchronized_steps = int(state["steps"])
        self.round_count = int(state["met"])
        names = ("error", "server", "mask", "scales")
        self._error, self._server_error, self._mask, self._scales = (np.asarray(state[name]) for name in names)

    def restart(self) -> None:
        """Discard compression errors, which belong to other weights."""
        super().restart()
        self._error, self._server_error = np.zeros_like(self._error), np.zeros_like(self._server_error)

    def close(self) -> None:
        """Do nothing: there are no threads."""

    # ------------------------------------------------------------------ encoding
    @property
    def _momenta(self) -> FlatVariables:
        return FlatVariables([each.momentum for each in self.slots])

    @property
    def _averages(self) -> FlatVariables:
        """The moving averages of layers."""
        trained = {id(each) for each in self.trained_variables}
        return FlatVariables([each for each in self.flat.variables if id(each) not in trained])

    @property
    def _ends(self) -> list[int]:
        """The ends of the parts of the momentum that share a scale: one part for each weight, or a single part."""
        ends = list(np.cumsum([np.prod(each.momentum.shape, dtype=int) for each in self.slots]))
        return ends[-1:] if self.optimizer.fused else ends

    @property
    def _compresses(self) -> bool:
        return self._optimizer_step >= self.optimizer.freeze_step

    def _encode(self, momentum: Numbers) -> tuple[Bytes, Numbers]:
        """The bytes to send, and their decoded values."""
        if not self._compresses:  # also after a reset of the optimizer, which freezes its variance again
            self._mask = np.zeros(0, np.float32)
            return momentum.view(np.uint8), momentum
        if not self._mask.size:
            self._freeze()
        wanted = momentum * self._scales * self._mask + self._error
        data, decoded = compress_signs(wanted, self._ends)
        decoded = decoded * self._mask
        self._error = wanted - decoded
        return data, decoded

    def _decode(self, data: Bytes) -> tuple[Numbers, Numbers]:
        total = self._momenta.total
        size = SCALE_BYTES * len(self._ends) + -(-total // 8) if self._compresses else 4 * total
        averages = read_numbers(data[size:], self._averages.total)
        if not self._compresses:
            return read_numbers(data[:size], total), averages
        return restore_signs(data[:size], self._ends) * self._mask, averages

    def _list_spans(self) -> list[list[tuple[int, int]]]:
        """The spans of numbers that each participant serves: one in each part that shares a scale."""
        return list_spans(self._ends, len(self.ends.lead_workers))

    def _compress_mean(self, mean: Numbers, sizes: Sequence[int], mask: Numbers) -> tuple[Bytes, Numbers]:
        """Compress a mean like servers with spans of these sizes: the bytes, and their decoded values. If all
        participants have all momenta, each computes this for all servers, and nothing else is sent.
        """
        wanted = mean + self._server_error
        data, decoded = compress_signs(wanted, np.cumsum([each for each in sizes if each]).tolist())
        decoded = decoded * mask
        self._server_error = wanted * mask - decoded
        return data, decoded

    def _freeze(self) -> None:
        """End the warm-up: momenta whose variance is still 0 are masked from now on, and errors start at zero."""
        before = self._slots_before or []
        first = [np.asarray(slots[1]).reshape(-1) > 0 for slots in before]
        self._mask = np.concatenate(first).astype(np.float32)
        scales = self.optimizer.scales_of([slots[0] for slots in before])
        counts = [each.size for each in first]
        self._scales = np.repeat(np.asarray(scales, np.float32), counts)
        self._error = np.zeros(self._mask.size, np.float32)
        self._server_error = np.zeros(self._mask.size, np.float32)

    # ------------------------------------------------------------------ the update
    def _make_update(self, momentum: Numbers) -> None:
        """Update weights and slots from those before the step and the mean momentum, identically in all clusters."""
        if self._update_function is None:
            self._update_function = tf.function(self._compute_update, autograph=False, reduce_retracing=True)
        weights = [
            tf.reshape(numbers, v.shape)
            for v, numbers in FlatVariables(self.trained_variables).divide(self._read_trained_before())
        ]
        momenta = [tf.reshape(numbers, slots.momentum.shape) for slots, (_, numbers) in zip(
            self.slots, self._momenta.divide(momentum), strict=True
        )]  # fmt: skip
        rate = tf.constant(self.optimizer.rate_at(self._optimizer_step), tf.float32)
        made, others = self._update_function(
            weights, self._slots_before, momenta, tf.constant(self._optimizer_step, tf.int64), rate
        )
        for variable, weight in zip(self.trained_variables, made, strict=True):
            variable.assign(weight)
        for slots, first, rest in zip(self.slots, momenta, others, strict=True):
            for slot, value in zip((slots.momentum, *slots.others), (first, *rest), strict=True):
                slot.assign(value)

    def _compute_update(self, weights: Any, before: Any, momenta: Any, step: Any, rate: Any) -> Any:
        beta = self.optimizer.beta_1
        made = []
        for weight, slots, momentum, own in zip(weights, before, momenta, self.slots, strict=True):
            gradient = (momentum - beta * slots[0]) / (1.0 - beta)
            after, others = self.optimizer.advance(weight, slots[0], momentum, slots[1:], gradient, step, rate)
            made.append((after if own.constraint is None else own.constraint(after), others))
        return [weight for weight, _ in made], [tuple(others) for _, others in made]

    def _read_trained_before(self) -> Numbers:
        """The trained weights from before the step, which all clusters share."""
        trained = {id(each) for each in self.trained_variables}
        shared = self._shared if self._shared is not None else np.zeros(0, np.float32)
        parts = {id(variable): numbers for variable, numbers in self.flat.divide(shared) if id(variable) in trained}
        return np.concatenate([parts[id(variable)] for variable in self.trained_variables])


def make_one_bit_rounds(
    kind: type[OneBitRounds], weights: Mapping[str, Any], ends: Ends, differences: Any, shares: Mapping[str, float],
    exchanged: ExchangedWeights, copy: Callable[[Any], Any], models_own: Mapping[str, Any],
) -> OneBitRounds:  # fmt: skip
    """The rounds, of this kind, of a cluster with these `weights`; `models_own` are the model's variables, which the
    optimizer trains, and `copy` returns this cluster's copy of one.
    """
    optimizer, trained = exchanged
    slots = [own for path in trained if (own := optimizer.slots_of(models_own[path])) is not None]
    copies = [each._replace(momentum=copy(each.momentum), others=tuple(map(copy, each.others))) for each in slots]
    return kind(
        FlatVariables(tuple(weights.values())), ends, differences, optimizer=optimizer,
        trained_variables=[weights[p] for p in trained], slots=copies, shares=shares,
    )  # fmt: skip
