"""Where a process listens: "host:port"."""

from __future__ import annotations

import re

from whale_nebula.config.place import Place

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})")


def address(place: Place) -> str:
    """A host and a port; IPv6 in brackets.

    >>> address(Place("10.77.0.2:7101")), address(Place("[::1]:7101"))
    ('10.77.0.2:7101', '[::1]:7101')
    """
    match = _ADDRESS.fullmatch(place.value) if isinstance(place.value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise place.wrong(
            f"{place.value!r} is no address",
            why="an address is a host, a colon and a port; an IPv6 host stands in brackets",
            mend=f'{place.path or "address"}: "10.77.0.2:7101"',
        )
    return str(place.value)
