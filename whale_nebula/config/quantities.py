"""Parse rates, times, sizes and speeds with units: "60mbit", "20ms", "16GiB", "5T"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whale_nebula.config.place import Place
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import closest

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ%/]*)\s*")
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SIZES = {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}  # fmt: skip
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def find_kind(word: str) -> str | None:
    """The kind of a quantity by its unit: "rate", "delay" or "loss".

    >>> find_kind("60mbit"), find_kind("20ms"), find_kind("1%"), find_kind("20")
    ('rate', 'delay', 'loss', None)
    """
    match = _NUMBER.fullmatch(word)
    unit = match[2].lower().removesuffix("/s") if match else ""
    for name, units in (("rate", _RATES), ("delay", _TIMES), ("loss", {"%": 0.01})):
        if unit in units:
            return name
    return None


@dataclass(frozen=True)
class Quantity:
    """A kind of positive quantity, to be called with a place: its name in errors, its units, those that are suggested
    for a number without one, the reason why other values are refused, and an example. `ending` may follow the unit.

    >>> rate(Place("60mbit")), rate(Place("1.5 Gbit/s")), memory_rate(Place("800GB/s")), flops(Place("90 GFLOP/s"))
    (60000000.0, 1500000000.0, 800000000000.0, 90000000000.0)
    """

    noun: str
    units: Mapping[str, float]
    suggested: Sequence[str]
    why: str
    example: str
    ending: str = "$"

    def __call__(self, place: Place) -> float:
        """Parse a number and a unit."""
        found = self.parse(place.value)
        if not found:
            raise self.invalid_value_error(place)
        return found

    def parse(self, value: Any) -> float | None:
        """The number, or None."""
        text = re.sub(rf"({self.ending})\s*$", "", value, flags=re.IGNORECASE) if isinstance(value, str) else ""
        match = _NUMBER.fullmatch(text)
        factor = self.units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            return None
        number = float(match[1])
        return number * factor if factor >= 1 else number / round(1 / factor)  # 20 · 0.001 would be rounded

    def invalid_value_error(self, place: Place) -> ConfigError:
        """The error for an invalid value."""
        value, mend = place.value, self.example
        guess = suggest_quantity(value) if isinstance(value, str) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            mend = f"add a unit: {', '.join(f'{value:g}{unit}' for unit in self.suggested)} ..."
        elif guess and find_kind(guess) == find_kind(f"1{self.suggested[0]}"):
            mend = f"did you mean {guess!r}?"
        in_bytes = self.units is _RATES and isinstance(value, str) and convert_to_bits(value)
        return place.make_error(
            f"{value!r} is not a {self.noun}", why=explain_bytes(value) if in_bytes else self.why, mend=mend
        )


rate = Quantity(
    "rate", _RATES, ("bit", "kbit", "mbit", "gbit"),
    "a rate is a positive number with a unit: kbit, mbit or gbit (per second)", "rate: 60mbit", "/s",
)  # fmt: skip
memory_rate = Quantity(
    "memory rate", _SIZES, ("GB/s", "TB/s"),
    "a memory rate is a positive number with a unit of bytes per second: GB/s or TB/s, GiB/s or TiB/s",
    "memory_rate: 20GB/s", "/s",
)  # fmt: skip
flops = Quantity(
    "number of operations per second", {"m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}, "MGTP",
    "it is a positive number with a unit: M, G, T or P (10^6 to 10^15 floating-point operations per second)",
    "flops: 5T", "flops?|flop/s",
)  # fmt: skip
_MEMORY = Quantity(
    "memory size", _SIZES, ("MiB", "GiB", "TiB"),
    "a memory size is a positive number with a unit: MiB, GiB or TiB (powers of 1024), or MB, GB or TB",
    "memory: 16GiB",
)  # fmt: skip
_TIME = Quantity(
    "time",
    _TIMES,
    ("us", "ms", "s"),
    "a time is a number of at least 0 with a unit: us, ms, s, min or h",
    "delay: 20ms",
)


def read_memory(place: Place) -> int:
    """Parse bytes of memory.

    >>> read_memory(Place("16GiB")), read_memory(Place("1.5 GB"))
    (17179869184, 1500000000)
    """
    found = round(_MEMORY(place))
    if not found:
        raise _MEMORY.invalid_value_error(place)
    return found


def read_seconds(place: Place) -> float:
    """Parse a time, which may be zero.

    >>> read_seconds(Place("20ms")), read_seconds(Place("1.5s")), read_seconds(Place(0))
    (0.02, 1.5, 0.0)
    """
    zero = place.value in (0, "0") and not isinstance(place.value, bool)
    found = 0.0 if zero else _TIME.parse(place.value)
    if found is None:
        raise replace(_TIME, example=f"{place.path.rpartition('.')[2] or 'delay'}: 20ms").invalid_value_error(place)
    return found


_SHARE = Quantity("share", {"%": 0.01}, "%", "a share is at least 0 and less than 1", 'loss: 0.01, or loss: "1%"')


def read_loss(place: Place) -> float:
    """Parse the loss in the text of a link: "1%"."""
    return read_share(place, '"60mbit,20ms,1%"')


def read_share(place: Place, mend: str = "") -> float:
    """Parse a share below one: 0.01 or "1%".

    >>> read_share(Place(0)), read_share(Place("1%"))
    (0.0, 0.01)
    """
    value = place.value
    found = _SHARE.parse(value) if isinstance(value, str) else value
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < 1:
        name = place.path.rpartition(".")[2] or "loss"
        mend = mend or f'{name}: 0.01, or {name}: "1%"'
        raise place.make_error(f"{value!r} is not a share", why="a share is at least 0 and less than 1", mend=mend)
    return float(found)


_OTHER_SPELLINGS = {
    "bps": "bit", "kbps": "kbit", "mbps": "mbit", "gbps": "gbit", "tbps": "tbit",
    "kb": "kbit", "mb": "mbit", "gb": "gbit",
    "m": "ms", "sec": "s", "secs": "s", "msec": "ms", "msecs": "ms", "usec": "us", "mins": "min", "hours": "h",
}  # fmt: skip


_BYTES = re.compile(r"([kmgtKMGT]?)(?:B|[Bb]ytes?|Bps)")


def convert_to_bits(word: str) -> str | None:
    """A rate in bytes converted to bits; None for any other text. A capital B means bytes, a small b bits.

    >>> convert_to_bits("60MB/s"), convert_to_bits("2.5 Gbyte"), convert_to_bits("60Mb")
    ('480mbit', '20gbit', None)
    """
    match = _NUMBER.fullmatch(word)
    unit = _BYTES.fullmatch(match[2].removesuffix("/s")) if match else None
    return f"{float(match[1]) * 8:.12g}{unit[1].lower()}bit" if match and unit else None


def explain_bytes(word: str) -> str:
    """Why a rate in bytes is refused as ambiguous.

    >>> explain_bytes("60MB")
    'rates are in bits per second, and B is a byte of 8 bits: 60MB per second is 480mbit'
    """
    per = "" if "/s" in word or word.endswith("ps") else " per second"
    return f"rates are in bits per second, and B is a byte of 8 bits: {word.strip()}{per} is {convert_to_bits(word)}"


def suggest_quantity(word: str) -> str | None:
    """The quantity that was probably meant: the same number with a known unit.

    >>> [suggest_quantity(text) for text in ("60mbits", "60 Mbps", "20msec", "60MB/s", "fast")]
    ['60mbit', '60mbit', '20ms', '480mbit', None]
    """
    if (bits := convert_to_bits(word)) is not None:
        return bits
    match = _NUMBER.fullmatch(word)
    unit = match[2].lower().removesuffix("/s") if match else ""
    known = _OTHER_SPELLINGS.get(unit) or closest(unit, [*_RATES, *_TIMES]) if unit else None
    return f"{match[1]}{known}" if match and known else None
