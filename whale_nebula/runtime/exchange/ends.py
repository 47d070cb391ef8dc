"""The sending and the receiving end of one direction of a boundary."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.codec import blocks, deltas
from whale_nebula.codec.deltas import Cache
from whale_nebula.codec.encoding import NONE, SKIP, Encoding
from whale_nebula.codec.objects import PLAIN, Codec, Structure
from whale_nebula.codec.packing import Dims, Payload, join, read_payload, split, write_payload
from whale_nebula.codec.sizes import choose_codec, mask_saves_bytes, nbytes
from whale_nebula.errors import NonFiniteError, RemoteProtocolError
from whale_nebula.runtime.exchange.state import (
    AT,
    LANE,
    At,
    ChannelState,
    Residue,
    States,
    Tally,
    note_changes,
    report_crossing,
)
from whale_nebula.transport.protocol import Packed

MEASURE_EVERY = 50
LADDER_EVERY = 10  # steps between two checks of the next precision
_CLAMPED = ("numbers beyond 65504 are clamped by fp16",)
_SLACK = 16  # bytes by which packed integers may exceed the numbers themselves


class _Made(NamedTuple):
    """An encoded tensor: payload, codec, residue, and the decoded rows."""

    payload: Any
    codec: Codec | None
    residue: Residue
    state: ChannelState
    clamped: int = 0
    notes: tuple[str, ...] = ()
    again: Any = None
    data: Any = None


@dataclass
class _End:
    """One end of a boundary, or of its gradient (`back`). `name` is that of reports, `key` that of its state; cached
    samples for differences take at most `limit` bytes.
    """

    name: str
    key: str
    way: Encoding
    states: States
    back: bool = False
    limit: int = deltas.LIMIT

    def _cache(self, state: ChannelState) -> Cache:
        return Cache(self.limit) if state.held is None else state.held


@dataclass
class Outgoing(_End):
    """The encoding end. `stage` computes the tensor."""

    stage: str = ""

    def send(
        self, x: Any, at: At, tally: Tally, residue: Residue | None = None, rows: Any = None, ids: Any = None
    ) -> tuple[Any, Residue]:
        """Encode a micro-batch's tensor: the payload, and the residue for its gradient. `ids` are those of samples."""
        began = perf_counter()
        state, asked = self._begin(x, at)
        residue = residue or Residue(None if rows is None else _mark_rows(rows, x, asked), dims=tuple(x.shape))
        made = self._encode(x, asked, state, at, residue, ids, tally)
        seconds, state, notes = perf_counter() - began, made.state, made.notes
        if asked not in (None, made.codec) and not tally.left_out:
            kind, dims, used = x.dtype.name, list(x.shape), made.codec or NONE
            notes = (*notes, f"{asked} would not make {kind}{dims} smaller, so it is sent as {used}")
        if at.training and at.first and not tally.left_out:
            state = note_changes(tally, self.name, self.way, self.states.of(self.key), state, made.codec)
            if not self.way.lossless and (state.error is None or is_due(state.steps)):
                state = replace(state, error=self._measure_error(x, made, state))
        self.states.put(self.key, state)
        report = report_crossing(
            made.payload, x, made.codec, encode_seconds=seconds, error=state.error, clamped=made.clamped, notes=notes
        )
        tally.add(self.name, report)
        return made.payload, made.residue

    def _begin(self, x: Any, at: At) -> tuple[ChannelState, Codec | None]:
        """Count a step of training, and consider the next rung of the ladder; returns the codec that the step uses."""
        state, way = self.states.of(self.key), self.way
        starts = at.training and at.first
        if starts:
            state = replace(state, steps=state.steps + 1)
        done = state.steps - 1 if at.training else state.steps
        if done < way.start:
            return state, None
        more = not way.auto and state.rung + 1 < len(way.rungs)
        if starts and more and (done - way.start) % LADDER_EVERY == 0:
            precision = (way.rungs[state.rung + 1] or PLAIN).precision or PLAIN
            if distance(x, precision.decode(precision.encode(x), tuple(x.shape), x.dtype.name)) <= way.bound:
                state = replace(state, rung=state.rung + 1)
        return state, way.rungs[min(state.rung, len(way.rungs) - 1)]

    def _encode(
        self, x: Any, asked: Codec | None, state: ChannelState, at: At, residue: Residue, ids: Any, tally: Tally
    ) -> _Made:
        way, dims = self.way, tuple(x.shape)
        kept = x if residue.rows is None else _select_rows(x, residue.rows)
        exact = way.lossless or way.cast is not None
        codec = asked if exact else choose_codec(asked, x.dtype.name, tuple(kept.shape), taken=residue.taken)
        structure, differs = None if codec is None else codec.structure, codec is not None and way.delta is not None
        remembers = differs or (structure is not None and structure.remembers(dims))
        if (remembers or (at.training and way.nonfinite == SKIP)) and not is_whole(kept):
            self._leave_out(at, tally)
            return _Made(x, None, Residue(dims=dims), state)
        if codec is not None and way.cast is not None:
            floating, cast = x.dtype.is_floating, codec.precision or PLAIN
            clamped = blocks.count_clamped(x) if cast.clamps and floating else 0
            payload = cast.encode(x)[0] if floating else x
            return _Made(payload, codec, residue, state, clamped, _CLAMPED if clamped else ())
        if codec is None and residue.rows is None and not way.zstd:
            return _Made(x, None, residue, state)
        if way.delta is not None and deltas.can_cache_differences(codec, dims, ids):
            held = self._cache(state)
            notes, stamp = deltas.explain_full_samples(held, dims, ids), held.stamp(ids)
            data, again = deltas.encode(codec, x, ids, held, residue.rows)
            packed = self._pack(x, codec, stamp, Payload(data, residue.rows, changes=True))
            state = replace(state, held=held, version=held.version)
            return _Made(packed, codec, residue, state, 0, notes, again)
        return self._compress(x, kept, codec, state, at, residue)

    def _compress(self, x: Any, kept: Any, codec: Codec | None, state: ChannelState, at: At, residue: Residue) -> _Made:
        structure, news = None if codec is None else codec.structure, None
        if structure is not None and structure.news(tuple(kept.shape)):
            state, news = self._refresh(structure, kept, state, at)
        held = residue.structure if structure is not None and structure.follows else state.structure
        key = rounding_key(self.key.partition(AT)[0].partition(LANE)[0], at) if self.back else None
        made = (codec or PLAIN).compress(kept, held, key)
        if made.state is not None:
            state = replace(state, structure=made.state)
        rows = None if self.back else residue.rows
        payload: Any = self._pack(x, codec, state.version, Payload(made.data, rows, news))
        if self.way.lossless and payload.nbytes >= payload.raw_bytes:
            payload = x
        if not self.back:
            residue = replace(residue, structure=made.residue, taken=structure is not None)
        return _Made(payload, codec, residue, state, made.clamped, _CLAMPED if made.clamped else (), None, made.data)

    def _refresh(self, structure: Structure, kept: Any, state: ChannelState, at: At) -> tuple[ChannelState, Any]:
        """The structure's state for the other side: sent with the first micro-batch of a training step and at the first
        use.
        """
        dims = tuple(kept.shape)
        known = state.structure is not None and structure.fits(state.structure, dims)
        if known and not (at.first and at.training):
            return state, None
        held = state.structure if known else structure.init(dims)
        held, news = structure.refresh(held, kept, max(state.steps - 1, 0))
        version = state.version + (news is not None)
        return replace(state, structure=held, version=version), None if news is None else join(news)

    def _pack(self, x: Any, codec: Codec | None, version: int, payload: Payload) -> Packed:
        data = write_payload(payload, zstd=self.way.zstd)
        return Packed(data, self.way.numbers[codec], version, x.dtype.name, tuple(x.shape))

    def _measure_error(self, x: Any, made: _Made, state: ChannelState) -> float:
        """Relative error of the decoded tensor."""
        rows, again = made.residue.rows, made.again
        kept = x if rows is None else _select_rows(x, rows)
        if again is not None:
            again = again if rows is None else _select_rows(again, rows)
        elif not isinstance(made.payload, Packed):
            again = blocks.restore(made.payload, x.dtype.name)
        else:
            codec = made.codec or PLAIN
            follows = codec.structure is not None and codec.structure.follows
            held = made.residue.structure if follows else state.structure
            again, _ = codec.restore(made.data, tuple(kept.shape), x.dtype.name, held)
        return distance(kept, again)

    def _leave_out(self, at: At, tally: Tally) -> None:
        """Mark the step as skipped, or raise an error if that is not allowed; in an evaluation do nothing."""
        if not at.training:
            return
        if self.way.nonfinite != SKIP:
            raise NonFiniteError(
                f"{self.name} contains a NaN or an infinity",
                boundary=self.name,
                stage=self.stage,
                step=at.step + 1,
                micro_batch=at.micro_batch,
                why="it would remain in the codec state of this boundary, and spoil all later steps",
            )
        name, stage = self.name, self.stage
        tally.leave_out(f"{name} contains a NaN or an infinity in micro-batch {at.micro_batch} of stage {stage!r}")


