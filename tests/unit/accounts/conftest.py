"""Passwords with a fast hash."""

import pytest

from whale_nebula.accounts import passwords


@pytest.fixture(autouse=True)
def fast_password_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much work a password is, the example of `hash_password` says."""
    monkeypatch.setattr(passwords, "_LOG_N", 4)
