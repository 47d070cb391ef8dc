"""Exchange of momenta between the workers of one cluster with TensorFlow's collectives. Each worker compresses its
whole momentum, and is the server of a part. In the warm-up, and with `servers=True`, parts are sent to their servers by
an all-to-all; the servers' means, compressed again after the warm-up, are gathered by all. Without servers, the
compressed momenta are gathered unchanged. The numbers are bit-identical to those of `OneBitRounds`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.local_sgd.one_bit import (
    SCALE_BYTES,
    MomentumOptimizer,
    OneBitRounds,
    list_spans,
    restore_signs,
)
from whale_nebula.runtime.local_sgd.topology import Ends, name_sender, read_numbers
from whale_nebula.runtime.replicas.collectives import Collectives, Group
from whale_nebula.transport import LinkTotals
from whale_nebula.wire.tensor import Bytes

Spans: TypeAlias = Sequence[tuple[int, int]]
_WORD_BYTES = 4
"""Bytes of an integer: TensorFlow has no collectives of single bytes."""


@dataclass(frozen=True)
class CollectiveEnds(Ends):
    """One worker's ends of the exchange with the others of its cluster. Momenta are sent with collectives; the averages
    of layers are sent over links, which also keeps every step in order with other messages of the workers.
    """

    group: Group = field(kw_only=True)
    _sent_counts: list[LinkTotals] = field(default_factory=lambda: [LinkTotals()])

    @classmethod
    def connect(cls, collectives: Collectives, ends: Ends) -> CollectiveEnds:
        """The ends of a worker whose cluster has these collectives."""
        group = collectives.group(range(len(ends.lead_workers)), f"momenta of rounds {ends.number}")
        return cls(**vars(ends), group=group)

    def exchange(self, parts: Sequence[Bytes], raw: int) -> Sequence[Bytes]:
        """Send each worker its part, in the order of `lead_workers`; returns the parts received from each. All parts
        have the same size; `raw` is the size of one of them without a codec, in bytes.
        """
        found = self.group.exchange(np.stack([_to_words(each) for each in parts]))
        self._count_numbers(parts[0].nbytes, raw)
        return [each.view(np.uint8) for each in found]

    def gather(self, data: Bytes, raw: int) -> Sequence[Bytes]:
        """The bytes of all workers, the same number from each, in the order of `lead_workers`."""
        found = self.group.gather(_to_words(data))
        self._count_numbers(data.nbytes, raw)
        return [each.view(np.uint8)[: data.nbytes] for each in found]

    def count_sent(self) -> Mapping[str, LinkTotals]:
        """The totals of the links to the other workers, with what was sent by collectives."""
        return {name: sent + self._sent_counts[0] for name, sent in super().count_sent().items()}

    def _count_numbers(self, count: int, raw: int) -> None:
        self._sent_counts[0] += LinkTotals(count, count, raw, 1)


def _to_words(data: Bytes) -> Any:
    return _pad_bytes(data, -(-data.nbytes // _WORD_BYTES) * _WORD_BYTES).view(np.int32)


@dataclass(repr=False)
class MemberRounds(OneBitRounds):
    """Exchange of momenta for one worker of a cluster whose workers each train a copy."""

    ends: CollectiveEnds
    _sent_bytes: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))

    @staticmethod
    def count_bytes(optimizer: MomentumOptimizer, sizes: Sequence[int], participants: int) -> tuple[int, int]:
        """The bytes that each worker sends to each other one in a step: in the warm-up, and after it."""
        _, signs = OneBitRounds.count_bytes(optimizer, sizes, participants)
        spans = list_spans([sum(sizes)] if optimizer.fused else list(itertools.accumulate(sizes)), participants)
        most, scales = max(map(_count_numbers, spans)), max(map(_count_filled, spans))
        there, back = (SCALE_BYTES * each + -(-most // 8) for each in (len(spans[0]), scales))
        return 8 * most, there + back if optimizer.servers else signs

    def _send(self, data: Bytes, averages: Numbers) -> None:
        self._sent_bytes = data
        self.ends.send_fragment(self.steps, 0, averages.view(np.uint8), averages.nbytes)

    def _average(self, own: Numbers, own_averages: Numbers) -> tuple[Numbers, Numbers]:
        began = time.perf_counter()
        if self._compresses and not self.optimizer.servers:
            found = self.ends.gather(self._sent_bytes, own.nbytes)
            momentum = self._add_up([restore_signs(data, self._ends) * self._mask for data in found])
        else:
            momentum = self._average_parts(own)
        received = {**self.ends.receive_fragments(self.steps, 0), self.ends.cluster: own_averages.view(np.uint8)}
        self.wait_seconds += time.perf_counter() - began
        averages = []
        for cluster, worker in self.ends.lead_workers.items():
            with name_sender(worker):
                averages.append(read_numbers(received[cluster], own_averages.size))
        return momentum, self._add_up(averages)

    def _average_parts(self, own: Numbers) -> Numbers:
        """The mean, of which each worker computes a part; `own` is this worker's momentum as decoded by others."""
        spans, place = self._list_spans(), list(self.ends.lead_workers).index(self.ends.cluster)
        most = max(_count_numbers(each) for each in spans)
        received = self.ends.exchange(self._encode_parts(own, spans, most), 4 * most)
        sizes, mask = [end - begin for begin, end in spans[place]], _select_spans(self._mask, spans[place])
        part = self._add_up([self._decode_part(data, sizes, mask) for data in received])
        data = part.view(np.uint8)
        if self._compresses:
            data = self._compress_mean(part, sizes, mask)[0] if part.size else data
        size = SCALE_BYTES * max(map(_count_filled, spans)) + -(-most // 8) if self._compresses else 4 * most
        momentum = np.empty_like(own)
        for each, found in zip(spans, self.ends.gather(_pad_bytes(data, size), 4 * most), strict=True):
            filled = [end - begin for begin, end in each if begin < end]
            values = self._decode_part(found, filled, _select_spans(self._mask, each))
            for (begin, end), numbers in zip(each, np.split(values, np.cumsum([b - a for a, b in each])), strict=False):
                momentum[begin:end] = numbers
        return momentum

    def _encode_parts(self, own: Numbers, spans: Sequence[Spans], most: int) -> list[Bytes]:
        """The part of a momentum for each server, all of the same size."""
        if not self._compresses:
            return [_pad_bytes(_select_spans(own, each).view(np.uint8), 4 * most) for each in spans]
        scales = self._sent_bytes[: SCALE_BYTES * len(self._ends)]
        signs = [np.packbits(_select_spans(own, each) >= 0) for each in spans]
        return [np.concatenate([scales, _pad_bytes(each, -(-most // 8))]) for each in signs]

    def _decode_part(self, data: Bytes, sizes: Sequence[int], mask: Numbers) -> Numbers:
        """The numbers of a part that consists of spans of these sizes."""
        count = sum(sizes)
        if not count:
            return np.zeros(0, np.float32)
        if not self._compresses:
            return read_numbers(data[: 4 * count], count)
        return restore_signs(data[: SCALE_BYTES * len(sizes) + -(-count // 8)], np.cumsum(sizes).tolist()) * mask

    def _add_up(self, each: Sequence[Numbers]) -> Numbers:
        """The mean by the shares of the workers, added in the same order everywhere, for identical bits."""
        total = np.zeros_like(each[0])
        for share, numbers in zip(self.shares.values(), each, strict=True):
            total += np.float32(share) * numbers
        return total

    def _freeze(self) -> None:
        super()._freeze()
        place = list(self.ends.lead_workers).index(self.ends.cluster)
        self._server_error = _select_spans(self._server_error, self._list_spans()[place])


def _select_spans(numbers: Numbers, spans: Spans) -> Numbers:
    """The numbers of some spans, one after the other; none if the array does not exist yet."""
    return np.concatenate([numbers[begin:end] for begin, end in spans])


def _count_numbers(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _count_filled(spans: Spans) -> int:
    """The number of spans with any numbers: each has a scale."""
    return sum(begin < end for begin, end in spans)


def _pad_bytes(data: Bytes, size: int) -> Bytes:
    padded = np.zeros(size, np.uint8)
    padded[: data.nbytes] = data
    return padded
