"""Check the arguments of public calls: unknown options are refused with a suggestion."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NoReturn, ParamSpec, TypeVar

from whale_nebula.config import quantities
from whale_nebula.config.place import Place
from whale_nebula.errors import ConfigError, OptionError, ScopeError
from whale_nebula.errors.text import closest, did_you_mean, list_names
from whale_nebula.site import calling_site

P = ParamSpec("P")
T = TypeVar("T")

_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_signature(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, except that a call that does not fit its signature raises an error with a correct call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _signature_error(function.__name__, signature, args, kwargs, error) from None
        return function(*args, **kwargs)

    return call


def scope(function: Callable[P, T]) -> Callable[P, T]:
    """A checked function that opens a scope: using it in `with` without parentheses is refused."""
    return _Opener(function)


class _Opener(Generic[P, T]):
    """The function of a scope, as an object with an `__enter__` that raises an error explaining the missing call."""

    def __init__(self, function: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self._name = function.__name__
        self._checked = check_signature(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if args and inspect.isroutine(args[0]):
            raise decorator_error(self._name)
        if self._name == "stage" and list(kwargs.values()) == [None]:
            option = next(iter(kwargs))
            why = "with None, the stage would be named after its number and run on any cluster"
            mend = f'nb.stage({option}="gpu"), or nb.stage() if this is intended'
            raise option_error(f"nb.stage({option}=None) has no {option}", why=why, mend=mend)
        return self._checked(*args, **kwargs)

    def __enter__(self) -> NoReturn:
        why = "a scope is created by a call"
        mend = f"with nb.{self._name}({_SCOPE_EXAMPLES.get(self._name, '')}):"
        raise ScopeError(f"nb.{self._name} is used without parentheses", where=str(calling_site()), why=why, mend=mend)

    def __exit__(self, *exc: object) -> None:
        """Never called: `__enter__` raises."""

    def __repr__(self) -> str:
        return f"<function nb.{self._name}>"


_SCOPE_EXAMPLES = {"stage": 'cluster="gpu"', "pipeline": "micro_batch=4", "compress": "fp16=True"}


def decorator_error(name: str) -> ScopeError:
    """The error for a scope that is used as a decorator."""
    why = "a scope contains the lines in its with block"
    mend = f"with nb.{name}(...): inside the function"
    return ScopeError(f"nb.{name} is not a decorator", where=str(calling_site()), why=why, mend=mend)


def _signature_error(
    name: str, signature: inspect.Signature, values: Sequence[object], words: Mapping[str, object], error: TypeError
) -> OptionError:
    known = [each.name for each in signature.parameters.values() if each.kind not in _COLLECTS]
    unknown = next((word for word in words if word not in known), None)
    what, mend = f"nb.{name}: {error}", f"nb.{name}{_format_signature(signature)}"
    if values and known and all(each.kind is each.KEYWORD_ONLY for each in signature.parameters.values()):
        what = f"nb.{name} takes keyword arguments only"
        given = (f"{option}={reprlib.repr(value)}" for option, value in zip(known, values, strict=False))
        mend = f"nb.{name}({', '.join(given)})"
    if unknown is not None:
        what, meant = f"nb.{name} has no option {unknown!r}", closest(unknown, known)
        mend = f"remove {unknown}=: nb.{name}{_format_signature(signature)}"
        if meant is not None:
            mend = f"did you mean {meant!r}? nb.{name}({meant}={reprlib.repr(words[unknown])})"
    return option_error(what, why=f"its options are {list_names(known)}" if known else "it has no options", mend=mend)


def _format_signature(signature: inspect.Signature) -> str:
    """A signature as it is written in a call, without types."""
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for each in signature.parameters.values()]
    return str(inspect.Signature(parameters))


_NAME = re.compile(r"\w(?:[\w./-]*\w)?")


def option_error(what: str, *, mend: str, why: str | None = None) -> OptionError:
    """An error about an option on the user's line."""
    return OptionError(what, where=str(calling_site()), why=why, mend=mend)


