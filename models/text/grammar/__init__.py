"""A small grammar of Spanish and English: every meaning has one sentence in each, and every sentence one meaning."""

from .patterns import PATTERNS
from .pick import Both, Pattern, Pick, size

__all__ = ["PATTERNS", "Both", "Pattern", "Pick", "size"]
