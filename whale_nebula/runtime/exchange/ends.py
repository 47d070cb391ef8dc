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
    HOST_SEPARATOR,
    ROUTE_SEPARATOR,
    ChannelState,
    Residue,
    States,
    Tally,
    TensorPosition,
    note_changes,
    report_crossing,
)
from whale_nebula.transport.protocol import Packed

MEASURE_EVERY = 50
LADDER_EVERY = 10  # steps between two checks of the next precision
_CLAMPED_NOTES = ("numbers beyond 65504 are clamped by fp16",)
_EXTRA_BYTES = 16  # bytes by which packed integers may exceed the numbers themselves


class _Encoded(NamedTuple):
    """An encoded tensor: what is sent, its codec, the residue for its gradient and the state afterwards. To measure the
    error, `decoded` has the whole tensor as the other end decodes it, or else `data` the codec's arrays.
    """

    payload: Any
    codec: Codec | None
    residue: Residue
    state: ChannelState
    clamped: int = 0
    notes: tuple[str, ...] = ()
    decoded: Any = None
    data: Any = None


@dataclass
class _ChannelEnd:
    """One end of a channel of a boundary, or of its gradient (`is_gradient`). `name` is that of reports, `key` that of
    its state; cached samples for differences take at most `limit` bytes.
    """

    name: str
    key: str
    encoding: Encoding
    states: States
    is_gradient: bool = False
    limit: int = deltas.LIMIT

    def _cache(self, state: ChannelState) -> Cache:
        return Cache(self.limit) if state.cache is None else state.cache