def check_integer(option: str, value: object) -> int:
    """Validate an integer; numpy integers are accepted, a bool is not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        meant = re.fullmatch(r"(\d+)(\.0)?", str(value))
        mend = f"{option}={2 if meant is None else meant[1]}"
        raise option_error(f"{option}={value!r} is not an integer", mend=mend) from None


def check_count(option: str, value: object) -> int:
    """Validate an integer of at least one."""
    number = check_integer(option, value)
    if number < 1:
        raise option_error(f"{option}={value!r} is not a valid count", why="it must be at least 1", mend=f"{option}=1")
    return number


def check_bool(option: str, value: object) -> bool:
    """Validate a bool."""
    if not isinstance(value, bool):
        raise option_error(f"{option}={value!r} is neither True nor False", mend=f"{option}=True")
    return value


def check_choice(option: str, value: object, known: Iterable[str]) -> str:
    """Validate one of the known words."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise option_error(f"{option}={value!r} is not a valid value", mend=did_you_mean(value, names))
    return value


def check_name(option: str, value: object) -> str:
    """Validate a name that can be a key in reports and plans."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        why = "a name consists of letters, digits and '_', with '.', '/' or '-' between them"
        mend = f'{option}="{_VALUE_EXAMPLES.get(option, "gpu")}"'
        raise option_error(f"{option}={value!r} is not a valid name", why=why, mend=mend)
    return value


def check_cluster_name(option: str, value: object) -> str:
    """Validate a cluster's name, without `/`: workers are named after it, `gpu/0`."""
    found = check_name(option, value)
    if "/" in found:
        why = "the names of workers ('gpu/0') and links are built from cluster names"
        raise option_error(
            f"{option}={value!r} is not a valid cluster name", why=why, mend=f'{option}="{found.replace("/", "-")}"'
        )
    return found


_VALUE_EXAMPLES = {"name": "encoder", "delta": "ids"}


_LEAST_MEMORY = 1 << 20


def check_memory(option: str, value: object) -> int:
    """Validate an amount of memory, in bytes or with a unit."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < _LEAST_MEMORY:
            mend = f'{option}="{value}GiB"' if value > 0 else f'{option}="16GiB"'
            raise option_error(
                f"{option}={value} is too small for the memory of a device",
                why="numbers without a unit are bytes",
                mend=mend,
            )
        return value
    try:
        return quantities.read_memory(Place(value, option, str(calling_site())))
    except ConfigError as error:
        unit = f"{value}GiB" if isinstance(value, float) else "16GiB"
        raise option_error(
            f"{option}={value!r} is not a memory size", why=error.why, mend=f'{option}="{unit}"'
        ) from None


def check_layout(value: object) -> str | tuple[str, ...]:
    """Validate names of clusters in order (sorted, if given as a set), or "all"; {"all"} is "all".

    >>> check_layout({"all"}), check_layout(["gpu", "npu"]), check_layout({"npu", "gpu"})
    ('all', ('gpu', 'npu'), ('gpu', 'npu'))
    """
    if value == "all" or value in ({"all"}, ["all"], ("all",)):
        return "all"
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        what = f"nb.cluster({value!r}): neither 'all' nor a list of clusters"
        raise option_error(what, mend="nb.cluster(['gpu', 'npu'])")
    names = [check_cluster_name("layout", each) for each in value]
    names = sorted(names) if isinstance(value, set | frozenset) else names
    if not names or len(set(names)) < len(names) or "all" in names:
        once = [each for each in dict.fromkeys(names) if each != "all"]
        mend = f"nb.cluster({once})" if once else 'nb.cluster(), which means layout="all"'
        raise option_error(
            f"layout={value!r} is not a list of cluster names", why="it lists the name of each cluster once", mend=mend
        )
    return tuple(names)