@dataclass
class Incoming(_End):
    """The decoding end. `dtype` is the type of a tensor that crosses as an array of another type."""

    dtype: str = ""

    def take(
        self, came: Any, tally: Tally, residue: Residue | None = None, ids: Any = None, *, first: bool = False
    ) -> tuple[Any, Residue]:
        """Decode a micro-batch's tensor: the tensor, and the residue for its gradient. `ids` are those of its samples;
        `first` marks the first one of a training step.
        """
        began, before, residue = perf_counter(), self.states.of(self.key), residue or Residue()
        if isinstance(came, Packed):
            codec, x, residue = self._open(came, residue, ids)
        else:
            codec, x = None if self.way.cast is None else self.way.codec, tf.convert_to_tensor(came)
            if codec is not None and self.dtype not in ("", x.dtype.name):
                x = blocks.restore(x, self.dtype)
        timed = isinstance(came, Packed) or codec is not None
        seconds = perf_counter() - began if timed else 0.0
        tally.took(self.name, report_crossing(came, x, codec, decode_seconds=seconds))
        if first:
            after = self.states.of(self.key)
            self.states.put(self.key, note_changes(tally, self.name, self.way, before, after, codec))
        return x, residue

    def _open(self, came: Packed, residue: Residue, ids: Any) -> tuple[Codec | None, Any, Residue]:
        if came.codec not in self.way.by_number:
            raise RemoteProtocolError(f"received codec {came.codec}, which is not one of '{self.way}'", where=self.name)
        codec = self.way.by_number[came.codec]
        structure = None if codec is None else codec.structure
        payload = self._read(came, structure)
        if payload.changes:
            made = self._decode_changes(codec, payload, came, ids)
            return codec, tf.cast(made, came.dtype), Residue(payload.rows, None, came.dims)
        follows = structure is not None and structure.follows
        if self.back and residue.dims not in (None, came.dims):
            raise RemoteProtocolError(
                f"received a gradient of shape {came.dims} for a tensor of shape {residue.dims}", where=self.name
            )
        if follows and not residue.taken:
            raise RemoteProtocolError(
                f"received a gradient as {codec}, but the tensor was not sent with it", where=self.name
            )
        rows = residue.rows if self.back else payload.rows
        dims = came.dims if rows is None else (int(rows.sum()), came.dims[-1])
        state = self._learn_state(codec, payload, came, dims)
        held = residue.structure if follows else state.structure
        x, left = (codec or PLAIN).restore(payload.data, dims, came.dtype, held)
        if not self.back:
            residue = Residue(rows, left, came.dims, structure is not None)
        if rows is not None:  # with zeros in the rows that were not sent
            x = tf.scatter_nd(tf.where(rows), x, [prod(came.dims[:-1]), came.dims[-1]])
        return codec, tf.reshape(x, came.dims), residue

    def _read(self, came: Packed, structure: Structure | None) -> Payload:
        news, most = 0, came.raw_bytes + _SLACK * self.way.lossless
        if structure is not None and came.dims and structure.numbers(came.dims) is not None:
            news = nbytes(structure.news(came.dims))
        if self.way.delta is not None:
            most = max(most, deltas.most_bytes(came.dims))
        return read_payload(came.data, prod(came.dims[:-1]), news, most, zstd=self.way.zstd)

    def _decode_changes(self, codec: Codec | None, payload: Payload, came: Packed, ids: Any) -> Any:
        """Decode a tensor sent as differences to cached samples, which must be the same on both sides."""
        state = self.states.of(self.key)
        held = self._cache(state)
        if ids is not None and held.stamp(ids) != came.state:
            raise self._version_error("of cached samples, or different samples", came.state, held.stamp(ids))
        made = deltas.decode(codec, payload.data, came.dims, ids, held, payload.rows)
        self.states.put(self.key, replace(state, held=held, version=held.version))
        return made

    def _learn_state(self, codec: Codec | None, payload: Payload, came: Packed, dims: Dims) -> ChannelState:
        """Update the state by a received update; it must then equal that of the other side."""
        state, structure = self.states.of(self.key), None if codec is None else codec.structure
        if structure is None or not dims or not structure.news(dims):
            return state
        if payload.news is not None:
            held = structure.init(dims) if state.structure is None else state.structure
            arrays = split(payload.news, structure.news(dims))
            state = replace(state, structure=structure.learn(held, arrays, dims), version=came.state)
            self.states.put(self.key, state)
        fits = state.structure is not None and structure.fits(state.structure, dims)
        if state.version != came.state or not fits:
            raise self._version_error(f"of {codec}", came.state, state.version)
        return state

    def _version_error(self, what: str, there: int, here: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"the two sides of {self.name} have different states {what}",
            why=f"the other side has version {there}, and this one {here}",
            mend="start all workers again, from the same checkpoint",
        )


