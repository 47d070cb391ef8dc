"""The values of a scope's options, each checked where it is written."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import closest, did_you_mean
from whale_nebula.site import calling_site

_NAME = re.compile(r"\w(?:[\w./-]*\w)?")


def refuse(what: str, *, mend: str, why: str | None = None) -> OptionError:
    """An error about what the user's line says."""
    return OptionError(what, where=str(calling_site()), why=why, mend=mend)


def integer(option: str, value: object) -> int:
    """A whole number, numpy's too, but no truth value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise refuse(f"{option}={value!r} is no whole number", mend=f"{option}={_whole(value)}") from None


def _whole(value: object) -> int:
    """The whole number that was probably meant, or an example."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 2
    return int(found) if found.is_integer() and not isinstance(value, bool) else 2


def count(option: str, value: object) -> int:
    """A whole number of at least one."""
    number = integer(option, value)
    if number < 1:
        raise refuse(f"{option}={value!r} is not a count", why="there is at least one", mend=f"{option}=1")
    return number


def truth(option: str, value: object) -> bool:
    """True or False and nothing else."""
    if not isinstance(value, bool):
        raise refuse(f"{option}={value!r} is neither True nor False", mend=f"{option}=True")
    return value


def choice(option: str, value: object, known: Iterable[str]) -> str:
    """One of the words that are known."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise refuse(f"{option}={value!r} is not known", mend=did_you_mean(value, names))
    return value


def name(option: str, value: object) -> str:
    """A name that reports and plans can be keyed by."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise refuse(
            f"{option}={value!r} is no name",
            why="a name is letters, digits and '_', with '.', '/' or '-' between them",
            mend=f'{option}="{_proper(value) or _EXAMPLES.get(option, "gpu")}"',
        )
    return value


_EXAMPLES = {"name": "encoder", "delta": "ids"}


def _proper(value: object) -> str:
    """The name that was probably meant."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return "_".join(re.findall(_NAME, value)) if isinstance(value, str) else ""


def _listed(value: object) -> str:
    """The layout that was probably meant."""
    if isinstance(value, str) and closest(value, ["all"]):
        return 'did you mean "all"? nb.cluster()'
    names = re.findall(_NAME, value) if isinstance(value, str) else []
    return f"nb.cluster({names or ['gpu', 'npu']!r})"


def layout(value: object) -> str | tuple[str, ...]:
    """Names of clusters in order (sorted, where they come as a set), or "all"; {"all"} is "all".

    >>> layout({"all"}), layout(["gpu", "npu"]), layout({"npu", "gpu"})
    ('all', ('gpu', 'npu'), ('gpu', 'npu'))
    """
    if value == "all" or value in ({"all"}, ["all"], ("all",)):
        return "all"
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise refuse(f"nb.cluster({value!r}): its layout is neither 'all' nor a list of clusters", mend=_listed(value))
    names = [name("layout", each) for each in value]
    names = sorted(names) if isinstance(value, set | frozenset) else names
    if not names or len(set(names)) < len(names) or "all" in names:
        once = [each for each in dict.fromkeys(names) if each != "all"]
        mend = f"nb.cluster({once})" if once else 'nb.cluster(), which is layout="all"'
        raise refuse(f"layout={value!r} is no list of clusters", why="it names each cluster once", mend=mend)
    return tuple(names)
