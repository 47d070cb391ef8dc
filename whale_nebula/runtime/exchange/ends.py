"""The sending and the receiving end of one direction of a boundary."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.codec import packing
from whale_nebula.codec.deltas import Cache
from whale_nebula.codec.objects import Codec, Dims
from whale_nebula.codec.packing import join, split
from whale_nebula.codec.sizes import by_number, elides, fitting, fitting_back, nbytes, number, structure_in
from whale_nebula.codec.way import NONE, Way
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange import coding, differences
from whale_nebula.runtime.exchange.coding import Payload, payload_bytes, read
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


@dataclass
class Incoming:
    """Makes the tensors of one boundary, or of its gradient, whole again. See `Outgoing`."""

    name: str
    key: str
    way: Way
    states: States
    back: bool = False
    limit: int = differences.LIMIT

    def take(self, came: Any, tally: Tally, residue: Residue | None = None, ids: Any = None) -> tuple[Any, Residue]:
        """The tensor of a micro-batch, and what its gradient will be treated with. `ids` are those of its samples."""
        residue = residue or Residue()
        if not isinstance(came, Packed):
            return tf.convert_to_tensor(came), residue
        with tally.decoding(self.name):
            return self._decode_payload(came, residue, ids)

    def _decode_payload(self, came: Packed, residue: Residue, ids: Any) -> tuple[Any, Residue]:
        codecs = by_number(self.way)
        codec = codecs.get(came.codec)
        if came.codec not in codecs:
            raise RemoteProtocolError(f"codec {came.codec} came, which is none of '{self.way}'", where=self.name)
        if codec is not None and codec.lossless:
            payload = read(came.data, 0, 0, came.raw_bytes + 16, zstd=self.way.zstd)
            return tf.convert_to_tensor(packing.unpack(payload.data, came.dtype, came.dims)), residue
        payload = self._read(came, codec)
        if payload.changes:
            made = self._decode_changes(codec, payload, came, ids)
            return tf.cast(made, came.dtype), Residue(payload.rows, None, came.dims)
        if self.back:
            return self._decode_gradient(codec, payload, came, residue), residue
        dims = _kept_dims(came.dims, payload.rows)
        state = self._learn_state(codec, payload, came, dims)
        x, left = coding.decode(codec, payload.data, dims, came.dtype, state.structure)
        residue = Residue(payload.rows, left, came.dims, structure_in(codec) is not None)
        return _whole(x, payload.rows, came.dims), residue

    def _decode_gradient(self, codec: Codec | None, payload: Payload, came: Packed, residue: Residue) -> Any:
        """The gradient of a tensor that was sent from here."""
        structure = structure_in(codec)
        if residue.dims not in (None, came.dims):
            raise RemoteProtocolError(f"a gradient of sizes {came.dims} came for {residue.dims}", where=self.name)
        if structure is not None and structure.returns and not residue.taken:
            raise RemoteProtocolError(f"a gradient came as {codec}, and the tensor did not", where=self.name)
        dims = _kept_dims(came.dims, residue.rows)
        state = self._learn_state(codec, payload, came, dims)
        x = coding.decode_back(codec, payload.data, dims, came.dtype, state.structure, residue.structure)
        return _whole(x, residue.rows, came.dims)

    def _read(self, came: Packed, codec: Codec | None) -> Payload:
        rows = prod(came.dims[:-1])
        structure = coding.own_structure(codec, back=self.back)
        news = 0
        if structure is not None and came.dims and structure.numbers(came.dims) is not None:
            news = nbytes(structure.news(came.dims))
        most = came.raw_bytes
        if self.way.delta is not None:
            most = max(most, differences.most_bytes(came.dims))
        return read(came.data, rows, news, most, zstd=self.way.zstd)

    def _decode_changes(self, codec: Codec | None, payload: Payload, came: Packed, ids: Any) -> Any:
        """The tensor of which changes of samples came, to what both sides must hold alike."""
        state = self.states.of(self.key)
        held = Cache(self.limit) if state.held is None else state.held
        if ids is not None and held.stamp(ids) != came.state:
            raise self._unlike("of what they hold, or different samples", came.state, held.stamp(ids))
        made = differences.decode(codec, payload.data, came.dims, ids, held, payload.rows)
        self.states.put(self.key, replace(state, held=held, version=held.version))
        return made

    def _learn_state(self, codec: Codec | None, payload: Payload, came: Packed, dims: Dims) -> ChannelState:
        """The state after the news, which must be the one that the other side has."""
        state = self.states.of(self.key)
        structure = coding.own_structure(codec, back=self.back)
        if structure is None or not dims or not structure.news(dims):
            return state
        if payload.news is not None:
            held = structure.init(dims) if state.structure is None else state.structure
            arrays = split(payload.news, structure.news(dims))
            state = replace(state, structure=structure.learn(held, arrays, dims), version=came.state)
            self.states.put(self.key, state)
        fits = state.structure is not None and structure.fits(state.structure, dims)
        if state.version != came.state or not fits:
            raise self._unlike(f"of {codec}", came.state, state.version)
        return state

    def _unlike(self, what: str, there: int, here: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"the two sides of {self.name} have different states {what}",
            why=f"the other side has version {there}, this one {here}",
            mend="start all workers again, from the same checkpoint",
        )


def _kept_dims(dims: Dims, rows: np.ndarray | None) -> Dims:
    return dims if rows is None else (int(rows.sum()), dims[-1])


def _whole(x: Any, rows: np.ndarray | None, dims: Dims) -> Any:
    """With zeros in the rows that were not sent."""
    if rows is None:
        return tf.reshape(x, dims)
    places = tf.where(rows)
    return tf.reshape(tf.scatter_nd(places, x, [prod(dims[:-1]), dims[-1]]), dims)


def rounding_key(name: str, at: At) -> np.ndarray:
    """Two 32-bit numbers from the run's seed, the boundary, the step and the micro-batch.

    >>> from whale_nebula.runtime.exchange.state import At
    >>> a, b = rounding_key("b0", At(1, 0, True)), rounding_key("b0", At(1, 1, True))
    >>> a.dtype.name, bool((a != b).any())
    ('uint32', True)
    """
    packed = struct.pack("<qqq", at.seed, at.step, at.micro_batch) + name.encode()
    return np.array([zlib.crc32(packed), zlib.crc32(packed[::-1])], np.uint32)


class _Sent(NamedTuple):
    """What a tensor got of its codec, what crosses, and what stays; `again` is what the other side reads, if that is
    known already.
    """

    codec: Codec | None
    payload: Any
    residue: Residue
    state: ChannelState
    again: Any = None


@dataclass
class Outgoing:
    """Makes the tensors of one boundary, or of its gradient, small.

    `name` is that of reports, `key` that of its state; `back` says that it is the gradient. Samples whose differences
    are sent take at most `limit` bytes here. `stage` makes what is sent.
    """

    name: str
    key: str
    way: Way
    states: States
    back: bool = False
    limit: int = differences.LIMIT
    stage: str = ""

    def send(
        self, x: Any, at: At, tally: Tally, residue: Residue | None = None, rows: Any = None, ids: Any = None
    ) -> tuple[Any, Residue]:
        """What crosses for a micro-batch, and what its gradient will be treated with. `ids` are those of samples."""
        with tally.encoding(self.name):
            state, on = coding.count_step(self.way, self.states.of(self.key), at)
            state = coding.climb_ladder(self.way, state, at, x) if on else state
            asked = self.way.rungs[min(state.rung, len(self.way.rungs) - 1)] if on else None
            residue = residue or Residue(_mark_rows(rows, x, asked), dims=_dims(x))
            sent = self._encode_tensor(x, self._fitting(asked, x, residue), state, at, residue, ids, tally)
        if asked not in (None, sent.codec) and not tally.left_out:
            tally.add(self.name, BoundaryReport(notes=(_fallen(asked, sent.codec, x),)))
        state = self._measure_error(x, sent, ids, tally) if at.training and at.first else sent.state
        self.states.put(self.key, state)
        tally.add(self.name, report_crossing(sent.payload, x, sent.codec, state.error))
        return sent.payload, sent.residue

    def _encode_tensor(
        self, x: Any, codec: Codec | None, state: ChannelState, at: At, residue: Residue, ids: Any, tally: Tally
    ) -> _Sent:
        if not self._fits(x, codec, at, residue, tally):
            return _Sent(None, x, Residue(dims=_dims(x)), state)
        if differences.keeps_differences(self.way, codec, _dims(x), ids):
            payload, state, again = self._changes(x, codec, state, ids, residue.rows, tally)
            return _Sent(codec, payload, residue, state, again)
        return _Sent(codec, *self._encode_with(x, codec, state, at, residue, tally))

    def _measure_error(self, x: Any, sent: _Sent, ids: Any, tally: Tally) -> ChannelState:
        """The state, and how exact what crosses is: measured now and then, and where the codec has changed."""
        if tally.left_out:
            return sent.state
        state = note_changes(tally, self.name, self.way, self.states.of(self.key), sent.state, sent.codec)
        if state.error is not None and not coding.due(state.steps):
            return state
        again = self._again(x, sent, state, ids) if sent.again is None else sent.again
        rows = sent.residue.rows
        return replace(state, error=coding.distance(_select_rows(x, rows), _select_rows(again, rows)))

    def _fits(self, x: Any, codec: Codec | None, at: At, residue: Residue, tally: Tally) -> bool:
        """Whether a tensor may be encoded: it has no NaN where that would do harm. See `finite`."""
        watched = coding.needs_finite_check(self.way, codec, _dims(x), at, back=self.back)
        if not watched or coding.is_whole(_select_rows(x, residue.rows)):
            return True
        why = coding.left_out(self.way, self.name, self.stage, at)
        if why:
            tally.leave_out(why)
        return False

    def _fitting(self, codec: Codec | None, x: Any, residue: Residue) -> Codec | None:
        """What of the codec this tensor gets: see `codec.fitting`."""
        if self.way.lossless or self.way.cast is not None:
            return codec
        dims, dtype = _dims(x), x.dtype.name
        if residue.rows is not None:
            dims = int(residue.rows.sum()), dims[-1]
        if self.back:
            return fitting_back(codec, dtype, dims, taken=residue.taken)
        return fitting(codec, dtype, dims)

    def _encode_with(
        self, x: Any, codec: Codec | None, state: ChannelState, at: At, residue: Residue, tally: Tally
    ) -> tuple[Any, Residue, ChannelState]:
        if self.way.cast is not None and codec is not None:
            _tell_clamped(tally, self.name, coding.count_clamped(x) if codec.clamps else 0)
            return coding.encode_cast(str(self.way), x), residue, state
        if codec is None and residue.rows is None and not self.way.zstd:
            return x, residue, state
        if codec is not None and codec.lossless:
            packed = self._pack_payload(x, codec, state, Payload(packing.pack(x.numpy())))
            return packed if packed.nbytes < _raw(x) else x, residue, state
        kept = _select_rows(x, residue.rows)
        state, news = self._refresh_state(codec, kept, state, at)
        if self.back:
            key = rounding_key(self.key.partition(AT)[0].partition(LANE)[0], at)
            made = coding.encode_back(codec, kept, state.structure, residue.structure, key)
            _tell_clamped(tally, self.name, made.clamped)
            return self._pack_payload(x, codec, state, Payload(made.data, news=news)), residue, state
        made = coding.encode(codec, kept, state.structure)
        _tell_clamped(tally, self.name, made.clamped)
        if made.state is not None:
            state = replace(state, structure=made.state)
        payload = Payload(made.data, residue.rows, news)
        residue = replace(residue, structure=made.residue, taken=structure_in(codec) is not None)
        return self._pack_payload(x, codec, state, payload), residue, state

    def _changes(
        self, x: Any, codec: Any, state: ChannelState, ids: Any, rows: Any, tally: Tally
    ) -> tuple[Packed, ChannelState, Any]:
        """Of samples that both sides know, what changed; and what the other side reads."""
        held = Cache(self.limit) if state.held is None else state.held
        tally.add(self.name, BoundaryReport(notes=differences.doubts(held, _dims(x), ids)))
        before = replace(state, version=held.stamp(ids))
        data, made = differences.encode(codec, x, ids, held, rows)
        packed = self._pack_payload(x, codec, before, Payload(data, rows, changes=True))
        return packed, replace(state, held=held, version=held.version), made

    def _refresh_state(
        self, codec: Codec | None, x: Any, state: ChannelState, at: At
    ) -> tuple[ChannelState, np.ndarray | None]:
        """What the structure wants the other side to know: with the first micro-batch of a step, and with the first of
        all that it is used for.
        """
        structure = coding.own_structure(codec, back=self.back)
        if structure is None or not structure.news(_dims(x)):
            return state, None
        known = state.structure is not None and structure.fits(state.structure, _dims(x))
        if known and not (at.first and at.training):
            return state, None
        held = state.structure if known else structure.init(_dims(x))
        held, news = structure.refresh(held, x, max(state.steps - 1, 0))
        state = replace(state, structure=held)
        if news is None:
            return state, None
        return replace(state, version=state.version + 1), join([_array(each) for each in news])

    def _pack_payload(self, x: Any, codec: Codec | None, state: ChannelState, payload: Payload) -> Packed:
        data = payload_bytes(payload, zstd=self.way.zstd)
        return Packed(data, number(self.way, codec), state.version, x.dtype.name, _dims(x))

    def _again(self, x: Any, sent: _Sent, state: ChannelState, ids: Any) -> Any:
        """What the other side makes of it."""
        if not isinstance(sent.payload, Packed):
            return coding.decode_cast(sent.payload, x.dtype)
        states = States()
        states.put(self.key, state)
        there = Incoming(self.name, self.key, self.way, states, self.back)
        return there.take(sent.payload, Tally(), sent.residue if self.back else None, ids)[0]


def _mark_rows(rows: Any, x: Any, codec: Codec | None) -> Any:
    """One truth value for each row of the matrix, or None: all are sent."""
    if rows is None or x.shape.rank < 1:
        return None
    marks = np.asarray(rows).astype(bool).reshape(-1)
    fits = marks.size == prod(_dims(x)[:-1]) and elides(codec, x.dtype.name, _dims(x), int(marks.sum()))
    return marks if fits else None


def _dims(x: Any) -> Dims:
    return tuple(int(size) for size in x.shape)


def _raw(x: Any) -> int:
    return int(x.shape.num_elements()) * int(x.dtype.size)


def _select_rows(x: Any, rows: Any) -> Any:
    """The rows that are sent, as a matrix; the tensor itself where all are."""
    if rows is None:
        return x
    return tf.boolean_mask(tf.reshape(x, [-1, x.shape[-1]]), rows)


def _fallen(asked: Codec, codec: Codec | None, x: Any) -> str:
    return f"{asked} would not make {x.dtype.name}{list(_dims(x))} smaller, so it crosses as {codec or NONE}"


def _tell_clamped(tally: Tally, name: str, count: int) -> None:
    if count:
        tally.add(name, BoundaryReport(clamped=count, notes=("numbers beyond 65504 are clamped by fp16",)))


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(x.numpy())
