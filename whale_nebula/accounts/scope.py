"""The scope of a token: the part of its account's certificates that it can obtain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from whale_nebula.errors import AccountError
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.identity import Identity


@dataclass(frozen=True, slots=True)
class Scope:
    """Bounds on the certificates that a token can obtain, None for no bound: their `role`, their numbers from `first`
    to `last`, and their validity in `hours`.

    >>> some = Scope("worker", 0, 1, 2.0)
    >>> Scope.decode(some.encode()) == some, str(some), bool(Scope())
    (True, 'worker 0 to 1, at most 2 hours', False)
    """

    role: str | None = None
    first: int | None = None
    last: int | None = None
    hours: float | None = None

    def __bool__(self) -> bool:
        return self != Scope()

    def __str__(self) -> str:
        several = f" to {self.last}" * (self.first != self.last)
        numbers = "" if self.first is None else f" {self.first}{several}"
        what = "" if self.role is None and not numbers else f"{self.role or 'number'}{numbers}"
        return ", ".join(filter(None, (what, "" if self.hours is None else f"at most {self.hours:g} hours")))

    def encode(self) -> bytes:
        """The text form in registries."""
        return encode_canonical({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def decode(cls, text: bytes | str) -> Scope:
        """Parse the text form; raises `ValueError` for anything else, as an unknown bound must not be ignored."""
        fields = json.loads(text)
        if not isinstance(fields, Mapping) or not fields.keys() <= set(cls.__slots__):
            raise ValueError("unknown scope of a token")
        return cls(**fields)

    def check(self, identity: Identity, hours: float) -> None:
        """Refuse a certificate outside the scope."""
        is_in_range = self.first is None or self.last is None or self.first <= identity.index <= self.last
        if self.role not in (None, identity.role) or not is_in_range:
            raise AccountError(
                f"the token is not valid for {identity.worker}",
                why=f"its scope is {self}",
                mend="stay within its scope with --index, --count and --role, or ask the owner for another token",
            )
        if self.hours is not None and hours > self.hours:
            raise AccountError(
                f"the token is not valid for certificates of {hours:g} hours",
                why=f"its scope is {self}",
                mend=f"--hours {self.hours:g}",
            )


UNBOUNDED = Scope()
