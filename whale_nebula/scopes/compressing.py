"""Parse the options of `nb.compress` into one codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whale_nebula import codec as codecs
from whale_nebula.codec import Codec
from whale_nebula.codec.way import NONFINITE, Way, ways
from whale_nebula.errors import NebulaError, OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.ir.outer_optimizer import NAMED, Average, Outer
from whale_nebula.ir.program import ASYNC, SYNC, Apart
from whale_nebula.schedule.rounds import time_to_arrive
from whale_nebula.scopes import options as values
from whale_nebula.scopes.frames import Frame, cluster_block_of, compress_of, replica_of
from whale_nebula.scopes.options import NOT_YET
from whale_nebula.scopes.scope import Missing
from whale_nebula.site import calling_site

_OTHERS = {"codec": ("auto",), "backward": ("default", "none"), "forward": ("none",)}
"""What an option may say instead of a codec's name."""
_CHANGES = ("ramp", "delta", "mask", "forward", "zstd")


def check_compress_options(flags: Mapping[str, Any], codec: Any, backward: Any, **others: Any) -> dict[str, object]:
    """The options as a frame holds them: the flags have become a codec."""
    try:
        made = codecs.from_flags(**flags)
        chosen = _codec_or_text(codec, made)
        options = {"codec": chosen, "backward": _backward(backward), **_others(others, chosen)}
        ways(options)
    except OptionError as error:
        raise _add_place(error) from None
    if chosen is None and not any(options[name] for name in _CHANGES):
        raise values.refuse("nb.compress() names no codec", mend="nb.compress(fp16=True)")
    return options


def _others(others: Mapping[str, Any], codec: Codec | str | None) -> dict[str, object]:
    if others["delta"] is not None:
        values.name("delta", others["delta"])
    return {
        **others,
        "start_step": _step(others["start_step"]),
        "ramp": _ramp(others["ramp"], codec),
        "mask": _mask(others["mask"]),
        "forward": None if others["forward"] is None else _none_or_codec("forward", others["forward"]),
        "zstd": _flag("zstd", others["zstd"]),
        "nonfinite": _one_of("nonfinite", others["nonfinite"], NONFINITE),
    }


def missing_of(options: Mapping[str, object]) -> Missing | None:
    """The first of these options that has no engine yet."""
    for name in NOT_YET["compress"]:
        if options[name]:
            return Missing(f"nb.compress({name}=...)", mend=f"leave {name} out")
    return None


def _backward(value: Any) -> Any:
    """None, "default", a precision's name (of what is left), or a codec that replaces all."""
    if value is None or value in ("default", "none") or isinstance(value, Codec):
        return value
    _codec("backward", value)
    return value


def _none_or_codec(option: str, value: Any) -> Codec | str:
    return "none" if value == "none" else _codec(option, value)


def _ramp(value: Any, codec: Codec | str | None) -> Any:
    """True, the bound of the next precision's error, or the precisions that come first."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if 0 < value < 1:
            return float(value)
        raise OptionError(f"ramp={value!r} is no bound", why="it bounds a relative error", mend="ramp=0.05")
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(_precision(name) for name in value)
    raise OptionError(f"ramp={value!r} is no ramp", mend='ramp=True, or ramp=["fp16", "int8"]')


def _precision(name: str) -> str:
    codec = codecs.parse(name)
    if not isinstance(codec, codecs.Precision):
        raise OptionError(f"a ramp climbs precisions, and {name!r} is none", mend='ramp=["fp16", "int8"]')
    return str(codec)


def _mask(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return values.name("mask", value)
    raise OptionError(
        f"mask={type(value).__name__} is neither True nor a name",
        why="it names the input that marks the rows which are sent, or takes the mask that Keras found",
        mend="mask=True",
    )


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} is neither True nor False", mend=f"{option}=True")
    return value


def _one_of(option: str, value: Any, words: tuple[str, ...]) -> str:
    if value not in words:
        raise OptionError(f"{option}={value!r} is not known", mend=did_you_mean(str(value), words))
    return str(value)


def _codec_or_text(codec: Any, made: Codec | None) -> Codec | str | None:
    if codec is None:
        return made
    if made is not None:
        raise values.refuse(
            f"nb.compress({codec!r}) has flags as well, which say {str(made)!r}",
            why="flags build a codec, and a boundary has one",
            mend=f"nb.compress({codec!r}) or nb.compress({str(made)!r})",
        )
    return "auto" if codec == "auto" else _codec("codec", codec)


def _codec(option: str, value: Any) -> Codec:
    codec = _parse_option(option, value) if isinstance(value, str) else value
    if isinstance(codec, Codec) and codec.lossless:
        why = "whole numbers cross in as few bits as they need by themselves"
        raise values.refuse(f"{option}={value!r} is no codec to choose", why=why, mend="leave it out")
    if isinstance(codec, Codec) and not codecs.is_built(codec):
        why = f"plans do not know {str(codec)!r}, so other processes could not read it"
        raise values.refuse(f"{option}={value!r} is not registered", why=why, mend="@nb.codec.register above its class")
    if isinstance(codec, Codec):
        return codec
    raise values.refuse(f"{option}={value!r} is no codec", mend=f"{option}=nb.codec.FP16()")


def _parse_option(option: str, text: str) -> Codec:
    """What is wrong with a text is said of the option, which is what was written."""
    try:
        return codecs.parse(text, _OTHERS[option])
    except OptionError as error:
        raise OptionError(f"{option}={text!r}: {error.what}", why=error.why, mend=error.mend) from None


def _step(value: Any) -> int:
    number = values.integer("start_step", value)
    if number < 0:
        raise values.refuse(f"start_step={value!r} is before the first step", mend="start_step=0")
    return number


def _add_place(error: NebulaError) -> OptionError:
    """The same, and where the user wrote it."""
    return OptionError(error.what, where=str(calling_site()), why=error.why, mend=error.mend)


_ALONE = {"mode": SYNC, "fragments": None, "delay": None, "staleness": None}
"""What the options are that mean nothing without `sync_every`."""
_KINDS = ("TopK", "FP16", "BF16", "INT8", "INT4")


def check_apart_options(
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


def _make_outer(options: Mapping[str, Any]) -> Outer:
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
        outer=_make_outer(options),
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
