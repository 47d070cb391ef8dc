"""A parallel corpus made by rule: Spanish and English, unlimited, seeded, with nothing to download.

A sentence is a form and a number, and the number says which words. All forms together have far more sentences than
any training asks for. Each belongs to one split for good, by what it says and whatever the seed: what is tested was
never trained on. As no sentence has two translations, that is so on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from whale_nebula.errors import OptionError
from whale_nebula.suggest import did_you_mean

from .corpus import SIDES, Pairs, Side
from .grammar import PATTERNS, Both, Pick, size

Language = Literal["es", "en"]
# Which share of all sentences a split has, in percent. The monolingual ones have no sentence in common either: the
# two sides that models are pretrained on are not translations of each other.
_SHARES = {"train": 40, "val": 5, "test": 5, "mono-es": 25, "mono-en": 25}
_SPLITS = tuple(split for split, share in _SHARES.items() for _ in range(share))
_SIZES = tuple(size(pattern) for pattern in PATTERNS)


def generated(
    split: str,
    count: int,
    *,
    seed: int = 0,
    source: Language = "es",
    target: Language = "en",
    sides: Sequence[Side] = SIDES,
) -> Pairs:
    """The first `count` pairs of a split: `train`, `val` or `test`.

    Each is a function of split, seed and place, so a cluster that asks for one side gets what belongs to the other's.

    >>> generated("val", 2).target == generated("val", 9, sides=["target"]).first(2).target
    True
    """
    _check(split, ("train", "val", "test"), count)
    for language in (source, target):
        _check(language, ("es", "en"), count, what="language")
    made = [_sentence(split, seed, place) for place in range(count)]
    languages = {"source": source, "target": target}
    return Pairs(**{side: [getattr(each, languages[side]) for each in made] for side in SIDES if side in sides})


def monolingual(language: Language, count: int, *, seed: int = 0) -> list[str]:
    """Sentences of one language, to pretrain on; none of them is in any pair, nor translated in the other's.

    >>> len(monolingual("es", 3))
    3
    """
    _check(language, ("es", "en"), count, what="language")
    return [getattr(_sentence(f"mono-{language}", seed, place), language) for place in range(count)]


def _check(name: str, known: Sequence[str], count: int, *, what: str = "split") -> None:
    if name not in known:
        raise OptionError(f"no {what} {name!r} is generated", mend=did_you_mean(name, known))
    if count < 1:
        raise OptionError(f"count={count!r} makes no text", mend="count=1, or more")


def _sentence(split: str, seed: int, place: int) -> Both:
    """Draw until what is drawn belongs to the split."""
    attempt = 0
    while True:
        number, which = divmod(_digest(f"{split}/{seed}/{place}/{attempt}"), len(PATTERNS))
        made = PATTERNS[which](Pick(number % _SIZES[which]))
        if _SPLITS[_digest(made.es) % len(_SPLITS)] == split:
            return made
        attempt += 1


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=12).digest(), "little")
