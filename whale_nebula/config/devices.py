"""The device of a worker, as a config writes it: TensorFlow's own words."""

from __future__ import annotations

import re

from whale_nebula.config.place import Place

_DEVICE = re.compile(r"/?(?:device:)?([a-z]+)(?::(\d+))?", re.IGNORECASE)
_KINDS = ("CPU", "GPU")


def device(place: Place) -> str:
    """A device in its short form: a kind, and which one of that kind the host has.

    >>> device(Place("/GPU:1")), device(Place("cpu")), device(Place("/device:GPU:0"))
    ('GPU:1', 'CPU', 'GPU:0')
    """
    found = _DEVICE.fullmatch(place.text())
    kind = "" if found is None else found[1].upper()
    if found is None or kind not in _KINDS:
        raise place.wrong(
            f"{place.value!r} is no device",
            why="a worker has the CPU alone, or one GPU of its host besides",
            mend='device: "GPU:0", or device: CPU',
        )
    return f"{kind}:{found[2] or 0}" if kind == "GPU" else kind
