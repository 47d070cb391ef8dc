"""The options of `nb.replica` for clusters that train apart, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whale_nebula.codec.chosen import ways
from whale_nebula.codec.way import Way
from whale_nebula.errors import OptionError
from whale_nebula.ir.apart import ASYNC, SYNC, Apart
from whale_nebula.ir.outer_optimizer import NAMED, Average, Outer
from whale_nebula.schedule.rounds import time_to_arrive
from whale_nebula.scopes import values
from whale_nebula.scopes.frames import Frame, cluster_block_of, compress_of, replica_of

_ALONE = {"mode": SYNC, "fragments": None, "delay": None, "staleness": None}
"""What the options are that mean nothing without `sync_every`."""
_KINDS = ("TopK", "FP16", "BF16", "INT8", "INT4", "TURNED4", "INT3", "INT2", "INT1")


def checked_options(
    sync_every: Any, outer: Any, mode: Any, fragments: Any, delay: Any, staleness: Any
) -> dict[str, object]:
    """The options as a frame holds them; nothing of them where `sync_every` is not given."""
    given = {"mode": mode, "fragments": fragments, "delay": delay, "staleness": staleness}
    if sync_every is None:
        idle = next((name for name in given if given[name] != _ALONE[name]), "" if outer == "average" else "outer")
        if idle:
            said = {**given, "outer": outer}[idle]
            raise values.refuse(
                f"{idle}={said!r} says nothing without sync_every",
                why="replicas of one cluster are alike after every step",
                mend=f"nb.replica(sync_every=100, {idle}={said!r})",
            )
        return {}
    every = values.count("sync_every", sync_every)
    values.choice("mode", mode, (SYNC, ASYNC))
    if mode == ASYNC and (fragments, delay) != (None, None):
        name = "fragments" if fragments is not None else "delay"
        why = "a server takes each difference whole, as it comes"
        raise values.refuse(f"{name}= does not go with mode='async'", why=why, mend=f"leave {name} out")
    if mode == SYNC and staleness is not None:
        why = "in mode='sync' all clusters wait for each other"
        raise values.refuse(f"staleness={staleness!r} says nothing here", why=why, mend='mode="async"')
    return {
        "sync_every": every,
        "outer": _outer(outer, mode),
        "mode": mode,
        "fragments": None if fragments is None else _at_most("fragments", values.count("fragments", fragments), every),
        "delay": None if delay is None else _at_most("delay", _steps("delay", delay), every - 1),
        "staleness": None if staleness is None else _steps("staleness", staleness),
    }


def _steps(option: str, value: Any) -> int:
    number = values.integer(option, value)
    if number < 0:
        raise values.refuse(f"{option}={value!r} is below zero", mend=f"{option}=0")
    return number


def _at_most(option: str, value: int, most: int) -> int:
    if value > most:
        why = "a fragment is sent once in sync_every steps, and has come before it is sent again"
        raise values.refuse(f"{option}={value} is more than {most}", why=why, mend=f"{option}={most}")
    return value


def _outer(value: Any, mode: str) -> Outer | str:
    """As it is written: a word that is known, or an object."""
    if isinstance(value, str):
        values.choice("outer", value, NAMED)
    if not isinstance(value, Outer) and value not in NAMED:
        raise values.refuse(f"outer={value!r} is no outer optimizer", mend='outer="nesterov", or nb.outer.Nesterov()')
    if mode == ASYNC and value not in ("average", Average()):
        why = "a server adds each cluster's difference as it comes; there is no mean to make a step of"
        raise values.refuse(f"outer={value!r} does not go with mode='async'", why=why, mend='outer="average"')
    found: Outer | str = value
    return found


def _made(options: Mapping[str, Any]) -> Outer:
    """The optimizer itself; a server adds what comes, which is the average."""
    found: Outer = NAMED[options["outer"]] if isinstance(options["outer"], str) else options["outer"]
    return Average() if options["mode"] == ASYNC else found


def apart_of(frames: Sequence[Frame], frame: Frame | None = None) -> Apart | None:
    """That what stands in these scopes trains apart; `frame` is the replica scope, if it is known already."""
    frame = frame or replica_of(frames)
    if frame is None or frame.options.get("sync_every") is None:
        return None
    options = frame.options
    block, squeeze = cluster_block_of(frames), compress_of(frames)
    layout = block.options["layout"] if block is not None else "all"
    every, delay = options["sync_every"], options["delay"]
    later = options["mode"] == ASYNC
    return Apart(
        every=every,
        fragments=1 if later else options["fragments"] or 0,
        delay=0 if later else time_to_arrive(every) if delay is None else delay,
        outer=_made(options),
        codec=str(_way(squeeze)) if squeeze is not None else "none",
        clusters=layout if isinstance(layout, tuple) else (),
        mode=options["mode"],
        staleness=_staleness(options) if later else 0,
        where=str(frame.site),
    )


def _staleness(options: Mapping[str, Any]) -> int:
    return 1 if options["staleness"] is None else int(options["staleness"])


def _way(frame: Frame) -> Way:
    """How weights cross under an `nb.compress`."""
    way = ways(frame.options)[0]
    codec = way.codec
    named = () if codec is None else tuple(type(part).__name__ for part in codec.members)
    odd = next((name for name in named if name not in _KINDS), "")
    for what, value in (("auto", way.auto), ("ramp", way.ladder), ("delta", way.delta), ("mask", way.mask is not None)):
        odd = odd or (what if value else "")
    if odd:
        raise OptionError(
            f"the differences of weights cannot cross by {odd}",
            where=str(frame.site),
            why="a difference is a row of numbers without samples: fp16, bf16, integers and topk make it small",
            mend="nb.compress(int4=True), or nb.compress(topk=0.05, int8=True)",
        )
    return way
