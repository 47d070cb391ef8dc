"""Translation with a trained model: source ids in, in the source's cluster; translations out, in the target's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.runtime.function import NebulaFunction, function

from ..decoder import Decoder
from ..encoder import Source
from .beam import Beam, beam_search
from .mask_predict import MaskPredict, mask_predict
from .search_result import Found


def beamed(decoder: Decoder, source: Source, beam: Beam) -> Found:
    """Decode by beam search. Caches hold the words of a prefix, so that the decoder computes each word once."""
    _check_room(beam.longest, decoder.embedding.length)
    memory = decoder.make_cache(source)

    def step(words: Any, position: Any, caches: Any) -> Any:
        return decoder.score_next_word(words, position, caches, memory)

    rows = tf.shape(source.hidden)[0]
    return beam_search(step, decoder.make_caches(rows * beam.width, beam.longest), rows, beam)


def mask_predicted(decoder: Decoder, source: Source, lengths: Any, search: MaskPredict) -> Found:
    """Decode by mask-predict; `lengths` are the logits of the numbers of words (rows, longest + 1)."""
    _check_room(search.longest, min(decoder.embedding.length - 2, lengths.shape[-1] - 1))
    memory = decoder.make_cache(source)

    def predict(shown: Any) -> Any:
        return decoder.score_sentences(shown, memory)

    return mask_predict(predict, lengths, search)


def _check_room(longest: int, room: int) -> None:
    if longest > room:
        raise OptionError(
            f"longest={longest} exceeds the {room} words that the model has positions for",
            why="start and end tokens take positions, too, where the model uses them",
            mend=f"longest={room}",
        )


def translation(model: Any, search: Any) -> NebulaFunction:
    """Create an `nb.function` that translates a batch: `translate(ids)` returns a `Found`.

    It runs in the model's scopes; without any it is plain TensorFlow. In several processes the target's cluster has no
    source text: call `translate(None, rows)` there and `translate(ids, rows)` elsewhere. `rows` has one element, of any
    value, for each row, so that every cluster knows the number of rows.

    Args:
        model: a trained translator.
        search: a `Beam` for causal models, a `MaskPredict` for models that fill in hidden words.
    """

    def translate(source: Any, rows: Any = None) -> Found:
        found: Found = model(source, search=search)
        return found

    made: NebulaFunction = function(translate)
    return made
