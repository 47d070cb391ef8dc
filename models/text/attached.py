"""Tokens parted by spaces become text again: marks are put where people write them."""

from __future__ import annotations

from typing import Any

# In this order. No rule can know whether `-` or `'` had spaces around it: nearly always they had none.
_RULES = (
    (r" ([.,;:!?%)\]}»…])", r"\1"),  # marks that end something
    (r"([(\[{¿¡«]) ", r"\1"),  # and that begin something
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


def attached(strings: Any) -> Any:
    """A tensor of strings whose marks stand by themselves, as text.

    >>> attached(["it ' s 25 . 50 , ¿ no ?"]).numpy()[0].decode()
    "it's 25.50, ¿no?"
    """
    import tensorflow as tf

    for pattern, instead in _RULES:
        strings = tf.strings.regex_replace(strings, pattern, instead)
    return strings
