"""Vocabularies in BERT's format: WordPiece tokens, one per line; a few special ones are found by name."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import list_names

from .corpus import read_lines

PAD, UNKNOWN, START, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, START, END, MASK)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, whose ids are their positions. `[PAD]` is 0, because masks are computed as ids != 0.

    >>> words = Vocabulary((*SPECIAL, "cat", "##s"))
    >>> len(words), words.pad, words.start, words.id("##s")
    (7, 0, 2, 6)
    """

    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_special(self.tokens)
        if twice := [token for token, count in Counter(self.tokens).items() if count > 1]:
            places = [str(place + 1) for place, token in enumerate(self.tokens) if token == twice[0]]
            raise DataError(
                f"the vocabulary contains {list_names(twice[:3])} twice",
                why=f"{twice[0]!r} is in lines {' and '.join(places)}, so its id is ambiguous",
                mend="use the vocab.txt that belongs to the weights",
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def id(self, token: str) -> int:
        """The id of an existing token."""
        if token not in self.tokens:
            raise DataError(f"the vocabulary has no token {token!r}", mend="ids of words come from Tokenizer.encode")
        return self.tokens.index(token)

    @property
    def pad(self) -> int:
        """The id of padding."""
        return self.id(PAD)

    @property
    def unknown(self) -> int:
        """The id of a word that cannot be spelled with tokens."""
        return self.id(UNKNOWN)

    @property
    def start(self) -> int:
        """The first id of a sentence."""
        return self.id(START)

    @property
    def end(self) -> int:
        """The last id of a sentence."""
        return self.id(END)

    @property
    def mask(self) -> int:
        """The id of a hidden word."""
        return self.id(MASK)

    @property
    def accented(self) -> bool:
        """Whether any token has an accent, so that text keeps its accents."""
        letters = {letter for token in self.tokens for letter in token if letter.isalpha()}
        parts = "".join(unicodedata.normalize("NFD", letter) for letter in letters)
        return any(unicodedata.category(part) == "Mn" for part in parts)

    def check_fits(self, rows: int, *, padded: bool = False, where: str = "") -> None:
        """Refuse a model whose embedding has another number of rows; `padded` allows more, as in some published ones.

        >>> Vocabulary(SPECIAL).check_fits(5)
        """
        if rows == len(self) or (padded and rows > len(self)):
            return
        raise DataError(
            f"a vocabulary of {len(self)} tokens does not match a model with {rows}",
            where=where,
            why="every id must be a row of the model's embedding, and every row a token",
            mend=f"build the model with vocabulary={len(self)}, or use the vocab.txt that belongs to its weights",
        )


def _check_special(tokens: Sequence[str]) -> None:
    missing = [name for name in SPECIAL if name not in tokens]
    if missing:
        raise DataError(
            f"the vocabulary lacks {list_names(missing)}",
            why="these tokens start, end, pad and mask sentences, and are found by their names",
            mend="use a vocab.txt in BERT's format, or a result of learn_vocabulary",
        )
    if tokens[0] != PAD:
        raise DataError(
            f"the first token of the vocabulary is {tokens[0]!r}, not {PAD!r}",
            why="padding must have id 0, so that masks do not need the vocabulary",
            mend=f"move {PAD!r} to the first line, unless weights already belong to the vocabulary",
        )


def learn_vocabulary(
    lines: Sequence[str],
    size: int,
    *,
    reserved: Sequence[str] = SPECIAL,
    accents: bool = True,
    fill: bool = False,
) -> Vocabulary:
    """Learn at most `size` WordPiece tokens from lower-case text: frequent words as one token, others in pieces.

    The same lines give the same vocabulary on every machine.

    Args:
        lines: the text.
        size: maximum number of tokens.
        reserved: the special tokens.
        accents: False strips accents, as in BERT's uncased models; a model can then not write them.
        fill: whether to pad the vocabulary to exactly `size` tokens with `[unused0]`, `[unused1]`, ..., so that a
            cluster without the text knows the size of the model.

    >>> words = learn_vocabulary(["El café está frío .", "el gato está aquí"] * 9, 60)
    >>> "está" in words.tokens, "el" in words.tokens, len(words) <= 60
    (True, True, True)
    """
    if not any(line.strip() for line in lines):
        raise DataError("no text to learn a vocabulary from", mend="pass the sentences of the training split")
    _check_special(reserved)
    tokens = learn_tokens(lines, size, reserved, accents=accents)
    if isinstance(tokens, int):
        raise OptionError(
            f"size={size} is too small for the letters of the text",
            why=f"each letter needs two tokens, at the start of a word and inside it: {tokens} tokens in total",
            mend=f"size={2 * tokens}, so that there is room for words",
        )
    unused = [f"[unused{number}]" for number in range(size - len(tokens))] if fill else []
    return Vocabulary((*tokens, *unused))


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Read a `vocab.txt`, or the `vocab.txt` in a folder.

    >>> write_vocabulary(Vocabulary((*SPECIAL, "cat")), "vocab.txt")
    >>> read_vocabulary(".").tokens[-1]
    'cat'
    """
    file = Path(path) / "vocab.txt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(
            f"there is no vocabulary at {str(file)!r}", mend="pass a vocab.txt, or a folder that contains one"
        )
    try:
        return Vocabulary(tuple(line.removesuffix("\r") for line in read_lines(file, exact=True)))
    except DataError as error:
        raise DataError(error.what, where=error.where or str(file), why=error.why, mend=error.mend) from None


def write_vocabulary(vocabulary: Vocabulary, path: str | Path) -> None:
    """Write a `vocab.txt`, one token per line in the order of their ids; in a folder, the file gets that name."""
    file = Path(path) / "vocab.txt" if Path(path).is_dir() else Path(path)
    file.write_text("".join(f"{token}\n" for token in vocabulary.tokens), "utf-8")


_LINES_AT_ONCE = 1024


def learn_tokens(lines: Sequence[str], size: int, reserved: Sequence[str], *, accents: bool) -> list[str] | int:
    """The largest list of tokens that fits into `size`; if not even the letters fit, the number of those.

    The learner of TensorFlow Text counts words, and keeps pieces above a threshold of frequency. `bert_vocab` searches
    that threshold, but if one step of it changes many pieces, as with little text, it returns a vocabulary that is too
    large. So the search is done here.
    """
    from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as library

    counts = count_line_words(lines, accents=accents)

    def learn(threshold: int) -> list[str]:
        return library.learn(counts, size, list(reserved), upper_thresh=threshold, lower_thresh=threshold)

    letters = learn(sum(counts.values()) + 1)  # above all counts, so only letters remain
    return len(letters) if len(letters) > size else _search_threshold(learn, size)


def count_line_words(lines: Sequence[str], *, accents: bool) -> Any:
    """The count of each word, split by BERT's rules."""
    import tensorflow as tf
    from tensorflow_text.python.ops.bert_tokenizer import BasicTokenizer
    from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as library

    cutter = BasicTokenizer(**make_learner_options(accents=accents))

    @tf.autograph.experimental.do_not_convert  # converting the library would take seconds without effect
    def cut(text: Any) -> Any:
        return cutter.tokenize(normalize_spelling(text, accents=accents))

    return library.count_words(tf.data.Dataset.from_tensor_slices(list(lines)).batch(_LINES_AT_ONCE).map(cut))


def _search_threshold(learn: Callable[[int], list[str]], size: int) -> list[str]:
    """The tokens for the lowest threshold at which they fit: it is doubled until they do, then found by bisection."""
    too_low, enough = 0, 1
    while len(fits := learn(enough)) > size:
        too_low, enough = enough, 2 * enough
    while enough - too_low > 1:
        middle = (too_low + enough) // 2
        tokens = learn(middle)
        if len(tokens) <= size:
            fits, enough = tokens, middle
        else:
            too_low = middle
    return fits


def normalize_spelling(strings: Any, *, accents: bool) -> Any:
    """Convert a tensor of strings to lower case in normal form C. Without `accents` it is unchanged: a tokenizer that
    strips accents converts to lower case itself.

    >>> normalize_spelling(["El CAFÉ"], accents=True).numpy()[0].decode()
    'el café'
    """
    import tensorflow as tf
    import tensorflow_text

    if not accents:
        return tf.convert_to_tensor(strings, tf.string)
    return tensorflow_text.normalize_utf8(tf.strings.lower(strings, encoding="utf-8"), "NFC")


def make_learner_options(*, accents: bool) -> dict[str, bool]:
    """The options of the tokenizer with which a vocabulary is learned from text of `normalize_spelling`."""
    return {"lower_case": not accents}


def make_tokenizer_options(*, accents: bool) -> dict[str, bool]:
    """The options of the tokenizer for text of `normalize_spelling`."""
    return {"lower_case_nfd_strip_accents": not accents}
