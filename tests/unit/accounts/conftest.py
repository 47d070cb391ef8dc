"""Passwords with a fast hash."""

import pytest

from whale_nebula.accounts import passwords


@pytest.fixture(autouse=True)
def fast_password_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash passwords with a low cost; the doctest of `hash_password` covers the real one."""
    monkeypatch.setattr(passwords, "_LOG_N", 4)
