"""The forms of sentences. Each picks its words and says them in both languages; what it picks, both sentences show."""

from __future__ import annotations

from .about import ages, compared, described, felt, jobs, liked, placed, there_are, where
from .doing import bought, did, wanted
from .pick import Pattern
from .quantities import costs, dates, how_many, how_much, numbers, prices, rooms, times

PATTERNS: tuple[Pattern, ...] = (
    described, felt, placed, there_are, compared, liked, ages, jobs, where,
    did, wanted, bought,
    costs, prices, dates, times, numbers, rooms, how_many, how_much,
)  # fmt: skip