def is_due(step: int) -> bool:
    """Whether the error is measured in a step, counted from 1.

    >>> [step for step in range(1, 102) if is_due(step)]
    [1, 2, 4, 8, 16, 32, 50, 64, 100]
    """
    return step > 0 and (step % MEASURE_EVERY == 0 or step & (step - 1) == 0)


def distance(x: Any, again: Any) -> float:
    """The norm of the difference relative to that of the tensor; 0 for an unchanged tensor of zeros."""
    wide = tf.cast(x, tf.float32)
    off, size = tf.norm(wide - tf.cast(again, tf.float32)), tf.norm(wide)
    return float(off) if float(size) == 0 else float(off / size)


def is_whole(x: Any) -> bool:
    """Whether all numbers of a tensor are finite.

    >>> is_whole(tf.constant([1.0, 2.0])), is_whole(tf.constant([1.0, float("inf")])), is_whole(tf.zeros([0]))
    (True, False, True)
    """
    return not x.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(x)))


def rounding_key(name: str, at: At) -> np.ndarray:
    """Two 32-bit numbers from the run's seed, the boundary, the step and the micro-batch.

    >>> a, b = rounding_key("b0", At(1, 0, True)), rounding_key("b0", At(1, 1, True))
    >>> a.dtype.name, bool((a != b).any())
    ('uint32', True)
    """
    packed = struct.pack("<qqq", at.seed, at.step, at.micro_batch) + name.encode()
    return np.array([zlib.crc32(packed), zlib.crc32(packed[::-1])], np.uint32)


def _mark_rows(rows: Any, x: Any, codec: Codec | None) -> Any:
    """One truth value for each row of the matrix, or None if all are sent."""
    if x.shape.rank < 1:
        return None
    marks, dims = np.asarray(rows).astype(bool).reshape(-1), tuple(x.shape)
    fits = marks.size == prod(dims[:-1]) and mask_saves_bytes(codec, x.dtype.name, dims, int(marks.sum()))
    return marks if fits else None


def _select_rows(x: Any, rows: Any) -> Any:
    """The rows that are sent, as a matrix."""
    return tf.boolean_mask(tf.reshape(x, [-1, x.shape[-1]]), rows)
