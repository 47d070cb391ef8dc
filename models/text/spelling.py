"""How text is spelled before it is cut into tokens: lower case, with its accents or without.

The learner of a vocabulary and the tokenizer must see the same spelling, or words that are in a vocabulary are not
found in it. Both take it from here.
"""

from __future__ import annotations

from typing import Any


def spelled(strings: Any, *, accents: bool) -> Any:
    """A tensor of strings as the tokenizers want it. Those that strip accents make it lower case by themselves.

    >>> spelled(["El CAFÉ"], accents=True).numpy()[0].decode()
    'el café'
    """
    import tensorflow as tf
    import tensorflow_text

    if not accents:
        return tf.convert_to_tensor(strings, tf.string)
    return tensorflow_text.normalize_utf8(tf.strings.lower(strings, encoding="utf-8"), "NFC")


def learner_reads(*, accents: bool) -> dict[str, bool]:
    """What to tell the learner of vocabularies."""
    return {"lower_case": not accents}


def tokenizer_reads(*, accents: bool) -> dict[str, bool]:
    """What to tell the tokenizer."""
    return {"lower_case_nfd_strip_accents": not accents}
