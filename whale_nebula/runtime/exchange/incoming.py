"""The receiving end of one direction of a boundary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec import packing
from whale_nebula.codec.deltas import Cache
from whale_nebula.codec.objects import Codec, Dims
from whale_nebula.codec.packing import split
from whale_nebula.codec.sizes import by_number, nbytes, structure_in
from whale_nebula.codec.way import Way
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.runtime.exchange import coding, differences
from whale_nebula.runtime.exchange.coding import Payload, read
from whale_nebula.runtime.exchange.state import ChannelState, Residue, States
from whale_nebula.runtime.exchange.statistics import Tally
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
