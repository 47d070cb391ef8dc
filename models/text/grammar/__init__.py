"""A small grammar of Spanish and English: every meaning has one sentence in each, and every sentence one meaning."""

from __future__ import annotations

from .actions import bought, did, wanted
from .pick import Both, Pattern, Pick, size
from .properties import ages, compared, described, felt, jobs, liked, placed, there_are, where
from .quantities import costs, dates, how_many, how_much, numbers, prices, rooms, times

__all__ = ["PATTERNS", "Both", "Pattern", "Pick", "size"]


PATTERNS: tuple[Pattern, ...] = (
    described, felt, placed, there_are, compared, liked, ages, jobs, where,
    did, wanted, bought,
    costs, prices, dates, times, numbers, rooms, how_many, how_much,
)  # fmt: skip
