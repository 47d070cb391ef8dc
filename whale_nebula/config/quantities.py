"""Parse rates, times, sizes and speeds with units: "60mbit", "20ms", "16GiB", "5T"."""

from __future__ import annotations

import math
import re

from whale_nebula.config.place import Place
from whale_nebula.errors.text import closest

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ%/]*)\s*")
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SIZES = {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}  # fmt: skip
_SPEEDS = {"m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def kind(word: str) -> str | None:
    """The kind of a quantity by its unit: "rate", "delay" or "loss".

    >>> kind("60mbit"), kind("20ms"), kind("1%"), kind("20")
    ('rate', 'delay', 'loss', None)
    """
    match = _NUMBER.fullmatch(word)
    unit = match[2].lower().removesuffix("/s") if match else ""
    for name, units in (("rate", _RATES), ("delay", _TIMES), ("loss", {"%": 0.01})):
        if unit in units:
            return name
    return None


def rate(place: Place) -> float:
    """Parse bits a second.

    >>> rate(Place("60mbit")), rate(Place("1.5 Gbit/s"))
    (60000000.0, 1500000000.0)
    """
    found = _quantity(place, _RATES, suffix="/s")
    if not found:
        why = "a rate is a number above zero and a unit: kbit, mbit or gbit (a second)"
        if isinstance(place.value, str) and convert_to_bits(place.value):
            why = explain_bytes(place.value)
        raise place.wrong(f"{place.value!r} is no rate", why=why, mend=_meant(place, _RATES, "rate: 60mbit"))
    return found


def seconds(place: Place) -> float:
    """Parse a time.

    >>> seconds(Place("20ms")), seconds(Place("1.5s")), seconds(Place(0))
    (0.02, 1.5, 0.0)
    """
    zero = place.value in (0, "0") and not isinstance(place.value, bool)
    found = 0.0 if zero else _quantity(place, _TIMES)
    if found is None:
        why = "a time is a number and a unit: us, ms, s, min or h"
        mend = _meant(place, _TIMES, f"{place.path.rpartition('.')[2] or 'delay'}: 20ms")
        raise place.wrong(f"{place.value!r} is no time", why=why, mend=mend)
    return found


_SHORT_SIZE = re.compile(r"\s*([\d.]+)\s*([kmgt])i?\s*", re.IGNORECASE)


def memory(place: Place) -> int:
    """Parse bytes of memory.

    >>> memory(Place("16GiB")), memory(Place("1.5 GB"))
    (17179869184, 1500000000)
    """
    found = _quantity(place, _SIZES)
    if not found or found < 1:
        why = "a memory is a number above zero and a unit: MiB, GiB or TiB (powers of 1024), or MB, GB or TB"
        short = _SHORT_SIZE.fullmatch(place.value) if isinstance(place.value, str) else None
        example = f"did you mean '{short[1]}{short[2].upper()}iB'?" if short else "memory: 16GiB"
        mend = _meant(place, dict.fromkeys(("MiB", "GiB", "TiB"), 1.0), example)
        raise place.wrong(f"{place.value!r} is no size of a memory", why=why, mend=mend)
    return round(found)


def memory_rate(place: Place) -> float:
    """Parse bytes a second of a memory.

    >>> memory_rate(Place("800GB/s")), memory_rate(Place("2 GiB"))
    (800000000000.0, 2147483648.0)
    """
    found = _quantity(place, _SIZES, suffix="/s")
    if not found:
        why = "the rate of a memory is a number above zero and a unit, in bytes a second: GB/s or TB/s, GiB/s or TiB/s"
        mend = _meant(place, dict.fromkeys(("GB/s", "TB/s"), 1.0), "memory_rate: 20GB/s")
        raise place.wrong(f"{place.value!r} is no rate of a memory", why=why, mend=mend)
    return found


_FLOPS = re.compile(r"flop(s|/s)?\s*$", re.IGNORECASE)


def flops(place: Place) -> float:
    """Parse floating-point operations a second.

    >>> flops(Place("5T")), flops(Place("90 GFLOP/s"))
    (5000000000000.0, 90000000000.0)
    """
    text = place.value
    found = _quantity(Place(_FLOPS.sub("", text) if isinstance(text, str) else text), _SPEEDS)
    if not found:
        why = "it is a number above zero and a unit: M, G, T or P (10^6 to 10^15 floating-point operations a second)"
        mend = _meant(place, dict.fromkeys("MGTP", 1.0), "flops: 5T")
        raise place.wrong(f"{text!r} is no count of operations a second", why=why, mend=mend)
    return found


def loss(place: Place) -> float:
    """Parse the loss in the text of a line: "1%"."""
    return share(place, '"60mbit,20ms,1%"')


def share(place: Place, mend: str = "") -> float:
    """Parse a share below one: 0.01 or "1%".

    >>> share(Place(0)), share(Place("1%"))
    (0.0, 0.01)
    """
    value = place.value
    found = _quantity(place, {"%": 0.01}) if isinstance(value, str) else value
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < 1:
        name = place.path.rpartition(".")[2] or "loss"
        mend = mend or f'{name}: 0.01, or {name}: "1%"'
        raise place.wrong(f"{value!r} is no share", why="it is from 0 to below 1", mend=mend)
    return float(found)


def _quantity(place: Place, units: dict[str, float], suffix: str = "") -> float | None:
    match = _NUMBER.fullmatch(place.value) if isinstance(place.value, str) else None
    factor = units.get(match[2].lower().removesuffix(suffix)) if match else None
    if match is None or factor is None:
        return None
    number = float(match[1])
    return number * factor if factor >= 1 else number / round(1 / factor)  # 20 · 0.001 would be rounded


_SAID_ELSEWHERE = {
    "bps": "bit", "kbps": "kbit", "mbps": "mbit", "gbps": "gbit", "tbps": "tbit",
    "kb": "kbit", "mb": "mbit", "gb": "gbit",
    "m": "ms", "sec": "s", "secs": "s", "msec": "ms", "msecs": "ms", "usec": "us", "mins": "min", "hours": "h",
}  # fmt: skip


_BYTES = re.compile(r"([kmgtKMGT]?)(?:B|[Bb]ytes?|Bps)")


def convert_to_bits(word: str) -> str | None:
    """A rate written in bytes converted to bits; None if it is not one. A capital B is a byte, a small one a bit.

    >>> convert_to_bits("60MB/s"), convert_to_bits("2.5 Gbyte"), convert_to_bits("60Mb")
    ('480mbit', '20gbit', None)
    """
    match = _NUMBER.fullmatch(word)
    unit = _BYTES.fullmatch(match[2].removesuffix("/s")) if match else None
    return f"{float(match[1]) * 8:.12g}{unit[1].lower()}bit" if match and unit else None


def explain_bytes(word: str) -> str:
    """Why a rate in bytes is refused as ambiguous.

    >>> explain_bytes("60MB")
    'a rate is in bits a second, and B is a byte of 8 bits: 60MB a second are 480mbit'
    """
    per = "" if "/s" in word or word.endswith("ps") else " a second"
    return f"a rate is in bits a second, and B is a byte of 8 bits: {word.strip()}{per} are {convert_to_bits(word)}"


def meant(word: str) -> str | None:
    """The quantity that was probably meant: the same number with a known unit.

    >>> meant("60mbits"), meant("60 Mbps"), meant("20msec"), meant("60MB/s"), meant("fast")
    ('60mbit', '60mbit', '20ms', '480mbit', None)
    """
    if (bits := convert_to_bits(word)) is not None:
        return bits
    match = _NUMBER.fullmatch(word)
    unit = match[2].lower().removesuffix("/s") if match else ""
    known = _SAID_ELSEWHERE.get(unit) or closest(unit, [*_RATES, *_TIMES]) if unit else None
    return f"{match[1]}{known}" if match and known else None


def _meant(place: Place, units: dict[str, float], example: str) -> str:
    """The suggested quantity for a number without a unit."""
    value = place.value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return f"say in what: {', '.join(f'{value:g}{unit}' for unit in list(units)[:4])} ..."
    guess = meant(value) if isinstance(value, str) else None
    return f"did you mean {guess!r}?" if guess and kind(guess) == kind(f"1{next(iter(units))}") else example