@dataclass
class Outgoing(_ChannelEnd):
    """The encoding end. `stage` computes the tensor."""

    stage: str = ""

    def encode(
        self,
        x: Any,
        at: TensorPosition,
        tally: Tally,
        residue: Residue | None = None,
        rows: Any = None,
        ids: Any = None,
    ) -> tuple[Any, Residue]:
        """Encode a micro-batch's tensor: the payload, and the residue for its gradient. For a gradient, `residue` is
        that of its tensor. `rows` marks the rows to be sent, `ids` are those of samples.
        """
        began = perf_counter()
        state, requested = self._begin_step(x, at)
        residue = residue or Residue(None if rows is None else _mark_rows(rows, x, requested), dims=tuple(x.shape))
        made = self._encode_as(x, requested, state, at, residue, ids, tally)
        seconds, state, notes = perf_counter() - began, made.state, made.notes
        if requested not in (None, made.codec) and not tally.skip_reason:
            kind, dims, used = x.dtype.name, list(x.shape), made.codec or NONE
            notes = (*notes, f"{requested} would not make {kind}{dims} smaller, so it is sent as {used}")
        if at.training and at.first and not tally.skip_reason:
            state = note_changes(tally, self.name, self.encoding, self.states.find_state(self.key), state, made.codec)
            if not self.encoding.lossless and (state.error is None or is_due(state.steps)):
                state = replace(state, error=self._measure_error(x, made, state))
        self.states.put(self.key, state)
        report = report_crossing(
            made.payload, x, made.codec, encode_seconds=seconds, error=state.error, clamped=made.clamped, notes=notes
        )
        tally.add(self.name, report)
        return made.payload, made.residue

    def _begin_step(self, x: Any, at: TensorPosition) -> tuple[ChannelState, Codec | None]:
        """Count a step of training, and consider the next rung of the ladder; returns the state, and the codec that the
        step uses.
        """
        state, encoding = self.states.find_state(self.key), self.encoding
        starts = at.training and at.first
        if starts:
            state = replace(state, steps=state.steps + 1)
        done = state.steps - 1 if at.training else state.steps
        if done < encoding.start:
            return state, None
        more = not encoding.auto and state.rung + 1 < len(encoding.rungs)
        if starts and more and (done - encoding.start) % LADDER_EVERY == 0:
            precision = (encoding.rungs[state.rung + 1] or PLAIN).precision or PLAIN
            if (
                measure_distance(x, precision.decode(precision.encode(x), tuple(x.shape), x.dtype.name))
                <= encoding.bound
            ):
                state = replace(state, rung=state.rung + 1)
        return state, encoding.rungs[min(state.rung, len(encoding.rungs) - 1)]

    def _encode_as(
        self,
        x: Any,
        requested: Codec | None,
        state: ChannelState,
        at: TensorPosition,
        residue: Residue,
        ids: Any,
        tally: Tally,
    ) -> _Encoded:
        encoding, dims = self.encoding, tuple(x.shape)
        kept = x if residue.rows is None else _select_rows(x, residue.rows)
        exact = encoding.lossless or encoding.cast is not None
        codec = (
            requested
            if exact
            else choose_codec(requested, x.dtype.name, tuple(kept.shape), taken=residue.has_structure)
        )
        structure, differs = (
            None if codec is None else codec.structure,
            codec is not None and encoding.delta is not None,
        )
        remembers = differs or (structure is not None and structure.remembers(dims))
        if (remembers or (at.training and encoding.nonfinite == SKIP)) and not is_all_finite(kept):
            self._skip_or_raise(at, tally)
            return _Encoded(x, None, Residue(dims=dims), state)
        if codec is not None and encoding.cast is not None:
            floating, cast = x.dtype.is_floating, codec.precision or PLAIN
            clamped = blocks.count_clamped(x) if cast.clamps and floating else 0
            payload = cast.encode(x)[0] if floating else x
            return _Encoded(payload, codec, residue, state, clamped, _CLAMPED_NOTES if clamped else ())
        if codec is None and residue.rows is None and not encoding.zstd:
            return _Encoded(x, None, residue, state)
        if encoding.delta is not None and deltas.can_cache_differences(codec, dims, ids):
            held = self._cache(state)
            notes, stamp = deltas.explain_full_samples(held, dims, ids), held.stamp(ids)
            data, decoded = deltas.encode(codec, x, ids, held, residue.rows)
            packed = self._pack(x, codec, stamp, Payload(data, residue.rows, changes=True))
            state = replace(state, cache=held, version=held.version)
            return _Encoded(packed, codec, residue, state, 0, notes, decoded)
        return self._compress(x, kept, codec, state, at, residue)

    def _compress(
        self, x: Any, kept: Any, codec: Codec | None, state: ChannelState, at: TensorPosition, residue: Residue
    ) -> _Encoded:
        structure, news = None if codec is None else codec.structure, None
        if structure is not None and structure.news(tuple(kept.shape)):
            state, news = self._refresh(structure, kept, state, at)
        held = residue.structure if structure is not None and structure.follows else state.structure
        key = (
            make_rounding_key(self.key.partition(HOST_SEPARATOR)[0].partition(ROUTE_SEPARATOR)[0], at)
            if self.is_gradient
            else None
        )
        made = (codec or PLAIN).compress(kept, held, key)
        if made.state is not None:
            state = replace(state, structure=made.state)
        rows = None if self.is_gradient else residue.rows
        payload: Any = self._pack(x, codec, state.version, Payload(made.data, rows, news))
        if self.encoding.lossless and payload.nbytes >= payload.raw_bytes:
            payload = x
        if not self.is_gradient:
            residue = replace(residue, structure=made.residue, has_structure=structure is not None)
        return _Encoded(
            payload, codec, residue, state, made.clamped, _CLAMPED_NOTES if made.clamped else (), None, made.data
        )

    def _refresh(
        self, structure: Structure, kept: Any, state: ChannelState, at: TensorPosition
    ) -> tuple[ChannelState, Any]:
        """Refresh the structure's state with the first micro-batch of a training step and at the first use; returns the
        state, and the update for the other side, if any.
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
        data = write_payload(payload, zstd=self.encoding.zstd)
        return Packed(data, self.encoding.numbers[codec], version, x.dtype.name, tuple(x.shape))

    def _measure_error(self, x: Any, made: _Encoded, state: ChannelState) -> float:
        """Relative error of the decoded tensor."""
        rows, decoded = made.residue.rows, made.decoded
        kept = x if rows is None else _select_rows(x, rows)
        if decoded is not None:
            decoded = decoded if rows is None else _select_rows(decoded, rows)
        elif not isinstance(made.payload, Packed):
            decoded = blocks.restore(made.payload, x.dtype.name)
        else:
            codec = made.codec or PLAIN
            follows = codec.structure is not None and codec.structure.follows
            held = made.residue.structure if follows else state.structure
            decoded, _ = codec.restore(made.data, tuple(kept.shape), x.dtype.name, held)
        return measure_distance(kept, decoded)

    def _skip_or_raise(self, at: TensorPosition, tally: Tally) -> None:
        """Mark the step as skipped, or raise an error if that is not allowed; in an evaluation do nothing."""
        if not at.training:
            return
        if self.encoding.nonfinite != SKIP:
            raise NonFiniteError(
                f"{self.name} contains a NaN or an infinity",
                boundary=self.name,
                stage=self.stage,
                step=at.step + 1,
                micro_batch=at.micro_batch,
                why="it would remain in the codec state of this boundary, and spoil all later steps",
            )
        name, stage = self.name, self.stage
        tally.skip_step(f"{name} contains a NaN or an infinity in micro-batch {at.micro_batch} of stage {stage!r}")


@dataclass
class Incoming(_ChannelEnd):
    """The decoding end. `dtype` is the type of a tensor that crosses as an array of another type."""

    dtype: str = ""

    def decode(
        self, received: Any, tally: Tally, residue: Residue | None = None, ids: Any = None, *, first: bool = False
    ) -> tuple[Any, Residue]:
        """Decode a micro-batch's tensor: the tensor, and the residue for its gradient. For a gradient, `residue` is
        that of its tensor. `ids` are those of its samples; `first` marks the first one of a training step.
        """
        began, before, residue = perf_counter(), self.states.find_state(self.key), residue or Residue()
        if isinstance(received, Packed):
            codec, x, residue = self._decode_packed(received, residue, ids)
        else:
            codec, x = None if self.encoding.cast is None else self.encoding.codec, tf.convert_to_tensor(received)
            if codec is not None and self.dtype not in ("", x.dtype.name):
                x = blocks.restore(x, self.dtype)
        timed = isinstance(received, Packed) or codec is not None
        seconds = perf_counter() - began if timed else 0.0
        tally.add_received(self.name, report_crossing(received, x, codec, decode_seconds=seconds))
        if first:
            after = self.states.find_state(self.key)
            self.states.put(self.key, note_changes(tally, self.name, self.encoding, before, after, codec))
        return x, residue

    def _decode_packed(self, received: Packed, residue: Residue, ids: Any) -> tuple[Codec | None, Any, Residue]:
        if received.codec not in self.encoding.by_number:
            raise RemoteProtocolError(
                f"received codec {received.codec}, which is not one of '{self.encoding}'", where=self.name
            )
        codec = self.encoding.by_number[received.codec]
        structure = None if codec is None else codec.structure
        payload = self._read_payload(received, structure)
        if payload.changes:
            made = self._decode_changes(codec, payload, received, ids)
            return codec, tf.cast(made, received.dtype), Residue(payload.rows, None, received.dims)
        follows = structure is not None and structure.follows
        if self.is_gradient and residue.dims not in (None, received.dims):
            raise RemoteProtocolError(
                f"received a gradient of shape {received.dims} for a tensor of shape {residue.dims}", where=self.name
            )
        if follows and not residue.has_structure:
            raise RemoteProtocolError(
                f"received a gradient as {codec}, but the tensor was not sent with it", where=self.name
            )
        rows = residue.rows if self.is_gradient else payload.rows
        dims = received.dims if rows is None else (int(rows.sum()), received.dims[-1])
        state = self._learn_state(codec, payload, received, dims)
        held = residue.structure if follows else state.structure
        x, left = (codec or PLAIN).restore(payload.data, dims, received.dtype, held)
        if not self.is_gradient:
            residue = Residue(rows, left, received.dims, structure is not None)
        if rows is not None:  # with zeros in the rows that were not sent
            x = tf.scatter_nd(tf.where(rows), x, [prod(received.dims[:-1]), received.dims[-1]])
        return codec, tf.reshape(x, received.dims), residue

    def _read_payload(self, received: Packed, structure: Structure | None) -> Payload:
        news, most = 0, received.raw_bytes + _EXTRA_BYTES * self.encoding.lossless
        if structure is not None and received.dims and structure.numbers(received.dims) is not None:
            news = nbytes(structure.news(received.dims))
        if self.encoding.delta is not None:
            most = max(most, deltas.most_bytes(received.dims))
        return read_payload(received.data, prod(received.dims[:-1]), news, most, zstd=self.encoding.zstd)

    def _decode_changes(self, codec: Codec | None, payload: Payload, received: Packed, ids: Any) -> Any:
        """Decode a tensor sent as differences to cached samples, which must be the same on both sides."""
        state = self.states.find_state(self.key)
        held = self._cache(state)
        if ids is not None and held.stamp(ids) != received.state:
            raise self._version_error("of cached samples, or different samples", received.state, held.stamp(ids))
        made = deltas.decode(codec, payload.data, received.dims, ids, held, payload.rows)
        self.states.put(self.key, replace(state, cache=held, version=held.version))
        return made

    def _learn_state(self, codec: Codec | None, payload: Payload, received: Packed, dims: Dims) -> ChannelState:
        """The state, after storing the update that was received with the tensor, if any. Its version must equal that
        of the other side.
        """
        state, structure = self.states.find_state(self.key), None if codec is None else codec.structure
        if structure is None or not dims or not structure.news(dims):
            return state
        if payload.news is not None:
            held = structure.init(dims) if state.structure is None else state.structure
            arrays = split(payload.news, structure.news(dims))
            state = replace(state, structure=structure.learn(held, arrays, dims), version=received.state)
            self.states.put(self.key, state)
        fits = state.structure is not None and structure.fits(state.structure, dims)
        if state.version != received.state or not fits:
            raise self._version_error(f"of {codec}", received.state, state.version)
        return state

    def _version_error(self, what: str, remote_version: int, local_version: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"the two sides of {self.name} have different states {what}",
            why=f"the other side has version {remote_version}, and this one {local_version}",
            mend="start all workers again, from the same checkpoint",
        )


def is_due(step: int) -> bool:
    """Whether the error is measured in a step, counted from 1.

    >>> [step for step in range(1, 102) if is_due(step)]
    [1, 2, 4, 8, 16, 32, 50, 64, 100]
    """
    return step > 0 and (step % MEASURE_EVERY == 0 or step & (step - 1) == 0)


def measure_distance(x: Any, decoded: Any) -> float:
    """The norm of the difference relative to that of the tensor; for a tensor of zeros the norm itself."""
    wide = tf.cast(x, tf.float32)
    off, size = tf.norm(wide - tf.cast(decoded, tf.float32)), tf.norm(wide)
    return float(off) if float(size) == 0 else float(off / size)


def is_all_finite(x: Any) -> bool:
    """Whether all numbers of a tensor are finite.

    >>> [is_all_finite(tf.constant(numbers, tf.float32)) for numbers in ([1, 2], [1, float("inf")], [])]
    [True, False, True]
    """
    return not x.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(x)))


def make_rounding_key(name: str, at: TensorPosition) -> np.ndarray:
    """Two 32-bit numbers from the run's seed, the boundary, the step and the micro-batch.

    >>> a, b = make_rounding_key("b0", TensorPosition(1, 0, True)), make_rounding_key("b0", TensorPosition(1, 1, True))
    >>> a.dtype.name, bool((a != b).any())
    ('uint32', True)
    """
    packed = struct.pack("<qqq", at.seed, at.step, at.micro_batch) + name.encode()
    return np.array([zlib.crc32(packed), zlib.crc32(packed[::-1])], np.uint32)


def _mark_rows(rows: Any, x: Any, codec: Codec | None) -> Any:
    """A truth value for each row of the tensor as a matrix; None if all rows are sent, because omitting some would not
    save bytes.
    """
    if x.shape.rank < 1:
        return None
    marks, dims = np.asarray(rows).astype(bool).reshape(-1), tuple(x.shape)
    fits = marks.size == prod(dims[:-1]) and mask_saves_bytes(codec, x.dtype.name, dims, int(marks.sum()))
    return marks if fits else None


def _select_rows(x: Any, rows: Any) -> Any:
    """The rows that are sent, as a matrix."""
    return tf.boolean_mask(tf.reshape(x, [-1, x.shape[-1]]), rows)
