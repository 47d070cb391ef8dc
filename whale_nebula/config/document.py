"""A YAML file becomes plain values; what cannot be read says where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from whale_nebula.config.place import Place
from whale_nebula.errors import ConfigError

_EXAMPLE = "clusters: {gpu: {}, npu: {}}"


def read(path: Path) -> Place:
    """The values in a file; a key that is given twice is refused, because YAML would drop the first."""
    text = _text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_doubles(node, str(path))
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _unreadable(path, error) from None
    if not isinstance(value, dict | None):
        raise ConfigError("a config is a mapping", where=str(path), mend=f"begin it like {_EXAMPLE}")
    return Place(value, source=str(path), lines=dict(_lines(node, "")))


def _lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Each path of keys, as a `Place` has it, with the line on which it stands."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{path}[{number}]", value.start_mark.line + 1
            yield from _lines(value, f"{path}[{number}]")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        mend = "give the path of a YAML file, or a dict"
        raise ConfigError("the config cannot be read", where=str(path), why=reason, mend=mend) from None


def _unreadable(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    why = getattr(error, "problem", None) or str(error)
    return ConfigError("the config is no YAML", where=where, why=why, mend=f"write it like {_EXAMPLE}")


def _refuse_doubles(node: yaml.Node | None, file: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(
                    f"the key {key.value!r} is given twice",
                    where=f"{file}:{key.start_mark.line + 1}",
                    why="YAML would forget the first of them",
                    mend="leave one of the two out",
                )
            seen.add(str(key.value))
            _refuse_doubles(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(value, file)
