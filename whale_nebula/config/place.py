"""A configuration value together with its position, so that every error can name it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A value with its path of keys, "clusters.gpu.workers[0]", and the file's name.

    `lines` maps paths to lines of the file, if known.
    """

    value: Any
    path: str = ""
    source: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def make_error(self, what: str, *, mend: str, why: str | None = None) -> ConfigError:
        """An error about this value."""
        where = ": ".join(part for part in (self.source + self._find_line(), self.path) if part)
        return ConfigError(what, where=where, why=why, mend=mend)

    def _find_line(self) -> str:
        """The line of this value, or of the table in which it is missing."""
        path = self.path
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return f":{self.lines[path]}" if path else ""

    def get(self, name: str) -> Place:
        """The place of a key in this table; its value is None if there is no such key."""
        path = f"{self.path}.{name}" if self.path else name
        return Place(self.value.get(name), path, self.source, self.lines)

    def read_table(self, known: Iterable[str] | None = None) -> Place:
        """The place itself if it holds a mapping with known keys only; None counts as empty."""
        if self.value is None:
            return Place({}, self.path, self.source, self.lines)
        names = None if known is None else list(known)
        if not isinstance(self.value, dict):
            raise self.make_error(f"{self.value!r} is not a mapping", mend=self._suggest_mapping(names))
        for key in self.value:
            if not isinstance(key, str):
                raise self.make_error(f"the key {key!r} is not a string", mend=f'write it in quotes: "{key}"')
            if names is not None and key not in names:
                raise self.get(key).make_error(f"unknown key {key!r}", mend=did_you_mean(key, names))
        return self

    def _suggest_mapping(self, known: Sequence[str] | None) -> str:
        """The mapping that was probably meant, for an error: its first key; a list of names becomes names with empty
        values.
        """
        if self.path and known:
            return f"{self.path}: {{{known[0]}: ...}}"
        names = self.value if isinstance(self.value, list | tuple) else ()
        inside = ", ".join(f"{each}: {{}}" for each in names) or "gpu: {}, npu: {}"
        return f"{self.path or 'clusters'}: {{{inside}}}"

    def read_entries(self) -> dict[str, Place]:
        """The values of a table with free keys."""
        table = self.read_table()
        return {name: table.get(name) for name in table.value}

    def read_or(self, read: Callable[[Place], T], default: T) -> T:
        """`read` of the value, or the default if there is none."""
        return default if self.value is None else read(self)

    def read_items(self) -> Iterator[Place]:
        """The items of a list; None counts as empty."""
        if self.value is not None and not isinstance(self.value, list | tuple):
            raise self.make_error(f"{self.value!r} is not a list", mend=f"{self.path}: [{self.value!r}]")
        for number, each in enumerate(self.value or ()):
            yield Place(each, f"{self.path}[{number}]", self.source, self.lines)

    def read_text(self) -> str:
        """A string that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            fault = "is an empty string" if self.value == "" else "is not a string"
            raise self.make_error(f"{self.value!r} {fault}", mend=f'{self._key}: "..."')
        return self.value

    def read_boolean(self) -> bool:
        """A boolean; the error for an invalid value suggests false, the safer one."""
        if not isinstance(self.value, bool):
            raise self.make_error(f"{self.value!r} is neither true nor false", mend=f"{self._key}: false")
        return self.value

    def read_choice(self, known: Iterable[str]) -> str:
        """One of the known words."""
        names = list(known)
        if self.value not in names:
            raise self.make_error(f"{self.value!r} is not a valid value", mend=did_you_mean(self.value, names))
        return str(self.value)

    def read_number(self, *, least: float, most: float = math.inf, integer: bool = False) -> Any:
        """A finite number from `least` to `most`."""
        kinds = int if integer else int | float
        right = isinstance(self.value, kinds) and not isinstance(self.value, bool) and self.value != math.inf
        if not right or not least <= self.value <= most:
            span = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            usual = f"{self._key}: {1 if least <= 1 <= most else least:g}"
            raise self.make_error(f"{self.value!r} is not {'an integer' if integer else 'a number'} {span}", mend=usual)
        return self.value

    @property
    def _key(self) -> str:
        return self.path.rpartition(".")[2] or "config"


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})")


def read_address(place: Place) -> str:
    """Parse a host and a port; IPv6 in brackets.

    >>> read_address(Place("10.77.0.2:7101")), read_address(Place("[::1]:7101"))
    ('10.77.0.2:7101', '[::1]:7101')
    """
    match = _ADDRESS.fullmatch(place.value) if isinstance(place.value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        why = "an address has the form host:port, with an IPv6 host in brackets and a port from 1 to 65535"
        mend = f'{place.path or "address"}: "10.77.0.2:7101"'
        raise place.make_error(f"{place.value!r} is not an address", why=why, mend=mend)
    return str(place.value)


def split_address(text: str) -> tuple[str, int]:
    """The host of an address, without brackets, and its port; -1 if it has none.

    >>> split_address("10.0.0.1:7101"), split_address("[::1]:7101"), split_address("host")
    (('10.0.0.1', 7101), ('::1', 7101), ('', -1))
    """
    host, _, port = text.rpartition(":")
    right = port.isdecimal() and port.isascii() and int(port) < 65536 and ":" in text
    return host.strip("[]"), int(port) if right else -1


def read_device_kind(place: Place) -> str:
    """Parse the kind of a device, without an index.

    >>> read_device_kind(Place("gpu")), read_device_kind(Place("CPU"))
    ('gpu', 'cpu')
    """
    kind = place.read_text().upper()
    if kind not in _KINDS:
        why = "the kind is cpu or gpu; the key 'device' selects one of the host's devices"
        raise place.make_error(f"{place.value!r} is not a device kind", why=why, mend="kind: gpu, or kind: cpu")
    return kind.lower()


_DEVICE = re.compile(r"/?(?:device:)?([a-z]+)(?::(\d+))?", re.IGNORECASE)
_KINDS = ("CPU", "GPU")


def read_device(place: Place) -> str:
    """Parse a device in its short form: its kind, and its index among the host's devices of that kind.

    >>> read_device(Place("/GPU:1")), read_device(Place("cpu")), read_device(Place("/device:GPU:0"))
    ('GPU:1', 'CPU', 'GPU:0')
    """
    found = _DEVICE.fullmatch(place.read_text())
    kind = "" if found is None else found[1].upper()
    if found is None or kind not in _KINDS:
        why = "a worker uses the CPU only, or the CPU and one GPU of its host"
        raise place.make_error(f"{place.value!r} is not a device", why=why, mend='device: "GPU:0", or device: CPU')
    return f"{kind}:{found[2] or 0}" if kind == "GPU" else kind
