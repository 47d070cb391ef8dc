"""The WordPiece learner of TensorFlow Text, asked for the threshold at which a vocabulary just fits.

It counts words, and keeps those pieces that are frequent enough. How frequent, `bert_vocab` searches by itself, but
where a step of the threshold changes many pieces at once, as with little text, it ends at a vocabulary that is larger
than it was asked for. So the search is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .spelling import learner_reads, spelled

_LINES_AT_ONCE = 1024


def learned(lines: Sequence[str], size: int, reserved: Sequence[str], *, accents: bool) -> list[str] | int:
    """The most tokens that fit into `size`; if not even the letters do, how many tokens these are."""
    from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as library

    counts = counted(lines, accents=accents)

    def at(threshold: int) -> list[str]:
        return library.learn(counts, size, list(reserved), upper_thresh=threshold, lower_thresh=threshold)

    fits = at(sum(counts.values()) + 1)  # so frequent is no piece: only letters are left
    return len(fits) if len(fits) > size else _largest(at, size)


def counted(lines: Sequence[str], *, accents: bool) -> Any:
    """How often each word is there, cut by BERT's rules."""
    import tensorflow as tf
    from tensorflow_text.python.ops.bert_tokenizer import BasicTokenizer
    from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as library

    cutter = BasicTokenizer(**learner_reads(accents=accents))

    @tf.autograph.experimental.do_not_convert  # it would convert the library for seconds, and find nothing to do
    def cut(text: Any) -> Any:
        return cutter.tokenize(spelled(text, accents=accents))

    return library.count_words(tf.data.Dataset.from_tensor_slices(list(lines)).batch(_LINES_AT_ONCE).map(cut))


def _largest(at: Callable[[int], list[str]], size: int) -> list[str]:
    """Double the threshold until the tokens fit, then halve the way back."""
    too_low, enough = 0, 1
    while len(fits := at(enough)) > size:
        too_low, enough = enough, 2 * enough
    while enough - too_low > 1:
        middle = (too_low + enough) // 2
        tokens = at(middle)
        if len(tokens) <= size:
            fits, enough = tokens, middle
        else:
            too_low = middle
    return fits
