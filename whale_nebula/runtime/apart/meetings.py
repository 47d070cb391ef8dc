"""What a cluster's step sees of those between the clusters: rounds of all together, or pushes to a server."""

from __future__ import annotations

from typing import Protocol

from whale_nebula.runtime.apart.ends import Ends
from whale_nebula.runtime.apart.flat import Flat


class Meetings(Protocol):
    """One cluster's side. `met` counts what was exchanged, `waited` are the seconds that steps waited for it."""

    flat: Flat
    ends: Ends
    steps: int
    met: int
    waited: float

    def begin(self) -> None:
        """From here on all clusters go their own way: what each has now is what all share."""

    def tell(self) -> None:
        """A step is over: send what is due after it."""

    def take(self) -> None:
        """Take in what is due now; it waits for what has not come yet."""

    def settle_tell(self) -> None:
        """Everybody wants the weights now: send all that was gone since they met."""

    def settle_take(self) -> None:
        """Then all clusters have the same weights, bit for bit."""

    @property
    def settled(self) -> bool:
        """Whether nothing was gone since all had the same."""

    @property
    def fragments(self) -> int:
        """How many exchanges tell the others of all weights once."""

    def restart(self) -> None:
        """The weights were replaced, in all clusters by the same ones: what was remembered belongs to others."""

    def digest(self) -> int:
        """A checksum of weights that all clusters share by now: the same in all of them."""

    def close(self) -> None:
        """Let the threads go."""
