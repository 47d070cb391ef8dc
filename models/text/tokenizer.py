"""Convert sentences to ids and back, in the graph: BERT's tokenizer, and detokenization."""

from __future__ import annotations

from typing import Any

from .vocabulary import Vocabulary, make_tokenizer_options, normalize_spelling

# Applied in this order. `-` and `'` are assumed to have had no spaces around them, which is nearly always right.
_RULES = (
    (r" ([.,;:!?%)\]}»…])", r"\1"),  # closing marks
    (r"([(\[{¿¡«]) ", r"\1"),  # opening marks
    (r'" ([^"]*) "', r'"\1"'),
    (r"“ ([^“”]*) ”", r"“\1”"),
    (r"„ ([^“]*) “", r"„\1“"),
    (r"([$€£#]) ?(\pN)", r"\1\2"),  # €5, but 5 €
    (r"(\pN[.:]) (\pN)", r"\1\2"),  # 25.50, 10:30
    (r"(\pN,) (\pN{2,3})\b", r"\1\2"),  # 25,50 and 1,000, but: in 1999, 3 of them
    (r" ?([-–/]) ?", r"\1"),  # well-known, and/or
    (r"(\pL)-(und|oder|bis|and|or) ", r"\1- \2 "),  # but: Obst- und Gemüse
    (r" (['’]) (s|t|re|ve|ll|d|m)\b", r"\1\2"),  # it's, don't
    (r"\b(\pL|qu|jusqu|lorsqu|puisqu|quelqu|aujourd|presqu) (['’]) ", r"\1\2"),  # l'eau, qu'il, o'clock
    (r"(s) (['’]) ", r"\1\2 "),  # the boys' books
)


def attach_marks(strings: Any) -> Any:
    """Detokenize a tensor of strings, whose punctuation is separated by spaces.

    >>> attach_marks(["it ' s 25 . 50 , ¿ no ?"]).numpy()[0].decode()
    "it's 25.50, ¿no?"
    """
    import tensorflow as tf

    for pattern, instead in _RULES:
        strings = tf.strings.regex_replace(strings, pattern, instead)
    return strings


class Tokenizer:
    """Converts lower-case text to ids of a vocabulary, and ids back to text. It also works in `tf.data`.

    Args:
        vocabulary: the vocabulary.
        accents: whether accents are kept; None keeps them if any token of the vocabulary has one.

    >>> from .vocabulary import SPECIAL
    >>> tokenizer = Tokenizer(Vocabulary((*SPECIAL, "the", "cat", "##s", "don", "t", "'", ".")))
    >>> ids = tokenizer.encode(["The cats don't."])
    >>> ids.to_list()
    [[2, 5, 6, 7, 8, 10, 9, 11, 3]]
    >>> tokenizer.decode(ids).numpy()[0]
    b"the cats don't."
    """

    def __init__(self, vocabulary: Vocabulary, *, accents: bool | None = None) -> None:
        import tensorflow as tf
        import tensorflow_text

        self.vocabulary = vocabulary
        self.accents = vocabulary.accented if accents is None else accents
        self.size = len(vocabulary)
        self.pad, self.unknown = vocabulary.pad, vocabulary.unknown
        self.start, self.end, self.mask = vocabulary.start, vocabulary.end, vocabulary.mask
        cutter = tensorflow_text.FastBertTokenizer(
            vocab=list(vocabulary.tokens),
            token_out_type=tf.int32,
            support_detokenization=True,
            **make_tokenizer_options(accents=self.accents),
        )
        plain = tf.autograph.experimental.do_not_convert  # converting the library takes seconds and has no effect
        self._cut, self._join = plain(cutter.tokenize), plain(cutter.detokenize)

    def encode(self, strings: Any) -> Any:
        """Tokenize a vector of strings to ragged int32 ids, each row from `[CLS]` to `[SEP]`."""
        import tensorflow as tf

        cut = self._cut(normalize_spelling(strings, accents=self.accents))
        ends = tf.ones((cut.nrows(), 1), tf.int32)
        return tf.concat([self.start * ends, cut, self.end * ends], axis=1)

    def decode(self, ids: Any) -> Any:
        """Convert rows of ids, ragged or padded, to strings: up to `[SEP]`, without special tokens."""
        import tensorflow as tf

        rows = ids.to_tensor(self.pad) if isinstance(ids, tf.RaggedTensor) else tf.convert_to_tensor(ids)
        rows = tf.cast(rows, tf.int32)
        ended = tf.cumsum(tf.cast(rows == self.end, tf.int32), axis=1) > 0
        silent = tf.reduce_any(rows[..., None] == [self.pad, self.start, self.mask], axis=-1)
        words = tf.ragged.boolean_mask(rows, ~(ended | silent))
        return attach_marks(self._join(words))

    def sentences(self, ids: Any) -> list[str]:
        """Like `decode`, as a list of Python strings."""
        return [each.decode() for each in self.decode(ids).numpy()]
