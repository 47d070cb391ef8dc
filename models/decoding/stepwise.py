"""A decoder searched: what `beam_search` and `mask_predict` ask for, from the layers of the target's side."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.errors import OptionError

from ..decoder import Decoder
from ..encoder import Source
from .beam import Beam, beam_search
from .found import Found
from .mask_predict import MaskPredict, mask_predict


def beamed(decoder: Decoder, source: Source, beam: Beam) -> Found:
    """The likeliest translations, word by word; the decoder computes each word once."""
    _check_room(beam.longest, decoder.embedding.length)
    memory = decoder.remember(source)

    def step(words: Any, position: Any, known: Any) -> Any:
        return decoder.next(words, position, known, memory)

    rows = tf.shape(source.hidden)[0]
    return beam_search(step, decoder.empty(rows * beam.width, beam.longest), rows, beam)


def mask_predicted(decoder: Decoder, source: Source, lengths: Any, search: MaskPredict) -> Found:
    """Translations of the likeliest lengths, all words at once; the source is read once."""
    _check_room(search.longest, min(decoder.embedding.length - 2, lengths.shape[-1] - 1))
    memory = decoder.remember(source)

    def predict(shown: Any) -> Any:
        return decoder.again(shown, memory)

    return mask_predict(predict, lengths, search)


def _check_room(longest: int, room: int) -> None:
    if longest > room:
        raise OptionError(
            f"longest={longest}, and the model has room for {room} words",
            why="it was made with so many positions; start and end need theirs where they stand beside the words",
            mend=f"longest={room}",
        )
